"""The decode matmul's x: a warp's run of columns through shared memory into fragments of the mma.

With a norm, x is multiplied by the norm's weight on the way and its squares are summed, float32,
in an order that depends on K's division alone; the token's factor meets the product's sum later.
What is still to be added to x is so before, and rounded as the sum that is stored.
"""

from __future__ import annotations

import functools
import itertools

from jax._src.lib.mlir.dialects import arith

from pallas_kernels import mosaic as p
from pallas_kernels import ptx as a
from pallas_kernels.fused_parts import floats, rounded_sum
from pallas_kernels.matmul.few_rows import widen
from pallas_kernels.matmul.few_rows.plan import TOKENS, WARPS

_IN_FLIGHT = 8  # loads of 16 bytes a lane holds in registers


class StagedX:
    """The part of a block's program that brings x; see ``matmul.few_rows.kernel``."""

    def granule(self, token, index):
        """Address of 8 columns of a token in the warp's run of x.

        A load of fragments takes 4 granules of 2 tokens at a time; the exchange puts those 8 in
        different banks.
        """
        odd = arith.andi(token, p.ci(1))
        if self.scheme.bits == 4:
            odd = arith.xori(p.mul(odd, 2), arith.andi(p.shift_right(index, 3), p.ci(1)))
        elif self.scheme.bits == 16:
            odd = p.mul(odd, 4)
        row = p.mul(token, 2 * self.plan.k_warp)
        return p.add(self.x_mine, row, p.mul(arith.xori(index, odd), 16))

    def x_source(self, token, index):
        at = p.offset(self.x, token, 2 * self.k)
        return p.offset(at, p.add(self.k0, p.mul(index, 8)), 2)

    def repeated(self):
        """Granules at the start of the run that the warp before has too, or None."""
        if not self.overlap:
            return None
        last = p.less(p.ci(self.plan.warps - 2), self.working)
        return arith.select(last, p.ci(self.overlap // 8), p.ci(0))

    def copy_x(self) -> None:
        """The warp's run of x to shared memory, whole lines at a time."""
        per_token = self.plan.k_warp // 8
        repeated = self.repeated()
        count = self.plan.m * per_token
        for first in range(0, count, 32):
            piece = p.add(self.lane, first)

            def copy(piece=piece):
                token, index = (f(piece, p.ci(per_token)) for f in (arith.divui, arith.remui))
                to, source = self.granule(token, index), self.x_source(token, index)
                if repeated is None:
                    p.copy_async(to, source, 0)
                else:
                    size = arith.select(p.less(index, repeated), p.ci(0), p.ci(16))
                    p.copy_async(to, source, 0, size=size)

            if first + 32 <= count:
                copy()
            else:
                p.when(p.less(piece, count), copy)

    # --- with a norm ---

    def normed_x(self):
        """A generator in two halves: the first loads; then everything else up to the squares' sums
        of the warp in shared memory.  What lies between travels with the loads."""
        plan = self.plan
        lanes = {1: 32, 2: 16}.get(plan.m, 8)  # to a token
        at_once, per_token = 32 // lanes, plan.k_warp // 8
        lane = arith.andi(self.lane, p.ci(lanes - 1))
        first = p.shift_right(self.lane, lanes.bit_length() - 1)
        rounds, steps = -(-plan.m // at_once), -(-per_token // lanes)
        tokens = [p.add(first, r * at_once) for r in range(rounds)]
        inside = [p.less(t, plan.m) for t in tokens]
        repeated = self.repeated()
        works = None if plan.warps == WARPS else p.less(self.warp, plan.warps)
        # Squares of the granules whose number is the same modulo 32: the same sums for any lanes.
        sums = [[p.cf(0.0)] * at_once for _ in tokens]
        per_load = max(1, _IN_FLIGHT // rounds)

        def load(step):
            index = p.add(lane, step * lanes)
            index = p.minimum(index, per_token - 1)
            rows = [p.minimum(t, plan.m - 1) for t in tokens]
            xs = [p.load_global(self.x_source(row, index), 4) for row in rows]
            if self.pending is not None:
                pending = [self.load_pending(row, index) for row in rows]
                xs = list(zip(xs, pending, strict=True))
            return xs, self.load_gamma(p.add(self.k0, p.mul(index, 8)))

        def use(step, xs, gamma):
            index = p.add(lane, step * lanes)
            whole = (step + 1) * lanes <= per_token
            for r, (token, words) in enumerate(zip(tokens, xs, strict=True)):
                if self.pending is not None:
                    words = self.store_total(*words, token, p.minimum(index, per_token - 1))
                if repeated is not None:
                    keep = p.less(index, repeated)
                    words = [arith.select(keep, p.ci(0), w) for w in words]
                values = floats(words)
                total = sums[r][step % at_once]
                for v in values:
                    total = p.fma(v, v, total)
                if not whole:
                    total = arith.select(p.less(index, per_token), total, sums[r][step % at_once])
                sums[r][step % at_once] = total
                scaled = [arith.mulf(v, g) for v, g in zip(values, gamma, strict=True)]
                pairs = [a.pack(*scaled[i : i + 2], "bf16") for i in range(0, 8, 2)]

                def store(token=token, pairs=pairs):
                    p.store_shared_words(self.granule(token, index), pairs)

                limits = [] if (r + 1) * at_once <= plan.m else [inside[r]]
                limits += [] if whole else [p.less(index, per_token)]
                limits += [] if works is None else [works]
                if limits:
                    p.when(functools.reduce(arith.andi, limits), store)
                else:
                    store()

        for start in range(0, steps, per_load):
            some = range(start, min(start + per_load, steps))
            loaded = [load(step) for step in some]
            if start == 0:
                yield
            for step, (xs, gamma) in zip(some, loaded, strict=True):
                use(step, xs, gamma)
        for r, token in enumerate(tokens):
            parts = sums[r]
            while len(parts) > 1:
                half = len(parts) // 2
                parts = [arith.addf(u, v) for u, v in zip(parts[:half], parts[half:], strict=True)]
            total = parts[0]
            for distance in (16, 8, 4, 2, 1):
                if distance < lanes:
                    total = arith.addf(total, a.shuffle_xor(total, distance))
            mine = arith.andi(p.less(lane, 1), inside[r])
            mine = arith.andi(mine, p.less(self.warp, plan.warps))
            at = p.add(self.squares, p.mul(self.warp, 4 * TOKENS), p.mul(token, 4))
            p.when(mine, lambda at=at, total=total: p.store_shared(at, total))
        yield

    def load_pending(self, token, index):
        """8 columns of what is to be added to a token, as floats."""
        at = p.offset(self.pending, token, 4 * self.k)
        at = p.offset(at, p.add(self.k0, p.mul(index, 8)), 4)
        return [arith.bitcast(p.f32(), w) for w in p.load_global(at, 4) + p.load_global(at, 4, 16)]

    def store_total(self, words, pending, token, index):
        """8 columns of a token with what was pending: words, which the first cluster stores."""
        words = rounded_sum(words, pending)
        at = p.offset(self.total, p.minimum(token, self.plan.m - 1), 2 * self.k)
        at = p.offset(at, p.add(self.k0, p.mul(index, 8)), 2)
        p.when(p.less(self.cluster, 1), lambda: a.store_words(at, words))
        return words

    def load_gamma(self, column):
        """The norm's weight of 8 columns, as floats."""
        if self.gamma_kind == "f32":
            at = p.offset(self.gamma, column, 4)
            words = p.load_global(at, 4) + p.load_global(at, 4, 16)
            return [arith.bitcast(p.f32(), w) for w in words]
        words = p.load_global(p.offset(self.gamma, column, 2), 4)
        return floats(words)

    def sum_squares(self) -> None:
        """A thread per token: the warps' sums to the block's; with one block the token's factor."""

        def one():
            at = p.add(self.squares, p.mul(self.thread, 4))
            total = p.load_shared(at)
            for w in range(1, self.plan.warps):
                total = arith.addf(total, p.load_shared(at, 4 * TOKENS * w))
            if self.plan.split == 1:
                total = self.factor_of(total)
            p.store_shared(at, total, 4 * TOKENS * WARPS)

        p.when(p.less(self.thread, self.plan.m), one)

    def factor_of(self, squares):
        mean = p.fma(squares, p.cf(1.0 / self.k), p.cf(self.eps))
        return p.rsqrt(mean)

    def factor(self, token):
        """The token's factor, in any thread, after the last barrier before the sums are written."""
        at = p.add(self.squares, 4 * TOKENS * WARPS, p.mul(token, 4))
        if self.plan.split == 1:
            return p.load_shared(at)
        total = p.load_peer(p.peer_address(at, 0))
        for i in range(1, self.plan.split):
            total = arith.addf(total, p.load_peer(p.peer_address(at, i)))
        return self.factor_of(total)

    # --- fragments ---

    def x_granules(self, tile: int):
        """Addresses of the lane's columns of the first block; a later block's are a multiple of
        ``x_step`` after.  (Plain weights: of the first two blocks, which are one granule each.)"""
        # Columns of mma beyond the last token repeat it and are not stored.
        token = p.minimum(p.add(self.row, 8 * tile), self.plan.m - 1)
        if self.scheme.plain:
            return [self.granule(token, p.add(self.quad, 4 * i)) for i in range(2)]
        pieces = self.scheme.columns // 32
        mine = p.mul(self.quad, pieces)
        return [self.granule(token, p.add(mine, i)) for i in range(pieces)]

    def load_x(self, block: int, tile: int):
        if self.scheme.plain:
            return p.load_shared_words(self.x_at[tile][block % 2], 4, 128 * (block // 2))
        step = 2 * self.scheme.columns
        return [v for at in self.x_at[tile] for v in p.load_shared_words(at, 4, step * block)]

    def arrange_x(self):
        """[block][8 tokens] pairs in the order of the words, or None and left in place."""
        blocks, tokens = range(self.n_blocks), range(self.plan.n_tiles)
        self.x_at = [self.x_granules(t) for t in tokens]
        if not self.plan.resident:
            return [[self.permuted(self.load_x(b, t)) for t in tokens] for b in blocks]
        if self.scheme.plain:
            return None  # words are pairs as they are

        def in_place():
            for b, t in itertools.product(blocks, tokens):
                words = self.permuted(self.load_x(b, t))
                p.warp_barrier()  # lanes beyond the last token read its words, and write the same
                for i, at in enumerate(self.x_at[t]):
                    step = 2 * self.scheme.columns
                    p.store_shared_words(at, words[4 * i : 4 * i + 4], step * b)
            p.warp_barrier()

        self.working_warps(in_place)
        return None

    def permuted(self, words):
        per = self.scheme.per_word // 2
        groups = [widen.x_pairs(self.scheme, words[i : i + per]) for i in range(0, len(words), per)]
        return [pair for group in groups for pair in group]
