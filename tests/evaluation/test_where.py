"""The account of a step: of a program and a trace recorded on a GPU, and of a step here."""

import gzip
import json
from pathlib import Path

import pytest

from jaxllama.cli.main import main
from jaxllama.evaluation.speed import where
from jaxllama.evaluation.speed.hlo import launches
from jaxllama.evaluation.speed.trace import TraceEvent, events_by_device
from tests.evaluation.test_bench import preset  # noqa: F401

RECORD = Path(__file__).parents[1] / "golden" / "decode_trace.json.gz"


@pytest.fixture(scope="module")
def record():
    return json.loads(gzip.decompress(RECORD.read_bytes()))


def test_a_recorded_step_of_a_gpu(record, tmp_path):
    """16 layers of five kernels, the norm and the head; CUPTI recorded one turn of the loop."""
    trace = gzip.compress(json.dumps(record).encode())
    (tmp_path / "host.trace.json.gz").write_bytes(trace)
    (events,) = events_by_device(tmp_path).values()
    events = [event for event in events if event.module == "jit_advance"]
    got = where.account(events, launches(record["hlo"], loop=True), (4e12, 8e14))
    assert got["steps"] == 1
    rows = {(row["kernel"], row["bytes"]): row for row in got["kernels"]}
    # Codes, scales and zeros of bfloat16 and int8 in groups of 128, x, what is fused, the result.
    qkv = 3072 * 2048 // 2 + 3072 * 16 * 3 + 2 * (2048 + 2048 + 3072)
    head = 128256 * 2048 + 4 * 128256
    assert rows["quantized_matmul_decode", qkv]["launches"] == 16
    assert rows["quantized_matmul_decode", qkv]["us"] == pytest.approx(75.1, abs=0.1)
    (big,) = (row for (name, size), row in rows.items() if size is not None and size > head)
    assert big["kernel"] == "quantized_matmul_row" and big["launches"] == 1
    assert big["floor_us"] == pytest.approx(big["bytes"] / 4e6)
    assert sum(row["launches"] for row in got["kernels"]) == 89
    assert got["kernels_us"] == pytest.approx(481.7, abs=0.1)
    assert 9 < got["between_us"] < 10
    (attention,) = (row for name, row in rows.items() if name[0] == "decode_attention_direct")
    assert attention["bytes"] == pytest.approx(2 * 1045 * 8 * 64 * 2, rel=0.01)  # in place: once
    report = {
        "model": "m",
        "device": "d",
        "phase": "decode",
        "batch": 1,
        "tokens": 1,
        "step_us": 522.3,
        "outside_us": 30.9,
        "call_us": 410.0,
        **got,
    }
    text = where.table(report)
    assert "quantized_matmul_row" in text and "between kernels" in text and "410.0" in text


HLO = """HloModule jit_f

%fused (p0: f32[8,64], p1: s32[]) -> f32[8,64] {
  %p0 = f32[8,64]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,64]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,64}
  ROOT %put = f32[8,64]{1,0} dynamic-update-slice(%p0, %row, %zero, %zero)
}

ENTRY %main (a: f32[8,64], i: s32[], x: s8[4,64]) -> f32[8,64] {
  %a = f32[8,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = s8[4,64]{1,0} parameter(2)
  %w = s8[16,64]{1,0} constant({...})
  %y = s32[4,16]{1,0} custom-call(%x, %w), custom_call_target="t", metadata={op_name="jit(f)/k/m"}
  %sum = s8[4,64]{1,0} custom-call(%x, %x), custom_call_target="t", metadata={op_name="jit(f)/n/m"}
  ROOT %loop_put = f32[8,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_parts_and_operations():
    product, sums, put = launches(HLO, loop=False)
    assert (product.kernel, product.operations, product.bits) == ("k", 2 * 4 * 16 * 64, 8)
    assert product.nbytes == 4 * 64 + 16 * 64 + 4 * 4 * 16
    assert (sums.kernel, sums.operations) == ("n", 0)  # of rows with rows: no product
    assert put == ("loop_put", "loop_put", 256 + 4 + 256, 0, 0)


def test_products_of_a_cpu_have_their_shapes():
    text = HLO.replace(
        's32[4,16]{1,0} custom-call(%x, %w), custom_call_target="t"', "s32[4,16]{1,0} dot(%x, %w)"
    )
    event = TraceEvent(0.0, 1e-6, "dot.7", "jit_f", "y")
    (row,) = where.account([event], launches(text, False), (1e9, 1e12))["kernels"]
    assert row["kernel"] == "dot [4,64] by [16,64]"


def test_handlers_of_a_cpu_have_their_names():
    target = 'custom_call_target="pallas_kernels.Matmul_4_32_avx512_e03"'
    program = launches(
        HLO.replace('custom_call_target="t"', target, 1).replace("%y", "%ffi_call.7"), False
    )
    event = TraceEvent(0.0, 1e-6, "ffi_call.7", "jit_f", "ffi_call.7")
    (row,) = where.account([event], program, (1e9, 1e12))["kernels"]
    assert (row["kernel"], row["launches"], row["bytes"]) == ("Matmul", 1, program[0].nbytes)


@pytest.mark.parametrize("phase", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_of_a_step_here(phase, preset, capsys):  # noqa: F811
    words = [
        "bench",
        "--random",
        "--preset",
        preset,
        "--where",
        phase,
        "--context",
        "40",
        "--prompt-tokens",
        "16",
        "--runs",
        "1",
        "--json",
    ]
    assert main(words) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["phase"] == phase and got["tokens"] == (1 if phase == "decode" else 16)
    assert got["outside_us"] is None and "outside" not in where.table(got)  # threads overlap
    assert got["step_us"] > 0 and (got["steps"] == 1 or phase == "decode")
    total = sum(row["us"] for row in got["kernels"])
    assert total == pytest.approx(got["kernels_us"]) and total > 0
    assert any(row["bytes"] and row["floor_us"] > 0 for row in got["kernels"])


def test_too_few_positions(preset, capsys):  # noqa: F811
    words = ["bench", "--random", "--preset", preset, "--where", "decode", "--context", "5000"]
    assert main(words) == 2
    assert "positions, and the context is" in capsys.readouterr().err
