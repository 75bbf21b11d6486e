"""Words of a warp of the direct decode attention: of the cache and the queries, or the projection.

Without RoPE q ``[B, N, H]`` comes as it is, beside the row's length.  With RoPE q is the projection
``[B, N + 2K, H]``, beside the new token's slot.  Queries are rotated.  The new token is not in the
cache yet: the tile that it belongs to takes it from the projection and stores it.  If q's and k's
heads have a norm, the four lanes that share one first sum its squares.  Its weights and the tables
are then read from shared memory, because registers would not hold them.  Tokens past the row's end
are the last one again.

With a block table (``attention.pages``) a tile lies in a page, whose entry is loaded a tile ahead.

Copies: a lane loads its own words, straight into registers; ``stage`` copies tables and the norm's
weights to shared memory.  Waits: ``first``, for these alone, at the block's barrier.
Writes: the warp of the new token's tile stores its key and value.
"""

from __future__ import annotations

import functools

import jax

from pallas_kernels import ptx as p
from pallas_kernels.attention import tile
from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.pages import BlockTable, Paging
from pallas_kernels.attention.tile import TILE
from pallas_kernels.rows.fused_parts import floats, packed


def staged_floats(head_dim: int) -> int:
    """Floats of shared memory: cos and sin of half a head, the norms' weights in 16 bits."""
    return 2 * head_dim


class HeadWords:
    """A lane's words of one kv head of a row; everything is emitted while a kernel is traced.

    gmem: q; tables, a list of cos, sin and the norms' weights of q and of k, or the start of it;
    lengths, with tables the slots; table or None; k and v, lists of their leaves.
    end: the row's length.  Keys and values of a tile are (words of each token, its scales and zero
    points).  staged: (eps of the norm, shared memory of ``staged_floats``), or None.
    """

    def __init__(
        self,
        gmem,
        codes: Codes,
        shape,
        paging: Paging | None,
        kind: str,
        row,
        head,
        lane,
        staged=None,
    ):
        self.codes, self.kind, self.row, self.head = codes, kind, row, head
        _, self.capacity, self.n_kv, self.n, self.h = shape
        self.g, self.quad = lane >> 2, lane & 3
        self.q, self.tables, self.k, self.v = gmem.q, gmem.tables, gmem.k, gmem.v
        self.pages = BlockTable(gmem.table, row, paging) if paging else None
        self.eps, self.staged = staged or (None, None)
        if self.staged is not None:
            self.stage()
        (number,) = p.load_global(p.offset(p.address(gmem.lengths), row, 4), 1)
        group = self.n // self.n_kv
        mine = head * group + p.minimum(self.g, group - 1)  # past the group copies
        self.raw_query = self.projected(mine)
        if self.tables:
            # All loads from the projection start before the block knows whether it needs them.
            self.new_key, self.new_value = self.load_new_key(), self.load_new_value()
            self.slot, self.there = number, number < self.capacity
            number = p.where(self.there, number + 1, 0)
        self.end = p.larger(p.smaller(number, self.capacity), 0)
        self.last = p.larger(self.end - 1, 0)
        if self.tables and self.pages:
            self.there = self.there & self.pages.holds(self.pages.entry(self.slot))
            self.end = p.where(self.there, self.end, 0)

    def first(self, token0, early: bool):
        """Query, keys and values for a warp's first tile.  early: its place does not hang on the
        row's length, nor should its page."""
        if early and self.pages:
            # Where it is past the end, any token of the row will do.
            own, first = self.pages.entry(token0), self.pages.entry(p.ci(0))
            entry = p.where(p.at_most(token0, self.last), own, first)
        else:
            entry = self.entry(token0)
        shift = self.shift(token0, entry)
        keys, values = self.load_keys(token0, shift), self.load_values(token0, shift)
        if not self.tables:
            return self.raw_query, keys, values
        if self.staged is not None:
            p.copies_wait(0)
            p.barrier()
        keys = self.with_new_key(token0, keys, shift, self.new_key)
        values = self.with_new_value(token0, values, shift, self.new_value)
        return self.turned(self.raw_query, self.new_key[1], "q"), keys, values

    def next_keys(self, token0, entry):
        shift = self.shift(token0, entry)
        keys = self.load_keys(token0, shift)
        return self.with_new_key(token0, keys, shift) if self.tables else keys

    def next_values(self, token0, entry):
        shift = self.shift(token0, entry)
        values = self.load_values(token0, shift)
        return self.with_new_value(token0, values, shift) if self.tables else values

    # --- the cache ---

    def entry(self, token0):
        """The table's entry for the tile's page; None without a table."""
        return self.pages.entry(p.smaller(token0, self.last)) if self.pages else None

    def shift(self, token0, entry):
        return self.pages.shift(p.smaller(token0, self.last), entry) if self.pages else None

    def line(self, ref, token, size: int, shift):
        """A token's ``size`` bytes of this head."""
        base = p.address(ref)
        if shift is None:
            base = p.offset(base, self.row, self.capacity * self.n_kv * size)
        else:
            token = token + shift
        return p.offset_rows(p.offset(base, self.head, size), token, self.n_kv * size)

    def key_tokens(self, token0) -> list:
        return [p.smaller(token0 + self.g + 8 * i, self.last) for i in range(2)]

    def value_tokens(self, token0) -> list:
        own = token0 + self.quad * 2
        return [p.smaller(own + (t % 2 + t // 2 * 8), self.last) for t in range(4)]

    def load_keys(self, token0, shift):
        codes, tokens = self.codes, self.key_tokens(token0)
        at = self.quad * codes.k_chunk
        return [
            [
                w
                for j in range(codes.k_chunks)
                for w in p.load_global(
                    p.offset(self.line(self.k[0], t, codes.row_bytes, shift), at),
                    codes.k_chunk // 4,
                    j * 4 * codes.k_chunk,
                )
            ]
            for t in tokens
        ], self.load_numbers(self.k, tokens, shift)

    def load_values(self, token0, shift):
        size, tokens = self.codes.row_bytes, self.value_tokens(token0)
        lines = [self.line(self.v[0], t, size, shift) for t in tokens]
        numbers = self.load_numbers(self.v, self.key_tokens(token0), shift)
        return [self.value_words(at) for at in lines], numbers

    def value_words(self, base) -> list:
        codes = self.codes
        base = p.offset(base, self.g * codes.v_chunk)
        return [
            w
            for j in range(codes.v_chunks)
            for w in p.load_global(base, codes.v_chunk // 4, j * 8 * codes.v_chunk)
        ]

    def load_numbers(self, refs, tokens, shift) -> list:
        """[token][scale, zero point] words."""
        size = self.codes.groups * self.codes.scale_size
        return [
            [
                [p.load_half(at)] if size == 2 else p.load_global(at, size // 4)
                for at in [self.line(ref, t, size, shift) for ref in refs[1:]]
            ]
            for t in (tokens if self.codes.quantized else ())
        ]

    # --- the projection ---

    def head_of(self, head):
        base = p.offset(p.address(self.q), self.row, 2 * self.h * self.heads)
        return p.offset(base, head, 2 * self.h)

    @property
    def heads(self) -> int:
        return self.n + 2 * self.n_kv if self.tables else self.n

    def projected(self, head) -> list:
        """A head's features that meet this lane's chunks of keys."""
        at = self.quad * (2 * tile.features_of(self.codes))
        return tile.load_heads(p.offset(self.head_of(head), at), self.codes)

    def stage(self) -> None:
        """Sends the row's tables and the norms' weights, 2 H bytes each, to shared memory."""
        thread, size = p.register("tid.x"), 2 * self.h
        own = thread * 16

        def copy():
            for i, ref in enumerate(self.tables):
                source = p.offset(p.address(ref), own)
                if i < 2:
                    source = p.offset(source, self.row, size)
                p.copy_async(self.staged + own, source, size * i)

        p.when(thread < size // 16, copy)
        p.copies_commit()

    def load_new_key(self):
        """The new token's features, not rotated, and (cos, sin) of a head's first half of them;
        None for those where they are staged."""
        features = tile.features_of(self.codes)
        projected = self.projected(self.head + self.n)
        if self.staged is not None:
            return projected, None
        at = self.quad * (4 * features)
        turns = [
            [
                x
                for j in range(self.codes.k_chunks // 2)
                for i in range(features // 4)
                for x in p.load_global(
                    p.offset(p.offset(p.address(t), self.row, 2 * self.h), at),
                    4,
                    16 * features * j + 16 * i,
                    "f32",
                )
            ]
            for t in self.tables
        ]
        return projected, turns

    def load_new_value(self) -> list:
        return self.value_words(self.head_of(self.head + (self.n + self.n_kv)))

    def turned(self, chunks, turns, of: str) -> list:
        """RoPE of a head of q or k, after its norm; a lane has feature i + H / 2 in the chunk half
        of them after i's."""
        half, features = len(chunks) // 2, tile.features_of(self.codes)
        factor = None if self.staged is None else self.norm_factor(chunks)
        low, high = [], []
        for j in range(half):
            x, y = (floats(chunks[i], self.kind) for i in (j, j + half))
            if factor is not None:
                x, y = (
                    [v * factor * w for v, w in zip(part, own, strict=True)]
                    for part, own in ((x, self.weights(j, of)), (y, self.weights(j + half, of)))
                )
                cos, sin = (self.staged_table(j, i) for i in range(2))
            else:
                cos, sin = (table[j * features : (j + 1) * features] for table in turns)
            turn = list(zip(x, y, cos, sin, strict=True))
            low.append([x * c + y * -s for x, y, c, s in turn])
            high.append([y * c + x * s for x, y, c, s in turn])
        return [packed(part, self.kind) for part in low + high]

    def norm_factor(self, chunks):
        total = p.cf(0.0)
        for x in floats([w for chunk in chunks for w in chunk], self.kind):
            total = p.fma(x, x, total)
        total = p.over_lanes(total, (1, 2))  # the other features of the head
        return p.rsqrt(p.fma(total, 1.0 / self.h, self.eps))

    def weights(self, chunk: int, of: str) -> list:
        """The norm's at the lane's features of a chunk."""
        features = tile.features_of(self.codes)
        at = self.staged + self.quad * (2 * features)
        begin = 2 * self.h * (2 + "qk".index(of)) + 8 * features * chunk
        return floats(p.load_shared(at, features // 2, begin), self.kind)

    def staged_table(self, chunk: int, index: int) -> list:
        """cos or sin at the lane's features of a chunk."""
        features = tile.features_of(self.codes)
        at = self.staged + self.quad * (4 * features)
        begin = 2 * self.h * index + 16 * features * chunk
        return p.load_shared(at, features, begin, "f32")

    def with_new_key(self, token0, keys, shift, loaded=None):
        """loaded: by ``load_new_key``, where there are registers for it."""
        own, chunk = p.equal(self.slot & 7, self.g), self.codes.k_chunk

        def new():
            return [w for part in self.turned(*(loaded or self.load_new_key()), "k") for w in part]

        at = self.line(self.k[0], self.slot, self.codes.row_bytes, shift)
        at = p.offset(at, self.quad * chunk)
        return self.with_new(token0, keys, self.key_tokens(token0), new, own, at, 4 * chunk)

    def with_new_value(self, token0, values, shift, loaded=None):
        own, chunk = self.quad < 1, self.codes.v_chunk
        at = self.line(self.v[0], self.slot, self.codes.row_bytes, shift)
        at = p.offset(at, self.g * chunk)
        return self.with_new(
            token0,
            values,
            self.value_tokens(token0),
            lambda: loaded or self.load_new_value(),
            own,
            at,
            8 * chunk,
        )

    def with_new(self, token0, held, tokens, new, own, at, apart: int):
        """Return the held words of ``tokens`` with those of the new token, and store these.

        Lanes ``own`` store four words at ``at`` and every four ``apart`` bytes on.
        """

        def replaced():
            fresh = new()
            is_own = own & p.at_most(token0, self.slot)
            p.when(is_own, functools.partial(_store_words, at, fresh, apart))
            return [
                p.where(p.equal(t, self.slot), y, x)
                for t, old in zip(tokens, held[0], strict=True)
                for x, y in zip(old, fresh, strict=True)
            ]

        # Tiles past the row's end hold its last token over and over.
        reached = self.there & p.below(self.slot, token0 + TILE)
        flat, tree = jax.tree.flatten(held)  # no scales: the words alone
        return jax.tree.unflatten(tree, p.choose(reached, replaced, flat))


def _store_words(at, words, apart: int) -> None:
    """Store words, four together, ``apart`` bytes from one four to the next."""
    for i in range(0, len(words), 4):
        p.store_global(at, words[i : i + 4], i // 4 * apart)
