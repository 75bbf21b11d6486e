"""Runner: carries out the scheduler's plans on the device.

It owns the engine's arrays (slots, the caches of prompts in lanes, the pool) and the index of the
prefix cache, and knows which shapes there are.  It decides nothing about requests.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.model.cache import Cache, init_cache
from jaxllama.model.lora import for_rows
from jaxllama.parallel.mesh import mesh_of, row_axis
from jaxllama.serving.engine import slots as device
from jaxllama.serving.engine.options import ResolvedOptions
from jaxllama.serving.engine.prefix import Node, PrefixCache, load_blocks, store_blocks
from jaxllama.serving.engine.scheduler import Fill, Sequence

# Steps for which the running rows must fit a smaller size before the slots shrink to it.
PATIENCE = 32
_PROGRAMS = (
    device.empty_cache, device.fill, device.fill_new, device.insert, device.resize,
    load_blocks, store_blocks,
)  # fmt: skip


@dataclasses.dataclass
class Lane:
    """A prompt on its way into a slot.  nodes: its blocks in the pool.  cache: one row, between two
    steps and while it is worked on; None before."""

    nodes: list[Node] = dataclasses.field(default_factory=list)
    cache: Cache | None = None


class Written(NamedTuple):
    """What one row has written in a decode call.  top: ids and logprobs of the likeliest tokens,
    each ``[width, n]``, if somebody asked."""

    tokens: list[int]
    logprobs: list[float]
    top: tuple[np.ndarray, ...] = ()


class Runner:
    def __init__(
        self,
        cfg: ModelConfig,
        params: device.Params,
        options: ResolvedOptions,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.cfg, self.params, self.options, self.adapters = cfg, params, options, adapters
        self.mesh = mesh_of(params)
        self._decoding = params  # those of the newest decode call
        self._decode_program = device.decode
        if self.mesh is None:
            self._decode_program = compiler_options.compiled_for(
                device.decode, None, static_argnums=0, static_argnames="width", donate_argnums=2
            )
        self.slots = self._init_slots()
        self.prefix = PrefixCache(options.prefix_blocks, options.prefix_block)
        self.pool = None
        if options.prefix_blocks:
            self.pool = self.empty(options.prefix_blocks, options.prefix_block)
        self.lanes: dict[Sequence, Lane] = {}
        self.patience = 0
        self._thread = ThreadPoolExecutor(1, "jaxllama-decode")
        self._stop_ids = jax.device_put(np.array(cfg.eos_token_ids, np.int32))
        width = options.widths[0]
        self._blank = self.empty(options.rows(width), width)
        n_masks = -(-cfg.vocab_size // 32)
        self._no_masks = {
            size: jax.device_put(np.full((size, n_masks), 2**32 - 1, np.uint32))
            for size in options.sizes
        }

    def _init_slots(self) -> device.Slots:
        return device.init_slots(self.cfg, self.empty(self.options.sizes[0], self.options.capacity))

    def empty(self, rows: int, capacity: int) -> Cache:
        dtype = self.options.kv_dtype
        if self.mesh is None:
            return device.empty_cache(self.cfg, rows, capacity, dtype)
        cache = init_cache(self.cfg, rows, capacity, dtype, mesh=self.mesh)
        # jit tells P(None) from P(), which is what programs give: it would compile each twice.
        axis = row_axis(self.mesh, rows)
        place = NamedSharding(self.mesh, P() if axis is None else P(axis))
        return dataclasses.replace(cache, lengths=jax.device_put(cache.lengths, place))

    def _with(self, rows: int, sequences: Mapping[int, Sequence]) -> device.Params:
        """The parameters for a call of so many rows, of which these are somebody's.  With adapters
        each row has its own, or none, in one program."""
        if not self.adapters:
            return self.params
        numbers = np.zeros(rows, np.int32)
        for row, sequence in sequences.items():
            if sequence.request.adapter is not None:
                numbers[row] = 1 + self.adapters.index(sequence.request.adapter)
        return for_rows(self.params, numbers)

    # Prompts

    def lookup(self, sequence: Sequence) -> int:
        """Begin a sequence with what the prefix cache has of it; returns how many tokens."""
        nodes = []
        if self.pool:
            tokens = sequence.tokens[: self._shared(sequence)]
            nodes = self.prefix.match(tokens, sequence.request.adapter)
        self.lanes[sequence] = Lane(nodes)
        return len(nodes) * self.prefix.block

    def _shared(self, sequence: Sequence) -> int:
        """Tokens to be filled whose keys and values are those of any prompt that begins so: with
        sparse attention what was generated is not."""
        if self.cfg.attn_sparsity == 1.0:
            return sequence.to_fill
        return min(sequence.to_fill, len(sequence.request.prompt))

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's lane, if it has one."""
        lane = self.lanes.pop(sequence, None)
        if lane is not None:
            self.prefix.release(lane.nodes)

    def prefill(self, fills: list[Fill], started: list[Sequence]) -> None:
        """Do a plan's chunks and insert ``started`` into their slots.  In the plan's order, each as
        soon as its prompt is filled: so no more than ``lanes`` whole rows exist at any time, and
        the rows of one call for short prompts."""
        chunks: dict[Sequence, list[Fill]] = {}
        for fill in fills:
            chunks.setdefault(fill.sequence, []).append(fill)
        short: dict[int, list[Fill]] = {}
        for sequence in started:
            mine = chunks.pop(sequence, [])
            if self._is_short(mine):
                short.setdefault(self._width(mine[0]), []).append(mine[0])
                continue
            cache = self._fill_row(sequence, mine) if sequence.to_fill else self._blank
            self._insert(cache, [sequence])
        for width, group in short.items():
            rows = self.options.rows(width)
            for first in range(0, len(group), rows):
                self._fill_new(group[first : first + rows], width)
        for sequence in self.lanes:
            self._fill_row(sequence, chunks.get(sequence, []))

    def _is_short(self, fills: list[Fill]) -> bool:
        """Is this a prompt that one call can take among others?  Not where blocks that others will
        find must have the bits of every longer prompt's."""
        if len(fills) != 1 or fills[0].begin or not fills[0].completes:
            return False
        return not self.options.deterministic or fills[0].end < self.options.prefix_block

    def _width(self, fill: Fill) -> int:
        return next(width for width in self.options.widths if width >= fill.end - fill.begin)

    def _fill_new(self, fills: list[Fill], width: int) -> None:
        """Whole prompts of up to one chunk, several at once, into their slots."""
        rows = self.options.rows(width)
        inputs = _pad(fills, rows, width)
        params = self._with(rows, {row: fill.sequence for row, fill in enumerate(fills)})
        cache = device.fill_new(self.cfg, params, self.options.kv_dtype, *inputs)
        self._remember(fills, cache, width)
        self._insert(cache, [fill.sequence for fill in fills])

    def _fill_row(self, sequence: Sequence, fills: list[Fill]) -> Cache:
        """The row of a sequence's lane, with these chunks."""
        lane = self.lanes[sequence]
        lane.cache = cache = self._load(lane.nodes) if lane.cache is None else lane.cache
        for fill in fills:
            inputs = _pad([fill], 1, self._width(fill))
            params = self._with(1, {0: sequence})
            lane.cache = cache = device.fill(self.cfg, params, cache, *inputs)
            self._remember([fill], cache, self.options.prefill_chunk)
        return cache

    def _load(self, nodes: list[Node]) -> Cache:
        """A row that begins with these blocks of the pool."""
        if not nodes:
            return self.empty(1, self.options.capacity)
        rows = np.zeros(self.options.capacity // self.options.prefix_block, np.int32)
        rows[: len(nodes)] = [node.row for node in nodes]
        length = len(nodes) * self.prefix.block
        return load_blocks(self.pool, rows, np.int32(len(nodes)), np.int32(length))

    def _remember(self, fills: list[Fill], cache: Cache, width: int) -> None:
        """Put the blocks that these chunks, the first rows of ``cache``, have completed into the
        pool."""
        block = self.prefix.block
        if self.pool is None or width < block:
            return
        nowhere = self.prefix.rows
        rows = np.full((cache.batch, width // block), nowhere, np.int32)
        state_rows = np.full(cache.batch, nowhere, np.int32)
        for row, fill in enumerate(fills):
            lane = self.lanes[fill.sequence]
            if len(lane.nodes) * block != fill.begin:
                continue  # the pool was full before
            tokens, is_new = fill.sequence.tokens, False
            end = min(fill.end, self._shared(fill.sequence))
            for index, begin in enumerate(range(fill.begin, end - block + 1, block)):
                found = self.prefix.extend(
                    lane.nodes, tokens[begin : begin + block], fill.sequence.request.adapter
                )
                if found is None:
                    break
                node, is_new = found
                lane.nodes.append(node)
                if is_new:
                    rows[row, index] = node.row
            if is_new:
                # Blocks with GLA layers are whole chunks: the state is that of the block's end.
                state_rows[row] = lane.nodes[-1].row
        if np.any(rows != nowhere):
            begin = np.int32(fills[0].begin)  # 0 where there are several
            self.pool = store_blocks(self.pool, cache, begin, rows, state_rows)

    # Slots

    def fit(self, running: Mapping[int, Sequence], started: list[Sequence]) -> dict[int, int]:
        """Grow the slots to hold every running sequence, or shrink them: after a while, or at once
        where nothing would have to move.  ``started`` are those of ``running`` that are not in
        their slots yet.  Returns where each slot's sequence is now."""
        sizes, size = self.options.sizes, self.slots.size
        need = max(running, default=0) + 1
        while self.slots.size < need:
            larger = sizes[sizes.index(self.slots.size) + 1]
            index = np.full(larger, -1, np.int32)
            index[: self.slots.size] = np.arange(self.slots.size)
            self.slots = device.resize(self.slots, index)
        if len(running) == len(started):
            while self.slots.size > sizes[0] and need <= sizes[sizes.index(self.slots.size) - 1]:
                smaller = sizes[sizes.index(self.slots.size) - 1]
                self.slots = device.resize(self.slots, np.full(smaller, -1, np.int32))
        smaller = sizes[max(sizes.index(self.slots.size) - 1, 0)]
        fits = len(running) <= smaller < self.slots.size == size
        self.patience = self.patience + 1 if fits else 0
        if self.patience <= PATIENCE:
            return {slot: slot for slot in running}
        self.patience = 0
        moves = {slot: new for new, slot in enumerate(sorted(running))}
        index = np.full(smaller, -1, np.int32)
        index[: len(moves)] = list(moves)
        self.slots = device.resize(self.slots, index)
        return moves

    def _insert(self, cache: Cache, sequences: list[Sequence]) -> None:
        """The first rows of ``cache``, these sequences', into their slots."""
        newcomers = {
            row: device.Newcomer(
                sequence.slot,  # pyright: ignore[reportArgumentType] - who runs has one
                sequence.request.sampling, sequence.request.prompt, sequence.output,
                sequence.remaining, sequence.request.ignore_eos,
            )
            for row, sequence in enumerate(sequences)
        }  # fmt: skip
        self.slots = device.insert(self.slots, cache, self._pack(newcomers, cache.batch))
        for sequence in sequences:
            self.drop(sequence)

    def _pack(self, newcomers: Mapping[int, device.Newcomer], rows: int) -> np.ndarray:
        vocab_size = self.cfg.vocab_size
        return device.pack(device.make_rows(newcomers, rows, self.options.max_len, vocab_size))

    def decode(
        self,
        running: Mapping[int, Sequence],
        masks: Mapping[int, np.ndarray],
        steps: int,
        wanted: int,
    ) -> Future[list[Written]]:
        """Up to ``steps`` tokens for every running row; by slot.  They are waited for in a thread:
        until the device has left its loop, the call does not return.  Nothing else may be asked of
        the runner meanwhile."""
        keep = np.zeros(self.slots.size, bool)
        keep[list(running)] = True
        allowed: Any = self._no_masks[self.slots.size]
        if masks:
            allowed = np.full(allowed.shape, 2**32 - 1, np.uint32)
            for slot, mask in masks.items():
                allowed[slot] = mask
            allowed = jax.device_put(allowed)
        requests = [sequence.request for sequence in running.values()]
        level = device.level_of([request.sampling for request in requests], bool(masks))
        if self.options.deterministic:  # branches round on their own
            level = device.HIGHEST_LEVEL
        wants_top = any(request.logprobs for request in requests)
        # Rows that end one by one are not replaced one by one: a prefill call costs about the same.
        wanted = min(wanted, self.options.rows(self.options.widths[0]))
        orders = device.make_orders(
            keep, steps=steps, level=level, wants_top=wants_top, wanted=wanted
        )
        self._decoding = self._with(self.slots.size, running)
        return self._thread.submit(self._decode, orders, allowed)

    def _decode(self, orders: np.ndarray, masks: jax.Array) -> list[Written]:
        width, wants_top = self.options.steps_per_call, orders[2]
        self.slots, rows, top = self._decode_program(
            self.cfg, self._decoding, self.slots, orders, masks, self._stop_ids, width=width
        )
        rows, top = jax.device_get((rows, top if wants_top else ()))
        numbers = rows[:, : 1 + width], rows[:, 1 + width :].view(np.float32)
        written = [  # lists at once: many small slices of arrays would cost more than the rest
            Written(tokens[:n], logprobs[:n])
            for (n, *tokens), logprobs in zip(*(part.tolist() for part in numbers), strict=True)
        ]
        if not wants_top:
            return written
        return [row._replace(top=tuple(pair)) for row, *pair in zip(written, *top, strict=True)]

    # Programs

    def compiled_programs(self) -> int:
        """Programs of the engine that this process has compiled."""
        programs: tuple[Any, ...] = (*_PROGRAMS, self._decode_program)
        return sum(program._cache_size() for program in programs)

    def warm_up(self) -> None:
        """Run every program in every shape once, on slots of their own; the state stays."""
        if self.mesh is None:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for compiled in [pool.submit(low.compile) for low in self._lower()]:
                    compiled.result()
        options = self.options
        kept, self.slots = self.slots, self._init_slots()
        lane = self.empty(1, options.capacity)
        caches = []
        for width in options.widths:
            rows = options.rows(width)
            empty, params = _pad([], rows, width), self._with(rows, {})
            caches.append(device.fill_new(self.cfg, params, options.kv_dtype, *empty))
            lane = device.fill(self.cfg, self._with(1, {}), lane, *_pad([], 1, width))
        if self.pool is not None:
            self._warm_up_pool(
                [*zip(caches, options.widths, strict=True), (lane, options.prefill_chunk)]
            )
        caches.append(lane)
        for size, smaller in zip(options.sizes, (1, *options.sizes[:-1]), strict=True):
            if self.slots.size != size:
                self.slots = device.resize(self.slots, np.full(size, -1, np.int32))
                device.resize(self.slots, np.full(smaller, -1, np.int32))
            for cache in caches:
                self.slots = device.insert(self.slots, cache, self._pack({}, cache.batch))
            self._decoding = self._with(size, {})
            self._thread.submit(self._decode, _idle(size), self._no_masks[size]).result()
        self.slots = kept

    def _lower(self) -> Iterator[Any]:
        """The larger programs, for compilers that work side by side: jit finds what they made."""
        options, cfg, kv_dtype = self.options, self.cfg, self.options.kv_dtype
        lane = jax.eval_shape(partial(init_cache, cfg, 1, options.capacity, kv_dtype))
        caches = [lane]
        for width in options.widths:
            rows = options.rows(width)
            new = _pad([], rows, width)
            yield device.fill_new.lower(cfg, self._with(rows, {}), kv_dtype, *new)
            yield device.fill.lower(cfg, self._with(1, {}), lane, *_pad([], 1, width))
            caches.append(jax.eval_shape(partial(init_cache, cfg, rows, width, kv_dtype)))
        for size in options.sizes:
            slots = jax.eval_shape(device.resize, self.slots, np.zeros(size, np.int32))
            yield self._decode_program.lower(
                cfg, self._with(size, {}), slots, _idle(size), self._no_masks[size], self._stop_ids,
                width=options.steps_per_call,
            )  # fmt: skip
            for cache in caches:
                yield device.insert.lower(slots, cache, self._pack({}, cache.batch))

    def _warm_up_pool(self, caches: list[tuple[Cache, int]]) -> None:
        block, nowhere = self.prefix.block, self.prefix.rows
        rows = np.zeros(self.options.capacity // block, np.int32)
        load_blocks(self.pool, rows, np.int32(1), np.int32(block))
        for cache, width in caches:
            if width >= block:
                rows = np.full((cache.batch, width // block), nowhere, np.int32)
                states = np.full(cache.batch, nowhere, np.int32)
                self.pool = store_blocks(self.pool, cache, np.int32(0), rows, states)


def _idle(size: int) -> np.ndarray:
    """The orders of a decode that does nothing."""
    return device.make_orders(np.zeros(size, bool), steps=0, level=0, wants_top=False, wanted=0)


def _pad(fills: list[Fill], rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens ``[rows, width]``, lengths, lengths of the whole prompts)."""
    tokens = np.zeros((rows, width), np.int32)
    lengths, totals = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row, fill in enumerate(fills):
        lengths[row] = fill.end - fill.begin
        totals[row] = len(fill.sequence.request.prompt)
        tokens[row, : lengths[row]] = fill.sequence.tokens[fill.begin : fill.end]
    return tokens, lengths, totals
