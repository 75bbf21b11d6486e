"""Device times of decode attention, of RoPE with the cache write, and of both as a decode step has
them, beside XLA's and cuDNN's.

    python -m pallas_kernels.bench.attention [rows x capacity ...]

32 query and 8 kv heads of 128, every row full, all cache dtypes.  Microseconds of all kernels of
one call (CUPTI, median of ten), bytes of codes and scales read per second, and their share of the
4.2 TB/s at which a sum over memory runs.  Needs a Hopper GPU; the tables in attention/NOTES.md come
from here.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import quantize_kv, rope_and_write
from pallas_kernels.bench.timing import device_us
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import hopper_reason

N, K, H = 32, 8, 128
SHAPES = ((64, 8192), (1, 131072), (256, 1024), (1, 1152), (1, 8192), (64, 1152), (8, 4096))
CACHES = ("bfloat16", "int8", "int4", "float8_e4m3fn")


def cudnn(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q[:, None], k, v, query_seq_lengths=jnp.ones_like(lengths), key_value_seq_lengths=lengths,
        implementation="cudnn",
    )  # fmt: skip


def main() -> None:
    if reason := hopper_reason():
        raise SystemExit(f"bench_attention: {reason}")
    shapes = [tuple(int(x) for x in arg.split("x")) for arg in sys.argv[1:]]
    for batch, capacity in shapes or SHAPES:
        for cache in CACHES:
            run(batch, capacity, cache)


def run(batch: int, capacity: int, cache: str) -> None:
    @jax.jit
    def make(key):
        x = jax.random.normal(key, (batch, capacity, K, H), jnp.bfloat16)
        return x if cache == "bfloat16" else quantize_kv(x, cache)

    k, v = make(jax.random.key(0)), make(jax.random.key(1))
    qkv = jax.random.normal(jax.random.key(2), (batch, N + 2 * K, H)).astype(jnp.bfloat16)
    q, lengths = qkv[:, :N], jnp.full((batch,), capacity, jnp.int32)
    forms = {
        name: jax.jit(lambda *args, name=name: decode_attention(*args, implementation=name))
        for name in ("mosaic", "xla")
    }
    if cache == "bfloat16":
        forms["cudnn"] = jax.jit(cudnn)
    size = k.nbytes + v.nbytes
    for name, form in forms.items():
        us = device_us(form, [(q, k, v, lengths)])
        rate = size / us * 1e6
        print(
            f"decode_attention {batch:4d} x {capacity:6d} {cache:13s} {name:6s} {us:8.1f} us "
            f"{rate / 1e12:5.2f} TB/s {rate / gpu().sum_rate:5.0%}", flush=True,
        )  # fmt: skip
    table = jnp.ones((batch, H // 2), jnp.float32)
    for name in ("mosaic", "xla"):
        # The cache is the carry of a loop, so that it is updated in place as in decoding.
        def loop(qkv, k, v, name=name):
            def turn(i, kv):
                slots = jnp.full((batch,), i, jnp.int32)
                return rope_and_write(qkv, table, table, *kv, slots, implementation=name)[1:]

            return jax.lax.fori_loop(0, 32, turn, (k, v))

        us = device_us(loop, [(qkv, k, v)]) / 32
        print(f"rope_and_write   {batch:4d} x {capacity:6d} {cache:13s} {name:6s} {us:8.1f} us")
    for name, form in (("chosen", None), ("xla", "xla")):
        # Its last tokens, so that nearly all of the cache is seen.
        def step(qkv, k, v, form=form):
            def turn(i, state):
                slots = jnp.full((batch,), capacity - 1 - i, jnp.int32)
                return rope_and_attend(qkv, table, table, *state[1:], slots, implementation=form)

            return jax.lax.fori_loop(0, 32, turn, (qkv[:, :N], k, v))

        us = device_us(step, [(qkv, k, v)]) / 32
        print(f"rope_and_attend  {batch:4d} x {capacity:6d} {cache:13s} {name:6s} {us:8.1f} us")


if __name__ == "__main__":
    main()
