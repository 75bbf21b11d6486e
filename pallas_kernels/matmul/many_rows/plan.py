"""Which kernel of many rows takes a product, and its tile: arithmetic only.

    pair     int8 x int8 and e4m3 x e4m3, any M; bf16 x bf16 and f16 x f16, 17 to 64 rows
    weight   bf16 or f16 x int4 or int8; int8 or e4m3 x int4

The tile comes from the card's table of timed tiles: the blocks are persistent, so a product takes
(rounds of tiles) x (time of a tile).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.device import block_bytes, gpu, lacking, sms, tiles_of, timed_tiles
from pallas_kernels.dispatch import Predicted, Reason
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import TOKENS
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.primitives.refused import UNIT
from pallas_kernels.qtensor import QTensor

BLOCK_BYTES = 128  # of a row in a slot of the pair kernel: one swizzle
BLOCK_K = 64  # columns in a slot of the weight kernel: one swizzle of 16-bit activations, ...
CODES_K = 128  # ... and of 8-bit ones
MOST_GROUPS = 256  # elements that a copy of shared memory has along an axis
_UNUSED = 128  # bytes of an array of shared memory that a scheme has no use for


def plan(call: MatmulCall) -> PairTile | WeightTile | Reason:
    if reason := lacking("wgmma"):
        return Reason(reason)
    if not call.alone or (call.plain and call.m <= TOKENS):
        return Reason("")
    if call.quantized_x:
        found = int4_plan(call) if call.w.dtype == jnp.int4 else quantized_plan(call)
    else:
        found = plain_plan(call) if call.plain else weight_plan(call)
    if not isinstance(found, Reason):
        return dataclasses.replace(found, codes=_codes_of(call, found))
    own = found.plan
    if not isinstance(own, PairTile | WeightTile):
        return found
    return Reason(found.text, dataclasses.replace(own, codes=_codes_of(call, own)))


def _codes_of(call: MatmulCall, plan: PairTile | WeightTile) -> str:
    """Return how the operands are stored, as far as a kernel has a program of its own for it."""
    if call.plain:
        return "float"
    w = call.weight
    if isinstance(plan, PairTile):
        if w.n_groups == 1:
            return w.form
        return f"{w.form} blocks" if plan.m > 64 and has_block_scales(w) else f"{w.form} groups"
    if plan.block < CODES_K:
        return w.form
    levels = " levels" if call.x == jnp.int8 and w.has_unit else ""
    return f"{w.form}{levels} x {'int8' if call.x == jnp.int8 else 'float8'}"


def pair_plans() -> list[PairTile]:
    """Return every tile of the pair kernel that ``plan`` can return on a GPU with wgmma."""
    promoted = {"float": 0, "int8": 0, "float8": _FP8_PROMOTE, "float8 groups": 1}
    found = []
    for codes, promote in promoted.items():
        tiles = [_stream(n, split, promote) for n in STREAM_WIDTHS for split in (1, 2)]
        if codes != "float":
            tiles += [dataclasses.replace(_stream(128, 1, promote), cluster=2)]
            tiles += tiles_of(f"pair {codes.split()[0]}", PairTile)
        found += [dataclasses.replace(tile, promote=promote, codes=codes) for tile in tiles]
    blocks = tiles_of("pair float8 blocks", PairTile)
    return found + [dataclasses.replace(tile, promote=1, codes="float8 blocks") for tile in blocks]


def weight_plans() -> list[WeightTile]:
    """Return every tile of the weight kernel that ``plan`` can return on a GPU with wgmma."""
    many, few = tiles_of("weight", WeightTile), tiles_of("weight few tokens", WeightTile)
    found = []
    for codes in ("int4", "int8", "float8", "mxfp4", "nvfp4"):
        of_few = few + (tiles_of("weight few tokens int4", WeightTile) if codes == "int4" else [])
        tiles = many + [tile for tile, _ in _tiles_ahead(codes)]
        tiles += [
            dataclasses.replace(tile, tokens=tokens, stored=stored)
            for tile in of_few
            for tokens in (32, 64)
            for stored in (False, True)
        ]
        found += [dataclasses.replace(tile, codes=codes) for tile in tiles]
    for codes in ("int4 x int8", "int4 x float8", "int4 levels x int8"):
        exact = codes == "int4 levels x int8"
        most = 256 if exact else _SCALED_TOKENS
        tiles = [tile for tile in many if tile.tokens % 32 == 0 and tile.tokens <= most]
        tiles += [dataclasses.replace(tile, tokens=tokens) for tile in few for tokens in (32, 64)]
        tiles = [dataclasses.replace(tile, block=CODES_K) for tile in tiles]
        if exact:
            wide = tiles_of(FEW_CODES, WeightTile)
            tiles += [_for_tokens(tile, tokens) for tile in wide for tokens in (32, 64)]
        else:
            tiles = [dataclasses.replace(tile, unroll=1) for tile in tiles]
        found += [dataclasses.replace(tile, codes=codes, stored=True) for tile in tiles]
    return list(dict.fromkeys(found))


def _tiles_ahead(codes: str) -> list[tuple[WeightTile, float]]:
    """Return the tiles whose first warpgroup copies, if such codes were timed beside bfloat16."""
    return [one for one in timed_tiles("weight ahead", WeightTile) if one[0].codes == codes]


@dataclasses.dataclass(frozen=True)
class SlotGroups:
    """The groups of scales in the ring's slots.

    group: columns that share a scale.  block: columns of a slot.
    """

    group: int
    block: int

    @property
    def groups_per_slot(self) -> int:
        return max(1, self.block // self.group)

    @property
    def slots_per_group(self) -> int:
        return max(1, self.group // self.block)

    def group_of(self, j: jax.Array) -> jax.Array:
        """The first group of slot j."""
        return (j // self.slots_per_group) * self.groups_per_slot


@dataclasses.dataclass(frozen=True)
class PairTile(Predicted):
    """One block's tile and pipeline.

    m, n: rows of x and of w.  m == 64 puts the two warpgroups side by side in n.
    cluster: 2 blocks that lie below each other in m share (multicast) the weight tile, or with
        m == 64 two beside each other in n the rows of x.
    width: of the planar snake, in tiles of m.
    promote: 0, or fp8: steps of 128 after which the tensor cores' sum is added to a float32 one;
        in groups of 128 columns 1.
    split: 2 (with m == 64) gives each block of a cluster half of K.  Each sends the columns of one
        of its warpgroups to the other's shared memory and finishes those of the other.
    codes: how x and w are stored.
    """

    kernel: ClassVar[str] = "quantized_matmul_prefill_pair"
    m: int = 128
    n: int = 256
    stages: int = 4
    cluster: int = 2
    width: int = 16
    promote: int = 0
    split: int = 1
    codes: str = ""
    sms: int = dataclasses.field(default_factory=sms, repr=False)

    def divide(self, call: MatmulCall) -> PairTile:
        """Return the tile of a call that has this plan."""
        return self.in_even_snakes(call.m)

    def in_even_snakes(self, m: int) -> PairTile:
        """Return the tile for m rows; the parts of e4m3's snake are equally wide if they can be."""
        if not self.promote:
            return self
        return dataclasses.replace(self, width=_even_width(-(-m // (self.m * self.cluster))))

    @property
    def rows(self) -> int:
        return 64 if self.m == 64 else self.m // 2

    @property
    def cols(self) -> int:
        return self.n // 2 if self.m == 64 else self.n


@dataclasses.dataclass(frozen=True)
class WeightTile(Predicted):
    """One block's tile and pipeline.

    tokens: rows of x, the N of its wgmma.
    rows: of w, 64 per compute warpgroup.
    stages: of a plan, at most; ``divide`` gives as many as fit.
    cluster: 2 blocks side by side in w's rows share (multicast) the activations.
    width: of the planar snake, in tiles of w's rows.
    unroll: slots that are dequantized before their wgmmas are issued.
    store: tokens per store of the epilogue.
    parts: sets of warpgroups that take turns at the slots; their sums meet in shared memory.
    split: 2 gives each block of a cluster half of K.  Each sends the sums of half of its rows to
        the other's shared memory and finishes the other half.
    stored: the groups' scales and zeros come as they are stored, [N, K / group], once a tile.
    block: columns of a slot; 256 are two swizzles of 8-bit x, whose sums leave the tensor cores
        once a tile.
    lag: 0 gives a block a warpgroup that copies.  Else the first of two that multiply copies into
        the slot that it left as many steps ago, and a thread has up to 255 registers.  A step is
        one slot, and K has at least as many as the ring.
    codes: how w is stored, and x if its codes are multiplied.
    """

    kernel: ClassVar[str] = "quantized_matmul_prefill_weight"
    tokens: int = 256
    rows: int = 128
    stages: int = 4
    cluster: int = 2
    width: int = 8
    unroll: int = 2
    store: int = 64
    parts: int = 1
    split: int = 1
    stored: bool = False
    block: int = BLOCK_K
    lag: int = 0
    codes: str = ""
    sms: int = dataclasses.field(default_factory=sms, repr=False)

    @property
    def pieces(self) -> int:
        """Swizzles of x in a slot."""
        return max(1, self.block // CODES_K)

    def unrolled(self, k: int) -> int:
        """Slots that are dequantized together: all of a block's, in steps of as many."""
        return self.unroll if k // self.block // self.split % self.unroll == 0 else 1

    def divides(self, k: int) -> bool:
        """Whether a block has whole slots, as many as the ring where copies are ``lag`` behind, and
        always the same set of warpgroups comes to a slot of the ring: who skips a barrier's phase
        loses count."""
        turn = self.parts * self.unrolled(k)
        steps, rest = divmod(k // self.block, self.split)
        if rest or (self.lag and steps < self.stages):
            return False
        return self.parts == 1 or steps % turn == self.stages % turn == 0

    def divide(self, call: MatmulCall) -> WeightTile:
        """Return the tile of a call that has this plan, with as many stages as fit."""
        return self.fitted(call, _stored_bytes(call.codes, self.split) if self.stored else ())

    def fitted(self, call: MatmulCall, row_bytes: tuple[int, ...] = ()) -> WeightTile:
        """With as many stages as fit.  row_bytes: those that a block has of a row's scales, and of
        its zeros, if they come as they are stored."""
        turn, most = self.parts * self.unroll if self.parts > 1 else 1, gpu().shared_bytes
        counts = (n for n in range(self.stages // turn * turn, 0, -turn))
        stages = (n for n in counts if self.shared_bytes(call, n, row_bytes) <= most)
        return dataclasses.replace(self, stages=next(stages, 0), stored=bool(row_bytes))

    def shared_bytes(self, call: MatmulCall, stages: int, row_bytes: tuple[int, ...]) -> int:
        """Bytes of shared memory with so many stages, where rows have a scale and a bias."""
        w, across, vectors = call.weight, self.rows // 64, self.vector_slots(call.m, call.n)
        sum_bytes, x_bytes = 256 * self.tokens, BLOCK_K * 2 * self.tokens * self.pieces
        of_groups = [vectors * self.rows * size for size in row_bytes]
        if not row_bytes:  # of up to two groups in a slot, in 16 bits
            in_slot = 2 * self.rows * SlotGroups(w.group, self.block).groups_per_slot
            of_groups = [stages * in_slot] * (1 + (w.zero is not None))
        sizes = (
            stages * x_bytes,
            stages * self.block * self.rows * w.bits // 8,
            *of_groups,
            *[_UNUSED] * (2 - len(of_groups)),
            across * 256 * min(self.store, self.tokens),
            *[vectors * self.rows * 4] * 2,
            vectors * self.tokens * 4 if call.quantized_x else _UNUSED,
            across * (self.parts - 1) * sum_bytes or _UNUSED,
            -(-across // 2) * (self.split - 1) * sum_bytes,
        )
        barriers = 2 * stages + 4 + 2 * across * max(1, self.parts - 1)
        return block_bytes(sizes, barriers + (1 + across) * (self.split - 1))

    def vector_slots(self, m: int, n: int) -> int:
        """Two tiles' vectors are in shared memory, unless no block has two tiles."""
        blocks = self.cluster * self.split
        tiles = -(-m // self.tokens) * -(-n // (self.rows * self.cluster))
        return min(2, -(-tiles // (self.sms // blocks)))


FEW_CODES = "weight int4 x int8"  # family of tiles, and of the costs that time them
_SCALED_TOKENS = 128  # at most, where groups' sums are multiplied: two sums are in registers
_GATED = "float8 gated"
_FP8_PROMOTE = 2  # steps of 128 columns; a float32 sum stands beside the tensor cores'


def _rounds(m_tiles: int, n_tiles: int, cluster: int) -> int:
    return -(-m_tiles * n_tiles // (gpu().sms // cluster))


def pair_tile(
    m: int,
    n: int,
    k: int,
    dtype: DTypeLike = jnp.int8,
    sources: tuple[int, ...] = (),
    scales: int = 0,
) -> PairTile:
    """The tile for int8 or e4m3 operands x [m, k], w [n, k].

    sources: multiples of 32 rows of w, of which a tile of few rows of x has only one's.
    scales: bytes of a row's scales of groups, the narrower operand's.
    """
    fp8 = dtype != jnp.int8
    if m <= 64:
        promote = _FP8_PROMOTE if fp8 else 0
        tile = stream_tile(n, k, promote, sources=sources, scales=scales)
        # A block without a tile of its own has no source of a low-rank term to wait for.
        alone = tile.split > 1 or tile.n < 128 or sources
        return tile if alone else dataclasses.replace(tile, cluster=2)

    tile = _least_time(m, n, "pair float8" if fp8 else "pair int8")
    return dataclasses.replace(tile, promote=_FP8_PROMOTE if fp8 else 0)


def _least_time(m: int, n: int, family: str) -> PairTile:
    def cost(option: tuple[PairTile, float]) -> float:
        tile, us = option
        return _rounds(-(-m // (tile.m * tile.cluster)), -(-n // tile.n), tile.cluster) * us

    return min(timed_tiles(family, PairTile), key=cost)[0]


def _even_width(tiles: int) -> int:
    """Return a snake's width that divides ``tiles``, if one near 16 does.

    Otherwise the last part is narrower. The arithmetic of both takes registers that FP8's two sums
    need: with 44 tiles of 160 columns a thread of 168 registers spills 268 bytes, and ptxas lets
    each wgmma wait for the one before (C7519). With a width of 11 it spills 8, and none waits.
    """
    if tiles <= 16:
        return 16
    return min((n for n in range(8, 25) if tiles % n == 0), key=lambda n: abs(n - 16), default=16)


def stream_tile(
    n: int,
    row_bytes: int,
    promote: int = 0,
    swiglu: bool = False,
    sources: tuple[int, ...] = (),
    scales: int = 0,
) -> PairTile:
    """Return the tile for one tile of rows, where the bytes of w [N, row_bytes] decide.

    The predicted time is the larger of an SM's copies and all of w at the memory's rate, and that
    of adding the two halves of a split K.  At M = 64 the prediction is within 10% of the measured
    time less that of every launch.  Among equal tiles it takes the one that copies least.

    swiglu: K is not split, and a warpgroup has at least 16 columns of gate.
    sources, scales: as of ``pair_tile``.
    """

    card = gpu().many_rows

    def nanoseconds(tile: PairTile) -> tuple[float, float]:
        tiles = -(-n // tile.n)
        copied = _rounds(1, tiles, tile.split) * (tile.m + tile.n) * row_bytes / tile.split
        longest = max(copied / card.sm_rate, n * row_bytes / card.memory_rate)
        return longest + 1e3 * card.split_us * (tile.split - 1), copied

    # Copies of both halves of K begin at whole slots, and at whole 16 bytes of scales.
    halves = row_bytes % (2 * BLOCK_BYTES) == 0 and scales % (2 * UNIT) == 0
    splits = (1, 2) if halves and not swiglu else (1,)
    widths = [
        n for n in ((64, 128) if swiglu else STREAM_WIDTHS) if not any(size % n for size in sources)
    ]
    return min((_stream(n, s, promote) for s in splits for n in widths), key=nanoseconds)


STREAM_WIDTHS = 32, 64, 96, 128  # rows of w in the tile of few rows of x


def _stream(width: int, split: int, promote: int) -> PairTile:
    stages = gpu().many_rows.ring_bytes // ((64 + width) * BLOCK_BYTES)
    return PairTile(64, width, stages, cluster=1, promote=promote, split=split)


def weight_tile(
    m: int,
    n: int,
    k: int,
    block: int = BLOCK_K,
    most: int = 256,
    codes: str = "",
    scaled: bool = False,
) -> WeightTile:
    """The tile for activations x [m, K] and a quantized w [n, K].

    block: columns of a slot.  most: tokens of a tile.  codes: those of ``_tiles_ahead``, if w has
    such.  scaled: each token has a scale.
    """
    k = k * BLOCK_K // block  # in the time of so many columns of floats
    if m <= 64:
        return _few_tokens_tile(m, n, k)

    def cost(option: tuple[WeightTile, float]) -> float:
        tile, us = option
        n_tiles = -(-n // (tile.rows * tile.cluster))
        return _rounds(-(-m // tile.tokens), n_tiles, tile.cluster) * us

    def fits(tile: WeightTile) -> bool:
        """A tile's scales of tokens are a copy, of whole units of 128 bytes."""
        whole = not scaled or tile.tokens % 32 == 0
        return tile.divides(k) and tile.tokens <= most and whole

    options = [option for option in timed_tiles("weight", WeightTile) if fits(option[0])]
    options += [option for option in _tiles_ahead(codes) if option[0].divides(k)]
    return min(options, key=cost)[0]


def _few_tokens_tile(m: int, n: int, k: int, *more: str) -> WeightTile:
    """Return the tile, for one tile of tokens, that gives the busiest block the least work.

    more: families of tiles beside those of all codes.
    """
    options = [
        option
        for family in ("weight few tokens", *more)
        for option in timed_tiles(family, WeightTile)
        if option[0].divides(k)
    ]
    split_us = gpu().many_rows.split_us

    def cost(option: tuple[WeightTile, float]) -> float:
        tile, us = option
        rounds = _rounds(1, -(-n // (tile.rows * tile.cluster)), tile.cluster * tile.split)
        return rounds * (k // BLOCK_K // tile.split) * us + split_us * (tile.split - 1)

    tile = min(options, key=cost)[0]
    return dataclasses.replace(tile, tokens=32 if m <= 32 else 64)


def gated_tile(m: int) -> PairTile:
    """The tile for m rows of e4m3 and w of gate and up, whose result is e4m3 too.

    A warpgroup stores 32 columns, or with many rows 64: fewer are no swizzle of shared memory, and
    other numbers no whole swizzles.
    """
    if m > 64:
        return PairTile(128, 128, stages=6, promote=_FP8_PROMOTE, codes=_GATED)
    return dataclasses.replace(_stream(128, 1, _FP8_PROMOTE), codes=_GATED)


# --- plans ---------------------------------------------------------------------------------------


def quantized_plan(call: MatmulCall) -> PairTile | Reason:
    """Return the plan for x and w both int8 or both e4m3, with one scale a row.

    e4m3 in groups of 128 columns has scales of both operands in each group.
    """
    n, k = call.w.shape
    if n % 8:
        return Reason(f"w has N = {n}, not a multiple of 8")
    if k % 16:
        return Reason(f"w has K = {k}, not a multiple of 16")
    if call.weight.n_groups > 1:
        return _block_plan(call)
    tile = pair_tile(call.m, n, k, call.x)
    if (low := call.low_rank) is not None:
        if call.m > 64:
            return Reason(f"x has {call.m} rows: up to 64 have a low-rank term in the kernel")
        if low.dtype not in (jnp.bfloat16, jnp.float16) or low.ranks % 8:
            return Reason(f"{low.ranks} ranks of {low.dtype}, not a multiple of 8 of 16-bit floats")
        if any(size % 32 for size in low.sources):
            return Reason(f"sources of {low.sources} rows, not multiples of 32")
        return pair_tile(call.m, n, k, call.x, low.sources)
    return tile


def _block_plan(call: MatmulCall) -> PairTile | Reason:
    """Return the plan for e4m3 operands that both have scales of groups."""
    n, k = call.w.shape
    if call.weight.group != CODES_K:
        return Reason(f"groups of {call.weight.group} columns, the kernel takes {CODES_K}")
    if call.low_rank is not None:
        return Reason("a low-rank term beside FP8 codes in groups")
    if call.m > 64 and has_block_scales(call.weight):
        return dataclasses.replace(_least_time(call.m, n, "pair float8 blocks"), promote=1)
    row_bytes = call.weight.n_groups * min(4, call.weight.scale_bytes)  # x has as many of float32
    return dataclasses.replace(pair_tile(call.m, n, k, call.x, scales=row_bytes), promote=1)


def has_block_scales(w: StoredWeight) -> bool:
    """Whether one copy brings a row's scales, and each 128 rows of w share them."""
    return w.has_blocks and w.n_groups <= MOST_GROUPS


def plain_plan(call: MatmulCall) -> PairTile | Reason:
    """Return the plan for x and w both bf16 or both f16."""
    m, n, k, w = call.m, call.n, call.k, call.w
    if not 1 <= m <= 64:
        return Reason(f"x has {m} rows: 1 to 64 of plain weights' products have a kernel")
    if call.x != w.dtype or call.x not in (jnp.bfloat16, jnp.float16):
        return Reason(f"no kernel multiplies x of {call.x} by w of {w.dtype}")
    if n % 16 or k % 64:
        return Reason(f"w [{n}, {k}]: N is not a multiple of 16 or K not of 64")
    fused = call.swiglu and not call.bias and call.activation == "silu"
    tile = stream_tile(n, k * w.dtype.itemsize, swiglu=fused)
    if m <= TOKENS:  # its values on a GPU are tested from 17 rows on
        return Reason(f"{m} rows of plain weights' products: the kernel is for more", tile)
    return tile


def int4_plan(call: MatmulCall, tile: WeightTile | None = None) -> WeightTile | Reason:
    """Return the plan for x in codes with a scale a row, and w in int4 codes.

    tile: overrides the tile of the table.
    """
    w, n, k = call.codes, call.n, call.k
    if call.low_rank is not None:
        return Reason("a low-rank term beside int4 codes")
    as_floats = dataclasses.replace(call, x=jnp.dtype(jnp.bfloat16))
    if k % CODES_K or w.group_size % CODES_K:
        return weight_plan(as_floats, tile)
    if n % 8:
        return Reason(f"w has N = {n}, not a multiple of 8")
    if call.out not in (jnp.bfloat16, jnp.float16):
        return Reason(f"the output would be {call.out}, the kernel writes 16-bit floats")
    exact = call.x == jnp.int8 and w.unit is not None
    most = 256 if exact else _SCALED_TOKENS
    if exact and tile is None and call.m <= 64 and (wide := _few_codes_tile(call)) is not None:
        return wide
    made = tile or weight_tile(call.m, n, k, CODES_K, most, scaled=True)
    made = dataclasses.replace(made, block=CODES_K)
    if not exact:
        made = dataclasses.replace(made, unroll=1)
    row_bytes = _stored_bytes(w, made.split)
    if not row_bytes and not exact:
        return weight_plan(as_floats, tile)
    if not row_bytes:
        return Reason(f"w has {w.scale.shape[1]} groups, not a multiple of 16 up to 256")
    if made.fitted(call, row_bytes).stages < 3:
        return Reason(f"{row_bytes} bytes of scales and zeros a row leave no room for a ring")
    return dataclasses.replace(made, stored=True)


def _few_codes_tile(call: MatmulCall) -> WeightTile | None:
    """Return the tile of ``FEW_CODES`` that is predicted to be shortest, of those that fit."""
    n, k = call.n, call.k
    costs = gpu().costs[FEW_CODES].serial

    def fits(tile: WeightTile) -> bool:
        made = tile.divide(call)
        return made.stored and made.stages >= max(3, 2 * tile.parts) and made.divides(k)

    def us(tile: WeightTile) -> float:
        return sum(map(operator.mul, costs, few_codes_work(tile, n, k)))

    tokens = 32 if call.m <= 32 else 64
    tiles = [tile for tile in tiles_of(FEW_CODES, WeightTile) if k % tile.block == 0]
    tiles = [_for_tokens(tile, tokens) for tile in tiles]
    return min(filter(fits, tiles), key=us, default=None)


def _for_tokens(tile: WeightTile, tokens: int) -> WeightTile:
    # With 64 tokens one set of warpgroups is enough, and leaves room for two more slots.
    parts = 1 if tokens == 64 and tile.rows == 128 else tile.parts
    return dataclasses.replace(tile, tokens=tokens, parts=parts, stored=True)


def few_codes_work(tile: WeightTile, n: int, k: int) -> tuple[float, float, float]:
    """Return whether K is halved, the tiles of the busiest block beyond one, and the thousands of
    rows in all of its slots."""
    rounds = _rounds(1, -(-n // (tile.rows * tile.cluster)), tile.cluster * tile.split)
    rows = rounds * tile.rows * (k // tile.block // tile.split)
    return float(tile.split > 1), rounds - 1.0, rows / 1e3


def weight_plan(call: MatmulCall, tile: WeightTile | None = None) -> WeightTile | Reason:
    """Return the plan for x in 16-bit floats and w in int4 or int8 codes.

    tile: overrides the tile of the table.
    """
    w, n, k = call.weight, call.n, call.k
    if n % 8:
        return Reason(f"w has N = {n}, not a multiple of 8")
    if call.x not in (jnp.bfloat16, jnp.float16):
        return Reason(f"x is {call.x}, the kernel takes bfloat16 and float16")
    is_float = w.is_format or (w.float8 and w.group % BLOCK_K == 0)
    if w.codes not in (jnp.int4, jnp.int8) and not (is_float and call.x == jnp.bfloat16):
        return Reason(f"no kernel multiplies x of {call.x} by w of {w.codes} codes")
    if call.out not in (jnp.bfloat16, jnp.float16):
        return Reason(f"the output would be {call.out}, the kernel writes 16-bit floats")
    if k % BLOCK_K:
        return Reason(f"w has K = {k}, not a multiple of {BLOCK_K}")
    if w.group != 32 and w.group % BLOCK_K and not w.is_format:
        return Reason(f"w has group size {w.group}, neither 32 nor a multiple of {BLOCK_K}")
    is_stored = call.m <= 64 and (w.is_format or _as_stored(call))
    if tile is None and is_stored and w.codes == jnp.int4:
        tile = _few_tokens_tile(call.m, n, k, "weight few tokens int4")
    ahead = _timed_ahead(call)
    tile = tile or weight_tile(call.m, n, k, codes=ahead, scaled=call.quantized_x)
    if is_stored and (row_bytes := _stored_bytes(call.codes, tile.split)):
        if tile.fitted(call, row_bytes).stages >= 4:
            return dataclasses.replace(tile, stored=True)
    if w.is_format and n % 16:
        return Reason(f"w has N = {n}, and {n} scales of a byte are no whole 16 bytes")
    return tile


def _timed_ahead(call: MatmulCall) -> str:
    """Return the codes of a call that has a tile of ``_tiles_ahead``, or an empty string."""
    w = call.weight
    if call.x != jnp.bfloat16 or w.zero is not None:
        return ""
    if w.codes == jnp.int8 and w.n_groups == 1:
        return "int8"
    if w.codes == jnp.int4 and w.group == 128:
        return "int4"
    return "mxfp4" if w.is_format and w.form == "mxfp4" else ""


def _stored_bytes(w: QTensor, split: int) -> tuple[int, ...]:
    """Bytes that a block has of a row's scales, and of its zeros, in the weight's own layout; none
    if a row is no TMA box."""
    held = [v for v in (w.scale, w.zero) if v is not None]
    groups = w.scale.shape[1]
    if not 1 < groups <= 256 or any(groups * v.dtype.itemsize % UNIT for v in held):
        return ()
    return tuple(part_groups(v, split) * v.dtype.itemsize for v in held)


def part_groups(v: jax.Array, split: int) -> int:
    """Groups of v [N, groups] that each of ``split`` parts of K copies: its own, or all where they
    are no multiple of 16 bytes."""
    groups, rest = divmod(v.shape[1] * v.dtype.itemsize, UNIT * split)
    return v.shape[1] if rest else groups * UNIT // v.dtype.itemsize


def _as_stored(call: MatmulCall) -> bool:
    """Whether the kernel multiplies by scales and zeros as they are: bfloat16 (f16 needs its rows
    divided by their largest)."""
    scale, zero = call.weight.scale, call.weight.zero
    return call.x == scale == jnp.bfloat16 and (zero is None or zero in (jnp.bfloat16, jnp.int8))
