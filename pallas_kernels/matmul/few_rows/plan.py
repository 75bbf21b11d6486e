"""Which kernel of few rows takes a product, and how it divides ``x[M, K] w[N, K]^T`` among the
blocks and warps of a GPU: arithmetic only.

``row`` is the kernel of one row, ``tile`` that of up to 16; their docstrings describe the parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu, sms
from pallas_kernels.dispatch import Predicted, Reason
from pallas_kernels.matmul.call import MatmulCall, Weight
from pallas_kernels.matmul.stored import KIND, StoredWeight
from pallas_kernels.operands import HasShape
from pallas_kernels.qtensor import QTensor

WARPS = 16
MOST_WARPS = 24  # 80 registers a thread
THREADS = 32 * WARPS
TOKENS = 16  # at a time, at most
PASSES = TOKENS, 8, 4, 2, 1
MOST_PASSED = 64


def plans(call: MatmulCall) -> list[RowPlan | TilePlan | Reason]:
    """The kernels that have a plan, or why the one for several rows has none."""
    if call.quantized_x or (call.alone and call.m > most_tokens()):
        return [Reason("")]
    if call.m > 8 and not gpu().clusters:
        # 8 rows at a time need no sums over blocks.
        return [tile_plan(call), tile_plan(call, at_once=8)]
    one = row_plan(call)
    is_without = isinstance(one, Reason) and one.plan is None
    return [tile_plan(call)] if is_without else [one, tile_plan(call)]


def most_tokens() -> int:
    """Rows of the largest products that are planned here, in passes over w from 17 on.

    Where there is no kernel for many rows, XLA's form of int4 writes the weights as floats first.
    """
    return TOKENS if gpu().wgmma else MOST_PASSED


# --- one row -------------------------------------------------------------------------------------

MAX_K = 48 * 1024  # x is in shared memory as floats
FOLDED = 64, 32  # groups of int4 whose scales multiply the weights


@dataclasses.dataclass(frozen=True)
class RowPlan(Predicted):
    """How the kernel of one row computes a product.

    codes: ``form_of`` w.
    """

    kernel: ClassVar[str] = "quantized_matmul_row_mosaic"
    codes: str
    rows: int  # of w that a warp has at a time
    warps: int  # of a block; see ``row_warps``
    sms: int = dataclasses.field(default_factory=sms, repr=False)

    def divide(self, call: MatmulCall) -> RowDivision:
        """Return the division of a call that has this plan."""
        return RowDivision(
            call.k,
            self.rows,
            call.n // self.rows,
            call.weight.bits,
            warps=self.warps,
            sms=self.sms,
            # Of two blocks an SM, those without a unit in the last round make room for the next
            # kernel's.
            spread=self.warps >= WARPS,
            chains=2 if self.codes == "int4" and call.k <= gpu().few_rows.chained_columns else 1,
        )


@dataclasses.dataclass(frozen=True)
class RowDivision:
    """The division of one row's product among warps."""

    kernel: ClassVar[str] = RowPlan.kernel
    k: int
    rows: int  # of w that a warp has at a time
    units: int  # of so many rows
    bits: int  # of a value of w
    loads: int = 4  # of 16 bytes that a lane multiplies while as many more are under way
    warps: int = WARPS  # of a block; see ``row_warps``
    sms: int = dataclasses.field(default_factory=sms)
    spread: bool = False  # a round without a unit for each warp is one of all blocks
    # Sums of a group beside int4 that the tensor cores add to in turn.
    chains: int = 1

    @property
    def per_load(self) -> int:
        """Values of w in 16 bytes."""
        return 128 // self.bits

    @property
    def chunks(self) -> int:
        """Instructions that read one row."""
        return -(-self.k // (32 * self.per_load))

    @property
    def padded_k(self) -> int:
        """Columns of the chunks.  x has zeros behind its K."""
        return self.chunks * 32 * self.per_load

    @property
    def last_lanes(self) -> int:
        """Lanes with columns of their own in the last chunk."""
        return 32 - (self.padded_k - self.k) // self.per_load

    def is_short(self, chunk: int) -> bool:
        """Whether the row ends inside this chunk."""
        return self.last_lanes < 32 and chunk == self.chunks - 1

    @property
    def blocks(self) -> int:
        at_once = self.sms * max(1, WARPS // self.warps)
        return min(at_once, -(-self.units // (1 if self.spread else self.warps)))

    @property
    def is_last_short(self) -> bool:
        """Whether some warps have no unit in the last round."""
        return self.units % (self.blocks * self.warps) != 0

    @property
    def rounds(self) -> int:
        return -(-self.units // (self.blocks * self.warps))

    @property
    def groups(self) -> list[list[int]]:
        """The chunks of a row by the groups in which they are loaded."""
        each = max(1, self.loads // self.rows)
        return [list(range(c, min(c + each, self.chunks))) for c in range(0, self.chunks, each)]

    def scratch_sizes(self, normed: bool) -> list[int]:
        """Bytes of x, as floats, or as pairs and their powers of two beside 4 bits; and of the
        warps' sums of its squares."""
        del normed
        powers = self.padded_k // 64  # bytes: a float for 256 columns
        x_bytes = self.padded_k * 4 if self.bits > 4 else self.padded_k * 2 + powers
        return [x_bytes, 4 * self.warps]


def _has_row_codes(w: HasShape) -> bool:
    """Whether the one-row kernel reads such codes and groups."""
    if not isinstance(w, QTensor):
        return False
    groups = {"int8": (w.shape[1],), "int4": (128, *FOLDED), "float8_e4m3fn": (128, 64)}
    return StoredWeight.of(w).is_format or w.group_size in groups.get(w.dtype.name, ())


def columns_of(weight: StoredWeight) -> int:
    """Return the columns of a block of w: 4 lanes x 4 words."""
    return 16 * weight.per_word


def folds(weight: StoredWeight) -> bool:
    """Whether scales go into the 16-bit weights instead of the group's float32 sum."""
    return weight.group % columns_of(weight) != 0 or weight.float_zero


def form_of(weight: StoredWeight) -> str:
    """Return how w is stored, as far as the kernels have a program of their own for it."""
    is_folded = folds(weight) and not (weight.plain or weight.float4)
    return f"{weight.form} fold" if is_folded else weight.form


# How many rows of w a warp may have at a time, by ``form_of``.
ROWS = {
    "float": (1, 2),
    "int8": (1, 2),
    "float8": (2,),
    "int4": (2,),
    "int4 fold": (2,),
    "mxfp4": (2,),
    "nvfp4": (2,),
}
_FOUR_BITS = "int4", "int4 fold", "mxfp4", "nvfp4"


def row_plans() -> list[RowPlan]:
    """Return every plan that ``row_plan`` can return on this GPU."""
    return [
        RowPlan(form, rows, warps)
        for form, of_a_warp in ROWS.items()
        for rows in of_a_warp
        for warps in (8, WARPS, *((MOST_WARPS,) if form in _FOUR_BITS else ()))
    ]


def _one_row(w: HasShape, swiglu: bool) -> RowPlan:
    """Return the plan for w, whose codes the kernel of one row reads."""
    (n, k), weight = w.shape, StoredWeight.of(w)
    # Two rows share what is read of x; one round of short rows is better than two.
    is_short = k <= gpu().few_rows.paired_columns
    one_round = weight.bits == 8 and n % 2 == 0 and n <= 2 * sms() * WARPS and is_short
    in_pairs = weight.bits == 4 or weight.float8
    rows = 2 if swiglu or in_pairs or one_round else 1
    warps = row_warps(k, n // rows, weight.bits, sms())
    return RowPlan(form_of(weight), rows, warps)


def divide_row(w: jax.Array | Weight, swiglu: bool = False) -> RowDivision:
    """Return the division of one row's product with w."""
    call = MatmulCall.of(jax.ShapeDtypeStruct((1, w.shape[1]), jnp.bfloat16), w, jnp.bfloat16)
    return _one_row(w, swiglu).divide(call)


def row_warps(k: int, units: int, bits: int, sms: int) -> int:
    """Return the warps of a block that has a share of so many units on ``sms`` multiprocessors.

    A product of 4 bits waits for memory and for instructions in turn, which more warps overlap.  So
    if 16 have several units each, 24 are taken.
    """
    card = gpu().few_rows
    if bits == 4 and card.narrow_columns < k < card.wide_columns and units > sms * WARPS:
        return MOST_WARPS
    # With two blocks an SM, one of them ends earlier and makes room for the next kernel's block.
    # But each block loads all of x.
    return 8 if k <= card.narrow_columns else WARPS


def row_plan(call: MatmulCall, *, short_chunk: bool = False) -> RowPlan | Reason:
    """The one-row kernel's plan, or why it has none.

    short_chunk: int4 rows may end inside a chunk.  A dense product may have tiles for such K, and
    the choice is between both where the chunks have at most an eighth more columns.  Rows of float4
    may always, and those of int4 if there are no tiles.
    """
    w, n, k = call.w, call.n, call.k
    short_chunk |= not has_tiles(k, call.weight)
    if call.m != 1 or call.x != jnp.bfloat16:
        return Reason(f"{call.m} rows of {call.x.name}; the kernel takes one of bfloat16")
    if call.plain:
        if w.dtype != jnp.bfloat16:
            return Reason(f"plain weights {w.dtype.name}")
    elif not _has_row_codes(w):
        return Reason("codes other than int8 by rows, int4 in groups of 32, 64 and 128, MXFP4")
    elif (zero := call.codes.zero) is not None and (w.dtype, zero.dtype) != (jnp.int4, jnp.int8):
        return Reason(f"{w.dtype.name} codes with zeros of {zero.dtype.name}")
    plan = _one_row(w, call.swiglu)
    divided = plan.divide(call)
    wanted = 32 * divided.per_load
    if divided.bits == 4 and (short_chunk or 8 * (divided.padded_k - k) <= k):
        wanted = 128
    if not call.plain and w.dtype.name not in ("int4", "int8"):
        wanted = 64 if w.dtype == jnp.float8_e4m3fn else 32
    if not call.plain and w.dtype == jnp.int4 and call.codes.group_size in FOLDED:
        wanted = 32
        if not short_chunk:
            return Reason(f"int4 in groups of {call.codes.group_size}: tiles take K = {k}")
    if k % wanted or k > MAX_K:
        return Reason(f"K = {k} is not a multiple of {wanted} up to {MAX_K}")
    if call.norm is not None and KIND.get(call.norm.name) not in ("bf16", "f32"):
        return Reason(f"a norm with weights {call.norm.name}")
    if call.residual is not None and (call.swiglu or call.residual != jnp.bfloat16):
        return Reason(f"a residual {call.residual.name}, or one behind SwiGLU")
    if n % 2 and divided.rows == 2:
        return Reason(f"N = {n} is odd")
    if call.alone and not call.plain and n % (16 if call.out == jnp.float32 else 8):
        return Reason(f"N = {n} with nothing around the product is left to XLA", plan)
    return plan


# --- tiles ---------------------------------------------------------------------------------------

_SPLITS = 1, 2, 4, 8  # blocks that share K
SLOT = WARPS * 1024  # bytes of a ring slot: one block of columns of a tile, 2 x 16 bytes per lane


def clusters_at_once() -> dict[int, int]:
    """Return how many clusters of each size the GPU runs at a time."""
    of_cards = gpu().few_rows.cluster_sms[: len(_SPLITS) if gpu().clusters else 1]
    return {
        size: sms() * at_work // (of_cards[0] * size)
        for size, at_work in zip(_SPLITS, of_cards, strict=False)
    }


def splits_of(whole: bool) -> list[int]:
    """Return the numbers of blocks that may share K.

    whole: a norm or SwiGLU needs the sum over all of K in one block, or in a cluster.
    """
    return [1] if whole and not gpu().clusters else list(_SPLITS)


# With at most this many rows, x stays in shared memory, and K is not divided among a cluster.
RESIDENT_TOKENS = 4
# Squares of x: a sum per warp and token, then one per token.
SQUARES = 4 * (WARPS + 1) * TOKENS
# Floats from one token to the next in a partial sum of 16 rows: stores hit every bank once.
PITCH = 20


@dataclasses.dataclass(frozen=True)
class TilePlan(Predicted):
    """How the kernel of few rows computes a product.

    codes: ``form_of`` w.
    split, apart: as of ``TileDivision``.
    k_warp: columns of a warp; 0 gives one block all of K, and x stays in shared memory.
    depth: ring slots.
    clusters: most clusters, or with ``apart`` most sets of blocks.
    tokens: most rows of x at a time.  With more rows w is read several times.
    """

    kernel: ClassVar[str] = "quantized_matmul_decode_mosaic"
    codes: str
    split: int
    k_warp: int
    depth: int
    clusters: int = dataclasses.field(repr=False)
    tokens: int = TOKENS
    apart: bool = False

    def representative(self) -> TilePlan:
        return dataclasses.replace(self, tokens=TOKENS)  # of a pass

    def divide(self, call: MatmulCall) -> TileDivision:
        """Return the division of a call that has this plan."""
        m = min(call.m, self.tokens)
        found = _division(m, call.w, self._cut(call), self.depth, FusedTile.of(call))
        assert found is not None
        return found

    def _cut(self, call: MatmulCall) -> Cut:
        if not self.k_warp:
            return resident_cut(call.k, call.weight.bits)
        return Cut(self.split, call.k // self.k_warp // self.split, self.k_warp, False)


@dataclasses.dataclass(frozen=True)
class TileDivision:
    """The division of one product among blocks and warps.

    m: rows of x at a time, fewer than there are where no more fit shared memory.
    split: blocks that share K, a cluster; with ``apart``, which is for GPUs without clusters, each
    writes its own sums as float32, and XLA adds these.
    """

    kernel: ClassVar[str] = TilePlan.kernel
    m: int
    split: int
    warps: int  # of a block that have columns of their own
    k_warp: int  # columns of a warp
    resident: bool  # x stays in shared memory instead of registers
    clusters: int
    per: int  # tiles of the busiest cluster
    batch: int  # tiles between two sums over warps
    depth: int  # ring slots
    param_bytes: int  # scales, zeros, bias and residual of one tile
    pairs: bool = False  # SwiGLU: a tile of gate, then the tile of up that belongs to it
    apart: bool = False

    @property
    def n_tiles(self) -> int:
        """Groups of 8 tokens."""
        return -(-self.m // 8)

    @property
    def buffers(self) -> int:
        return min(2, -(-self.per // self.batch))

    @property
    def partial_bytes(self) -> int:
        """Partial sums of the batches in flight."""
        return self.buffers * self.batch * WARPS * self.n_tiles * 8 * PITCH * 4

    @property
    def x_bytes(self) -> int:
        return 2 * self.m * self.warps * self.k_warp

    @property
    def arena_bytes(self) -> int:
        """Partial sums and x, which lie in the same place unless x has to stay."""
        if self.resident:
            return self.partial_bytes + self.x_bytes
        return max(self.partial_bytes, self.x_bytes)

    def scratch_sizes(self, normed: bool) -> list[int]:
        """Bytes of partial sums and x, of the ring, of the tiles' parameters, of squares."""
        params = self.buffers * self.batch * self.param_bytes
        sizes = [self.arena_bytes, self.depth * SLOT, max(16, params)]
        return [*sizes, SQUARES] if normed else sizes

    @property
    def shared_bytes(self) -> int:
        """With each array at a multiple of 1 KB, where Mosaic GPU puts it."""
        return sum(-(-size // 1024) * 1024 for size in self.scratch_sizes(normed=True))


class Cut(NamedTuple):
    """A way to give K to the warps of ``split`` blocks, of which so many have columns of their own.

    resident: x is in shared memory.
    """

    split: int
    warps: int
    k_warp: int
    resident: bool


# (blocks that share K, columns of a warp) with x in registers.
CUTS = (1, 64), (1, 128), (1, 256), (1, 512), (2, 256), (4, 256), (4, 512), (8, 256), (8, 512)
# Where a block has little shared memory, more blocks share K with shorter runs.
_NARROW_CUTS = (2, 64), (2, 128), (4, 64), (4, 128), (8, 64), (8, 128)
# Bits of a value by ``form_of``.
TILES = {
    "float": 16,
    "int8": 8,
    "int8 fold": 8,
    "float8": 8,
    "float8 fold": 8,
    **dict.fromkeys(_FOUR_BITS, 4),
}


def cuts_here() -> tuple[tuple[int, int], ...]:
    is_narrow = gpu().shared_bytes < gpu().few_rows.narrow_bytes
    return CUTS + (_NARROW_CUTS if is_narrow else ())


def tile_plans() -> list[TilePlan]:
    """Return every plan that ``tile_plan`` can return on this GPU."""
    passes = (TOKENS,) if gpu().clusters else PASSES
    found = []
    for form, bits in TILES.items():
        cuts = [cut for cut in cuts_here() if cut[1] * bits % 512 == 0]
        depths = (4, 2) if form == "float" else (2,)
        slots = [(*cut, depth) for cut in cuts for depth in depths] + [(1, 0, 4), (1, 0, 2)]
        found += [
            TilePlan(form, split, k_warp, depth, most_clusters(split), tokens, is_apart(split))
            for split, k_warp, depth in slots
            for tokens in passes
        ]
    return found


def has_tiles(k: int, weight: StoredWeight) -> bool:
    """Return whether K columns are whole blocks of a tile, and enough for its warps."""
    return k % columns_of(weight) == 0 and k >= 8 * columns_of(weight)


def resident_cut(k: int, bits: int) -> Cut:
    unit = max(512 // bits, 64)  # the places of x are exchanged among 8 granules
    k_warp = -(-k // unit // WARPS) * unit
    return Cut(1, -(-k // k_warp), k_warp, True)


def slices(k: int, bits: int, m: int, splits: Sequence[int]) -> list[Cut]:
    """Ways to give K to warps, best first.

    With x in registers it takes a thread columns / 8 of them for 8 tokens, of which 64 fit, and the
    runs divide K.  With x in shared memory one block has all of K; the last run then begins where
    it still ends with K, and reads zeros for the part of x that the one before it has.
    """
    block, n_tiles, known = 512 // bits, -(-m // 8), cuts_here()
    cuts = []
    for split in splits:
        # Floats get as many warps as there are: 6160 x 2048 9.1 to 8.2 us, 11264 x 2048 with SwiGLU
        # 16.5 to 14.2.  Codes were not measured.
        for k_warp in (64, 128, 256, 512) if bits == 16 else (256, 128, 64, 512):
            is_one = (split, k_warp) in known and k_warp % block == 0
            if not is_one or k % (k_warp * split) or n_tiles * k_warp > 512:
                continue
            warps = k // k_warp // split
            if 8 <= warps <= WARPS:
                cuts.append(Cut(split, warps, k_warp, False))
                break
    # A sum over a cluster takes longer than 512 columns a warp, which crowd the registers.
    cuts.sort(key=lambda cut: (cut.split > 1, cut.split == 8, cut.k_warp == 512, cut.split))
    few = m <= RESIDENT_TOKENS and not (cuts and cuts[0].split == 1)
    if (few or not cuts) and k % block == 0 and k >= 8 * block:
        cuts.insert(0, resident_cut(k, bits))
    return cuts


def _straddles(cut: Cut, weight: StoredWeight) -> bool:
    """Whether a group of columns would belong to two warps, or, with x in shared memory, to two
    blocks of columns."""
    group = weight.group
    if folds(weight) or weight.n_groups <= 1:
        return False
    straddled = bool(cut.k_warp % group and group % cut.k_warp)
    return straddled or (cut.resident and group > columns_of(weight))


class FusedTile(NamedTuple):
    """The parts of a call around the product that take memory of a tile's."""

    bias: bool = False
    residual: bool = False
    pairs: bool = False
    normed: bool = False

    @classmethod
    def of(cls, call: MatmulCall) -> FusedTile:
        return cls(call.bias, call.residual is not None, call.swiglu, call.norm is not None)


def _division(m: int, w: HasShape, cut: Cut, depth: int, fused: FusedTile) -> TileDivision | None:
    """Return the division with the longest batches that fit shared memory, or None."""
    parts = 2 if fused.pairs else 1
    tiles = w.shape[0] // 16 // parts
    weight = StoredWeight.of(w)
    apart = is_apart(cut.split)
    clusters = min(tiles, most_clusters(cut.split))
    tile_bytes = 16 * (weight.scale_row + weight.zero_row)
    if not apart:
        tile_bytes += (64 if fused.bias else 0) + (32 * m if fused.residual else 0)
    per = -(-tiles // clusters)
    for batch in (-(-per // i) for i in range(1, per + 1)):
        sizes = clusters, parts * per, parts * batch, depth, tile_bytes
        found = TileDivision(m, *cut, *sizes, pairs=fused.pairs, apart=apart)
        if found.shared_bytes <= gpu().shared_bytes - 1024:
            return found
    return None


def is_apart(split: int) -> bool:
    """Whether blocks that share K are no cluster."""
    return split > 1 and not gpu().clusters


def most_clusters(split: int) -> int:
    """Return how many sets of ``split`` blocks the GPU runs at a time."""
    return sms() // split if is_apart(split) else clusters_at_once()[split]


def _tile_of(m: int, w: HasShape, fused: FusedTile) -> tuple[Cut, int] | None:
    """Return the way to give K to warps and the ring's slots, or None if nothing fits shared
    memory."""
    weight = StoredWeight.of(w)
    cuts = slices(w.shape[1], weight.bits, m, splits_of(fused.normed or fused.pairs))
    cuts.sort(key=lambda cut: _straddles(cut, weight))
    for cut in cuts:
        # Codes that arrive while others are multiplied are not late, and a ring that is full at the
        # start delays the first of them; without arithmetic to wait for, or with x to load at
        # every step, more is better.
        for depth in (4, 2) if weight.plain or cut.resident else (2,):
            if _division(m, w, cut, depth, fused):
                return cut, depth
    return None


def divide_tiles(m: int, w: HasShape, **fused: bool) -> TileDivision | None:
    """The division for m tokens and w, or None if nothing fits shared memory.

    fused: fields of ``FusedTile``.
    """
    around = FusedTile(**fused)
    found = _tile_of(m, w, around)
    return None if found is None else _division(m, w, *found, around)


def tile_plan(call: MatmulCall, *, at_once: int = TOKENS) -> TilePlan | Reason:
    """Return the tile kernel's plan, or why it has none; at_once: rows of a pass at most."""
    weight = call.weight
    m, w, n, k, x_kind = call.m, call.w, call.n, call.k, KIND.get(call.x.name)
    if call.plain and w.dtype != call.x:
        return Reason(f"plain weights {w.dtype.name} in w where x is {call.x.name}")
    known = (jnp.int4, jnp.int8, jnp.float8_e4m3fn)
    if not call.plain and w.dtype not in known and not weight.is_format:
        return Reason(f"w has codes of {w.dtype.name}; the kernel reads int4, int8, MXFP4, NVFP4")
    if x_kind not in ("bf16", "f16"):
        return Reason(f"x is {call.x.name}; the kernel multiplies bfloat16 and float16")
    most = most_tokens() if call.alone else TOKENS
    if not 1 <= m <= most:
        return Reason(f"x has {m} tokens; the decode kernel takes 1 to {most}")
    m = min(m, at_once)
    if n % (32 if call.swiglu else 16):
        return Reason(f"w has N = {n}, not a multiple of {32 if call.swiglu else 16}")
    if call.norm is not None and (
        x_kind != "bf16" or KIND.get(call.norm.name) not in ("bf16", "f32")
    ):
        return Reason(f"the norm's weight is {call.norm.name} where x is {call.x.name}")
    if call.residual is not None and (call.swiglu or call.residual.itemsize != 2):
        return Reason(f"a residual {call.residual.name}, or one behind SwiGLU")
    whole_k = call.norm is not None or call.swiglu
    if not slices(k, weight.bits, m, splits_of(whole_k)):
        wanted = columns_of(weight)
        return Reason(f"w has K = {k}, not a multiple of {wanted} from {8 * wanted} on")
    # Room for a bias is always reserved, because the planner of fused calls does not see it.
    fused = FusedTile.of(call)._replace(bias=True)
    # Where a call does not fit, fewer rows at a time read w several times.
    passes = (at_once,) if gpu().clusters else [size for size in PASSES if size <= at_once]
    fits = ((size, _tile_of(min(call.m, size), w, fused)) for size in passes)
    tokens, whole = next((found for found in fits if found[1] is not None), (at_once, None))
    if whole is None:
        return Reason(f"K = {k} of w and {m} tokens of x need more than shared memory holds")
    found = whole if call.bias else _tile_of(min(call.m, tokens), w, FusedTile.of(call))
    assert found is not None
    cut, depth = found
    plan = TilePlan(
        form_of(weight),
        cut.split,
        0 if cut.resident else cut.k_warp,
        depth,
        most_clusters(cut.split),
        tokens,
        is_apart(cut.split),
    )
    if call.plain:
        return plan
    if weight.bits == 8 and weight.zero is not None:
        return Reason("w has int8 codes with zero points")
    if weight.float_zero and weight.zero != weight.scale:
        return Reason(f"w.zero is {weight.zero} where w.scale is {weight.scale}")
    if weight.int_zero and weight.zero != jnp.int8:
        return Reason(f"w.zero is {weight.zero}; the kernel reads int8")
    if folds(weight):
        if x_kind != "bf16":
            return Reason(f"w has groups of {weight.group} or floating zeros where x is float16")
        if weight.group % (columns_of(weight) // 4) and not weight.float4:
            return Reason(
                f"w has groups of {weight.group}; multiples of {columns_of(weight) // 4} are needed"
            )
    elif _straddles(whole[0], weight):
        return Reason(f"w's groups of {weight.group} columns straddle runs of {whole[0].k_warp}")
    return plan
