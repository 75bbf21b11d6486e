"""One block's program of ``mid_rows.kernel``: a tile of x's rows by w's rows, over a part of K.

Everything it does is emitted while the kernel is traced.

A unit is 64 bytes of a row of x: two steps of mma.  A quad's lane q has the unit's bytes 16 q to
16 q + 15, which are neighbouring columns, and the codes of the same columns of w.  The order of
columns within a unit does not matter to a sum, as long as both operands have the same one, so each
load is of one word, two or four.  Only where w is multiplied as it is stored (int8 by int8) both
operands come by ldmatrix, which brings each register from a row of its own.

w is the A operand, whose registers alternate between two rows: the weights come from arithmetic, so
no register is moved for it.  x is the B operand, whose registers are of one row, as loaded.

Lane g of 8 has the rows 4 g to 4 g + 3 of the warp's 32, two in each of two tiles of A.  It ends
with these 4 neighbouring outputs of a row of x, and the 8 lanes with 32.

Pieces of 16 bytes lie in shared memory so that the lanes of a load are in different banks: a row's
are XORed by bits of its number, and rows of 64 bytes change places.

The phases are ``place_copies``, ``place_loads``, the loop over ``step``, then ``exchange`` (warps
that share K meet at two block barriers) and ``store``.  ``kernel`` says who copies and waits.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from pallas_kernels import ptx as p
from pallas_kernels.matmul import widen
from pallas_kernels.matmul.mid_rows.plan import WARP_ROWS, MidStep, MidTile
from pallas_kernels.ptx import Value
from pallas_kernels.rows.fused_parts import floats, packed

_PIECE = 16  # bytes of a copy
_OWN = WARP_ROWS // 8  # rows of w of a lane
_SIZE = {"bf16": 2, "f16": 2, "f32": 4}


class MidBlock:
    """gmem: x, w, scale, zero, unit, scale_x, bias, out.  kinds: of those that hold floats."""

    def __init__(
        self,
        tile: MidTile,
        form: MidStep,
        shape: tuple[int, int, int],
        kinds: dict[str, str],
        gmem: SimpleNamespace,
        smem: SimpleNamespace,
    ):
        self.tile, self.form, self.kinds = tile, form, kinds
        self.m, self.n, self.k = shape
        self.gmem = {name: None if r is None else p.address(r) for name, r in vars(gmem).items()}
        self.ring = p.shared_address(smem.ring)
        self.steps = self.k // form.columns // tile.parts  # of this block
        self.thread = p.register("tid.x")
        lane = self.thread & 31
        self.group, self.quad = lane >> 2, lane & 3
        warp, across = self.thread >> 5, tile.rows // WARP_ROWS
        self.warp_n, self.warp_k = warp % across, warp // across
        self.lane = lane
        block, down = p.register("ctaid.x"), -(-self.m // tile.tokens)
        block, token = block // down, block % down
        wide = -(-self.n // tile.rows)
        self.part, row = block // wide, block % wide
        self.first_token, self.first_row = token * tile.tokens, row * tile.rows
        # A warp behind the last row multiplies copies of that row, and stores nothing.
        own = self.first_row + self.warp_n * WARP_ROWS
        self.has_rows = own < self.n
        self.warp_row = p.smaller(own, self.n - WARP_ROWS)

    def run(self) -> None:
        p.await_kernel()
        tile, form = self.tile, self.form
        begin = tile.tokens * form.x_pitch
        self.pieces: list[tuple[Value, Value, Value, int]] = []
        self.place_copies("x", tile.tokens, form.x_pitch, self.first_token, 8 * form.x_size, 0)
        self.place_copies("w", tile.rows, form.w_pitch, self.first_row, form.w.bits, begin)
        self.place_loads()
        for step in range(tile.stages - 1):
            if step < self.steps:
                self.copy(p.ci(step), p.ci(step * tile.step_bytes(form)))
            p.copies_commit()
        zero = p.ci(0) if form.exact else p.cf(0.0)
        first = self.load_scales(p.ci(0))
        carry = p.loop(0, self.steps, 1, [zero] * tile.tokens + [p.ci(0), *first], self.step)
        # Of 8 rows of x and 16 of w.
        sums = [carry[i : i + 4] for i in range(0, tile.tokens, 4)]
        if tile.k_warps > 1:
            self.exchange(sums)
        else:
            self.store(sums)

    # --- copies ---

    def place_copies(self, name: str, rows: int, pitch: int, first: Value, bits: int, begin: int):
        """The thread's pieces of a step of an operand: its address, bytes from there, place in the
        ring.  begin: of the operand in a slot."""
        across = pitch // _PIECE
        place = self.thread >> (across.bit_length() - 1)
        chunk = self.thread & (across - 1)
        row = self.exchanged(place) if pitch == 64 else place
        k0 = self.part * (self.steps * self.form.columns)
        column = k0 * bits // 8 + chunk * _PIECE
        last = (self.m if name == "x" else self.n) - 1
        apart = 32 * self.tile.warps // across  # rows between two pieces of a thread: 8 or more
        for i in range(rows // apart):
            here = row + i * apart
            group = here if name == "x" else here // _OWN
            moved = chunk ^ self.swizzle(group, pitch)
            to = self.ring + (place + i * apart) * pitch + moved * _PIECE + begin
            there = p.smaller(first + here, last)
            source = there * (self.k * bits // 8) + column
            self.pieces.append((self.gmem[name], source, to, pitch))

    def copy(self, step: Value, slot: Value) -> None:
        """Start the copies of a step of K into the ring at byte ``slot``."""
        for base, source, to, pitch in self.pieces:
            at = p.offset(base, source + step * pitch)
            p.copy_async(to + slot, at, 0, line=True)

    def swizzle(self, group: Value, pitch: int) -> Value:
        """The number that the pieces of a row are XORed with; group: of the lanes that load it."""
        if self.form.exact:
            return group & 7
        if pitch > 64:
            return (group & 1) << 2
        first, second = ((group >> i) & 1 for i in (1, 2))
        return (first << 1) + second

    def exchanged(self, row: Value) -> Value:
        """The number with bits 0 and 2 exchanged.  Lanes of a load have rows 4 apart, which thus
        are beside one another."""
        low, high = row & 1, (row >> 2) & 1
        rest = row ^ (low + (high << 2))
        return rest + high + (low << 2)

    # --- a step ---

    def place_loads(self) -> None:
        """The lane's places of each of the warp's units in the ring: of x and of w."""
        form = self.form
        share = form.units // self.tile.k_warps
        units = [self.warp_k * share + i for i in range(share)]
        eight = 16 // form.x_size
        self.columns = [u * form.unit + self.quad * eight for u in units]
        w_begin = self.ring + self.tile.tokens * form.x_pitch
        w_begin = w_begin + self.warp_n * (WARP_ROWS * form.w_pitch)
        if form.exact:
            self.place_matrices(units, w_begin)
        else:
            self.place_words(units, w_begin)

    def place_words(self, units: list[Value], w_begin: Value) -> None:
        form = self.form
        # The first of the lane's rows; the others are a constant number of bytes behind it.
        row = self.group * _OWN
        self.row_places = [form.w_pitch * i for i in range(_OWN)]
        if form.w_pitch == 64:
            row, self.row_places = self.exchanged(row), [0, 4 * 64, 2 * 64, 6 * 64]
        w_begin = w_begin + row * form.w_pitch
        x_begin = self.ring + self.group * form.x_pitch
        x_moved, w_moved = (self.swizzle(self.group, x) for x in (form.x_pitch, form.w_pitch))
        self.words = form.w.bits // 4  # of the lane's codes of a unit
        self.x_places, self.w_places = [], []
        for unit in units:
            piece = (unit * 4 + self.quad) ^ x_moved
            self.x_places.append(x_begin + piece * _PIECE)
            at = (unit * 4 + self.quad) * (4 * self.words)
            piece = (at >> 4) ^ w_moved
            at = piece * _PIECE + (at & (_PIECE - 1))
            self.w_places.append([w_begin + at])

    def place_matrices(self, units: list[Value], w_begin: Value) -> None:
        """Place four pieces of 8 rows of x for a unit, and two of 16 rows of w for each mma."""
        form = self.form
        row, matrix = self.lane & 7, self.lane >> 3
        of_w = row * _OWN + (matrix & 1)
        w_begin = w_begin + of_w * form.w_pitch
        x_begin = self.ring + row * form.x_pitch

        def place(begin: Value, piece: Value) -> Value:
            return begin + (piece ^ row) * _PIECE

        upper = matrix >> 1
        self.x_places = [place(x_begin, unit * 4 + matrix) for unit in units]
        self.w_places = [[place(w_begin, unit * 4 + upper + s) for s in (0, 2)] for unit in units]

    def step(self, index: Value, carry: list[Value]) -> list[Value]:
        """Multiply a step that has arrived, and start the copies of one that is to come."""
        tile, form = self.tile, self.form
        slot, scales = carry[tile.tokens], carry[tile.tokens + 1 :]
        acc = [carry[i : i + 4] for i in range(0, tile.tokens, 4)]
        size = tile.step_bytes(form)
        p.copies_wait(tile.stages - 2)
        p.barrier()
        later = index + (tile.stages - 1)
        # The slot before this one, which all warps have read.
        behind = p.where(p.equal(slot, 0), p.ci((tile.stages - 1) * size), slot - size)
        p.when(later < self.steps, functools.partial(self.copy, later, behind))
        p.copies_commit()
        following = self.load_scales(p.smaller(index + 1, self.steps - 1))
        per_unit = len(scales) // self.scale_sets if scales else 0
        for i in range(len(self.x_places)):
            held = i % self.scale_sets * per_unit if scales else 0
            places = [place + slot for place in self.w_places[i]]
            left = self.weights(places, scales[held : held + per_unit])
            place = self.x_places[i] + slot
            for t in range(tile.tokens // 8):
                right = self.load_x(place, 8 * t * form.x_pitch)
                for s in range(2):
                    for half in range(2):
                        at = 2 * t + half
                        acc[at] = self.multiply(acc[at], left[half][s], right[2 * s : 2 * s + 2])
        moved = slot + size
        moved = p.where(moved < tile.stages * size, moved, 0)
        return [*(x for four in acc for x in four), moved, *following]

    def load_x(self, place: Value, at: int) -> list[Value]:
        """The lane's words of 8 rows of x in a unit, two for each step of mma."""
        if self.form.exact:
            return p.load_matrices(place, at)
        return p.load_shared(place, 4, at)

    def multiply(self, acc: list[Value], left: list[Value], right: list[Value]) -> list[Value]:
        if self.form.exact:
            return p.mma_int8(acc, left, right)
        return p.mma(acc, left, right, self.form.x)

    # --- weights ---

    @property
    def is_one_group(self) -> bool:
        """Whether the columns of a step have one scale."""
        return self.form.w.group % self.form.columns == 0

    @property
    def scale_sets(self) -> int:
        """The sets of scales of a step: one for all its units, or one for each unit of a warp."""
        return 1 if self.is_one_group else self.form.units // self.tile.k_warps

    def load_scales(self, step: Value) -> list[Value]:
        """Scales and zeros of the lane's rows in a step as they are stored, set after set; none
        where the sums are multiplied and no zeros are taken off."""
        form, w = self.form, self.form.w
        zeros = self.gmem["zero"] is not None
        if not form.folds and not zeros:
            return []
        begin = (self.warp_row + self.group * _OWN) * w.n_groups
        found = []
        k0 = (self.part * self.steps + step) * form.columns
        for i in range(self.scale_sets):
            column = k0 if self.is_one_group else k0 + self.columns[i]
            at = begin + column // w.group
            if form.folds:
                found += self.load_four("scale", at)
            if zeros:
                found += self.load_four("zero", at)
        return found

    def load_four(self, name: str, at: Value) -> list[Value]:
        """A scale or zero of each of the lane's rows: floats as they are stored, integers wide."""
        kind = self.kinds.get(name)
        size = 1 if kind is None else _SIZE[kind]
        base, found = p.offset(self.gmem[name], at, size), []
        for i in range(_OWN):
            here = i * self.form.w.n_groups * size
            if kind is None:
                found.append(p.load_signed_byte(base, here))
            elif kind == "f32":
                found.append(p.load_global(base, 1, here, "f32")[0])
            else:
                found.append(p.load_half(base, here))
        return found

    def weights(self, places: list[Value], scales: list[Value]) -> list[list[list[Value]]]:
        """The A operands of a unit: of both tiles of 16 rows, each for two steps of mma."""
        if self.form.exact:
            pitch = self.form.w_pitch
            return [[p.load_matrices(at, 2 * i * pitch) for at in places] for i in range(2)]
        (place,) = places
        rows = [
            self.row(p.load_shared(place, self.words, at), scales, i)
            for i, at in enumerate(self.row_places)
        ]
        return [
            [[low[s], high[s], low[s + 1], high[s + 1]] for s in (0, 2)]
            for low, high in (rows[:2], rows[2:])
        ]

    def row(self, words: list[Value], scales: list[Value], i: int) -> list[Value]:
        """The lane's four pairs of its i-th row in a unit, as they are multiplied."""
        w, x, kinds = self.form.w, self.form.x, self.kinds
        factors = scales[:_OWN] if self.form.folds else []
        zeros = scales[len(factors) :]
        bias = p.ci(widen.code_bias(w, x))
        if w.int_zero:
            bias = bias + zeros[i] * 0x00010001
        pairs = [v for word in words for v in widen.word_pairs(w, word, bias, x, neighbours=True)]
        if not factors:
            return pairs
        factor = widen.scale_pair(w, factors[i], x)
        if w.float_zero:
            above = widen.doubled(zeros[i], kinds["zero"], x)
            return [p.fma_pairs(pair, factor, above) for pair in pairs]
        return [p.mul_pairs(pair, factor, x) for pair in pairs]

    # --- the end ---

    def exchange(self, sums: list[list[Value]]) -> None:
        """Add the sums of warps with the same rows of w, in order of K; the first of them store."""
        across = self.tile.rows // WARP_ROWS
        size = 16 * 32  # bytes of four sums of a warp
        own = self.ring + self.warp_n * (len(sums) * size) + self.lane * 16
        apart = across * len(sums) * size
        p.copies_wait(0)
        p.barrier()
        to = own + (self.warp_k - 1) * apart

        def give() -> None:
            for i, four in enumerate(sums):
                p.store_shared(to, four, i * size)

        p.when(0 < self.warp_k, give)
        p.barrier()

        def take() -> None:
            kind = "b32" if self.form.exact else "f32"
            total = []
            for i, four in enumerate(sums):
                for other in range(self.tile.k_warps - 1):
                    more = p.load_shared(own, 4, i * size + other * apart, kind)
                    four = [x + y for x, y in zip(four, more, strict=True)]
                total.append(four)
            self.store(total)

        p.when(p.equal(self.warp_k, 0), take)

    def store(self, sums: list[list[Value]]) -> None:
        """The lane's outputs of each of its rows of x, finished unless XLA adds parts."""
        whole = self.tile.parts == 1
        row = self.warp_row + self.group * _OWN
        scale = self.row_scales(row) if whole else None
        bias = self.load_own("bias", row) if whole else None
        for t in range(self.tile.tokens // 8):
            for i in range(2):
                token = self.first_token + self.quad * 2 + (8 * t + i)
                values = [four[2 * half + i] for four in sums[2 * t : 2 * t + 2] for half in (0, 1)]
                is_here = self.has_rows & (token < self.m)
                body = functools.partial(self.store_own, token, row, values, scale, bias)
                p.when(is_here, body)

    def row_scales(self, row: Value) -> list[Value] | None:
        """The factors of the sums of the lane's rows of w, or None."""
        if self.form.w.float4:
            rest = p.cf(widen.FLOAT4_REST)
            units = self.load_own("unit", row)
            return [rest] * _OWN if units is None else [x * rest for x in units]
        return None if self.form.folds else self.load_own("scale", row)

    def load_own(self, name: str, row: Value) -> list[Value] | None:
        """The lane's rows' floats, or None if the call has no such operand."""
        if self.gmem[name] is None:
            return None
        kind = self.kinds[name]
        at = p.offset(self.gmem[name], row, _SIZE[kind])
        if kind == "f32":
            return p.load_global(at, 4, 0, "f32")
        return floats(p.load_global(at, 2), kind)

    def store_own(
        self,
        token: Value,
        row: Value,
        values: list[Value],
        scale: list[Value] | None,
        bias: list[Value] | None,
    ) -> None:
        if self.tile.parts > 1:
            line = self.part * self.m + token
            p.store_global(p.offset(self.gmem["out"], line * self.n + row, 4), values)
            return
        if self.form.exact:
            values = [p.to_float(x) for x in values]
        if scale is not None:
            if self.gmem["scale_x"] is not None:
                of_token = p.load_global(p.offset(self.gmem["scale_x"], token, 4), 1, 0, "f32")[0]
                scale = [of_token * x for x in scale]
            values = [x * y for x, y in zip(values, scale, strict=True)]
        if bias is not None:
            values = [x + y for x, y in zip(values, bias, strict=True)]
        kind = self.kinds["out"]
        at = p.offset(self.gmem["out"], token * self.n + row, _SIZE[kind])
        p.store_global(at, values if kind == "f32" else packed(values, kind))
