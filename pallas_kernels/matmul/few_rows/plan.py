"""What the decode matmul takes, and how it divides ``x[M, K] w[N, K]^T`` among blocks and warps of
an H200.

Arithmetic only; ``matmul.few_rows.kernel`` tells what the parts do.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.few_rows.scheme import KIND, Scheme
from pallas_kernels.qtensor import QTensor

WARPS = 16
THREADS = 32 * WARPS
TOKENS = 16  # at most
# How many clusters of a size an H200 runs at a time: 4 does not divide the SMs of all of its
# processing clusters.  One cluster more waits for the first to end.  (8: from the sizes that give
# 30 clusters of 4, not measured.)
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 14}
SHARED = 226 * 1024
SLOT = WARPS * 1024  # bytes of a ring slot: one block of columns of a tile, 2 x 16 bytes per lane
# Up to so many rows of x stay in shared memory rather than divide K among the blocks of a cluster.
RESIDENT_TOKENS = 4
# Squares of x: a sum per warp and token, then one per token.
SQUARES = 4 * (WARPS + 1) * TOKENS
# Floats from one token to the next in a partial sum of 16 rows: stores hit every bank once.
PITCH = 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """The division of one product among blocks and warps."""

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


def slices(k: int, bits: int, m: int) -> list[tuple[int, int, int, bool]]:
    """Ways to give K to warps, best first: (split, warps, columns of a warp, x resident).

    With x in registers it takes a thread columns / 8 of them for 8 tokens, of which 64 fit, and the
    runs divide K.  With x in shared memory one block has all of K; the last run then begins where
    it still ends with K, and reads zeros for the part of x that the one before it has.
    """
    block, n_tiles = 512 // bits, -(-m // 8)
    cuts = []
    for split in CLUSTERS:
        # Floats get as many warps as there are: 6160 x 2048 9.1 to 8.2 us, 11264 x 2048 with SwiGLU
        # 16.5 to 14.2.  Words were not measured.
        for k_warp in (64, 128, 256, 512) if bits == 16 else (256, 128, 64, 512):
            if k_warp % block or k % (k_warp * split) or n_tiles * k_warp > 512:
                continue
            warps = k // k_warp // split
            if 8 <= warps <= WARPS:
                cuts.append((split, warps, k_warp, False))
                break
    # A sum over a cluster takes longer than 512 columns a warp, which crowd the registers.
    cuts.sort(key=lambda cut: (cut[0] > 1, cut[0] == 8, cut[2] == 512, cut[0]))
    few = m <= RESIDENT_TOKENS and not (cuts and cuts[0][0] == 1)
    if (few or not cuts) and k % block == 0 and k >= 8 * block:
        unit = max(block, 64)  # the places of x are exchanged among 8 granules
        k_warp = -(-k // unit // WARPS) * unit
        cuts.insert(0, (1, -(-k // k_warp), k_warp, True))
    return cuts


def _straddles(split: int, warps: int, k_warp: int, resident: bool, scheme: Scheme) -> bool:
    """Whether a group of columns would belong to two warps, or, with x in shared memory, to two
    blocks of columns."""
    group = scheme.group
    if scheme.fold or scheme.n_groups <= 1:
        return False
    return bool(k_warp % group and group % k_warp) or (resident and group > scheme.columns)


def make_plan(
    m: int,
    w: jax.Array | QTensor,
    *,
    depth: int | None = None,
    bias: bool = False,
    residual: bool = False,
    pairs: bool = False,
) -> Plan | None:
    """The plan for m tokens and w, or None if nothing fits shared memory."""
    n, k = w.shape
    parts = 2 if pairs else 1
    tiles = n // 16 // parts
    scheme = Scheme(w, "bf16")
    param_bytes = 16 * scheme.n_groups * (scheme.scale_bytes + scheme.zero_bytes)
    param_bytes += (64 if bias else 0) + (32 * m if residual else 0)
    cuts = slices(k, scheme.bits, m)
    cuts.sort(key=lambda cut: _straddles(*cut, scheme))
    for cut in cuts:
        clusters = min(tiles, CLUSTERS[cut[0]])
        per = -(-tiles // clusters)
        # Words that arrive while others are multiplied are not late, and a ring that is full at the
        # start delays the first of them; without arithmetic to wait for, or with x to load at
        # every step, more is better.
        best = 4 if scheme.plain or cut[3] else 2
        for slots in (depth or best, 2):
            for batch in (-(-per // i) for i in range(1, per + 1)):
                sizes = clusters, parts * per, parts * batch, slots, param_bytes
                plan = Plan(m, *cut, *sizes, pairs=pairs)
                if plan.shared_bytes <= SHARED:
                    return plan
    return None


def unsupported(
    m: int,
    x_dtype,
    w: jax.Array | QTensor,
    out_dtype=None,
    *,
    norm=None,
    residual=None,
    swiglu: bool = False,
) -> str | None:
    """Why the kernel does not take ``[m, K] x w``, or None.  norm, residual: the dtypes of a norm's
    weight and of a residual."""
    n, k = w.shape
    x_kind = KIND.get(jnp.dtype(x_dtype).name)
    plain = not isinstance(w, QTensor)
    if plain and w.dtype != x_dtype:
        return f"plain weights {w.dtype.name} in w where x is {jnp.dtype(x_dtype).name}"
    if not plain and w.dtype not in (jnp.int4, jnp.int8):
        return f"w has words of {jnp.dtype(w.dtype).name}; the kernel reads int4 and int8"
    if x_kind not in ("bf16", "f16"):
        return f"x is {jnp.dtype(x_dtype).name}; the kernel multiplies bfloat16 and float16"
    if not plain and jnp.dtype(w.scale.dtype).name not in KIND:
        return f"w.scale is {w.scale.dtype}"
    if out_dtype is not None and jnp.dtype(out_dtype).name not in KIND:
        return f"the output would be {jnp.dtype(out_dtype).name}"
    if not 1 <= m <= TOKENS:
        return f"x has {m} tokens; the decode kernel takes 1 to {TOKENS}"
    if n % (32 if swiglu else 16):
        return f"w has N = {n}, not a multiple of {32 if swiglu else 16}"
    if norm is not None and (
        x_kind != "bf16" or KIND.get(jnp.dtype(norm).name) not in ("bf16", "f32")
    ):
        return f"the norm's weight is {jnp.dtype(norm).name} where x is {jnp.dtype(x_dtype).name}"
    if residual is not None and (swiglu or jnp.dtype(residual).itemsize != 2):
        return f"a residual {jnp.dtype(residual).name}, or one behind SwiGLU"
    scheme = Scheme(w, x_kind)
    if not slices(k, scheme.bits, m):
        return f"w has K = {k}, not a multiple of {scheme.columns} from {8 * scheme.columns} on"
    plan = make_plan(m, w, bias=True, residual=residual is not None, pairs=swiglu)
    if plan is None:
        return f"K = {k} of w and {m} tokens of x need more than shared memory holds"
    if plain:
        return None
    if scheme.bits == 8 and w.zero is not None:
        return "w has int8 words with zero points"
    if scheme.zero == "float" and w.zero.dtype != w.scale.dtype:
        return f"w.zero is {w.zero.dtype} where w.scale is {w.scale.dtype}"
    if scheme.zero == "int" and w.zero.dtype != jnp.int8:
        return f"w.zero is {w.zero.dtype}; the kernel reads int8"
    if scheme.fold:
        if scheme.kind != "bf16":
            return f"w has groups of {scheme.group} or floating zeros where x is float16"
        if scheme.group % (scheme.columns // 4):
            return f"w has groups of {scheme.group}; multiples of {scheme.columns // 4} are needed"
    elif _straddles(plan.split, plan.warps, plan.k_warp, plan.resident, scheme):
        return f"w's groups of {scheme.group} columns straddle runs of {plan.k_warp}"
    return None
