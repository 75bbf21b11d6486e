"""Every kernel at real shapes through the GPU's own assembler, which needs no GPU: its registers,
what it spills, and no product that waits for the one before.

The wheels are those of the extra ``assemble`` (Linux, Python >= 3.12).  jax 0.11.2 assembles by
ptxas, 0.12 by nvJitLink, which ignores ``setmaxnreg``: a kernel may be quick with one and slow with
the other.
"""

from __future__ import annotations

import importlib.metadata
import random
import re

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import assembling

pytestmark = pytest.mark.newer
FIND = importlib.metadata.Distribution.discover  # which reads no other package
HERE = {name for name in assembling.WHEELS if any(FIND(name=name))}
if MISSING := [name for name in assembling.WHEELS if name not in HERE]:
    pytest.skip(
        f"the assembler is not here: pip install 'jaxllama[assemble]' brings {', '.join(MISSING)}",
        allow_module_level=True,
    )

from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jaxllama import compiler_options  # noqa: E402
from pallas_kernels import dispatch  # noqa: E402
from pallas_kernels import fixed_sums as sums  # noqa: E402
from pallas_kernels.cards.architecture import BY_NAME  # noqa: E402
from pallas_kernels.fixed_sums import fixed_sums  # noqa: E402
from pallas_kernels.matmul.op import quantized_matmul  # noqa: E402
from tests.helpers.kernel_cases import CASES, S  # noqa: E402
from tests.helpers.matmul_cases import newest  # noqa: E402
from tests.kernels.test_plan_records import drawn_call  # noqa: E402

# Their kernels are among those of another case: a backward pass with its forward one, another dtype
# or length.
IMPLIED = {
    "GLA in segments",
    "GLA-1.3B",
    "GLA-1.3B, pairs of blocks",
    "SSD in segments",
    "delta in segments",
    "KDA",
    "past, heads of 64",
    "past, float16",
}
# Branches of kernels that another case has: other words of a weight, and other widths.
BESIDE = {
    "product 1 zeros",
    "product 1 bfloat16",
    "product 1 int4 swiglu",
    "experts bfloat16",
    "experts zeros swiglu",
    "experts zeros short row",
    "experts 64 zeros",
    "experts 64 zeros-64",
    "experts sum zeros",
    "experts 8192 fp8-block",
    "product 1 nvfp4",
    "product 1 fp8-block",
    "product 8 mxfp4",
    "product 16 fp8-block",
    "product 16 nvfp4",
    "product 64 nvfp4",
    "product 64 fp8-block",
    "product 64 mxfp4",
    "product 64 int4",
    "product 64 W4A8, two levels",
    "product 64 W4A8, wide",
    "product 2048 zeros",
    "product 2048 nvfp4",
    "product 2048 fp8-block",
    "product 2048 W4A8",
    "decode 64 bfloat16",
    "decode 64 int4",
    "GLA gradients",
    "delta gradients",
    "SSD step",
    "SSD, Dk = 256",
    "delta, Dk = 256",
    "tokens to int8",
}
# Bytes that a thread spills, at most, on either jax: what was measured so, and is no slower for it.
SPILLED = {
    "product 64 W4A8": {"quantized_matmul_w4a8": 28},
    "product 2048 FP8": {"quantized_matmul_fp8": 4},
    "product 11264 FP8, float32 result": {"quantized_matmul_fp8": 8},
    "GLA gradients": {"gla_chunk_gradients": 188},
    "GLA-1.3B": {"gla_chunk_gradients": 228},
    "GLA-1.3B gradients, pairs of blocks": {
        "gla_scan": 16,
        "gla_scan_reverse": 68,
        "gla_chunk_gradients": 228,
    },
    "SSD, Dk = 256": {"ssd_scan": 48},
    "delta gradients": {"gated_delta_gradients": 348},
    "KDA": {"gated_delta_channels": 80},
    "KDA gradients": {
        "gated_delta_channels": 80,
        "gated_delta_products": 148,
        "gated_delta_gradients": 452,
    },
}
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
        where = topologies.get_topology_desc(
            platform="cuda",
            topology="1x1x1",
            target_config=assembling.description(BY_NAME["sm_90"]),
        )
        yield SingleDeviceSharding(where.devices[0])
    jax.config.update("jax_enable_compilation_cache", kept)


_SERIALIZED = re.compile(
    r"wgmma.mma_async instructions are serialized.*?'(\w+?)_mosaic_gpu_kernel'"
)


def assembled(said: str) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """What the assembler said: (registers, bytes spilled) by kernel; whose wgmma are serialized."""
    found = {
        name: (int(used), int(spilled)) for name, spilled, used in assembling.KERNEL.findall(said)
    }
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
    [
        pytest.param(case, marks=pytest.mark.slow if case in IMPLIED | BESIDE else ())
        for case in CASES
    ],
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


@pytest.mark.slow
@pytest.mark.parametrize("part", range(30))
def test_random_calls_are_assembled(part, device, capfd):
    """Ten calls at sizes of real models, where a kernel's unrolled loops are longest."""
    draw = random.Random(part)
    capfd.readouterr()
    for _ in range(10):
        call = drawn_call(draw, 1 << 32)
        operands = jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=device), call.operands)
        jax.jit(call.kernel).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    found, serialized = assembled("".join(capfd.readouterr()))
    assert found and not serialized


@newest
def test_products_of_fixed_sums_stay_apart(device):
    """XLA makes one product of those with the same rows, or the same weight, whose sums differ."""
    x, w = (S((n, 256), jnp.bfloat16, sharding=device) for n in (32, 64))

    def products(xs, ws):
        with fixed_sums(True):
            return [quantized_matmul(x, w, implementation="xla") for x in xs for w in ws]

    def free(xs, ws):
        return [x @ w.T for x in xs for w in ws]

    def joined(f):
        lowered = jax.jit(f).trace([x, x], [w, w]).lower(lowering_platforms=("cuda",))
        return lowered.compile().as_text().count(" concatenate(")

    assert joined(free) and not joined(products)


@newest
def test_programs_of_a_deterministic_model_keep_each_cast(device, monkeypatch):
    """A product of fixed sums is rounded to bfloat16 and then read as float32.

    By default XLA drops both casts for one block of rows and keeps them for two.  So a row's bits
    would depend on the rows beside it.
    """
    monkeypatch.setattr(sums, "_is_on_cpu", lambda: False)
    monkeypatch.setattr(compiler_options, "for_device", lambda: compiler_options._WHOLE_LOOP)

    def product(x, w):
        return jnp.einsum("...k,nk->...n", x, w, preferred_element_type=jnp.float32)

    def half(x, w):
        with fixed_sums(True):
            y = sums.by_blocks(product, x, w, axes=2)
        return y.astype(jnp.bfloat16).astype(jnp.float32) * 0.5

    def keeps(blocks, fixed):
        """Whether a cast to float32 is left, which only the rounded product has."""
        shapes = (blocks, 512, 64), (64, 64)
        arrays = [S(shape, jnp.bfloat16, sharding=device) for shape in shapes]
        program = compiler_options.compiled_for(jax.jit(half), None, fixed)
        lowered = program.trace(*arrays).lower(lowering_platforms=("cuda",))
        return re.search(r"= f32\[.* convert\(", lowered.compile().as_text()) is not None

    assert [keeps(blocks, False) for blocks in (1, 2)] == [False, True]
    assert [keeps(blocks, True) for blocks in (1, 2)] == [True, True]
