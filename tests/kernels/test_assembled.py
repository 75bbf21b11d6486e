"""Every kernel at real shapes through the GPU's own assembler, which needs no GPU: its registers,
what it spills, and no product that waits for the one before.

The wheels are those of the extra ``assemble`` (Linux, Python >= 3.12).  jax 0.11.2 assembles by
ptxas, 0.12 by nvJitLink, which ignores ``setmaxnreg``: a kernel may be quick with one and slow with
the other.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re

import jax
import jax.numpy as jnp
import pytest

WHEELS = (
    "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-nvjitlink",
    "nvidia-cuda-runtime",
)  # fmt: skip
HERE = {found.metadata["Name"] for found in importlib.metadata.distributions()}
if MISSING := [name for name in WHEELS if name not in HERE]:
    pytest.skip(
        f"the assembler is not here: pip install 'jaxllama[assemble]' brings {', '.join(MISSING)}",
        allow_module_level=True,
    )

from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from pallas_kernels import dispatch, quantize  # noqa: E402
from pallas_kernels.attention.op import decode_attention  # noqa: E402
from pallas_kernels.attention.past import attend as attend_past  # noqa: E402
from pallas_kernels.attention.rope_attention import rope_and_attend  # noqa: E402
from pallas_kernels.attention.rope_cache import quantize_kv, rope_and_write  # noqa: E402
from pallas_kernels.attention.rope_tokens import rope_and_write_tokens  # noqa: E402
from pallas_kernels.experts.op import grouped_matmul  # noqa: E402
from pallas_kernels.gated_delta import kernel as delta  # noqa: E402
from pallas_kernels.gated_delta import step_kernel as delta_step  # noqa: E402
from pallas_kernels.gla import kernel as gla  # noqa: E402
from pallas_kernels.matmul.op import quantized_matmul  # noqa: E402
from pallas_kernels.rows.quantize_tokens import quantize_tokens  # noqa: E402
from pallas_kernels.rows.rms_norm import rms_norm  # noqa: E402
from pallas_kernels.rows.swiglu import swiglu  # noqa: E402

# What XLA and Mosaic ask of the device that they compile for.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 dnn_version: "9.8.0"
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""
BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
S = jax.ShapeDtypeStruct
HEADS = 32, 8, 128  # Llama-3.1-8B's: query heads, kv heads, features


def weight(scheme: str, n: int, k: int):
    floats = S((n, k), BF16)
    if scheme == "bfloat16":
        return floats
    how = {"int4": (128, True), "zeros": (128, False)}.get(scheme, (k, True))
    words = scheme.replace("zeros", "int4")
    return jax.eval_shape(lambda w: quantize(w, words, group_size=how[0], symmetric=how[1]), floats)


def product(rows: int, scheme: str, words: str | None = None, shape=(14336, 4096), **named):
    """A product of ``rows`` tokens; words: the tokens' own codes."""
    x = S((rows, shape[1]), BF16)
    if words is not None:
        x = jax.eval_shape(functools.partial(quantize_tokens, dtype=words), x)
    return functools.partial(quantized_matmul, implementation="mosaic", **named), (
        x, weight(scheme, *shape),
    )  # fmt: skip


def grouped(scheme: str, n: int, k: int, gated: str | None = None):
    """One token through 8 of 128 experts."""
    one = weight(scheme, n, k)
    w = jax.tree.map(lambda v: S((128, *v.shape), v.dtype), one)
    given = S((1, k), BF16), w, S((1, 8), I32)
    return functools.partial(grouped_matmul, gated=gated, implementation="mosaic"), given


def cache_of(kind: str, batch: int, capacity: int, heads=HEADS):
    floats = S((batch, capacity, *heads[1:]), BF16)
    return floats if kind == "bfloat16" else jax.eval_shape(
        functools.partial(quantize_kv, dtype=kind), floats
    )  # fmt: skip


def decode(kind: str, batch: int, capacity: int, tokens: int | None = None, heads=HEADS):
    shape = (batch,) if tokens is None else (batch, tokens)
    kv = cache_of(kind, batch, capacity, heads)
    given = S((*shape, heads[0], heads[2]), BF16), kv, kv, S(shape, I32)
    return functools.partial(decode_attention, implementation="mosaic"), given


def rope(op, kind: str, batch: int, capacity: int, tokens: int | None = None, heads=HEADS):
    n, n_kv, h = heads
    shape = (batch,) if tokens is None else (batch, tokens)
    half, kv = S((*shape, h // 2), F32), cache_of(kind, batch, capacity, heads)
    given = S((*shape, n + 2 * n_kv, h), BF16), half, half, kv, kv, S(shape, I32)
    return functools.partial(op, implementation="mosaic"), given


def past(width: int, capacity: int, heads=HEADS, dtype=BF16):
    n, n_kv, h = heads
    kv = cache_of("int8", 1, capacity, heads)
    given = S((1, width, n, h), dtype), kv, S((1, capacity, n_kv, h), dtype), S((1,), I32)
    return attend_past, given


def gla_chunks(b: int, t: int, h: int, dk: int, dv: int, save="nothing"):
    q, v = S((b, t, h, dk), BF16), S((b, t, h, dv), BF16)
    forward = functools.partial(gla.gla_forward, scale=0.1, save=save)
    if save == "nothing":
        return forward, (q, q, v, S(q.shape, F32))

    def both(q, k, v, g, d_out):
        o, state, saved = forward(q, k, v, g)
        return o, gla.gla_backward(q, k, v, g, d_out, state, scale=0.1, saved=saved)

    return both, (q, q, v, S(q.shape, F32), v)


def delta_chunks(b, t, hk, h, dk, dv, by_channel=False, backward=False):
    q, v, beta = S((b, t, hk, dk), BF16), S((b, t, h, dv), BF16), S((b, t, h), F32)
    g = S((b, t, h, dk), F32) if by_channel else beta
    if not backward:
        return functools.partial(delta.gated_delta_forward, scale=0.1), (q, q, v, g, beta)
    f = functools.partial(delta.gated_delta_backward, scale=0.1)
    return lambda *x: f(*x[:6], None), (q, q, v, g, beta, v)


def step(f, b: int, hk: int, h: int, dk: int, dv: int, gates: int):
    q, v, g, state = (S((b, *x), y) for x, y in (
        ((hk, dk), BF16), ((h, dv), BF16), ((h, dk)[:gates], F32), ((h, dk, dv), F32)))  # fmt: skip
    return f, (q, q, v, g, state)


def delta_token(q, k, v, g, state):
    plan = delta_step.plan(q, k, v)
    return delta_step.gated_delta_step(q, k, v, g, g, state, scale=0.1, plan=plan)


def rows(op, count: int, width: int, **named):
    return functools.partial(op, implementation="mosaic", **named), (S((count, width), BF16),)


def normed(x, words=None):
    weight = jnp.ones((x.shape[-1],), x.dtype)
    return rms_norm(x, weight, 1e-5, residual=x, quantize=words, implementation="mosaic")


CASES = {
    "product 1 int4": lambda: product(1, "int4"),
    "product 1 zeros": lambda: product(1, "zeros"),
    "product 1 int8": lambda: product(1, "int8"),
    "product 1 bfloat16": lambda: product(1, "bfloat16"),
    "product 1 int4 swiglu": lambda: product(1, "int4", shape=(28672, 4096), swiglu=True),
    "experts bfloat16": lambda: grouped("bfloat16", 2048, 768),
    "experts bfloat16 swiglu": lambda: grouped("bfloat16", 1536, 2048, "silu"),
    "experts zeros swiglu": lambda: grouped("zeros", 1536, 2048, "silu"),
    "experts int8": lambda: grouped("int8", 2048, 1024),
    "product 8 int4": lambda: product(8, "int4"),
    "product 16 int8": lambda: product(16, "int8"),
    "product 64 int4": lambda: product(64, "int4"),
    "product 64 W8A8": lambda: product(64, "int8", "int8"),
    "product 64 W4A8": lambda: product(64, "int4", "int8"),
    "product 2048 int4": lambda: product(2048, "int4"),
    "product 2048 zeros": lambda: product(2048, "zeros"),
    "product 2048 int8": lambda: product(2048, "int8"),
    "product 2048 W8A8": lambda: product(2048, "int8", "int8"),
    "product 2048 FP8": lambda: product(2048, "float8_e4m3fn", "float8_e4m3fn"),
    "product 2048 W4A8": lambda: product(2048, "int4", "int8"),
    "product 2048 W4A8 zeros": lambda: product(2048, "zeros", "int8"),
    "decode 64 bfloat16": lambda: decode("bfloat16", 64, 8192),
    "decode 64 int8": lambda: decode("int8", 64, 1152),
    "decode 64 int4": lambda: decode("int4", 64, 8192),
    "decode 1 of 5 tokens": lambda: decode("bfloat16", 1, 1536, 5),
    "direct": lambda: rope(rope_and_attend, "bfloat16", 1, 1152),
    "rope and cache int8": lambda: rope(rope_and_write, "int8", 64, 1152),
    "rope of many tokens": lambda: rope(rope_and_write_tokens, "int8", 8, 4096, 2048),
    "past": lambda: past(32768, 32768),
    "past, heads of 64": lambda: past(32768, 32768, (32, 8, 64)),
    "past, float16": lambda: past(32768, 131072, dtype=jnp.float16),
    "GLA": lambda: gla_chunks(8, 4096, 16, 128, 128),
    "GLA gradients": lambda: gla_chunks(8, 4096, 16, 128, 128, "all"),
    "GLA in segments": lambda: gla_chunks(1, 16384, 16, 128, 128),
    "GLA-1.3B": lambda: gla_chunks(8, 2048, 4, 256, 512, "all"),
    "GLA-1.3B, pairs of blocks": lambda: gla_chunks(32, 2048, 4, 256, 512),
    "GLA-1.3B gradients, pairs of blocks": lambda: gla_chunks(32, 2048, 4, 256, 512, "all"),
    "GLA step": lambda: step(lambda *x: gla.gla_step(*x, 0.1), 64, 4, 4, 256, 512, 2),
    "delta": lambda: delta_chunks(8, 4096, 16, 16, 128, 128),
    "delta gradients": lambda: delta_chunks(8, 4096, 16, 16, 128, 128, backward=True),
    "delta in segments": lambda: delta_chunks(1, 16384, 16, 16, 128, 128),
    "delta, Dk = 256": lambda: delta_chunks(8, 4096, 6, 6, 256, 512),
    "KDA": lambda: delta_chunks(1, 8192, 64, 64, 128, 128, True),
    "KDA gradients": lambda: delta_chunks(1, 8192, 64, 64, 128, 128, True, True),
    "delta step": lambda: step(delta_token, 64, 16, 32, 128, 128, 1),
    "norm": lambda: (normed, (S((64, 4096), BF16),)),
    "norm to int8": lambda: (functools.partial(normed, words="int8"), (S((8192, 4096), BF16),)),
    "gate to int8": lambda: rows(swiglu, 64, 28672, quantize="int8"),
    "tokens to int8": lambda: rows(quantize_tokens, 64, 4096, dtype="int8"),
}
# Their kernels are among those of another case: a backward pass with its forward one, another dtype
# or length.
IMPLIED = {
    "GLA in segments", "GLA-1.3B", "GLA-1.3B, pairs of blocks", "delta in segments", "KDA",
    "past, heads of 64", "past, float16",
}  # fmt: skip
# Bytes that a thread spills, at most, on either jax: what was measured so, and is no slower for it.
SPILLED = {
    "product 64 W4A8": {"quantized_matmul_w4a8": 28},
    "product 2048 FP8": {"quantized_matmul_fp8": 4},
    "GLA gradients": {"gla_chunk_gradients": 188},
    "GLA-1.3B": {"gla_chunk_gradients": 228},
    "GLA-1.3B gradients, pairs of blocks": {
        "gla_scan": 16, "gla_scan_reverse": 68, "gla_chunk_gradients": 228,
    },
    "delta gradients": {"gated_delta_gradients": 348},
    "KDA": {"gated_delta_channels": 80},
    "KDA gradients": {
        "gated_delta_channels": 80, "gated_delta_products": 148, "gated_delta_gradients": 452,
    },
}  # fmt: skip
# Kernels whose wgmma wait for one another on jax 0.12, which was not timed for this one.
SERIALIZED = {"KDA gradients": {"gated_delta_products"}}


@pytest.fixture(scope="module")
def device():
    # An executable that was kept would not be assembled.
    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        patch.setattr(dispatch, "hopper_reason", lambda *_: None)
        where = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200)
        yield SingleDeviceSharding(where.devices[0])
    jax.config.update("jax_enable_compilation_cache", kept)


_KERNEL = re.compile(
    r"entry function '(\w+?)_mosaic_gpu_kernel'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
    re.DOTALL,
)
_SERIALIZED = re.compile(
    r"wgmma.mma_async instructions are serialized.*?'(\w+?)_mosaic_gpu_kernel'"
)


def assembled(said: str) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """What the assembler said: (registers, bytes spilled) by kernel; whose wgmma are serialized."""
    found = {name: (int(used), int(spilled)) for name, spilled, used in _KERNEL.findall(said)}
    return found, set(_SERIALIZED.findall(said))


def test_what_the_assembler_says_is_read():
    said = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility.
ptxas info    : (C7509) Potential Performance Loss: wgmma.mma_async instructions are \
serialized due to the presence of Extern calls in the function \
'attend_past_int8_mosaic_gpu_kernel' in line 3835
ptxas info    : Compiling entry function 'attend_past_int8_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for attend_past_int8_mosaic_gpu_kernel
ptxas         .     256 bytes stack frame, 256 bytes spill stores, 240 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 17 bytes smem
"""
    assert assembled(said) == ({"attend_past_int8": (168, 256)}, {"attend_past_int8"})


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in IMPLIED else ()) for case in CASES],
)
def test_a_kernel_fits_its_registers(case, device, capfd):
    f, operands = CASES[case]()
    operands = jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=device), operands)
    capfd.readouterr()
    jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    found, serialized = assembled("".join(capfd.readouterr()))
    assert found, "nothing was assembled"
    allowed = SPILLED.get(case, {})
    over = {name: x for name, x in found.items() if x[1] > allowed.get(name, 0)}
    assert not over, f"{case}: (registers, bytes spilled) of {over}; known: {allowed}"
    assert serialized <= SERIALIZED.get(case, set())
