"""Device times of decode attention, of RoPE with the cache write, and of both as a decode step has
them, beside XLA's and cuDNN's.

    python -m benchmarks.kernels.attention [rows x capacity ...] [--page 64 --page 256]

32 query and 8 kv heads of 128, every row full, all cache dtypes.  Microseconds of all kernels of
one call (CUPTI, median of ten), bytes of codes and scales read per second, and their share of the
4.2 TB/s at which a sum over memory runs.  page: the same with the cache in pages of so many tokens,
in random order, and the time's ratio to that of rows.  Needs a Hopper GPU; the tables in
docs/lab/attention.md come from here.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import device_us
from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import quantize_kv, rope_and_write
from pallas_kernels.device import gpu
from pallas_kernels.dispatch import hopper_reason

N, K, H = 32, 8, 128
SHAPES = ("64x8192", "1x131072", "256x1024", "1x1152", "1x8192", "64x1152", "8x4096")
CACHES = ("bfloat16", "int8", "int4", "float8_e4m3fn")


def cudnn(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q[:, None],
        k,
        v,
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="rows x capacity, as 64x8192")
    parser.add_argument(
        "--page", type=int, action="append", default=[], help="tokens, 32 or a multiple"
    )
    args = parser.parse_args()
    if reason := hopper_reason():
        raise SystemExit(f"benchmarks.kernels.attention: {reason}")
    for batch, capacity in (map(int, shape.split("x")) for shape in args.shapes):
        for cache in CACHES:
            rows = run(batch, capacity, cache)
            for page in args.page:
                run(batch, capacity, cache, page, rows)


def run(
    batch: int, capacity: int, cache: str, page: int | None = None, rows: dict | None = None
) -> dict[str, float]:
    """Microseconds of our kernels by op; with a page beside those of ``rows``."""
    shape, table = (batch, capacity, K, H), None
    if page is not None:
        entries = -(-capacity // page)
        shape = batch * entries, page, K, H
        table = jax.random.permutation(jax.random.key(3), batch * entries).reshape(batch, entries)

    @jax.jit
    def make(key):
        x = jax.random.normal(key, shape, jnp.bfloat16)
        return x if cache == "bfloat16" else quantize_kv(x, cache)

    k, v = make(jax.random.key(0)), make(jax.random.key(1))
    qkv = jax.random.normal(jax.random.key(2), (batch, N + 2 * K, H)).astype(jnp.bfloat16)
    q, lengths = qkv[:, :N], jnp.full((batch,), capacity, jnp.int32)
    tables = [jnp.ones((batch, H // 2), jnp.float32)] * 2
    size = (k.nbytes + v.nbytes) * batch * capacity // (shape[0] * shape[1])
    ours: dict[str, float] = {}

    def tell(op, name, us, rest=""):
        if name in ("mosaic", "chosen"):
            ours[op] = us
            rest += f" {us / rows[op]:5.2f} of rows'" if rows else ""
        place = cache if page is None else f"{cache}/{page}"
        print(
            f"{op:16s} {batch:4d} x {capacity:6d} {place:17s} {name:6s} {us:8.1f} us{rest}",
            flush=True,
        )

    def attend(q, k, v, lengths, table, name):
        return decode_attention(q, k, v, lengths, table=table, implementation=name)

    forms = {"mosaic": attend, "xla": attend} if page is None else {"mosaic": attend}
    if cache == "bfloat16" and page is None:
        forms["cudnn"] = lambda q, k, v, lengths, *_: cudnn(q, k, v, lengths)
    for name, form in forms.items():
        form = jax.jit(form, static_argnums=5)
        us = device_us(
            lambda *args, form=form, name=name: form(*args, name), [(q, k, v, lengths, table)]
        )
        rate = size / us * 1e6
        tell("decode_attention", name, us, f" {rate / 1e12:5.2f} TB/s {rate / gpu().sum_rate:5.0%}")
    for name in ("mosaic", "xla") if page is None else ("mosaic",):
        # The cache is the carry of a loop, so that it is updated in place as in decoding.
        def loop(qkv, k, v, table, name=name):
            def turn(i, kv):
                slots = jnp.full((batch,), i, jnp.int32)
                options = {"table": table, "implementation": name}
                return rope_and_write(qkv, *tables, *kv, slots, **options)[1:]

            return jax.lax.fori_loop(0, 32, turn, (k, v))

        tell("rope_and_write", name, device_us(loop, [(qkv, k, v, table)]) / 32)
    for form in (None, "xla") if page is None else (None,):
        # Its last tokens, so that nearly all of the cache is seen.
        def step(qkv, k, v, table, form=form):
            def turn(i, state):
                slots = jnp.full((batch,), capacity - 1 - i, jnp.int32)
                options = {"table": table, "implementation": form}
                return rope_and_attend(qkv, *tables, *state[1:], slots, **options)

            return jax.lax.fori_loop(0, 32, turn, (qkv[:, :N], k, v))

        tell("rope_and_attend", form or "chosen", device_us(step, [(qkv, k, v, table)]) / 32)
    return ours


if __name__ == "__main__":
    main()
