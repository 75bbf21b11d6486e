"""Perplexity by sliding windows, distance to a reference, kinds of text side by side, caches as
they are stored, and the audit of what the decode program holds.

Oracles: one window at a time through ``generation.logits`` in float64, and ``decode_step`` token by
token for quantized caches.
"""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import jaxllama as jl
from jaxllama import generation
from jaxllama.evaluation import damage as reports
from jaxllama.evaluation.perplexity import BATCH, perplexity, summary
from jaxllama.evaluation.speed.hlo import stored_results
from jaxllama.evaluation.weight_audit import buffers, decode_program
from jaxllama.language_model import LanguageModel
from jaxllama.placement import Placement
from jaxllama.quantization.quantize import quantize_params
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.arrays import as_jax
from tests.helpers.models import LLAMA, params_of

CFG = LLAMA.replace(vocab_size=256, d_model=64, head_dim=16, d_ff=96, max_position=256)
TEXTS = {"prose": "It was the best of times, it was the worst. " * 5, "lists": "1, 2, 3; " * 30}
TEXT = "It was the best of times, it was the worst of times, and it was long ago."


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(CFG, params_of(CFG), Tokenizer.byte_level())


@pytest.fixture(scope="module")
def quantized(lm: LanguageModel) -> LanguageModel:
    return dataclasses.replace(lm, params=quantize_params(lm.params, "w4a16-g32"))


def log_probabilities(lm: LanguageModel, ids: list[int]) -> np.ndarray:
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(ids)] = ids
    scores = np.asarray(lm.logits(tokens, [len(ids)])[0, : len(ids)], np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("stride", [None, 31, 16, 5])
def test_every_token_is_predicted_once_with_the_context_that_stride_gives(lm, stride):
    ids = lm.tokenizer.encode(TEXT)
    got = perplexity(lm, TEXT, 32, stride)
    step, want, done = stride or 31, [], 1
    for begin in range(0, len(ids), step):
        part = ids[begin : begin + 32]
        logs = log_probabilities(lm, part)
        for position in range(done, begin + len(part)):
            want.append(-logs[position - begin - 1, ids[position]])
        done = begin + len(part)
        if done == len(ids):
            break
    assert got["tokens"] == len(want) == len(ids) - 1 and got["stride"] == step
    # float32 sums against float64.
    assert got["perplexity"] == pytest.approx(math.exp(np.mean(want)), rel=1e-5)


@pytest.mark.core
def test_kl_and_top1_are_those_of_the_two_distributions(lm, quantized):
    ids = lm.tokenizer.encode(TEXT)[:32]
    text = lm.tokenizer.decode(ids)
    own, other = log_probabilities(quantized, ids)[:-1], log_probabilities(lm, ids)[:-1]
    got = perplexity(quantized, text, 32, reference=lm)
    assert got["kl"] == pytest.approx(np.mean((np.exp(other) * (other - own)).sum(1)), rel=1e-3)
    assert got["kl"] > 0.01
    assert got["top1"] == pytest.approx(np.mean(own.argmax(1) == other.argmax(1)))
    itself = perplexity(lm, text, 32, reference=lm)
    assert itself["kl"] == pytest.approx(0, abs=1e-6) and itself["top1"] == 1


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_quantized_cache_is_scored_as_decoding_reads_it(lm, kv_dtype):
    ids = lm.tokenizer.encode(TEXT)[:24]
    cache = jl.init_cache(CFG, 1, 24, kv_dtype)
    nll = []
    for token, following in zip(ids[:-1], ids[1:], strict=True):
        logits, cache = generation.decode_step(CFG, lm.params, as_jax([token]), cache)
        scores = np.asarray(logits[0], np.float64)
        nll.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[following])
    got = perplexity(lm, lm.tokenizer.decode(ids), 24, kv_dtype=kv_dtype)
    # The same words in the cache, but for a few that sums in another order round elsewhere.
    assert got["nll"] == pytest.approx(np.mean(nll), rel=1e-3)
    plain = perplexity(lm, lm.tokenizer.decode(ids), 24)
    assert abs(got["nll"] - plain["nll"]) > 1e-4  # and the damage shows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 1}, "window = 1: must be from 2 to 256"),
        ({"window": 32, "stride": 32}, "stride = 32: must be from 1 to window - 1, 31"),
        ({"window": 32, "stride": 0}, "stride = 0"),
        ({"max_tokens": 1}, "the text has 1 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_named(lm, options, words):
    with pytest.raises(jl.JaxLlamaError, match=words):
        perplexity(lm, TEXT, **options)
    other = dataclasses.replace(lm, config=CFG.replace(vocab_size=300))
    with pytest.raises(jl.JaxLlamaError, match="a vocabulary of 300, the model one of 256"):
        perplexity(lm, TEXT, reference=other)
    backend = json.loads(lm.tokenizer._backend.to_str())
    vocab = backend["model"]["vocab"]
    backend["model"]["vocab"] = dict(zip(vocab, reversed(list(vocab.values())), strict=True))
    turned = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(backend)), "turned")
    with pytest.raises(jl.JaxLlamaError, match="the reference's tokenizer gives other tokens"):
        perplexity(lm, TEXT, reference=dataclasses.replace(lm, tokenizer=turned))


@pytest.mark.slow
def test_offloaded_weights_give_the_resident_model_s_perplexity(lm, tmp_path):
    """Unit by unit in blocks of windows, the last of them filled in part."""
    policy = jl.Policy.parse("30 40 100 0 100 0 gpu_batch_size=2 num_gpu_batches=2")
    place = Placement(policy, jnp.float32, directory=tmp_path)
    off = place.model(CFG, place.tree(jax.tree.map(np.asarray, lm.params)), lm.tokenizer)
    got = perplexity(off, TEXT, 32, 20, reference=lm)
    want = perplexity(lm, TEXT, 32, 20, reference=lm)
    assert got["nll"] == pytest.approx(want["nll"], rel=1e-6) and got["top1"] == 1
    assert got["kl"] == pytest.approx(0, abs=1e-6)
    narrow = perplexity(lm, TEXT, 32, kv_dtype="int8")["nll"]
    assert perplexity(off, TEXT, 32, kv_dtype="int8")["nll"] == pytest.approx(narrow, rel=1e-6)


# Kinds of text side by side


def test_standard_errors_are_of_batch_means():
    rng = np.random.default_rng(0)
    rows = np.zeros((40 * BATCH + 7, 5), np.float32)
    # Neighbours share what their batch has: naive errors would be too small by about sqrt(BATCH).
    rows[: 40 * BATCH, 0] = np.repeat(rng.standard_normal(40), BATCH) + 3
    rows[40 * BATCH :, 0] = 3
    report = summary(rows, has_reference=True)
    means = rows[: 40 * BATCH, 0].reshape(40, BATCH).mean(1)
    assert report["nll_se"] == pytest.approx(means.std(ddof=1) / math.sqrt(40), rel=1e-4)
    assert report["rise"] == pytest.approx(math.expm1(rows[:, 0].astype(float).mean()), rel=1e-5)
    assert report["top1"] == 1 and report["top1_se"] == 0
    assert math.isnan(summary(rows[:BATCH], has_reference=False)["nll_se"])


def test_the_report_has_every_kind_as_perplexity_has_it(lm, quantized):
    report = reports.damage(quantized, TEXTS, 64, reference=lm)
    for kind, text in TEXTS.items():
        alone = perplexity(quantized, text, 64, reference=lm)
        assert report["kinds"][kind] == {
            key: value for key, value in alone.items() if key not in ("window", "stride")
        }
        own = perplexity(lm, text, 64)["perplexity"]
        assert alone["rise"] == pytest.approx(alone["perplexity"] / own - 1, abs=1e-5)
    assert set(reports.damage(quantized, TEXTS, 64)) == {"window", "stride", "kinds"}


def test_the_worst_predictions_stand_in_their_text(lm, quantized):
    worst = reports.damage(quantized, TEXTS, 64, reference=lm)["worst"]["prose"]
    kls = [entry["kl"] for entry in worst]
    assert len(worst) == reports.WORST and kls == sorted(kls, reverse=True) and kls[-1] > 0
    for entry in worst:
        assert entry["before"] + entry["token"] in TEXTS["prose"]
        assert TEXTS["prose"][entry["position"]] == entry["token"]


def test_behind_the_last_layer_the_lens_is_the_model(lm, quantized):
    text = TEXTS["prose"][:64]
    report = reports.damage(quantized, {"prose": text + "?"}, 65, reference=lm)
    layers = report["layers"]["prose"]
    assert len(layers["kl"]) == CFG.n_layers
    whole = report["kinds"]["prose"]
    # The lens reads the last token too, whose successor nobody scores.
    assert layers["kl"][-1] == pytest.approx(whole["kl"], rel=0.1)
    itself = reports.damage(lm, {"prose": text}, 64, reference=lm)["layers"]["prose"]
    np.testing.assert_allclose(itself["kl"], 0, atol=1e-6)
    assert itself["top1"] == [1.0] * CFG.n_layers


def test_table_json_and_picture(lm, quantized, tmp_path):
    report = reports.damage(quantized, TEXTS, 64, reference=lm)
    text = reports.table(report)
    assert "prose" in text and "±" in text and "worst predictions" in text
    reports.write(report, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["kinds"] == report["kinds"]
    reports.write({"kl_se": math.nan, "kl": (1.0, math.inf)}, tmp_path / "n.json")
    assert json.loads((tmp_path / "n.json").read_text()) == {"kl_se": None, "kl": [1.0, None]}
    reports.write(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


# The audit


def test_buffers_name_every_array_and_its_bytes(lm):
    rows = {row["path"]: row for row in buffers(quantize_params(lm.params, "w8a16"))}
    row = rows["layer_0/mlp/down/weight/q"]
    assert (row["dtype"], row["shape"], row["bytes"]) == ("int8", [64, 96], 64 * 96)
    assert rows["layer_0/mlp/down/weight/scale"]["bytes"] == 4 * 64
    assert rows["norm/weight"]["dtype"] == "float32"


def test_the_decode_program_of_quantized_weights_has_no_float_copy():
    """Weights have more rows than a tile, or a tile would be a copy; layers are all alike."""
    cfg = LLAMA.replace(
        d_model=256, head_dim=64, d_ff=320, n_layers=1, layer_types=("attention",), vocab_size=600
    )
    params = quantize_params(params_of(cfg), "w8a16")
    got = decode_program(cfg, params)
    assert got["quantized_weights"] == 5 and got["copies"] == []
    assert got["largest_temporary"]["bytes"] < got["largest_weight_as_floats"]
    # The weight in floats is in the program that dequantizes it, and is found there.
    from pallas_kernels.qtensor import dequantize

    def undone(w, x):
        return dequantize(w) @ x, jnp.sum(dequantize(w) ** 2)

    text = (
        jax.jit(undone).lower(params["layer_0"]["mlp"]["down"]["weight"], jnp.ones(320)).compile()
    )
    shapes = [row["shape"] for row in stored_results(text.as_text()) if row["type"] == "f32"]
    assert any(math.prod(shape) == 256 * 320 for shape in shapes)
