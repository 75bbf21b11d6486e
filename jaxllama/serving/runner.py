"""Runner: carries out the scheduler's plans on the device.

It owns the engine's arrays (slots, the caches of prompts in lanes, the pool) and the index of the
prefix cache, and knows which shapes there are.  It decides nothing about requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxllama.cache import Cache
from jaxllama.config import ModelConfig
from jaxllama.sampling import Sampling
from jaxllama.serving import slots as device
from jaxllama.serving.options import EngineOptions
from jaxllama.serving.prefix_cache import Node, PrefixCache
from jaxllama.serving.scheduler import Fill, Sequence

# Steps for which the running rows must fit a smaller size before the slots shrink to it.
PATIENCE = 32
_PROGRAMS = (
    device.empty_cache, device.fill, device.fill_new, device.insert, device.resize, device.decode,
    device.load_blocks, device.store_blocks,
)  # fmt: skip


def compiled_programs() -> int:
    """Programs of the engine that this process has compiled."""
    return sum(program._cache_size() for program in _PROGRAMS)


@dataclasses.dataclass
class Lane:
    """A prompt on its way into a slot: row ``row`` of ``cache``."""

    cache: Cache
    row: int
    nodes: list[Node]


class Runner:
    def __init__(self, cfg: ModelConfig, params: device.Params, options: EngineOptions) -> None:
        self.cfg, self.params, self.options = cfg, params, options
        self.slots = self._init_slots()
        self.prefix = PrefixCache(options.prefix_blocks, options.prefix_block)
        self.pool = None
        if options.prefix_blocks:
            self.pool = device.init_pool(
                cfg, options.prefix_blocks, options.prefix_block, options.kv_dtype
            )
        self.lanes: dict[Sequence, Lane] = {}
        self.patience = 0
        self._stop_ids = jax.device_put(np.array(cfg.eos_token_ids, np.int32))
        self._blank = self.empty(options.prefill_rows, options.prefill_chunk)
        words = -(-cfg.vocab_size // 32)
        self._no_masks = {
            size: jax.device_put(np.full((size, words), 2**32 - 1, np.uint32))
            for size in options.sizes
        }

    def _init_slots(self) -> device.Slots:
        return device.init_slots(self.cfg, 1, self.options.capacity, self.options.kv_dtype)

    def empty(self, rows: int, capacity: int) -> Cache:
        return device.empty_cache(self.cfg, rows, capacity, self.options.kv_dtype)

    # Prompts

    def lookup(self, sequence: Sequence) -> int:
        """Begin a sequence with what the prefix cache has of it; returns how many tokens."""
        nodes = self.prefix.match(sequence.tokens[: sequence.to_fill]) if self.pool else []
        if not nodes:
            return 0
        rows = np.zeros(self.options.capacity // self.options.prefix_block, np.int32)
        rows[: len(nodes)] = [node.row for node in nodes]
        length = len(nodes) * self.prefix.block
        cache = device.load_blocks(self.pool, rows, np.int32(len(nodes)), np.int32(length))
        self.lanes[sequence] = Lane(cache, 0, nodes)
        return length

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's lane, if it has one."""
        lane = self.lanes.pop(sequence, None)
        if lane is not None:
            self.prefix.release(lane.nodes)

    def fill(self, fills: list[Fill]) -> None:
        group: list[Fill] = []
        for fill in fills:
            if fill.begin == 0 and fill.completes:
                group.append(fill)
                if len(group) == self.options.prefill_rows:
                    self._fill_new(group)
                    group = []
            else:
                self._fill_lane(fill)
        if group:
            self._fill_new(group)

    def _fill_new(self, fills: list[Fill]) -> None:
        """Whole prompts of up to one chunk, several at once."""
        tokens, lengths, totals = self._pad(fills, self.options.prefill_rows)
        cache = device.fill_new(
            self.cfg, self.params, self.options.prefill_chunk, self.options.kv_dtype,
            tokens, lengths, totals,
        )  # fmt: skip
        for row, fill in enumerate(fills):
            self.lanes[fill.sequence] = Lane(cache, row, [])
            self._remember(fill)

    def _fill_lane(self, fill: Fill) -> None:
        lane = self.lanes.get(fill.sequence)
        if lane is None:
            lane = self.lanes[fill.sequence] = Lane(self.empty(1, self.options.capacity), 0, [])
        lane.cache = device.fill(self.cfg, self.params, lane.cache, *self._pad([fill], 1))
        self._remember(fill)

    def _pad(self, fills: list[Fill], rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        longest = max(fill.end - fill.begin for fill in fills)
        width = next(width for width in self.options.widths if width >= longest)
        tokens = np.zeros((rows, width), np.int32)
        lengths, totals = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, fill in enumerate(fills):
            lengths[row] = fill.end - fill.begin
            totals[row] = len(fill.sequence.request.prompt)
            tokens[row, : lengths[row]] = fill.sequence.tokens[fill.begin : fill.end]
        return tokens, lengths, totals

    def _remember(self, fill: Fill) -> None:
        """Put the blocks that a chunk has completed into the pool."""
        block, lane = self.prefix.block, self.lanes[fill.sequence]
        if self.pool is None or len(lane.nodes) * block != fill.begin:
            return  # the pool was full before
        rows = np.full(self.options.prefill_chunk // block, self.prefix.rows, np.int32)
        tokens, is_new = fill.sequence.tokens, False
        for index, begin in enumerate(range(fill.begin, fill.end - block + 1, block)):
            found = self.prefix.extend(lane.nodes, tokens[begin : begin + block])
            if found is None:
                break
            node, is_new = found
            lane.nodes.append(node)
            if is_new:
                rows[index] = node.row
        if np.all(rows == self.prefix.rows):
            return
        # Blocks with GLA layers are whole chunks, so the state is that of the block's end.
        state_row = lane.nodes[-1].row if is_new else self.prefix.rows
        self.pool = device.store_blocks(
            self.pool, lane.cache, np.int32(lane.row), np.int32(fill.begin), rows,
            np.int32(state_row),
        )  # fmt: skip

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
            while self.slots.size > 1 and need <= sizes[sizes.index(self.slots.size) - 1]:
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

    def start(self, sequence: Sequence) -> None:
        """Insert a sequence whose prompt is filled into its slot."""
        request, lane = sequence.request, self.lanes.get(sequence)
        row = device.make_row(
            request.sampling, request.prompt, sequence.output, sequence.remaining,
            request.ignore_eos, self.cfg.vocab_size,
        )  # fmt: skip
        source, source_row = (self._blank, 0) if lane is None else (lane.cache, lane.row)
        self.slots = device.insert(
            self.slots, np.int32(sequence.slot), source, np.int32(source_row), row
        )
        self.drop(sequence)

    def decode(
        self,
        running: Mapping[int, Sequence],
        masks: Mapping[int, np.ndarray],
        steps: int,
        is_contended: bool,
    ) -> device.Drawn:
        """Up to ``steps`` tokens for every running row; numpy arrays."""
        keep = np.zeros(self.slots.size, bool)
        keep[list(running)] = True
        words: Any = self._no_masks[self.slots.size]
        if masks:
            words = np.full(words.shape, 2**32 - 1, np.uint32)
            for slot, mask in masks.items():
                words[slot] = mask
        requests = [sequence.request for sequence in running.values()]
        level = device.level_of([request.sampling for request in requests], bool(masks))
        wants_top = any(request.logprobs for request in requests)
        drawn = self._decode(keep, words, steps, level, wants_top, is_contended)
        if not wants_top:
            drawn = dataclasses.replace(drawn, top_tokens=None, top_logprobs=None)
        return jax.device_get(drawn)

    def _decode(self, keep, words, steps, level, wants_top, is_contended) -> device.Drawn:
        self.slots, drawn = device.decode(
            self.cfg, self.params, self.slots, keep, words, self._stop_ids, np.int32(steps),
            np.int32(level), np.bool_(wants_top), np.bool_(is_contended),
            width=self.options.steps_per_call,
        )  # fmt: skip
        return drawn

    # Programs

    def warm_up(self) -> None:
        """Run every program in every shape once, on slots of their own; the state stays."""
        options, block = self.options, self.prefix.block
        kept, self.slots = self.slots, self._init_slots()
        caches = [self._blank, self.empty(1, options.capacity)]
        for width in options.widths:
            shapes = np.zeros((options.prefill_rows, width), np.int32)
            none = np.zeros(options.prefill_rows, np.int32)
            device.fill_new(
                self.cfg, self.params, options.prefill_chunk, options.kv_dtype, shapes, none, none
            )
            one = np.zeros(1, np.int32)
            caches[1] = device.fill(
                self.cfg, self.params, caches[1], np.zeros((1, width), np.int32), one, one
            )
        if self.pool is not None:
            rows = np.zeros(options.capacity // block, np.int32)
            device.load_blocks(self.pool, rows, np.int32(1), np.int32(block))
            nowhere = np.full(options.prefill_chunk // block, self.prefix.rows, np.int32)
            for cache in caches:
                self.pool = device.store_blocks(
                    self.pool, cache, np.int32(0), np.int32(0), nowhere, np.int32(self.prefix.rows)
                )
        row = device.make_row(Sampling(), [0], [], 0, False, self.cfg.vocab_size)
        for size, smaller in zip(options.sizes, (1, *options.sizes[:-1]), strict=True):
            if self.slots.size != size:
                self.slots = device.resize(self.slots, np.full(size, -1, np.int32))
                device.resize(self.slots, np.full(smaller, -1, np.int32))
            for cache in caches:
                self.slots = device.insert(self.slots, np.int32(0), cache, np.int32(0), row)
            keep = np.zeros(size, bool)
            self._decode(keep, self._no_masks[size], 0, 0, False, False)
        self.slots = kept
