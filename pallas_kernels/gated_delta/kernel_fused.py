"""The gated delta rule's forward pass on Hopper in one kernel, for one decay a head.

``kernel_chunks`` and ``kernel_scan`` in one block, which a value head's chunks pass one after the
other: q, k and v are read once, o is written, and nothing else leaves the SM.  The first warpgroup
prepares chunk c + 1 while the others, of 64 value channels each, pass the state through chunk c,
and form what chunk c + 1 needs of its queries:

    0    : k k^T | A | X (``kernel_inverse``) | K' = X^T diag(to end) K | M = P X ->
    1, 2 : P of c + 1 -> | S k^T | R | S <- e_64 S + K'^T R, q S | o = diag(e) q S + M R -> TMA

Three slots of q and k: passed, prepared, on its way; two of v, out of which o leaves.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ptx as p
from pallas_kernels.gated_delta import kernel_inverse as inverse
from pallas_kernels.gated_delta.kernel_chunks import (
    PART,
    PARTS,
    array,
    bf16_array,
    high_low,
    pairs,
    parts_array,
)
from pallas_kernels.gated_delta.kernel_scan import (
    by_token,
    tiles,
    tokens,
)
from pallas_kernels.gla.channels import (
    CHUNK,
    ROWS,
    ChannelLane,
    bundle,
    bundle_layout,
    bundle_type,
    unbundle,
)
from pallas_kernels.gla.scan import VALUE_BLOCK, read_state, write_state
from pallas_kernels.launch import launch

SLOTS = 3  # of q and k
HALF = CHUNK // 2
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = (CHUNK, CHUNK)
_LIMIT = plgpu.Layout.WG_SPLAT((128,))
_GATES = 4  # registers: log_decay and beta of two tokens


def _gates_call(pitch: int):
    """log_decay and beta of a chunk's tokens, on their way to ``_vectors_call``."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _LIMIT), return_type=bundle_type(_GATES)
    )
    def call(ctx, decays, betas, limit):
        del ctx
        gates = inverse.load_gates(
            p.address(decays), p.address(betas), limit.registers.flat[0], pitch, ""
        )
        return bundle([x for pair in gates for x in pair])

    return call


def _vectors_call(scale: float):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), bundle_layout(_GATES), _LIMIT))
    def call(ctx, vectors, gates, limit):
        del ctx
        to, limit = p.shared_address(vectors), limit.registers.flat[0]
        inverse.store_vectors(to, unbundle(gates, 2, 2), limit, scale)

    return call


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(ROWS), _WGMMA), return_type=PARTS
)
def _inverse_call(ctx, vectors, scratch, tiles_ref, kk):
    """k k^T -> ((I + A)^-1)^T."""
    del ctx
    rows = inverse.Rows()
    a = inverse.below_diagonal(rows, p.shared_address(vectors), pairs(kk))
    parts = inverse.inverse_parts(rows, p.shared_address(tiles_ref), p.shared_address(scratch), a)
    return parts_array(parts)


@plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=PARTS)
def _halves(ctx, x):
    """x rounded to bf16, and in a second one the bits that, with it, give x again."""
    del ctx
    words = []
    for both in pairs(x):
        for pair in both:
            bits = [p.add(p.bits(y), 1 << 15) for y in pair]
            words.append([p.permute(*bits, selector) for selector in (0x7632, 0x5410)])
    return tuple(bf16_array(list(part)) for part in zip(*words, strict=True))


@plgpu.inline_mgpu(
    arg_types=(_WGMMA, _WGMMA),
    return_type=plgpu.ShapeDtypeStruct(_SQUARE, jnp.float32, layout=_WGMMA),
)
def _whole(ctx, high, low):
    del ctx
    out = []
    words = [[mgpu.utils.bitcast(y, p.i32()) for y in x.registers.reshape(-1)] for x in (low, high)]
    for low_word, high_word in zip(*words, strict=True):
        both = (p.permute(low_word, high_word, selector) for selector in (0x5410, 0x7632))
        out.append([p.from_bits(p.add(bits, -(1 << 15))) for bits in both])
    return array([out[i : i + 2] for i in range(0, len(out), 2)])


def _scores_call(scale: float, half: int):
    """To the tiles: P's columns of the ``half``, high and low, from those of q k^T."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(ROWS), _WGMMA))
    def call(ctx, vectors, to, qk):
        del ctx
        rows, first = inverse.Rows(), 4 * half
        x = inverse.upto_diagonal(rows, p.shared_address(vectors), pairs(qk), scale, first)
        inverse.store_split(rows, p.shared_address(to), x, first)

    return call


def _rest_call(ragged: bool):
    """R^T of R = V - diag(e) K S, from V in shared memory and (K S)^T."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(ROWS), _WGMMA, _LIMIT),
        return_type=plgpu.ShapeDtypeStruct(_SQUARE, jnp.bfloat16, layout=_WGMMA),
    )
    def call(ctx, vectors, tile, seen, limit):
        del ctx
        place, seen = ChannelLane(), pairs(seen)
        matrices = place.column_matrices(p.shared_address(tile))
        decays = p.add(p.shared_address(vectors), p.shift_left(place.c, 3))
        out = []
        for block in range(4):
            words = p.load_matrices(matrices, 2048 * block, transposed=True)
            for n, word in enumerate(words):
                at, half = 2 * block + n // 2, n % 2
                if not half:
                    e = p.load_shared(decays, 2, inverse.FROM_START + 32 * at, "f32")
                values = p.widen(word), p.widen_high(word)
                rest = [
                    p.fma(arith.negf(x), y, z)
                    for x, y, z in zip(seen[at][half], e, values, strict=True)
                ]
                if ragged:
                    token = p.add(p.shift_left(place.c, 1), 8 * at)
                    there = [p.below(p.add(token, i), limit.registers.flat[0]) for i in range(2)]
                    rest = [arith.select(x, y, p.cf(0.0)) for x, y in zip(there, rest, strict=True)]
                out.append(p.pack(*rest))
        return bf16_array(out)

    return call


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(ROWS), _WGMMA))
def _write_transposed(ctx, tile, x):
    """x^T [64 tokens, 64 dv] to the swizzled rows of tokens."""
    del ctx
    matrices = ChannelLane().column_matrices(p.shared_address(tile))
    words = [p.pack(*pair) for both in pairs(x) for pair in both]
    for block in range(4):
        p.store_matrices(matrices, words[4 * block : 4 * block + 4], 2048 * block, True)


def _body(q, k, g, beta, v, *rest, length: int, scale: float, group: int, parts: int,
          n_chunks: int, ragged: bool, initial: bool, dv: int):  # fmt: skip
    rest = list(rest)
    lengths = rest.pop(0) if ragged else None
    start = rest.pop(0) if initial else None
    out, final, q_union, k_union, v_union, kt_sm, m_sm, a_rows, p_union, vectors, scratch, *rest = (
        rest
    )
    full, given, begun, scored, prepared, emptied = rest
    (q_rows, q_sm), (k_rows, k_sm), (v_rows, v_sm) = q_union, k_union, v_union
    p_rows, p_sm = p_union
    j, head, b = (lax.axis_index(name) for name in ("values", "head", "row"))
    wg = lax.axis_index("warpgroup")
    end = jnp.minimum(lengths[b], length) if ragged else length
    steps = (end + (CHUNK - 1)) // CHUNK if ragged else n_chunks
    begin = jnp.minimum(0, steps)  # not static: a row may be shorter than a chunk
    tokens_of = lambda c: pl.ds(c * CHUNK, CHUNK)  # noqa: E731

    def limit_of(c):
        return jnp.full((128,), end - c * CHUNK, jnp.int32)

    def gates(c):
        at = b, tokens_of(c), head
        return _gates_call(4 * g.shape[-1])(g.at[*at], beta.at[*at], limit_of(c))

    def prepare():
        _vectors_call(scale)(vectors.at[0], gates(begin), limit_of(begin))
        plgpu.commit_smem()  # the other warps read them too
        plgpu.barrier_arrive(begun)

        def step(c, _):
            slot = c % SLOTS
            after = jnp.minimum(c + 1, steps - 1)
            ahead = gates(after)
            plgpu.barrier_wait(full.at[slot])
            if ragged:

                @pl.when(end - c * CHUNK < CHUNK)
                def _():
                    for part in range(parts):
                        tile = plgpu.load(k_sm.at[slot, part], layout=_WGMMA)
                        token = plgpu.broadcasted_iota(jnp.int32, _SQUARE, 0, layout=_WGMMA)
                        there = token < end - c * CHUNK
                        k_sm[slot, part] = jnp.where(there, tile, jnp.zeros_like(tile))
                    plgpu.commit_smem()

            def products(acc):
                for part in range(parts):
                    tile = k_sm.at[slot, part]
                    plgpu.wgmma(acc, tile, tile.transpose((1, 0)))
                return acc[...]

            square = plgpu.ACC(_SQUARE, jnp.float32)
            kk = pl.run_scoped(products, square)
            high, low = _inverse_call(vectors.at[slot], scratch, a_rows, kk)
            plgpu.barrier_wait(scored)  # P is there, and chunk c - 2 has passed

            def vector(at, axis):
                place = vectors.at[slot, at // 256]
                x = plgpu.load(place, layout=_WGMMA.reduce(1 - axis))
                return lax.broadcast_in_dim(x, _SQUARE, [axis])

            def weigh(acc):
                for left, n in ((high, 0), (high, 1), (low, 0)):
                    plgpu.wgmma(acc, left, p_sm.at[n].transpose((1, 0)))
                x = high.astype(jnp.float32) + low.astype(jnp.float32)
                return acc[...], *high_low(x * vector(inverse.TO_END, 1))

            weights, *moved = pl.run_scoped(weigh, square)
            beta_rows = vector(inverse.BETA, 0)
            m_sm[c % 2] = (weights * beta_rows).astype(q.dtype)

            def sums(*accs):
                for part, acc in enumerate(accs):
                    for left in moved:
                        plgpu.wgmma(acc, left, k_sm.at[slot, part])
                return [acc[...] for acc in accs]

            keys = pl.run_scoped(sums, *[square] * parts)
            for part in range(parts):
                kt_sm[c % 2, part] = (keys[part] * beta_rows).astype(q.dtype)
            _vectors_call(scale)(vectors.at[(c + 1) % SLOTS], ahead, limit_of(after))
            plgpu.commit_smem()
            plgpu.barrier_arrive(prepared)

        lax.fori_loop(0, steps, step, None)

    def load_tokens(c):
        slot = c % SLOTS
        for part in range(parts):
            at = pl.ds(part * PART, PART)
            for x, to in ((k, k_rows), (q, q_rows)):
                place = to.at[slot, part]
                plgpu.copy_gmem_to_smem(
                    x.at[b, tokens_of(c), head // group, at], place, full.at[slot]
                )

    def load_values(c):
        for w in range(2):
            at = pl.ds(j * VALUE_BLOCK + w * 64, 64)
            place = v_rows.at[c % 2, w]
            plgpu.copy_gmem_to_smem(v.at[b, tokens_of(c), head, at], place, given.at[c % 2])

    def score(w, c):
        """P of chunk c, this warpgroup's columns."""
        slot = c % SLOTS
        plgpu.barrier_wait(full.at[slot])

        def columns(n):
            def products(acc):
                for part in range(parts):
                    right = k_sm.at[slot, part, pl.ds(HALF * n, HALF)]
                    plgpu.wgmma(acc, q_sm.at[slot, part], right.transpose((1, 0)))
                return acc[...]

            qk = pl.run_scoped(products, plgpu.ACC((CHUNK, HALF), jnp.float32))
            _scores_call(scale, n)(vectors.at[slot], p_rows, qk)

        for n in range(2):
            pl.when(w == n)(functools.partial(columns, n))
        plgpu.commit_smem()
        plgpu.barrier_arrive(scored)

    def pass_on():
        w = wg - 1
        columns = pl.ds(j * VALUE_BLOCK + w * 64, 64)
        channels = [pl.ds(part * PART, PART) for part in range(parts)]

        @pl.when(w == 0)
        def _():
            lax.fori_loop(begin, jnp.minimum(2, steps), lambda c, _: load_tokens(c), None)
            pl.when(steps > 0)(lambda: load_values(begin))

        if initial:
            place = start.at[b, head]
            state = tuple(read_state(PART, dv)(place.at[at, columns]) for at in channels)
        else:
            zero = plgpu.layout_cast(jnp.zeros((64, PART), jnp.float32), _WGMMA)
            state = (zero,) * parts
        state = tuple(_halves(x) for x in state)
        plgpu.barrier_wait(begun)
        pl.when(steps > 0)(lambda: score(w, begin))

        def step(c, state):
            slot, place = c % SLOTS, c % 2
            plgpu.barrier_wait(prepared)
            pl.when(c + 1 < steps)(lambda: score(w, c + 1))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(emptied)

            @pl.when(w == 0)
            def _():
                plgpu.barrier_wait(emptied)
                pl.when(c + 1 < steps)(lambda: load_values(c + 1))
                pl.when(c + 2 < steps)(lambda: load_tokens(c + 2))

            def inside(x):
                if not ragged:
                    return x
                token = plgpu.broadcasted_iota(jnp.int32, (64, CHUNK), 1, layout=_WGMMA)
                return jnp.where(token < end - c * CHUNK, x, jnp.zeros_like(x))

            def read(*accs):
                for acc, at in zip(accs, (k_sm, q_sm), strict=True):
                    for part, (high, _) in enumerate(state):
                        plgpu.wgmma(acc, high, at.at[slot, part].transpose((1, 0)))
                return [acc[...] for acc in accs]

            square = plgpu.ACC((64, CHUNK), jnp.float32)
            seen, asked = pl.run_scoped(read, square, square)
            plgpu.barrier_wait(given.at[place])
            rest = _rest_call(ragged)(vectors.at[slot], v_rows.at[place, w], seen, limit_of(c))

            def weigh(acc):
                plgpu.wgmma(acc, rest, m_sm.at[place])

            asked = asked * by_token(vectors, slot, inverse.SCALED // 256)
            o = pl.run_state(weigh)(plgpu.ACC.init(asked))
            _write_transposed(v_rows.at[place, w], inside(o))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_rows.at[place, w], out.at[b, tokens_of(c), head, columns])

            def update(accs):
                for part, acc in enumerate(accs):
                    plgpu.wgmma(acc, rest, kt_sm.at[place, part])

            whole = vectors[slot, inverse.FROM_START // 256, CHUNK - 1]
            starts = [_whole(*x) * whole for x in state]
            state = pl.run_state(update)([plgpu.ACC.init(x) for x in starts])
            return tuple(_halves(x) for x in state)

        state = lax.fori_loop(0, steps, step, state)
        for part, at in enumerate(channels):
            write_state(dv)(final.at[b, head, at, columns], _whole(*state[part]))
        plgpu.wait_smem_to_gmem(0)
        if ragged:
            # Rows that end early: the outputs of the chunks beyond are zeros.
            v_sm[0, w] = plgpu.layout_cast(jnp.zeros((CHUNK, 64), jnp.bfloat16), _WGMMA)
            plgpu.commit_smem()

            def clear(c, _):
                plgpu.copy_smem_to_gmem(v_rows.at[0, w], out.at[b, tokens_of(c), head, columns])

            lax.fori_loop(steps, n_chunks, clear, None)
            plgpu.wait_smem_to_gmem(0)

    pl.when(wg == 0)(prepare)
    pl.when(wg > 0)(pass_on)


def fused(q, k, v, log_decay, beta, *, scale: float, start=None, lengths=None):
    """(o [B, T, H, Dv], state [B, H, Dk, Dv]); Dv a multiple of 128, start [B, H, Dk, Dv] or None
    (zeros), lengths int32[B] or None."""
    b, t, h, dv = v.shape
    hk, dk = q.shape[2:]
    nc, parts = -(-t // CHUNK), dk // PART
    body = functools.partial(
        _body, length=t, scale=scale, group=h // hk, parts=parts, n_chunks=nc,
        ragged=lengths is not None, initial=start is not None, dv=dv,
    )  # fmt: skip
    return launch(
        body,
        (q, k, log_decay, beta, v, lengths, start),
        (
            jax.ShapeDtypeStruct((b, t, h, dv), v.dtype),
            jax.ShapeDtypeStruct((b, h, dk, dv), jnp.float32),
        ),
        name="gated_delta_fused",
        grid={"values": dv // VALUE_BLOCK, "head": h, "row": b},
        warpgroups=3,
        scratch=[
            tokens(SLOTS, parts, CHUNK, PART),
            tokens(SLOTS, parts, CHUNK, PART),
            tokens(2, 2, CHUNK, 64),
            tiles(2, parts, CHUNK, PART),
            tiles(2, CHUNK, CHUNK),
            plgpu.SMEM((2, CHUNK, PART), jnp.bfloat16, transforms=ROWS),
            tokens(2, CHUNK, PART),
            plgpu.SMEM((SLOTS, 5, CHUNK), jnp.float32),
            inverse.WORDS,
            plgpu.Barrier(num_arrivals=2 * parts, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
