"""``jaxllama bench``: the compiled loop, its accounting, random weights made one at a time."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from benchmarks import adapters as adapters_bench
from jaxllama import generation
from jaxllama.cli.main import main
from jaxllama.config import ExpertsConfig
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed import decode as bench
from jaxllama.evaluation.speed import drafts
from jaxllama.evaluation.speed.harness import (
    bytes_per_step,
    cache_bytes_per_step,
    compile_decode,
    held_cache,
)
from jaxllama.evaluation.speed.hlo import count_loop_kernels
from jaxllama.executors import prompts, resident
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import init_cache
from jaxllama.quantization import random_params
from jaxllama.quantization.quantize import quantize_params
from pallas_kernels.qtensor import QTensor, tree_bytes
from tests.helpers.http_server import tiny_model
from tests.helpers.models import FAMILIES, LLAMA, params_of, tokens_of
from tests.helpers.packed_oracle import floats_of

HLO = """HloModule jit_loop, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p)
}

%grouped (p: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %f.1 = f32[8]{0:S(1)} fusion(%p.1), kind=kLoop, calls=%fused
  ROOT %c.1 = (f32[8]{0}, /*index=1*/s8[4]{0}) custom-call(%f.1), custom_call_target="__gemm"
}

%inner (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t.1 = (s32[], f32[8]{0}) parameter(0)
  %g.1 = f32[8]{0} get-tuple-element(%t.1), index=1
  %f.2 = f32[8]{0} fusion(%g.1), kind=kLoop, calls=%fused
  ROOT %r.1 = (s32[], f32[8]{0}) tuple(%f.2, %f.2)
}

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t.2 = (s32[], f32[8]{0}) parameter(0)
  %g.2 = f32[8]{0} get-tuple-element(%t.2), index=1
  %call = f32[8]{0} call(%g.2), to_apply=%grouped
  %w.1 = (s32[], f32[8]{0}) while(%t.2), condition=%cond, body=%inner
  %copy.1 = f32[8]{0} copy(%g.2)
  ROOT %r.2 = (s32[], f32[8]{0}) tuple(%copy.1, %copy.1)
}

%cond (t: (s32[], f32[8])) -> pred[] {
  %t.3 = (s32[], f32[8]{0}) parameter(0)
  ROOT %lt = pred[] compare(%t.3, %t.3), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %f.0 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %w = (s32[], f32[8]{0}) while(%f.0), condition=%cond, body=%body
}
"""


def test_kernels_of_a_step_are_those_of_the_loops_body():
    """A grouped fusion and call (2), the inner loop's fusion (1), the copy (1); not the entry's."""
    assert count_loop_kernels(HLO) == 4
    assert count_loop_kernels(HLO.replace("while(%f.0)", "fusion(%f.0)")) == 0


def state_of(cfg, batch: int = 2, room: int = 6):
    sampling = SamplingParams.stack([Sampling()] * batch, cfg.vocab_size)
    stops = jnp.zeros((0,), jnp.int32)
    tokens, lengths = tokens_of(cfg, batch, 5), jnp.full((batch,), 5)
    cache = init_cache(cfg, batch, 5 + room)
    asked = prompts.PromptBatch(tokens, lengths, sampling, stops)
    state = prompts.start(
        cfg, params_of(cfg), asked, cache.layers, cache.lengths, max_new_tokens=room
    )
    return state, sampling, stops


def test_compiled_loop_writes_the_tokens_that_generate_writes():
    cfg, params = LLAMA, params_of(LLAMA)
    state, sampling, stops = state_of(cfg)
    program = compile_decode(cfg, params, state, sampling, stops)
    got, _ = program(params, state, sampling, stops, 6)
    again, *_ = state_of(cfg)
    want, _ = resident.advance(cfg, params, again, sampling, stops, 6)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert program.kernels_per_step >= 2 * cfg.n_layers and program.compile_seconds > 0
    held = tree_bytes((params, again.layers))
    assert held <= program.nbytes < 10 * held


def test_bytes_of_a_step_are_those_it_must_move():
    """By hand: K and V of 2 heads of 8, float32 (int8 and a float32 scale a head), a window of 7;
    GLA's 2 x [8, 16] read and written."""
    plain = init_cache(LLAMA, 3, 40)
    assert cache_bytes_per_step(LLAMA, plain, 20) == 2 * 2 * 3 * 20 * 2 * 8 * 4
    words = init_cache(LLAMA, 3, 40, "int8")
    assert cache_bytes_per_step(LLAMA, words, 20) == 2 * 2 * 3 * 20 * 2 * (8 + 4)
    window = LLAMA.replace(sliding_window=7, window_layers=(1,))
    assert cache_bytes_per_step(window, plain, 20) == 2 * 3 * (20 + 7) * 2 * 8 * 4
    hybrid = FAMILIES["hybrid"]
    states = 2 * 3 * 2 * 8 * 16 * 4
    assert cache_bytes_per_step(hybrid, init_cache(hybrid, 3, 40), 20) == states + 2 * 3 * 20 * 64


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "float8_e4m3fn"])
def test_held_cache_is_a_cache_with_noise(dtype):
    cfg = FAMILIES["hybrid"]
    got, want = held_cache(cfg, 2, 64, dtype, 20), init_cache(cfg, 2, 64, dtype)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), got) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), want
    )
    assert got.lengths.tolist() == [20, 20]
    for leaf in jax.tree.leaves(got.layers):
        values = np.asarray(leaf.astype(jnp.float32))
        assert np.isfinite(values).all() and np.count_nonzero(values) > 0.5 * values.size


# Random weights


@pytest.mark.core
@pytest.mark.parametrize("name", ["mha-tied-bias", "gla-conv-groups"])
def test_random_params_are_init_params_in_kind(name):
    cfg = FAMILIES[name]
    got = random_params.random_params(cfg, jax.random.key(0), jnp.bfloat16)
    init = functools.partial(generation.init_params, cfg, dtype=jnp.bfloat16)
    want = jax.eval_shape(init, jax.random.key(0))
    for tree in (got, random_params.param_shapes(cfg, jnp.bfloat16)):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), want
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        *_, parent, last = (entry.key for entry in path)
        values = np.asarray(leaf, np.float32)
        if last == "bias" or parent.endswith("norm"):
            assert np.all(values == (0 if last == "bias" else 1))
        else:  # four standard errors of a normal's mean and deviation
            std = values.shape[1] ** -0.5 if parent.endswith("conv") else 0.02
            error = 4 * std * values.size**-0.5
            assert abs(values.mean()) < error and abs(values.std() - std) < error


@pytest.mark.parametrize(
    "scheme", ["w4a16-g32-zero,embed=w8a16", pytest.param("fp8", marks=pytest.mark.slow)]
)
def test_random_words_are_those_of_quantized_floats_in_kind(scheme):
    """The tree is ``quantize_params``'s, the deviations are the floats', and nothing larger than a
    weight's words is drawn for them: the shapes alone are quantized."""
    cfg = LLAMA.replace(d_model=64, d_ff=96, head_dim=16)
    got = random_params.random_params(cfg, jax.random.key(3), jnp.bfloat16, scheme)
    floats = random_params.param_shapes(cfg, jnp.bfloat16)
    want = jax.eval_shape(functools.partial(quantize_params, scheme=scheme), floats)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    for leaf in jax.tree.leaves(got, is_leaf=lambda leaf: isinstance(leaf, QTensor)):
        if isinstance(leaf, QTensor):  # four standard errors of a mean and a deviation, half a step
            values = floats_of(leaf)
            error = 4 * 0.02 * values.size**-0.5
            assert abs(values.std() - 0.02) < error + 1e-4
            assert abs(values.mean()) < error + np.asarray(leaf.scale, np.float32).max() / 2


# The command


@pytest.fixture(scope="module")
def preset(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("presets") / "tiny.toml"
    tables = {"": LLAMA.replace(vocab_size=256, eos_token_ids=(0,)).to_dict()}
    tables |= {name: tables[""].pop(name) for name in ("rope", "stored")}
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{k} = {json.dumps(value)}" for k, value in table.items() if value is not None]
    path.write_text("\n".join(lines))
    return str(path)


def test_a_step_of_a_mixture_reads_the_chosen_experts():
    cfg = LLAMA.replace(experts=ExpertsConfig(n_experts=8, n_active=2, d_ff=16))
    lm = LanguageModel(cfg, params_of(cfg), None)
    # SwiGLU has three products of each expert, in float32.
    held = cfg.n_layers * 8 * 3 * cfg.d_model * 16 * 4
    all_read = bytes_per_step(lm, 10_000)
    assert all_read - bytes_per_step(lm) == held * 6 // 8
    assert all_read - bytes_per_step(lm, 2) == held * 36 // 64


def test_bench_of_random_quantized_weights_with_a_trace(preset, tmp_path, capsys):
    """The float parameters never exist: the scheme reaches ``random_params``.  stderr has each
    figure as it is known, stdout the report alone."""
    words = [
        "bench",
        "--random",
        "--preset",
        preset,
        "--quantize",
        "w8a16",
        "--context",
        "300",
        "--runs",
        "1",
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "4",
        "--json",
        "--trace",
        str(tmp_path / "trace"),
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in err.splitlines()] == [
        "weights",
        "first",
        "decode",
        "prefill",
    ]
    got = json.loads(out)
    lm = jl.load(preset, quantize="w8a16", random=True)
    cfg = lm.config
    assert got["context"] == 300 and got["kv_dtype"] == "float32"
    assert got["weight_bytes_per_step"] == bytes_per_step(lm)
    row = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * 4
    assert got["bytes_per_step"] - got["weight_bytes_per_step"] == 302 * row
    assert got["kernels_per_step"] > 10 and got["compile_seconds"] > 0
    assert got["gigabytes_per_second"] == pytest.approx(
        got["bytes_per_step"] * got["decode_tokens_per_second"] / 1e9
    )
    assert got["share_of_ceiling"] == pytest.approx(
        got["gigabytes_per_second"] / got["ceiling_gigabytes_per_second"]
    )
    text = bench.table(got)
    assert f"{got['kernels_per_step']} kernels a step" in text and "rows of 300 tokens" in text
    assert "tokens/s" in text and 5e7 < got["peak_rss_bytes"] < 1e12
    assert got["prefill_tokens_per_second"] == pytest.approx(8 / got["prefill_seconds"])
    assert [file for file in (tmp_path / "trace").rglob("*") if file.suffix in (".gz", ".pb")]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--context", "4"], "context = 4"),
        (["--context", "5000"], "needs 5064 positions"),
    ],
)
def test_bench_refuses(preset, capsys, words, named):
    assert main(["bench", "--random", "--preset", preset, "--prompt-tokens", "8", *words]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_are_measured_beside_the_base_model():
    cfg = LLAMA.replace(n_layers=1, layer_types=())
    report = adapters_bench.run(
        LanguageModel(cfg, params_of(cfg), None),
        adapters=2,
        rank=3,
        batch=2,
        prompt_tokens=8,
        new_tokens=4,
        runs=1,
    )
    assert report["ratio"] == report["step_seconds"] / report["base_step_seconds"] > 0
    # qkv with three ranks side by side, o, gate and up with two, down
    values = 9 * (32 + 64) + 3 * (32 + 32) + 6 * (32 + 96) + 3 * (48 + 32)
    assert report["adapter_bytes"] == 2 * 4 * values


def test_a_draft_is_measured(monkeypatch, tmp_path):
    """The report counts the tokens after the first, which a draft does not change."""
    prompt, lm = "aba aba aba", tiny_model()
    (tmp_path / "texts").mkdir()
    line = json.dumps({"kind": "edit", "prompt": prompt})
    (tmp_path / "texts" / "drafts.jsonl").write_text(line + "\n")
    monkeypatch.setattr(drafts, "configs_dir", lambda: tmp_path)
    with pytest.raises(JaxLlamaError, match="prompt 0: .* exceed the context of"):
        drafts.run(lm, "ngram", 2, new_tokens=lm.config.max_position)
    found = drafts.run(lm, "ngram", 2, new_tokens=8)["kinds"]["edit"]
    [plain] = lm.generate([prompt], max_new_tokens=8)
    assert found["tokens"] == len(plain.tokens) - 1
    assert found["speedup"] == found["tokens_per_second"] / found["plain_tokens_per_second"]
