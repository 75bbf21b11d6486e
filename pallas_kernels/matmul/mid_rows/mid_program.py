"""One block's program of ``mid_rows.kernel``: a tile of x's rows by w's rows, over a part of K.

Everything it does is emitted while the kernel is traced.

A unit is 64 bytes of a row of x: two steps of mma.  A quad's lane q has the unit's bytes 16 q to
16 q + 15, which are neighbouring columns, and the codes of the same columns of w.  The order of
columns within a unit does not matter to a sum, as long as both operands have the same one, so each
load is of one word, two or four.  x is the A operand, w the B operand.

Lane g of the 8 lanes of a column of B has row 8 (g / 2) + 2 j + g % 2 of the warp's 32 in the j-th
of its four tiles.  A lane then ends with 8 neighbouring outputs of a row of x.

Rows in shared memory are XORed, in units of 16 bytes, by bits of their own number, so that the
lanes of a load are in different banks.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.fused_parts import floats, packed
from pallas_kernels.jax_internals import arith
from pallas_kernels.matmul.mid_rows.plan import WARP_ROWS, MidScheme, MidTile
from pallas_kernels.ptx import Value

_PIECE = 16  # bytes of a copy
_TILES = WARP_ROWS // 8  # of B, of a warp
_SIZE = {"bf16": 2, "f16": 2, "f32": 4}


class MidBlock:
    """gmem: x, w, scale, zero, scale_x, bias, out.  kinds: of those that hold floats, by name."""

    def __init__(
        self,
        tile: MidTile,
        scheme: MidScheme,
        shape: tuple[int, int, int],
        kinds: dict[str, str],
        gmem: SimpleNamespace,
        smem: SimpleNamespace,
    ):
        self.tile, self.scheme, self.kinds = tile, scheme, kinds
        self.m, self.n, self.k = shape
        self.gmem = {name: None if r is None else p.address(r) for name, r in vars(gmem).items()}
        self.ring = p.shared_address(smem.ring)
        self.steps = self.k // scheme.columns // tile.parts  # of this block
        self.thread = p.register("tid.x")
        lane = p.masked(self.thread, 31)
        self.group, self.quad = p.shift_right(lane, 2), p.masked(lane, 3)
        warp, across = p.shift_right(self.thread, 5), tile.rows // WARP_ROWS
        self.warp_n, self.warp_k = arith.remui(warp, p.ci(across)), arith.divui(warp, p.ci(across))
        self.lane = lane
        block, down = p.register("ctaid.x"), -(-self.m // tile.tokens)
        block, token = arith.divui(block, p.ci(down)), arith.remui(block, p.ci(down))
        wide = -(-self.n // tile.rows)
        self.part, row = arith.divui(block, p.ci(wide)), arith.remui(block, p.ci(wide))
        self.first_token, self.first_row = p.mul(token, tile.tokens), p.mul(row, tile.rows)
        # A warp behind the last row computes the last rows again, and stores nothing.
        own = p.add(self.first_row, p.mul(self.warp_n, WARP_ROWS))
        self.has_rows = p.less(own, self.n)
        self.warp_row = p.smaller(own, p.ci(self.n - WARP_ROWS))

    def run(self) -> None:
        p.await_kernel()
        tile, scheme = self.tile, self.scheme
        self.place_copies()
        self.place_loads()
        for step in range(tile.stages - 1):
            if step < self.steps:
                self.copy(p.ci(step), p.ci(step * tile.step_bytes(scheme)))
            p.copies_commit()
        count = tile.tokens // 16 * _TILES * 4
        zero = p.ci(0) if scheme.exact else p.cf(0.0)
        first = self.load_scales(p.ci(0))
        carry = p.loop(0, self.steps, 1, [zero] * count + [p.ci(0), *first], self.step)
        sums = [carry[i : i + 4] for i in range(0, count, 4)]
        sums = [sums[i : i + _TILES] for i in range(0, len(sums), _TILES)]
        if tile.k_warps > 1:
            self.exchange(sums)
        else:
            self.store(sums)

    # --- copies ---

    def place_copies(self) -> None:
        """The thread's pieces of a step: (bytes from the operand's begin, place in the ring)."""
        tile, scheme = self.tile, self.scheme
        k0 = p.mul(self.part, self.steps * scheme.columns)
        self.pieces: list[tuple[Value, Value, Value, int]] = []
        for name, rows, pitch, first, last, bits, start in (
            ("x", tile.tokens, scheme.x_pitch, self.first_token, self.m, 8 * scheme.x_size, 0),
            (
                "w",
                tile.rows,
                scheme.w_pitch,
                self.first_row,
                self.n,
                scheme.w.bits,
                tile.tokens * scheme.x_pitch,
            ),
        ):
            threads, across = 32 * tile.warps, pitch // _PIECE
            row, chunk = (
                p.shift_right(self.thread, across.bit_length() - 1),
                p.masked(self.thread, across - 1),
            )
            moved = arith.xori(chunk, self.swizzle(row, pitch))
            to = p.add(self.ring, p.mul(row, pitch), p.mul(moved, _PIECE), start)
            column = p.add(arith.divui(p.mul(k0, bits), p.ci(8)), p.mul(chunk, _PIECE))
            apart = threads // across  # rows between two pieces of a thread: 16 or more
            for i in range(rows // apart):
                there = p.smaller(p.add(first, row, i * apart), p.ci(last - 1))
                source = p.add(p.mul(there, self.k * bits // 8), column)
                self.pieces.append((self.gmem[name], source, p.add(to, i * apart * pitch), pitch))

    def copy(self, step: Value, slot: Value) -> None:
        """Start the copies of a step of K into the ring at byte ``slot``."""
        for base, source, to, pitch in self.pieces:
            at = p.offset(base, p.add(source, p.mul(step, pitch)))
            p.copy_async(p.add(to, slot), at, 0, line=True)

    def swizzle(self, row: Value, pitch: int) -> Value:
        """What the pieces of a row are XORed with."""
        if pitch > 64:
            return p.shift_left(p.masked(row, 1), 2)
        # Rows of 64 bytes: the lanes of a load differ in bits 0, 3 and 4 of the row.
        third, fourth = (p.masked(p.shift_right(row, i), 1) for i in (3, 4))
        return p.add(p.shift_left(third, 1), fourth)

    # --- a step ---

    def place_loads(self) -> None:
        """The lane's places of each of the warp's units in the ring: of x and of w."""
        tile, scheme = self.tile, self.scheme
        share = scheme.units // tile.k_warps
        units = [p.add(p.mul(self.warp_k, share), i) for i in range(share)]
        self.columns = [
            p.add(p.mul(unit, scheme.unit), p.mul(self.quad, 16 // scheme.x_size)) for unit in units
        ]
        row = p.add(
            p.mul(self.warp_n, WARP_ROWS),
            p.mul(p.shift_right(self.group, 1), 8),
            p.masked(self.group, 1),
        )
        self.x_places, self.w_places = [], []
        w_begin = p.add(self.ring, tile.tokens * scheme.x_pitch, p.mul(row, scheme.w_pitch))
        word = scheme.w.bits * 16 // scheme.x_size // 8  # bytes of the lane's codes of a unit
        for unit in units:
            piece = p.add(p.mul(unit, 4), self.quad)
            piece = arith.xori(piece, self.swizzle(self.group, scheme.x_pitch))
            self.x_places.append(
                p.add(self.ring, p.mul(self.group, scheme.x_pitch), p.mul(piece, _PIECE))
            )
            at = p.add(p.mul(unit, 4 * word), p.mul(self.quad, word))
            piece = arith.xori(p.shift_right(at, 4), self.swizzle(row, scheme.w_pitch))
            at = p.add(p.mul(piece, _PIECE), p.masked(at, _PIECE - 1))
            self.w_places.append(p.add(w_begin, at))
        self.word = word // 4

    def step(self, index: Value, carry: list[Value]) -> list[Value]:
        """Multiply a step that has arrived, and start the copies of one that is to come."""
        tile, scheme = self.tile, self.scheme
        count = tile.tokens // 16 * _TILES * 4
        acc, slot, scales = carry[:count], carry[count], carry[count + 1 :]
        acc = [acc[i : i + 4] for i in range(0, count, 4)]
        size = tile.step_bytes(scheme)
        p.copies_wait(tile.stages - 2)
        p.barrier()
        later = p.add(index, tile.stages - 1)
        # The slot before this one, which all warps have read.
        behind = arith.select(
            p.equal(slot, 0), p.ci((tile.stages - 1) * size), arith.subi(slot, p.ci(size))
        )
        p.when(p.less(later, self.steps), functools.partial(self.copy, later, behind))
        p.copies_commit()
        following = self.load_scales(p.smaller(p.add(index, 1), p.ci(self.steps - 1)))
        per_unit = len(scales) // self.scale_sets if scales else 0
        for i in range(len(self.x_places)):
            held = i % self.scale_sets * per_unit if scales else 0
            right = self.weights(p.add(self.w_places[i], slot), scales[held : held + per_unit])
            place = p.add(self.x_places[i], slot)
            for t in range(tile.tokens // 16):
                low, high = (
                    p.load_shared(place, 4, (16 * t + 8 * half) * scheme.x_pitch)
                    for half in range(2)
                )
                for s in (0, 2):
                    left = [low[s], high[s], low[s + 1], high[s + 1]]
                    for j in range(_TILES):
                        at = t * _TILES + j
                        acc[at] = self.multiply(acc[at], left, right[j][s : s + 2])
        moved = p.add(slot, size)
        moved = arith.select(p.less(moved, tile.stages * size), moved, p.ci(0))
        return [*(x for four in acc for x in four), moved, *following]

    def multiply(self, acc: list[Value], left: list[Value], right: list[Value]) -> list[Value]:
        if self.scheme.exact:
            return p.mma_int8(acc, left, right)
        return p.mma(acc, left, right, self.scheme.w.kind)

    # --- weights ---

    @property
    def is_one_group(self) -> bool:
        """Whether the columns of a step have one scale."""
        return self.scheme.w.group % self.scheme.columns == 0

    @property
    def scale_sets(self) -> int:
        """Of a step: one for all of its units, or one for each unit of the warp."""
        return 1 if self.is_one_group else self.scheme.units // self.tile.k_warps

    def load_scales(self, step: Value) -> list[Value]:
        """Scales and zeros of the lane's rows in a step as they are stored, set after set; none
        where the sums are multiplied and no zeros are taken off."""
        scheme, w = self.scheme, self.scheme.w
        zeros = self.gmem["zero"] is not None
        if not scheme.folds and not zeros:
            return []
        row = p.add(self.warp_row, p.mul(p.shift_right(self.group, 1), 8), p.masked(self.group, 1))
        begin = p.mul(row, w.n_groups)
        found = []
        k0 = p.mul(p.add(p.mul(self.part, self.steps), step), scheme.columns)
        for i in range(self.scale_sets):
            column = k0 if self.is_one_group else p.add(k0, self.columns[i])
            at = p.add(begin, arith.divui(column, p.ci(w.group)))
            if scheme.folds:
                found += self.load_four("scale", at)
            if zeros:
                found += self.load_four("zero", at)
        return found

    def load_four(self, name: str, at: Value) -> list[Value]:
        """A scale or zero of each of the lane's rows: floats as they are stored, integers wide."""
        kind = self.kinds.get(name)
        size = 1 if kind is None else _SIZE[kind]
        base, found = p.offset(self.gmem[name], at, size), []
        for j in range(_TILES):
            here = 2 * j * self.scheme.w.n_groups * size
            if kind is None:
                found.append(p.load_signed_byte(base, here))
            elif kind == "f32":
                found.append(p.load_global(base, 1, here, "f32")[0])
            else:
                found.append(p.load_half(base, here))
        return found

    def doubled(self, value: Value, kind: str) -> Value:
        """A stored float as a pair of x's kind."""
        if kind == "f32":
            value = p.narrow(value, self.scheme.w.kind)
        elif kind != self.scheme.w.kind:
            value = p.narrow(p.widen(value, kind), self.scheme.w.kind)
        return p.permute(value, value, 0x1010)

    def weights(self, place: Value, scales: list[Value]) -> list[list[Value]]:
        """The lane's four words of each tile of B in a unit, as they are multiplied."""
        scheme, w, found = self.scheme, self.scheme.w, []
        factors = scales[:_TILES] if scheme.folds else []
        zeros = scales[len(factors) :]
        for j in range(_TILES):
            words = p.load_shared(place, self.word, 2 * j * scheme.w_pitch)
            if scheme.exact:
                found.append(words)
                continue
            bias = p.ci(w.bias)
            if w.zero == "int":
                bias = p.add(bias, p.mul(zeros[j], 0x00010001))
            pairs = [pair for word in words for pair in self.pairs(word, bias)]
            if factors:
                factor = self.doubled(factors[j], self.kinds["scale"])
                if w.zero == "float":
                    above = self.doubled(zeros[j], self.kinds["zero"])
                    pairs = [p.fma_pairs(pair, factor, above) for pair in pairs]
                else:
                    pairs = [p.mul_pairs(pair, factor, w.kind) for pair in pairs]
            found.append(pairs)
        return found

    def pairs(self, word: Value, bias: Value) -> list[Value]:
        """A word's codes, less what ``bias`` stands for, as pairs of neighbours.

        As in ``few_rows.widen``, a code stands under a constant exponent until the bias is taken
        off; bfloat16's 7 bits hold no byte, whose sign is therefore taken off apart.
        """
        w = self.scheme.w
        if w.bits == 4:
            upper = p.shift_right(word, 4)
            spread = [p.permute(word, upper, 0x4400 + 0x1111 * j) for j in range(4)]
            return [p.sub_pairs(p.and_xor(x, 0x000F000F, w.bias), bias, w.kind) for x in spread]
        spread = [p.permute(word, word, selector) for selector in (0x1100, 0x3322)]
        if w.kind == "f16":
            return [p.sub_pairs(p.and_xor(x, 0x00FF00FF, w.bias), bias, w.kind) for x in spread]
        return [
            p.sub_pairs(p.and_xor(x, 0x007F007F, 0x43004300), p.and_xor(x, 0x00800080, 0x43004300))
            for x in spread
        ]

    # --- the end ---

    def exchange(self, sums: list[list[list[Value]]]) -> None:
        """Add the sums of the warps that share columns, in their order; the first ones store."""
        across = self.tile.rows // WARP_ROWS
        size = 16 * 32  # bytes of four sums of a warp
        fours = [four for tiles in sums for four in tiles]
        own = p.add(self.ring, p.mul(self.warp_n, len(fours) * size), p.mul(self.lane, 16))
        apart = across * len(fours) * size
        p.copies_wait(0)
        p.barrier()
        to = p.add(own, p.mul(arith.subi(self.warp_k, p.ci(1)), apart))

        def give() -> None:
            for i, four in enumerate(fours):
                p.store_shared(to, four, i * size)

        p.when(p.less(p.ci(0), self.warp_k), give)
        p.barrier()

        def take() -> None:
            kind, add = ("b32", arith.addi) if self.scheme.exact else ("f32", arith.addf)
            total = []
            for i, four in enumerate(fours):
                for other in range(self.tile.k_warps - 1):
                    more = p.load_shared(own, 4, i * size + other * apart, kind)
                    four = [add(x, y) for x, y in zip(four, more, strict=True)]
                total.append(four)
            self.store([total[i : i + _TILES] for i in range(0, len(total), _TILES)])

        p.when(p.equal(self.warp_k, 0), take)

    def store(self, sums: list[list[list[Value]]]) -> None:
        """The lane's 8 outputs of each of its rows of x, finished unless XLA adds parts."""
        whole = self.tile.parts == 1
        row = p.add(self.warp_row, p.mul(self.quad, 8))
        scale = None if self.scheme.folds or not whole else self.load_eight("scale", row)
        bias = self.load_eight("bias", row) if whole else None
        for t, tiles in enumerate(sums):
            for half in range(2):
                token = p.add(self.first_token, 16 * t + 8 * half, self.group)
                values = [x for four in tiles for x in four[2 * half : 2 * half + 2]]
                is_here = arith.andi(self.has_rows, p.less(token, self.m))
                body = functools.partial(self.store_eight, token, row, values, scale, bias)
                p.when(is_here, body)

    def load_eight(self, name: str, row: Value) -> list[Value] | None:
        """Eight neighbouring floats, or None if the call has no such operand."""
        if self.gmem[name] is None:
            return None
        kind = self.kinds[name]
        at = p.offset(self.gmem[name], row, _SIZE[kind])
        if kind == "f32":
            return [x for i in range(2) for x in p.load_global(at, 4, 16 * i, "f32")]
        return floats(p.load_global(at, 4), kind)

    def store_eight(
        self,
        token: Value,
        row: Value,
        values: list[Value],
        scale: list[Value] | None,
        bias: list[Value] | None,
    ) -> None:
        if self.tile.parts > 1:
            line = p.add(p.mul(self.part, self.m), token)
            self.store_words(p.add(p.mul(line, self.n), row), values, 4)
            return
        if self.scheme.exact:
            values = [p.to_float(x) for x in values]
        if scale is not None:
            if self.gmem["scale_x"] is not None:
                of_token = p.load_global(p.offset(self.gmem["scale_x"], token, 4), 1, 0, "f32")[0]
                scale = [arith.mulf(of_token, x) for x in scale]
            values = [arith.mulf(x, y) for x, y in zip(values, scale, strict=True)]
        if bias is not None:
            values = [arith.addf(x, y) for x, y in zip(values, bias, strict=True)]
        kind = self.kinds["out"]
        if kind != "f32":
            values = packed(values, kind)
        self.store_words(p.add(p.mul(token, self.n), row), values, _SIZE[kind])

    def store_words(self, at: Value, words: list[Value], size: int) -> None:
        """4 or 8 words, of elements of ``size`` bytes, from element ``at`` of the result on."""
        base = p.offset(self.gmem["out"], at, size)
        for i in range(0, len(words), 4):
            p.store_global(base, words[i : i + 4], 4 * i)
