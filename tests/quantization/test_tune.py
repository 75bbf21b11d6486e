"""End-to-end tuning: predictions come closer on text that it has not seen, codes stay, a step is
what whole-model autodiff makes of it, a killed run goes on to the same bits, and what is exported
is what was tuned."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.save import flatten
from jaxllama.cli.main import main
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.perplexity import perplexity
from jaxllama.language_model import LanguageModel
from jaxllama.quantization import tune as tuning
from jaxllama.quantization.checkpoint import QuantizeRequest, check, quantize_checkpoint, table
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.tune import steps, tune
from jaxllama.quantization.work import QuantizeWork
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.models import LLAMA, relative_error
from tests.helpers.packed_oracle import floats_of
from tests.helpers.seeded import seeded_params

TEXT = (Path(__file__).parents[1] / "golden" / "english.txt").read_text(encoding="utf-8")
CUT = len(TEXT) // 2
CFG = LLAMA.replace(
    vocab_size=256, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=64, max_position=512
)


def is_packed(leaf) -> bool:
    return isinstance(leaf, QTensor)


def plain(params):
    return jax.tree.map(
        lambda leaf: dequantize(leaf) if is_packed(leaf) else leaf, params, is_leaf=is_packed
    )


def same(one, other) -> bool:
    return all(map(np.array_equal, *map(jax.tree.leaves, (one, other))))


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(CFG, jax.device_put(seeded_params(CFG)), Tokenizer.byte_level())


@pytest.fixture(scope="module")
def rounded(lm):
    return quantize_params(lm.params, "w4a16", cfg=CFG)


@pytest.fixture(scope="module")
def tokens(lm) -> np.ndarray:
    return steps(lm.tokenizer, TEXT[:CUT], 64, 24)


def kl(lm, params) -> float:
    one = dataclasses.replace(lm, params=params)
    return perplexity(one, TEXT[CUT:], 64, reference=lm)["kl"]


def test_predictions_come_closer_on_unseen_text(lm, tokens, rounded):
    tuned, losses = tune(CFG, lm.params, rounded, tokens)
    assert len(losses) == 24 and np.mean(losses[-6:]) < 0.75 * np.mean(losses[:6])
    assert kl(lm, tuned) < 0.8 * kl(lm, rounded)
    before, after = (tree["layer_0"]["mlp"]["down"]["weight"] for tree in (rounded, tuned))
    assert same((before.q, before.zero), (after.q, after.zero))
    assert after.scale.dtype == before.scale.dtype and not same(before.scale, after.scale)
    assert same(rounded["head"], tuned["head"]) and not same(rounded["norm"], tuned["norm"])


@pytest.mark.slow
def test_scales_in_two_levels_stay_int8(lm, tokens):
    rounded = quantize_params(lm.params, "w4a8", cfg=CFG)
    tuned, losses = tune(CFG, lm.params, rounded, tokens)
    before, after = (tree["layer_1"]["mixer"]["qkv"]["weight"] for tree in (rounded, tuned))
    assert same((before.q, before.scale), (after.q, after.scale)) and after.activations == "int8"
    assert not same(before.unit, after.unit)
    assert np.mean(losses[-6:]) < 0.75 * np.mean(losses[:6])


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_to_the_same_bits(lm, rounded, tokens, tmp_path):
    want, want_losses = tune(CFG, lm.params, rounded, tokens[:20])
    work, seen = QuantizeWork(tmp_path / "work"), []

    def die(_: int) -> None:
        seen.append(1)
        if len(seen) == 19:
            raise Killed

    with pytest.raises(Killed):
        tune(CFG, lm.params, rounded, tokens[:20], work=work, progress=die)
    told = []
    got, losses = tune(CFG, lm.params, rounded, tokens[:20], work=work, progress=told.append)
    assert told == [16, 1, 1, 1, 1] and losses == want_losses and same(got, want)


@pytest.fixture(scope="module")
def exported(lm, tmp_path_factory):
    """exported(format) -> the parameters that a tuned export in a format is read as.

    "wide" is the native format with scales that float16 need not hold.
    """
    folder = tmp_path_factory.mktemp("exported")
    how = {"method": "rtn", "text": TEXT, "samples": 4, "window": 64, "tune": 8}

    @functools.cache
    def make(format):
        with pytest.MonkeyPatch.context() as patch:
            if format == "wide":
                patch.setattr(QuantizeRequest, "rounds_scales", lambda *_: False)
            kind = "native" if format == "wide" else format
            request = QuantizeRequest(folder / format, "w4a16,head=none", format=kind, **how)
            quantize_checkpoint(lm, request)
        return jl.load(folder / format, exact=True).params

    return make


@pytest.mark.slow
@pytest.mark.parametrize("format", ["awq", "gptq", "compressed-tensors"])
def test_what_is_exported_is_what_was_tuned(exported, format):
    # The other formats hold float16's scales, and codes are computed against them.
    alike = "wide" if format == "compressed-tensors" else "native"
    native, other = (flatten(exported(one)) for one in (alike, format))
    for path, leaf in native.items():
        want = floats_of(leaf)
        off = np.linalg.norm(floats_of(other[path]) - want)
        assert off < 1e-6 * np.linalg.norm(want), path


def test_the_command_says_what_it_tuned(lm, tmp_path, capsys):
    from jaxllama.checkpoints.hf import load as hf

    folder = hf.save(tmp_path / "tiny", CFG, lm.params, lm.tokenizer.save(tmp_path))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    words = [
        "quantize",
        "--model",
        str(folder),
        "--calibration",
        str(tmp_path / "text.txt"),
        "--samples",
        "4",
        "--window",
        "64",
        "--tune",
        "8",
    ]
    assert main([*words, "--out", str(tmp_path / "q"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["tuning_losses"]) == 8 and "tuned     8 steps: KL " in table(report)
    assert kl(lm, jl.load(tmp_path / "q", exact=True).params) < 1
    assert main([*words[:-2], "--samples", "0", "--tune", "8", "--out", str(tmp_path / "r")]) == 2
    assert "samples = 0: tuning needs at least 1" in capsys.readouterr().err


def test_steps_go_round_the_text_in_another_order(lm):
    whole = np.asarray(lm.tokenizer.encode("abcdefghijklmnop" * 4))
    rows = steps(lm.tokenizer, "abcdefghijklmnop" * 4, 16, 10)
    assert rows.shape == (10, 16) and len(whole) >= 64
    some = steps(lm.tokenizer, TEXT, 64, 5)
    again = steps(lm.tokenizer, TEXT, 64, 5)
    assert np.array_equal(some, again) and len({row.tobytes() for row in some}) == 5


@pytest.mark.core
def test_a_step_is_whole_model_autodiff(lm, rounded, tokens, monkeypatch):
    """Plain gradient descent, so that what is learned in one step is the gradient. The last test of
    the file, because it forgets the programs that the others share."""
    import optax

    monkeypatch.setattr(tuning, "_RULE", optax.identity())
    jax.clear_caches()
    tuned, (loss,) = tune(CFG, lm.params, rounded, tokens[:1])
    monkeypatch.undo()
    jax.clear_caches()
    row, lengths = tokens[:1], np.asarray([64])

    def direct(scale, norm):
        p = jax.nn.log_softmax(_all_logits(lm.params, row, lengths))
        params = plain(rounded)
        w = dataclasses.replace(rounded["layer_0"]["mlp"]["down"]["weight"], scale=scale)
        params["layer_0"]["mlp"]["down"] = {"weight": dequantize(w)}
        params["layer_1"]["mixer_norm"] = {"weight": norm}
        q = jax.nn.log_softmax(_all_logits(params, row, lengths))
        return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))

    scale = rounded["layer_0"]["mlp"]["down"]["weight"].scale
    norm = rounded["layer_1"]["mixer_norm"]["weight"]
    want, grads = jax.jit(jax.value_and_grad(direct, argnums=(0, 1)))(scale, norm)
    assert loss == pytest.approx(float(want), rel=1e-5)
    got = tuned["layer_0"]["mlp"]["down"]["weight"].scale, tuned["layer_1"]["mixer_norm"]["weight"]
    for new, old, grad in zip(got, (scale, norm), grads, strict=True):
        # of 1 + a, a from 0: d/da = old * d/d(scale); the share learned is minus the rate times it
        new, old, grad = (np.asarray(one, np.float64) for one in (new, old, grad))
        assert relative_error((new / old - 1) / -tuning.RATE, old * grad) < 2e-2


def _all_logits(params, row, lengths):
    from jaxllama.model.decoder import forward, logits

    hidden = forward(CFG, params, row, lengths, None, sparse=False)[0]
    return logits(CFG, params, hidden)[0]


@pytest.mark.parametrize(
    ("scheme", "format"),
    [("fp8-block", "fp8"), ("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors")],
)
def test_formats_whose_rows_share_scales_refuse_tuning_at_once(tmp_path, scheme, format):
    with pytest.raises(JaxLlamaError, match=f"rows of {scheme} get scales of their own"):
        QuantizeRequest(tmp_path / "out", scheme, "rtn", format, "text", 2, 64, tune=2)


def test_blocks_that_a_fused_weight_s_parts_would_share_are_refused_at_once(tmp_path):
    cfg = CFG.replace(d_model=128, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=256)
    request = QuantizeRequest(tmp_path / "out", "fp8-block", format="fp8")
    with pytest.raises(JaxLlamaError, match="k_proj: its scales are not those of blocks"):
        check(cfg, request)
    check(cfg.replace(n_heads=4, n_kv_heads=2), request)
