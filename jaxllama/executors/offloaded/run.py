"""OffloadRun: one block of rows through an offloaded model, from prompts to the last token.

    run = OffloadRun(policy, store, cfg, params, call)
    run.step()             gives every row one token; the first step is the prefill
    run.join(tokens, ...)  new rows replace those that have ended

It implements ``schedule``'s ``Work``: it does each load, store and computation. The rows are
divided into batches of one size, and empty rows fill the last. Each batch has its sampling state, a
cache per layer and its hidden states. A prompt passes through each unit in pieces of ``chunk``
tokens, as in the resident model's prefill.

The prompt of a joining row passes through the model in the other rows' step, and costs no load of
weights. For that pass the whole cache of its batch is on the device. It is stored anew afterwards.

A deterministic model's batches always have ``gpu_batch_size`` rows. Their prompts pass through in
the pieces of ``Alone``. The last token is a separate piece, which has a decode step's shape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.decoding.heads import HeadDraft
from jaxllama.decoding.rows import Fields, Report, Rows
from jaxllama.decoding.sampling import History, SamplingParams
from jaxllama.executors.executor import Call
from jaxllama.executors.offloaded import cpu_attention, programs, sparse_cache
from jaxllama.executors.offloaded.batch import (
    OffloadedBatch,
    TokenPiece,
    Verified,
    append_token,
    cleared,
    joined,
    next_piece,
    read_prompts,
    without_written,
)
from jaxllama.executors.offloaded.cpu_attention import SplitCache
from jaxllama.executors.offloaded.expert_programs import Places, without_mlp
from jaxllama.executors.offloaded.experts import (
    ExpertWork,
    Following,
    SpanKind,
    placed_experts,
)
from jaxllama.executors.offloaded.layer_cache import LayerCache
from jaxllama.executors.offloaded.sparse_cache import SparseCache, SparseState
from jaxllama.model.cache import Cache, LayerState, init_layer
from jaxllama.model.decoder import activation_dtype
from jaxllama.model.linear import Stream
from jaxllama.model.lora import ROWS, with_rows
from jaxllama.model.mixers import keeps_tokens
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.records import Hidden
from jaxllama.offload.policy import Policy
from jaxllama.offload.schedule import Overlapped, serial
from jaxllama.offload.store import Pending, RowTable, Store, is_pending, moves, stored_leaves, wait
from jaxllama.offload.timeline import NO_RECORD, Recording
from jaxllama.offload.units import ModelUnit, in_spans, units_of
from jaxllama.typing import Params, Tree


class _Whole(NamedTuple):
    """A unit's weights that no step needs to load."""

    tree: Tree


class OffloadRun:
    """One block of rows on its way through the model. See the module docstring.

    call: the prompts, and how they are continued; it has a ``chunk``, which ``alone`` replaces.
    """

    def __init__(
        self,
        policy: Policy,
        store: Store,
        cfg: ModelConfig,
        params: Params,
        call: Call,
        recorder: Recording = NO_RECORD,
    ) -> None:
        assert call.chunk is not None
        self.policy, self.store, self.record = policy, store, recorder
        self.cfg, self.params = cfg, params
        self.dtype = activation_dtype(params)
        self.stop_ids, self.room, self.capacity = call.stop_ids, call.room, call.capacity
        self.limit, self.chunk, self.alone = call.limit, call.chunk, call.alone
        self.kv_dtype = jnp.dtype(call.kv_dtype).name
        self._each = units_of(self.cfg, self.policy.sep_layer)
        if not self._embeds_by_unit():
            self._each = self._each[1:]
        self.units = self._each  # of the step at hand
        self._in_spans: dict[int, list[ModelUnit]] = {}  # by tokens
        self.moves = {
            "weights": self.policy.weights.device < 100,
            "cache": self.policy.cache.device < 100,
            "hidden": self.policy.activations.device < 100,
        }
        self.filled, self.steps = 0, 0
        self.rows = call.tokens.shape[0]
        parts = self.cut(call.tokens, call.lengths, call.sampling)
        self.batches = [self._batch(*part) for part in parts]
        self._head_draft: tuple[HeadDraft, Params] | None = None
        self._known: dict[int, Pending] = {}  # the last loaded table, if it is tied
        self._whole: dict[ModelUnit, _Whole | None] = {}  # what ``_resident`` has found
        self.experts = ExpertWork(store, policy)
        self._overlapped = Overlapped(store.lanes) if self.policy.overlap else None
        self.join(call.tokens, call.lengths, call.sampling, params.get(ROWS))

    def begin_head(self, draft: HeadDraft, params: Params) -> None:
        """Let a head that drafts read the first step's prompts; params: on the device."""
        self._head_draft = draft, params
        for batch in self.batches:
            size = batch.rows.ints.shape[1]
            batch.head = draft.begin(params, size, self.capacity)

    # Rows to batches

    def cut(
        self, tokens: jax.Array, lengths: jax.Array, options: Tree = None
    ) -> Iterator[tuple[Tree, ...]]:
        """Yield the run's rows, batch by batch. Rows of length 0 fill the last batch.

        options: a tree of arrays of these rows.
        """
        size = self.policy.gpu_batch_size
        count = -(-self.rows // size)
        if self.alone is None:
            size = -(-self.rows // count)
        empty = count * size - self.rows

        def fill(leaf: jax.Array) -> jax.Array:
            return jnp.concatenate([leaf, jnp.repeat(leaf[:1], empty, axis=0)]) if empty else leaf

        tokens, options = jax.tree.map(fill, (tokens, options))
        lengths = jnp.pad(lengths, (0, empty))
        for first in range(0, count * size, size):
            yield jax.tree.map(lambda x: x[first : first + size], (tokens, lengths, options))  # noqa: B023

    def _batch(self, tokens: jax.Array, _: jax.Array, sampling: SamplingParams) -> OffloadedBatch:
        """A batch without a row that goes on."""
        batch = tokens.shape[0]
        blank = jnp.zeros((batch,), jnp.int32)
        rows = Rows.empty(blank, Cache((), blank), self.room)
        caches = {
            layer: self._layer_cache(kind, layer, batch)
            for layer, kind in enumerate(self.cfg.layer_types)
        }
        return OffloadedBatch(rows, sampling, caches)

    def join(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        sampling: SamplingParams,
        adapters: jax.Array | None = None,
    ) -> None:
        """Begin the rows whose ``lengths[B]`` are not 0 with these prompts ``[B, T]``, in the next
        step; they have ended, or never begun.

        sampling, adapters: of all rows, also of those that go on.
        """
        self.filled = max(tokens.shape[1], self._longest() + 1)
        parts = self.cut(tokens, lengths, (sampling, adapters))
        for batch, (tokens, lengths, options) in zip(self.batches, parts, strict=True):
            if not np.any(jax.device_get(lengths)):
                continue
            # The step of the rows that go on.  Those that join have ended so far.
            step = [self._next(batch)] if batch.live else []
            batch.prompts = [*step, *self._prompts(tokens, lengths)]
            batch.joining = lengths > 0 if batch.is_used else None
            batch.sampling, batch.adapters = options
            history = None
            if batch.sampling.penalties:
                history = History.of_prompt(tokens, lengths, self.cfg.vocab_size)
            batch.rows = joined(batch.rows, lengths, history)
            batch.live = batch.is_used = True

    def _longest(self) -> int:
        """Tokens in the cache of the longest row that goes on."""
        rows = [Fields(*jax.device_get(batch.rows.ints)) for batch in self.batches if batch.live]
        return max((int(np.max(fields.length * (1 - fields.done))) for fields in rows), default=0)

    def _next(self, batch: OffloadedBatch) -> TokenPiece:
        return TokenPiece(*next_piece(self.cfg, self.capacity, batch.rows))

    def _layer_cache(self, kind: str, layer: int, batch: int) -> LayerCache | SplitCache:
        own = self.cfg.layers[layer]
        empty = functools.partial(init_layer, own, batch, self.capacity, self.kv_dtype)
        if self.policy.cpu_attention and keeps_tokens(kind):
            return SplitCache(self.policy.cache, empty)
        by_row = self.cfg.attn_sparsity < 1 and self.moves["cache"] and kind == "attention"
        return (SparseCache if by_row else LayerCache)(self.store, self.policy.cache, empty)

    def _prompts(self, tokens: jax.Array, lengths: jax.Array) -> list[TokenPiece]:
        """The pieces of prompts ``tokens[B, T]``, ``lengths[B]`` valid."""
        piece = functools.partial(self._piece, tokens, lengths)
        if self.alone is None:
            chunk = min(self.chunk, tokens.shape[1])
            return [piece(begin, lengths, chunk) for begin in range(0, tokens.shape[1], chunk)]
        end, whole, pieces = jnp.maximum(lengths - 1, 0), 0, []
        if self.alone.piece:
            whole = end // self.alone.piece * self.alone.piece
            begins = range(0, int(jnp.max(whole)), self.alone.piece)
            pieces = [piece(begin, whole, self.alone.piece) for begin in begins]
        if self.alone.last:
            pieces.append(piece(whole, end, self.alone.last))
        return [*pieces, piece(end, lengths, 1)]

    def _piece(
        self,
        tokens: jax.Array,
        total: jax.Array,
        begin: jax.Array | int,
        end: jax.Array,
        width: int,
    ) -> TokenPiece:
        """Return ``width`` tokens of each row, from ``begin`` on and before ``end[B]``."""
        start = jnp.minimum(begin, end)
        places = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        part = jnp.take_along_axis(tokens, places, axis=1, mode="fill", fill_value=0)
        positions, rope = programs.positions_of(self.cfg, start, total, width)
        n_new = jnp.clip(end - start, 0, width)
        return TokenPiece(part, n_new, positions, rope, of_prompt=True)

    # One step

    def step(self) -> None:
        """Run the prefill, or write one more token a row."""
        for index in self.active_batches():
            batch = self.batches[index]
            batch.pieces, batch.prompts = batch.prompts or [self._next(batch)], []
        self._walk()
        self.filled += 1

    def verify(self, pieces: dict[int, TokenPiece], width: int) -> dict[int, Verified]:
        """Run one pass over these batches' pieces, ``width`` tokens of a row at a time.

        Attention's tokens are in its cache, past its length.
        """
        for index, piece in pieces.items():
            batch = self.batches[index]
            batch.pieces, batch.drafted, batch.tokens = [piece], width, {}
        self._walk()
        verified: dict[int, Verified] = {}
        for index in pieces:
            batch = self.batches[index]
            assert batch.scores is not None and batch.output is not None
            verified[index] = Verified(batch.scores, batch.tokens, batch.output)
        return verified

    def _walk(self) -> None:
        """Pass the active batches' pieces through all units."""
        for index in self.active_batches():
            batch = self.batches[index]
            if not self._embeds_by_unit():
                self.store_hidden(
                    index,
                    [
                        programs.embed_tokens(self.store, self.cfg, self.params, piece.tokens)
                        for piece in batch.pieces
                    ],
                )
        self.units = self._spans() or self._each
        if self._overlapped is None:
            serial(self)
        else:
            self._overlapped.step(self, last=self.steps + 1 >= self.limit)
        self.steps += 1

    def _spans(self) -> list[ModelUnit] | None:
        """Return the units of a step in which the device itself reads the experts that it lacks.

        None for other steps.
        """
        batches = [self.batches[index] for index in self.active_batches()]
        if not self.is_small or len(batches) > 1 or self.policy.cpu_attention or self.cfg.taps:
            return None
        [batch] = batches
        if batch.drafted is not None or batch.adapters is not None:
            return None
        if self.alone is not None or self.record is not NO_RECORD:  # a layer is a program there
            return None
        tokens = batch.pieces[0].tokens.size
        if tokens in self._in_spans:
            return self._in_spans[tokens]

        def kind(unit: ModelUnit) -> SpanKind | None:
            whole = self._resident(unit)
            if whole is None or placed_experts(whole.tree) is None:
                return None
            return self.experts.kind(self.cfg.layers[unit.layer], unit, whole.tree, tokens)

        return self._in_spans.setdefault(tokens, in_spans(self._each, kind))

    def end_rows(self, done: np.ndarray | None = None) -> None:
        """Find the rows that have stopped.

        done: bool ``[B]``: rows that the caller wants to stop.
        """
        for index, batch in enumerate(self.batches):
            ended = Report(jax.device_get(batch.rows.ints), None).done
            if done is not None:
                wanted = ended.copy()
                first = index * len(ended)
                part = done[first : first + len(ended)]
                wanted[: len(part)] |= part
                if (wanted != ended).any():
                    ended = wanted
                    batch.rows = batch.rows.ended(ended)
            batch.live = not ended.all()

    def forget_written(self) -> None:
        """The next step's tokens are the first of the report, whenever a row has joined."""
        for batch in self.batches:
            batch.rows = without_written(batch.rows)

    @property
    def report(self) -> Report:
        """Return the report of the run's rows, on the host."""
        reports = jax.device_get([batch.rows.report for batch in self.batches])
        self.experts.check()
        ints, written = (np.concatenate(parts, axis=1) for parts in zip(*reports, strict=True))
        return Report(ints[:, : self.rows], written[:, : self.rows])

    def _embeds_by_unit(self) -> bool:
        table = self.params["embed"]["weight"]
        return not isinstance(table, RowTable) and moves(table)

    # The Work of a step

    @property
    def is_small(self) -> bool:
        prompts = any(piece.of_prompt for batch in self.batches for piece in batch.pieces)
        return not (prompts or any(self.moves.values()))

    def active_batches(self) -> list[int]:
        return [index for index, batch in enumerate(self.batches) if batch.live]

    def _resident(self, unit: ModelUnit) -> _Whole | None:
        """Return a unit's weights if all of them are on the device, so that no step loads them.

        Otherwise return None.
        """
        if self.moves["weights"]:
            return None
        if unit not in self._whole:
            if unit.kind == "span":
                parts = [self._resident(layer) for layer in unit.layers]
                self._whole[unit] = _Whole([part.tree for part in parts if part is not None])
                return self._whole[unit]
            tree = unit.weights(self.params)
            stored = stored_leaves(tree)
            here = all(x.device is not None and x.device.shape == x.shape for x in stored)
            self._whole[unit] = _Whole(self.store.get(tree)) if here else None
        return self._whole[unit]

    def load_weights(self, unit: ModelUnit) -> Tree:
        if (whole := self._resident(unit)) is not None:
            return whole
        tree = unit.weights(self.params)
        stored = stored_leaves(tree)
        with self.record.watching("load weights", unit) as out:
            pending = self.store.begin(tree, self._known)
            leaves = jax.tree.leaves(pending, is_leaf=is_pending)
            begun = [leaf for leaf in leaves if is_pending(leaf)]
            out.append([leaf.moved for leaf in begun])
        # A tied table serves the head of one step and the embedding of the next.
        shared = self.cfg.tie_embeddings and unit.kind in ("head", "embed")
        self._known = dict(zip(map(id, stored), begun, strict=True)) if shared else {}
        return pending

    def finish_weights(self, pending: Tree) -> Tree:
        return pending.tree if isinstance(pending, _Whole) else self.store.finish(pending)

    def load_cache(self, unit: ModelUnit, batch: int) -> LayerState | None:
        if not unit.has_cache:
            return None
        if unit.kind == "span":
            return [self.load_cache(layer, batch) for layer in unit.layers]
        cache = self.batches[batch].caches[unit.layer]
        load = cache.load_whole if self.batches[batch].reads_prompts else cache.load
        if not cache.moves:
            return load()
        with self.record("load cache", unit, batch):
            return jax.block_until_ready(load())

    def load_hidden(self, batch: int) -> Tree:
        hidden = self.batches[batch].hidden
        if not self.moves["hidden"]:
            return hidden
        with self.record("load hidden", None, batch):
            return jax.block_until_ready(self.store.get(hidden))

    def compute(
        self, unit: ModelUnit, index: int, weights: Tree, cache: LayerState | None, hidden: Tree
    ) -> tuple[LayerState | None, Tree]:
        with self.record.watching("compute", unit, index) as out:
            batch = self.batches[index]
            if unit.kind == "embed":
                hidden = [
                    programs.embed(self.cfg, self.dtype, weights, piece.tokens)
                    for piece in batch.pieces
                ]
            elif unit.kind == "head":
                self._head(batch, weights, hidden)
                hidden = None
            elif unit.kind == "span":
                hidden, cache = self._span(unit, batch, weights, cache, hidden)
            else:
                hidden, cache = self._layer(unit, batch, weights, cache, hidden)
            out.append((batch.rows.written, batch.scores) if hidden is None else hidden)
        return cache, hidden

    def _span(
        self, unit: ModelUnit, batch: OffloadedBatch, weights: Tree, cache: Tree, hidden: Tree
    ) -> tuple[Tree, Tree]:
        [piece], [x] = batch.pieces, hidden
        layers = [self.cfg.layers[layer.layer] for layer in unit.layers]
        own = layers, unit.layers, weights
        kind = self.experts.kind(layers[0], unit.layers[0], weights[0], piece.tokens.size)
        assert kind is not None  # as ``_spans`` has found
        at = Places(piece.positions, piece.lengths, piece.rope)
        x, cache = self.experts.span(kind, *own, x, cache, at, self._is_sparse(piece))
        return [x], cache

    def _layer(
        self, unit: ModelUnit, batch: OffloadedBatch, weights: Tree, cache: Tree, hidden: Tree
    ) -> tuple[Tree, Tree]:
        layer = self.cfg.layers[unit.layer]
        if unit.layer in self.cfg.taps and unit.kind != "feed":
            batch.taps[unit.layer] = [x.total for x in hidden]
        if batch.adapters is not None:
            weights = with_rows(weights, batch.adapters_of_tokens)
        if batch.reads_prompts and batch.joining is not None and unit.has_cache:
            if not isinstance(cache, KVCache):
                cache = cleared(cache, batch.caches[unit.layer].empty(), batch.joining)
        placed = unit.kind != "mix" and placed_experts(weights) is not None
        mixing = without_mlp(weights) if placed else weights
        results = []
        for piece, x in zip(batch.pieces, hidden, strict=True):
            at, part = (piece.positions, piece.lengths, piece.rope), unit.kind
            apart = batch.drafted is not None or isinstance(cache, tuple | SparseState)
            if placed and (part == "feed" or not apart):
                x, cache = self._mixture(unit, piece, weights, x, cache)
                results.append(x)
                continue
            part = "mix" if placed else part
            if isinstance(cache, tuple):  # decode, with attention on the CPU
                x, cache = cpu_attention.decode_layer(layer, mixing, x, cache, *at)
                part = "feed"
            elif isinstance(cache, SparseState):
                store = self.store
                x, cache = sparse_cache.decode_layer(layer, store, mixing, x, cache, *at)
                part = "feed"
            if part != "feed":
                stays = batch.drafted is not None and not isinstance(cache, KVCache)
                run = programs.verify_layer if stays else programs.run_layer
                x, new = run(
                    layer,
                    part,
                    mixing,
                    x,
                    cache,
                    *at,
                    sparse=self._is_sparse(piece),
                    drafted=batch.drafted,
                )
                if stays:
                    batch.tokens[unit.layer] = new
                else:
                    cache = new
            elif unit.kind != "mix" and not placed:
                x, _ = programs.run_layer(layer, "feed", weights, x, None, *at)
            if placed:
                x, _ = self._mixture(ModelUnit("feed", unit.layer), piece, weights, x, None)
            results.append(x)
        return results, cache

    def _mixture(
        self, unit: ModelUnit, piece: TokenPiece, weights: Tree, x: Stream, cache: LayerState | None
    ) -> tuple[Stream, LayerState | None]:
        """Run a layer, or its second half, whose experts lie one by one."""
        return self.experts.layer(
            self.cfg.layers[unit.layer],
            unit.kind != "feed",
            unit,
            weights,
            x,
            cache,
            Places(piece.positions, piece.lengths, piece.rope),
            self._is_sparse(piece),
            self.record,
            self._following(unit, piece),
        )

    def _following(self, unit: ModelUnit, piece: TokenPiece) -> Following:
        """Return what comes after a piece has passed a layer with experts."""
        live = self.active_batches()
        if piece is self.batches[live[-1]].pieces[-1]:
            return self._next_experts.get(unit.layer, Following())
        return Following(keeps=len(live) > 1)

    @functools.cached_property
    def _next_experts(self) -> dict[int, Following]:
        """The next layer with experts that lie one by one, by layer."""
        found, after = {}, Following()
        for unit in reversed(self._each):
            weights = unit.weights(self.params)
            if placed_experts(weights) is not None:
                found[unit.layer], after = after, Following(False, unit.layer, weights)
        return found

    def _is_sparse(self, piece: TokenPiece) -> bool:
        """Whether the tokens read V sparsely. Otherwise a step has a prompt's programs."""
        return self.cfg.attn_sparsity < 1 and not piece.of_prompt

    def _taps(self, batch: OffloadedBatch, hidden: list[Stream]) -> list[jax.Array | None]:
        """Return ``Hidden.taps`` of each piece, whose last layer gave ``hidden``."""
        layers = self.cfg.taps
        if not layers:
            return [None] * len(hidden)
        batch.taps[self.cfg.n_layers] = [x.total for x in hidden]
        pieces = zip(*(batch.taps[layer] for layer in layers), strict=True)
        return [jnp.concatenate(states, axis=-1) for states in pieces]

    def _head(self, batch: OffloadedBatch, weights: Tree, hidden: list[Stream]) -> None:
        tapped = self._taps(batch, hidden)
        if batch.drafted is not None:
            [x], [taps] = hidden, tapped
            batch.scores = programs.all_logits(self.cfg, weights, x)[:, 0]
            batch.output = Hidden(x.total, taps)
            return
        if batch.head is not None and batch.reads_prompts:
            assert self._head_draft is not None
            draft, params = self._head_draft
            batch.head = read_prompts(
                draft,
                params,
                batch.head,
                batch.pieces,
                [Hidden(x.total, taps) for x, taps in zip(hidden, tapped, strict=True)],
            )
        last = None
        for piece, x, taps in zip(batch.pieces, hidden, tapped, strict=True):
            last = programs.last_hidden(x, piece.lengths, last, taps)
        batch.output = last
        scores = programs.head_logits(self.cfg, weights, last)
        new = [piece.lengths for piece in batch.pieces]
        fixed = self.cfg.fixed_sums
        batch.rows = append_token(fixed, batch.rows, new, scores, batch.sampling, self.stop_ids)

    def store_cache(self, unit: ModelUnit, index: int, cache: LayerState | None) -> None:
        if not unit.has_cache:
            return
        assert cache is not None
        if unit.kind == "span":
            for layer, own in zip(unit.layers, cache, strict=True):
                self.store_cache(layer, index, own)
            return
        batch = self.batches[index]
        home = batch.caches[unit.layer]
        if not home.moves:
            home.save(cache, None, 0)
            return
        keeps_others = isinstance(cache, KVCache) and not batch.reads_prompts
        slots = batch.pieces[0].slots if keeps_others else None
        with self.record("store cache", unit, index):
            home.save(jax.block_until_ready(cache), slots, self.filled)

    def store_hidden(self, index: int, hidden: Tree) -> None:
        batch = self.batches[index]
        if not self.moves["hidden"]:
            batch.hidden = hidden
            return
        with self.record("store hidden", None, index):
            old = batch.hidden
            stored = self.store.put(jax.block_until_ready(hidden), self.policy.activations)
            batch.hidden = wait(stored)
            self.store.free(old)
