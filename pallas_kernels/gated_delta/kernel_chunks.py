"""The gated delta rule's work inside a chunk on Hopper: what ``kernel_scan`` needs of every chunk,
all chunks at once.

With G the sums of log_decay from a chunk's start, D_ij = exp(G_i - G_j) for j <= i,

    A  = beta_i (k_i . k_j) D_ij below the diagonal         X = (I + A)^-1 diag(beta)
    M  = (scale q_i . k_j D_ij, j <= i) X                   [64, 64]
    K' = X^T diag(exp(G_64 - G)) K                          [64, Dk]

so that, from a chunk's first state S and R = V - diag(exp(G)) K S,

    o = scale diag(exp(G)) Q S + M R                        S <- exp(G_64) S + K'^T R.

That is the WY form with its inverse taken to the left: fla multiplies X into V and K, which leaves
two products with the tokens between a state and the next, and rounds u = X R, whose errors add up
where keys are parallel; M and K' are formed here once, from operands of 16 bits and more, and where
keys are parallel their entries are small.

One block of one warpgroup a chunk and value head, several to an SM, one after the other:

    TMA q k | sums of log_decay | k k^T, q k^T | A, P | X (``kernel_inverse``) | M, K' | TMA out

Floor: 7 bytes per element of q at Dk = 128 and as many key as value heads (4 in, 3 out), 0.109 ms
at (8, 4096, 16, 16, 128, 128).  Result: 0.144 on one H200.  What was tried: NOTES.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.jax_internals import ir, llvm, vector
from pallas_kernels.launch import launch
from pallas_kernels.recurrence.channels import BF16_TILE, CHUNK, ROWS, TILE

PART = 64  # key channels of a tile
_WGMMA = plgpu.Layout.WGMMA
PARTS = (plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.bfloat16, layout=_WGMMA),) * 2


def vectors_call(scale: float, pitch: int, want_out: bool = True):
    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, plgpu.Layout.WG_SPLAT((128,))))
    def call(ctx, scratch, decays, betas, out, limit):
        del ctx
        inverse.chunk_vectors(
            p.shared_address(scratch),
            p.address(decays),
            p.address(betas),
            limit.registers.flat[0],
            pitch,
            p.address(out) if want_out else None,
            scale,
        )
        p.warpgroup_barrier()

    return call


def pairs(array):
    """The registers of an array of 64 rows as ``x[tile][half]``, pairs."""
    flat = list(array.registers.reshape(-1))
    return [
        [
            [llvm.extractelement(flat[2 * tile + half], p.ci(e)) for e in range(2)]
            for half in range(2)
        ]
        for tile in range(len(flat) // 2)
    ]


def array(parts):
    layout = _WGMMA.to_mgpu()
    zero = mgpu.FragmentedArray.splat(p.cf(0.0), (CHUNK, CHUNK), layout, is_signed=None)
    registers = zero.registers.copy()
    kind = ir.VectorType.get((2,), p.f32())
    pairs = [pair for tile in parts for pair in tile]
    registers.reshape(-1)[:] = [vector.from_elements(kind, pair) for pair in pairs]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _inverse_call(scale: float, save: bool):
    """(k k^T, q k^T) -> ((I + A)^-1)^T; overwrites q by P's high and low parts, and leaves what it
    returns in the tiles if it is to be saved."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(ROWS), plgpu.RefType(ROWS), _WGMMA, _WGMMA),
        return_type=PARTS,
    )
    def call(ctx, scratch_ref, q_ref, tiles_ref, kk, qk):
        del ctx
        scratch, tiles = p.shared_address(scratch_ref), p.shared_address(tiles_ref)
        rows = inverse.InverseRows()
        a, weights = inverse.coefficients(rows, scratch, pairs(kk), pairs(qk), scale)
        p.warpgroup_barrier()  # all warps' products have read q
        inverse.store_split(rows, p.shared_address(q_ref), weights)
        x = inverse.inverse_parts(rows, tiles, scratch, a)
        if save:
            p.warpgroup_barrier()  # all warps have read A
            for n in range(2):
                words = [[both[n] for both in tile] for tile in x]
                rows.store_tile(p.add(tiles, n * TILE), words)
        return parts_array(x)

    return call


def bf16_array(words):
    """Words of two bf16 in the order of ``pairs`` as a [64, 8 * tiles] array."""
    layout, half = _WGMMA.to_mgpu(), ir.BF16Type.get()
    shape = (CHUNK, 4 * len(words))
    zero = mgpu.FragmentedArray.splat(mgpu.utils.c(0.0, half), shape, layout, is_signed=None)
    registers = zero.registers.copy()
    kind = ir.VectorType.get((2,), half)
    registers.reshape(-1)[:] = [mgpu.utils.bitcast(word, kind) for word in words]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def parts_array(x):
    """``x[tile][half]``, words of high and of low parts, as two arrays."""
    words = [both for tile in x for both in tile]
    return tuple(bf16_array(list(part)) for part in zip(*words, strict=True))


@plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=PARTS)
def high_low(ctx, x):
    """A [64, 64] array as two bf16 parts.  By instructions that convert two floats: what the
    compiler makes of ``astype`` converts the low part float by float, at an eighth of the rate."""
    del ctx
    return parts_array([[inverse.split(pair) for pair in tile] for tile in pairs(x)])


def _chunk_body(
    q,
    k,
    g,
    beta,
    *rest,
    length: int,
    scale: float,
    group: int,
    parts: int,
    ragged: bool,
    save: bool,
):
    rest = list(rest)
    lengths = rest.pop(0) if ragged else None
    keys, weights, decays = rest[:3]
    inverses = rest.pop(3) if save else None
    q_union, k_union, a_union, scratch, ready = rest[3:]
    (q_rows, q_sm), (k_rows, k_sm), (a_rows, a_sm) = q_union, k_union, a_union
    head, c, b = (lax.axis_index(name) for name in ("head", "chunk", "row"))
    rows = pl.ds(c * CHUNK, CHUNK)
    limit = (jnp.minimum(lengths[b], length) if ragged else length) - c * CHUNK

    def work():
        for part in range(parts):
            at = pl.ds(part * PART, PART)
            plgpu.copy_gmem_to_smem(q.at[b, rows, head // group, at], q_rows.at[part], ready)
            plgpu.copy_gmem_to_smem(k.at[b, rows, head // group, at], k_rows.at[part], ready)
        vectors_call(scale, 4 * g.shape[-1])(
            scratch,
            g.at[b, rows, head],
            beta.at[b, rows, head],
            decays.at[b, head, c],
            jnp.full((128,), limit, jnp.int32),
        )
        plgpu.barrier_wait(ready)
        if ragged:

            @pl.when(limit < CHUNK)
            def _():
                for part in range(parts):
                    tile = plgpu.load(k_sm.at[part], layout=_WGMMA)
                    token = plgpu.broadcasted_iota(jnp.int32, (CHUNK, PART), 0, layout=_WGMMA)
                    k_sm[part] = jnp.where(token < limit, tile, jnp.zeros_like(tile))
                plgpu.commit_smem()

        def products(kk, qk):
            for acc, left in ((kk, k_sm), (qk, q_sm)):
                for part in range(parts):
                    plgpu.wgmma(acc, left.at[part], k_sm.at[part].transpose((1, 0)))
            return kk[...], qk[...]

        square = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
        kk, qk = pl.run_scoped(products, square, square)
        high, low = _inverse_call(scale, save)(scratch, q_rows, a_rows, kk, qk)
        plgpu.commit_smem()
        if save:
            for n in range(2):
                plgpu.copy_smem_to_gmem(a_rows.at[n], inverses.at[b, head, n, rows])

        def vector(at, axis):
            place = scratch.at[pl.ds(at // 4, CHUNK)]
            x = plgpu.load(place, layout=_WGMMA.reduce(1 - axis))
            return lax.broadcast_in_dim(x, (CHUNK, CHUNK), [axis])

        def scores(acc):
            for left, n in ((high, 0), (high, 1), (low, 0)):
                plgpu.wgmma(acc, left, q_sm.at[n].transpose((1, 0)))
            x = high.astype(jnp.float32) + low.astype(jnp.float32)
            return acc[...], *high_low(x * vector(inverse.TO_END, 1))

        scored, *moved = pl.run_scoped(scores, square)
        betas = vector(inverse.BETA, 0)

        def sums(acc, part):
            for left in moved:
                plgpu.wgmma(acc, left, k_sm.at[part])
            return acc[...]

        if save:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        a_sm[0] = (scored * betas).astype(q.dtype)
        plgpu.commit_smem()  # and now P
        for part in range(parts):
            x = pl.run_scoped(functools.partial(sums, part=part), square)
            q_sm[part] = (x * betas).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(a_rows.at[0], weights.at[b, head, rows])
        for part in range(parts):
            at = pl.ds(part * PART, PART)
            plgpu.copy_smem_to_gmem(q_rows.at[part], keys.at[b, head, rows, at])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.when(limit > 0)(work) if ragged else work()


def chunks(q, k, log_decay, beta, lengths, scale: float, save: bool = False):
    """q, k [B, T, Hk, Dk] bf16, log_decay and beta [B, T, H] f32 -> K' [B, H, NC*64, Dk] and M^T
    [B, H, NC*64, 64], bf16, and [B, H, NC, 2, 64] f32: exp(G) and scale * exp(G).

    lengths: int32[B] or None.  Chunks that start at or after a row's length are not written.
    save: also (I + A)^-1, transposed, as two bf16 parts [B, H, 2, NC*64, 64].
    """
    b, t, hk, dk = q.shape
    h = beta.shape[-1]
    nc, parts = -(-t // CHUNK), dk // PART
    body = functools.partial(
        _chunk_body,
        length=t,
        scale=scale,
        group=h // hk,
        parts=parts,
        ragged=lengths is not None,
        save=save,
    )

    def tokens(n):  # one memory: rows of 128 bytes for the copies, tiles for wgmma
        shape = (n, CHUNK, PART)
        return plgpu.RefUnion(
            plgpu.SMEM(shape, jnp.bfloat16, transforms=ROWS),
            plgpu.SMEM(shape, jnp.bfloat16, transforms=BF16_TILE),
        )

    return launch(
        body,
        (q, k, log_decay, beta, lengths),
        (
            jax.ShapeDtypeStruct((b, h, nc * CHUNK, dk), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, nc * CHUNK, CHUNK), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, h, nc, 2, CHUNK), jnp.float32),
            *([jax.ShapeDtypeStruct((b, h, 2, nc * CHUNK, CHUNK), jnp.bfloat16)] if save else []),
        ),
        name="gated_delta_chunks",
        grid={"head": h, "chunk": nc, "row": b},
        scratch=[
            tokens(max(parts, 2)),
            tokens(parts),
            tokens(2),
            inverse.WORDS,
            plgpu.Barrier(num_arrivals=2 * parts),
        ],
    )
