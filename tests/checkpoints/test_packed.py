"""Packed checkpoints: import against independent unpackers, export and back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxllama as jl
from jaxllama import loading
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.save import flatten
from jaxllama.checkpoints.packed import save as packed
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.planner.accounting import weight_shapes
from jaxllama.quantization.quantize import quantize_params
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize, quantize
from tests.helpers import packed_cases as cases
from tests.helpers import packed_oracle as oracle
from tests.helpers.arrays import as_jax
from tests.helpers.models import GLA, LLAMA, relative_error, tokens_of
from tests.helpers.packed_cases import (
    CFG,
    CHANNEL,
    GPTQ,
    GROUP,
    IMPORTS,
    INT8,
    compressed,
    floating,
    quantized,
    tensors_of,
    words_of,
    write,
    write_case,
)
from tests.helpers.packed_oracle import floats_of, fused
from tests.helpers.seeded import seeded_params


@pytest.mark.core
@pytest.mark.parametrize("case", IMPORTS)
def test_import_is_bit_exact(tmp_path: Path, case: str) -> None:
    cfg, _, _, facts = IMPORTS[case]
    folder, weights = write_case(tmp_path / "m", case)
    got_cfg, params = hf.load(folder, dtype=np.float32)
    assert got_cfg.replace(name=cfg.name) == cfg
    got, want = flatten(params), fused(cfg, weights)
    assert got.keys() == want.keys()
    for path, values in want.items():
        np.testing.assert_array_equal(floats_of(got[path]), values, err_msg=str(path))
    words, groups, down_groups, zeros, columns, activations, static = facts
    for path in (("mixer", "qkv"), ("mlp", "gate_up"), ("mlp", "down")):
        leaf = got["layer_0", *path, "weight"]
        if case == "gptq-v2-uneven-groups":
            continue  # every Linear has its own order
        assert leaf.q.dtype.name == words
        n = down_groups if path[1] == "down" else groups
        assert leaf.scale.shape == (leaf.shape[0], n)
        assert (leaf.zero is not None, leaf.columns is not None) == (zeros, columns and n > 1)
        assert leaf.activations == activations
        assert (leaf.input_scale is not None) == static
        assert not static or leaf.input_scale == np.float32(0.02)
    assert isinstance(got["embed", "weight"], np.ndarray)


def test_dequantize_gives_the_original_order(tmp_path: Path) -> None:
    folder, weights = write_case(tmp_path / "m", "gptq-act-order")
    w = jax.device_put(hf.load(folder)[1]["layer_0"]["mlp"]["down"]["weight"])
    want = weights["model.layers.0.mlp.down_proj.weight"]
    assert w.columns is not None and w.columns.tolist() != list(range(48))
    np.testing.assert_array_equal(jax.jit(dequantize)(w), want)
    some = np.asarray([5, 0, 5])
    np.testing.assert_array_equal(jax.jit(lambda w: dequantize(w.rows(some)))(w), want[some])
    assert w.nbytes == 32 * 48 // 2 + 32 * 3 * 2 + 32 * 3 + 48 * 4


# --- members of a fused parameter that differ ------------------------------------------------


def _only(kinds: dict[str, Any], default: Any):
    def make(rng, name, out, width):
        kind = next((kind for key, kind in kinds.items() if key in name), default)
        return None if kind is None else kind(rng, name, out, width)

    return make


def test_members_that_differ_become_row_blocks(tmp_path: Path) -> None:
    """Other bits by ``dynamic``, a member in floats, orders of their own."""
    dynamic = {r"-:.*up_proj": {}, r"+:.*v_proj": {"bits": 8, "group_size": -1}}
    options = {**GPTQ, "desc_act": True, "lm_head": False, "dynamic": dynamic}
    make = _only({"up_proj": None, "v_proj": cases.gptq(-1, bits=8)}, cases.gptq(order="own"))
    folder, weights = write(tmp_path / "m", CFG, options, make)
    params = hf.load(folder)[1]["layer_0"]
    qkv, gate_up = params["mixer"]["qkv"]["weight"], params["mlp"]["gate_up"]["weight"]
    assert [block.q.dtype.name for block in qkv.blocks] == ["int4", "int4", "int8"]
    assert qkv.shape == (64, 32) and qkv.ndim == 2
    assert qkv.nbytes == sum(block.nbytes for block in qkv.blocks)
    assert isinstance(gate_up.blocks[1], np.ndarray) and isinstance(gate_up.blocks[0], QTensor)
    want = fused(CFG, weights)
    np.testing.assert_array_equal(floats_of(qkv), want["layer_0", "mixer", "qkv", "weight"])
    np.testing.assert_array_equal(floats_of(gate_up), want["layer_0", "mlp", "gate_up", "weight"])


def test_config_groups_by_name_pattern_and_class(tmp_path: Path) -> None:
    options = compressed("mixed-precision", {})
    groups = {
        "any": (["Linear"], {**CHANNEL, **INT8}, "pack-quantized"),
        "mlp": ([r"re:.*mlp\..*"], GROUP, "pack-quantized"),
        "one": (["model.layers.0.mlp.down_proj"], floating(CHANNEL), "float-quantized"),
    }
    options["config_groups"] = {
        name: {
            "targets": targets,
            "format": kind,
            "weights": {"type": "int", "num_bits": 4, "symmetric": True, **weights},
        }
        for name, (targets, weights, kind) in groups.items()
    }
    options["ignore"] = ["lm_head", "re:.*o_proj$"]
    make = _only(
        {"o_proj": None, "down": cases.plain(floating=True), "mlp": cases.packed()},
        cases.packed(None, bits=8),
    )
    folder, weights = write(tmp_path / "m", CFG, options, make)
    layer = hf.load(folder)[1]["layer_0"]
    assert isinstance(layer["mixer"]["o"]["weight"], np.ndarray)
    found = [layer["mixer"]["qkv"], layer["mlp"]["gate_up"], layer["mlp"]["down"]]
    assert [leaf["weight"].q.dtype.name for leaf in found] == ["int8", "int4", "float8_e4m3fn"]
    want = fused(CFG, weights)
    for path, leaf in flatten({"layer_0": layer}).items():
        np.testing.assert_array_equal(floats_of(leaf), want[path])


# --- the model ---------------------------------------------------------------------------------


def _dequantized(params: dict[str, Any]) -> dict[str, Any]:
    kinds = QTensor | RowBlocks
    return jax.tree.map(
        lambda leaf: as_jax(floats_of(leaf)),
        params,
        is_leaf=lambda leaf: isinstance(leaf, kinds),
    )


def test_logits_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    """Members that differ; both sum in float32 and differ in the order of the sums.  Of other
    kinds transformers' logits are in ``test_packed_peers``."""
    options = {**GPTQ, "desc_act": True}
    make = _only({"v_proj": None}, cases.gptq(order="own"))
    folder, _ = write(tmp_path / "m", CFG.replace(qkv_bias=True, o_bias=True), options, make)
    lm = jl.load(folder, exact=True)
    assert lm.tokenizer is None and lm.params["layer_0"]["mlp"]["down"]["weight"].ndim == 2
    tokens, lengths = tokens_of(lm.config, 2, 9), np.array([9, 5])
    want = jl.logits(lm.config, _dequantized(lm.params), tokens, as_jax(lengths))
    assert relative_error(lm.logits(tokens, lengths)[0], want[0]) < 1e-5
    with pytest.raises(JaxLlamaError, match="its weights are already quantized, so .*'w8a16'"):
        jl.load(folder, quantize="w8a16")


@pytest.mark.core
@pytest.mark.parametrize("case", ["int8-static", "fp8-tensor-static", "int8-tokens"])
def test_activations_are_quantized_as_the_checkpoint_says(tmp_path: Path, case: str) -> None:
    """One product against its definition in numpy; all products and sums of words are exact in
    float64, so only the last scaling rounds."""
    from jaxllama.model.linear import linear

    facts = IMPORTS[case][3]
    folder, weights = write_case(tmp_path / "m", case)
    w = hf.load(folder)[1]["layer_0"]["mlp"]["down"]["weight"]
    x = np.random.default_rng(1).normal(0, 1, (5, 48)).astype(np.float32)
    got = jax.jit(linear)(x, {"weight": w})
    integer = facts[0] == "int8"
    scale = np.float32(0.02)
    if not facts[6]:
        scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    steps = x / scale
    if integer:
        steps = np.clip(np.round(steps), -128, 127)
    else:
        steps = np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    want = (steps.astype(np.float64) * scale) @ weights[
        "model.layers.0.mlp.down_proj.weight"
    ].T.astype(np.float64)
    assert relative_error(got, want) < 1e-6


def test_input_codes_are_the_norms_only_where_each_token_has_its_scale() -> None:
    from jaxllama.model.linear import input_codes

    w = dataclasses.replace(words_of((4, 8), "int8"), activations="int8")
    static = dataclasses.replace(w, input_scale=np.float32(0.5))
    floats = np.ones((4, 8), np.float32)
    for weight, words in (
        (w, "int8"),
        (static, None),
        (floats, None),
        (RowBlocks((w, w)), "int8"),
        (RowBlocks((w, static)), None),
        (RowBlocks((w, floats)), None),
    ):
        assert input_codes({"weight": weight}) == words


@pytest.mark.parametrize("words", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_before_a_static_scale(words: str, kind: str) -> None:
    """A norm of RMS quantizes by itself; the product is that of the norm's quantized floats."""
    from jaxllama.model.linear import Stream, linear, norm, norm_linear
    from pallas_kernels.rows.quantize_tokens import quantize_tokens

    cfg = CFG.replace(norm=kind)
    w = dataclasses.replace(words_of((8, 64), words), activations=words)
    w = dataclasses.replace(w, input_scale=np.float32(0.02 if words == "int8" else 0.004))
    rng = np.random.default_rng(0)
    stream = Stream(as_jax(rng.normal(size=(5, 64)).astype(np.float32)))
    scale = {"weight": as_jax(rng.normal(size=(64,)).astype(np.float32))}
    got, _ = norm_linear(stream, scale, {"weight": w}, cfg)
    floats, _ = norm(stream, scale, cfg)
    codes = quantize_tokens(floats, words, scale=w.input_scale)
    assert relative_error(got, linear(codes, {"weight": w}, np.float32)) < 1e-6


# --- export and back ---------------------------------------------------------------------------


def _same(got: Any, want: Any) -> None:
    """Trees of the same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


# What AWQ and GPTQ packed together is a multiple of 8 in CFG; imports with other shapes, orders or
# values that a format has no form for go elsewhere.
EXPORTS = [
    *(("awq", case) for case in ("awq", "awq-rows", "gptq-symmetric")),
    *(
        ("gptq", case)
        for case in (
            "awq",
            "gptq",
            "gptq-symmetric",
            "gptq-act-order",
            "gptq-act-order-short-group",
            "gptq-v2-uneven-groups",
            "gptq-8bit",
            "gptq-8bit-symmetric-act-order",
            "gptq-8bit-v2-rows",
        )
    ),
    *(
        ("compressed-tensors", case)
        for case in IMPORTS
        if case.startswith(("packed", "int8", "fp8", "awq", "gptq-8bit-v2", "mxfp4", "nvfp4"))
        and "act" not in case
        and case != "awq-short-group"
    ),
    ("modelopt", "modelopt"),
    ("fp8", "fp8-blocks-of-128"),
    *(
        ("native", case)
        for case in (
            "awq",
            "gptq-act-order",
            "gptq-v2-uneven-groups",
            "gptq-padded",
            "packed-8bit-zeros",
            "int8-static",
            "fp8-blocks-at-the-edge",
            "fp8-scalar",
        )
    ),
]


# Exports of which every tensor is that of the file that was read: what other programs write.  The
# others differ in what nothing reads, as padding, or in a form that their format leaves open.
AS_IT_CAME = {
    ("awq", "awq"),
    ("awq", "awq-rows"),
    ("gptq", "gptq-symmetric"),
    ("gptq", "gptq-8bit"),
    ("gptq", "gptq-8bit-symmetric-act-order"),
    *(
        ("compressed-tensors", case)
        for case in (
            "packed",
            "packed-zeros",
            "packed-fp8-tokens",
            "int8-tokens-of-4-bits",
            "int8-tokens",
            "int8-static",
            "fp8-channel-tokens",
            "fp8-weights-only",
            "mxfp4",
            "nvfp4",
        )
    ),
    ("fp8", "fp8-blocks-of-128"),
}


@pytest.mark.core
@pytest.mark.parametrize(("format", "case"), EXPORTS, ids=["-".join(pair) for pair in EXPORTS])
def test_export_and_back_is_identical(tmp_path: Path, format: str, case: str) -> None:
    folder, _ = write_case(tmp_path / "m", case)
    cfg, params = hf.load(folder)
    has_groups_apart = (format, case) == ("compressed-tensors", "packed-padded")
    with pytest.warns(WeightWarning) if has_groups_apart else contextlib.nullcontext():
        out = packed.save(tmp_path / "out", cfg, params, format=format)
    config = json.loads((out / "config.json").read_text())
    method = {"native": "jaxllama"}.get(format, format)
    assert config["quantization_config"]["quant_method"] == method
    _, again = hf.load(out)
    _same(again, params)
    if (format, case) in AS_IT_CAME:
        written = oracle.load(out)
        for name, value in tensors_of(case)[0].items():
            _same(written[name], value)


def test_compressed_tensors_zero_points_have_one_group_size(tmp_path: Path) -> None:
    """transformers loads no others: the scales of coarser groups repeat, the weights stay."""
    folder, _ = write_case(tmp_path / "m", "awq-short-group")
    cfg, params = hf.load(folder)
    out = packed.save(tmp_path / "out", cfg, params, format="compressed-tensors")
    options = json.loads((out / "config.json").read_text())["quantization_config"]
    [group] = options["config_groups"].values()
    assert group["weights"]["group_size"] == 16 and options["dequantize"]
    got, want = flatten(hf.load(out)[1]), flatten(params)
    for path, leaf in want.items():
        np.testing.assert_array_equal(floats_of(got[path]), floats_of(leaf), err_msg=str(path))


def test_modelopt_s_own_file_says_what_config_json_may_not(tmp_path: Path) -> None:
    folder, _ = write_case(tmp_path / "m", "modelopt")
    cfg, params = hf.load(folder)
    out = packed.save(tmp_path / "out", cfg, params, format="modelopt")
    written = oracle.load(out)
    for name, value in tensors_of("modelopt")[0].items():
        if not name.endswith("input_scale"):
            _same(written[name], value)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    assert hf.is_packed(out)
    _same(hf.load(out)[1], params)
    (out / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(JaxLlamaError, match="quant_algo = 'W4A8_AWQ': not supported"):
        hf.load(out)


def test_rounded_models_are_written_bit_for_bit(tmp_path: Path) -> None:
    """What ``quantize_params`` makes, in the formats of other programs."""
    cfg = CFG.replace(d_ff=128)
    for name, format in (
        ("nvfp4", "compressed-tensors"),
        ("nvfp4", "modelopt"),
        ("mxfp4", "compressed-tensors"),
        ("fp8-block", "fp8"),
        ("fp8-block", "compressed-tensors"),
    ):
        # The embedding stays the head, which these formats leave in floats.
        params = jax.device_get(quantize_params(seeded_params(cfg), f"{name},head=none,qkv=none"))
        out = packed.save(tmp_path / f"{name}-{format}", cfg, params, format=format)
        _same(hf.load(out)[1], params)


@pytest.mark.parametrize("format", ["native", "compressed-tensors"])
def test_scales_in_two_levels_come_back(tmp_path: Path, format: str) -> None:
    """compressed-tensors holds their products, which are told from other scales."""
    round_to = jax.jit(
        quantize, static_argnames=("dtype", "group_size", "symmetric", "scale_dtype")
    )

    def pick(path, w):
        zeros = format == "native" and path[-2] == "down"
        t = round_to(w, "int4", group_size=16, symmetric=not zeros, scale_dtype="int8")
        return dataclasses.replace(jax.tree.map(np.asarray, t), activations="int8")

    params = quantized(CFG, pick)
    out = packed.save(tmp_path / "out", CFG, params, format=format)
    _same(hf.load(out)[1], params)


def test_native_holds_anything(tmp_path: Path) -> None:
    """A hybrid of GLA and attention, every kind of leaf, odd widths, shards, tokenizer files."""
    cfg = LLAMA.replace(layer_types=("gla", "attention"), gla=GLA, d_ff=45, eos_token_ids=())
    rng = np.random.default_rng(0)

    def pick(path, w):
        parent, width = path[-2], w.shape[1]
        if parent in ("q", "gate_up", "down"):  # 45 inputs: an odd number of int4 words
            t = words_of(
                w.shape, group={32: 16, 45: 9}[width], zeros=parent != "q", scale=np.float32
            )
            return dataclasses.replace(t, columns=rng.permutation(width).astype(np.int32))
        if parent == "k":  # zeros as GGUF has them, and its negative scales
            t = words_of(w.shape, group=8, scale=np.float32)
            return QTensor(t.q, -t.scale, t.scale * np.float32(0.5))
        if parent == "qkv":
            static = dataclasses.replace(
                words_of((20, 32), "int8"),
                activations="int8",
                input_scale=np.array(0.03, np.float32),
            )
            return RowBlocks((static, w[20:32], words_of((32, 32), "float8_e4m3fn", 8)))
        if parent == "o":
            fp8 = words_of(w.shape, "float8_e4m3fn", scale=ml_dtypes.bfloat16)
            return dataclasses.replace(fp8, activations="float8_e4m3fn")
        return w

    params = quantized(cfg, pick)
    (tmp_path / "tokenizer.json").write_text("{}")
    out = packed.save(
        tmp_path / "out",
        cfg,
        params,
        [tmp_path / "tokenizer.json"],
        format="native",
        max_shard_bytes=5000,
    )
    assert len(list(out.glob("jaxllama-*.safetensors"))) > 3 and (out / "tokenizer.json").is_file()
    got_cfg, got = hf.load(out)
    assert got_cfg == cfg.replace(name="out")
    _same(got, params)
    for path in out.glob("jaxllama*"):  # the names of files that older versions wrote
        path.rename(out / path.name.replace("jaxllama", "model"))
    index = out / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("jaxllama-", "model-"))
    _same(hf.load(out)[1], params)
    half = hf.load(out, dtype=ml_dtypes.bfloat16)[1]
    assert half["embed"]["weight"].dtype == ml_dtypes.bfloat16
    assert half["layer_1"]["mixer"]["qkv"]["weight"].blocks[1].dtype == ml_dtypes.bfloat16
    assert half["layer_0"]["mixer"]["q"]["weight"].scale.dtype == np.float32


def test_exports_mix_bits_and_groups(tmp_path: Path) -> None:
    """down in 8 bits and whole rows; GPTQ says so in ``dynamic``, compressed-tensors in groups."""
    cfg = CFG.replace(tie_embeddings=False)

    def pick(path, w):
        if path[0] == "head":
            return w
        bits, group = ("int8", None) if path[-2] == "down" else ("int4", 16)
        return words_of(w.shape, bits, group)

    params = quantized(cfg, pick)
    for format in ("gptq", "compressed-tensors"):
        _same(hf.load(packed.save(tmp_path / format, cfg, params, format=format))[1], params)
    options = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert options["dynamic"] == {
        r"-:^lm_head$": {},
        r"+:^model\.layers\.0\.mlp\.down_proj$": {"bits": 8, "group_size": -1},
    }
    options = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())
    groups = options["quantization_config"]["config_groups"]
    assert groups["group_1"]["targets"] == ["model.layers.0.mlp.down_proj"]


def test_awq_takes_the_finest_group(tmp_path: Path) -> None:
    params = quantized(
        CFG, lambda path, w: words_of(w.shape, group=None if path[-2] == "down" else 8, zeros=True)
    )
    got = hf.load(packed.save(tmp_path / "out", CFG, params, format="awq"))[1]
    assert got["layer_0"]["mlp"]["down"]["weight"].group_size == 8
    for a, b in zip(flatten(got).values(), flatten(params).values(), strict=True):
        np.testing.assert_array_equal(floats_of(a), floats_of(b))


def _refused() -> dict[str, tuple[str, Any, str]]:
    int4, int8 = words_of((32, 48), group=16), words_of((32, 48), "int8")
    columns = dataclasses.replace(int4, columns=np.arange(48, dtype=np.int32)[::-1])
    nan = QTensor(int8.q, int8.scale * np.float16("nan"))
    return {
        "awq-int8": ("awq", int8, "no int8 codes"),
        "awq-columns": ("awq", columns, "act-order"),
        "awq-float32-scales": ("awq", words_of((32, 48), scale=np.float32), "float16"),
        "gptq-fp8": ("gptq", words_of((32, 48), "float8_e4m3fn"), "no float8_e4m3fn codes"),
        "gptq-activations": ("gptq", dataclasses.replace(int8, activations="int8"), "activations"),
        "gptq-float-zeros": ("gptq", QTensor(int4.q, int4.scale, int4.scale), "zeros of float16"),
        "gptq-negative": ("gptq", QTensor(int4.q, -int4.scale), "negative scales"),
        "compressed-zeros": (
            "compressed-tensors",
            dataclasses.replace(words_of((32, 48), group=16, zeros=True), activations="int8"),
            "no zeros beside",
        ),
        "compressed-columns": ("compressed-tensors", columns, "act-order"),
        "compressed-nan": ("compressed-tensors", nan, "NaN"),
        "native-nan": ("native", nan, "NaN"),
        "nothing": ("gptq", np.ones((32, 48), np.float32), "no weight is quantized"),
        "format": ("exl2", int4, "not one of native, awq, gptq, compressed-tensors"),
    }


@pytest.mark.parametrize("case", _refused())
def test_what_a_format_cannot_hold_is_named(tmp_path: Path, case: str) -> None:
    format, weight, words = _refused()[case]
    params = seeded_params(CFG)
    params["layer_0"]["mlp"]["down"]["weight"] = weight
    with pytest.raises(JaxLlamaError, match=words) as caught:
        packed.save(tmp_path / "out", CFG, params, format=format)
    named = "down" in str(caught.value) or case in ("nothing", "format")
    assert named and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(tmp_path: Path) -> None:
    params = quantized(CFG, lambda path, w: words_of(w.shape))
    embed = dict(params, embed={"weight": words_of((97, 32), "int8")})
    with pytest.raises(JaxLlamaError, match="embed/weight: it has no quantized embedding"):
        packed.save(tmp_path / "a", CFG, embed, format="awq")
    wide = CFG.replace(d_ff=44)
    odd = quantized(wide, lambda path, w: words_of(w.shape))
    with pytest.raises(JaxLlamaError, match="GPTQ packs 8 inputs or outputs together"):
        packed.save(tmp_path / "a", wide, odd, format="gptq")
    with pytest.raises(JaxLlamaError, match="AWQ packs 8 outputs together"):
        packed.save(tmp_path / "a", wide, odd, format="awq")
    with pytest.raises(JaxLlamaError, match=r"layer_0/mlp/gate_up/weight: shape \[96, 32\]"):
        packed.save(tmp_path / "a", wide, params, format="native")
    del odd["norm"]
    with pytest.raises(JaxLlamaError, match="missing: norm/weight"):
        packed.save(tmp_path / "a", wide, odd)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(JaxLlamaError, match="already exists"):
        packed.save(tmp_path / "full", CFG, params)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("awq", "qkv=w4a16-g16"),
        ("gptq-symmetric", "down=w4a16-g16-sym"),
        ("gptq-8bit", "down=w8a16-g16-zero"),
        ("packed-int8-tokens", "o=w4a8-g16-sym"),
        ("int8-tokens", "gate_up=w8a8"),
        ("fp8-channel-tokens", "qkv=fp8"),
        ("fp8-blocks-of-128", "down=fp8-block"),
        ("mxfp4", "qkv=mxfp4"),
        ("nvfp4", "qkv=nvfp4"),
    ],
)
def test_the_scheme_of_a_checkpoint_makes_codes_like_its_own(tmp_path, case, said) -> None:
    """The planner counts them so."""
    folder = write_case(tmp_path / "m", case)[0]
    scheme = loading.stored_scheme(folder)
    assert scheme is not None and said in scheme.split(",")
    cfg, params = hf.load(folder)
    got, want = (leaves_by_path(tree) for tree in (weight_shapes(cfg, np.float32, scheme), params))
    assert got == want


def leaves_by_path(params) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """The codes' dtype and groups, whether there are zero points, and the activations' dtype."""
    return {
        path: (w.dtype.name, w.scale.shape, w.zero is None, w.activations)
        for path, w in flatten(params).items()
        if isinstance(w, QTensor)
    }


@pytest.mark.parametrize(
    "case", ["awq", "gptq", "packed", "fp8-blocks", "nvfp4", "fp8-compressed-blocks"]
)
def test_a_checkpoint_without_the_model_s_prefix_is_the_same(tmp_path, case) -> None:
    """As bare decoders have their names, and multimodal models others; and those in a config."""
    tensors, config = tensors_of(case)
    name, ignored = "model.layers.0.self_attn.o_proj", {}
    if case == "fp8-compressed-blocks":
        tensors = {key: x for key, x in tensors.items() if not key.startswith(f"{name}.")}
        tensors[f"{name}.weight"] = np.ones((32, 32), np.float32)
        ignored = {"ignore": [name]}
    own = {**config["quantization_config"], **ignored}
    oracle.save(tmp_path / "whole", tensors, {**config, "quantization_config": own})
    bare = {key.removeprefix("model."): x for key, x in tensors.items()}
    if ignored:
        own = {**own, "ignore": [name.removeprefix("model.")]}
    oracle.save(tmp_path / "bare", bare, {**config, "quantization_config": own})
    got, want = (hf.load(tmp_path / folder)[1] for folder in ("bare", "whole"))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_fp8_blocks_get_activations_in_fp8(tmp_path) -> None:
    folder = write_case(tmp_path / "m", "fp8-blocks-of-128")[0]
    lm = jl.load(folder, quantize="fp8-block-a8", exact=True)
    mlp, table = lm.params["layer_0"]["mlp"], lm.params["embed"]["weight"]
    assert mlp["down"]["weight"].activations == "float8_e4m3fn" and not isinstance(table, QTensor)
    assert "head" not in lm.params
    other = write_case(tmp_path / "other", "awq")[0]
    for path, options in (
        (folder, {"quantize": "w4a16"}),
        (folder, {"policy": "0 100 100 0 100 0 compress_weight=true"}),
        (other, {"quantize": "fp8-block-a8"}),
    ):
        with pytest.raises(JaxLlamaError, match="weights are already quantized, so quantize="):
            jl.load(path, **options)
