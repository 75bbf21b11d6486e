"""Packed checkpoints that are damaged or ask for what is not there: one line that names it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import save as packed
from jaxllama.errors import JaxLlamaError, WeightWarning
from tests.helpers import packed_oracle as oracle
from tests.helpers.packed_cases import (
    CFG,
    TOKEN,
    quantized,
    tensors_of,
    words_of,
    write_case,
)
from tests.helpers.packed_oracle import floats_of
from tests.helpers.seeded import hf_tensors, seeded_params

DOWN = "model.layers.0.mlp.down_proj"


def _edit(tensor: str, change) -> Any:
    """The tensor of down_proj after ``change`` (of a copy, in place or returned); None drops it."""

    def damage(tensors: dict[str, np.ndarray], options: dict[str, Any]) -> None:
        name = f"{DOWN}.{tensor}"
        value = tensors[name].copy()
        result = change(value)
        if result is False:
            del tensors[name]
        else:
            tensors[name] = value if result is None else result

    return damage


def _option(**changes: Any) -> Any:
    return lambda tensors, options: options.update(changes)


def _weights(**changes: Any) -> Any:
    return lambda tensors, options: options["config_groups"]["g"]["weights"].update(changes)


def _inputs(value: Any) -> Any:
    return lambda tensors, options: options["config_groups"]["g"].update(input_activations=value)


def _put(index: Any, value: Any) -> Any:
    return lambda array: array.__setitem__(index, value)


def _floats(tensors: dict[str, np.ndarray]) -> None:
    tensors.clear()
    tensors.update(hf_tensors(CFG, seeded_params(CFG)))


DAMAGE = {
    "method": ("awq", _option(quant_method="exl2"), "quant_method = 'exl2': not supported"),
    "no-method": ("awq", _option(quant_method=None), "quant_method = None: not supported"),
    "awq-bits": ("awq", _option(bits=3), "bits = 3: only 4"),
    "awq-gemv": ("awq", _option(version="gemv"), "version = 'gemv': only 'gemm'"),
    "awq-no-zeros": ("awq", _option(zero_point=False), "zero_point = False"),
    "awq-llm-awq": ("awq", _option(backend="llm-awq"), "backend = 'llm-awq'"),
    "group-size": ("awq", _option(group_size=0), "group_size = 0: expected -1 or a positive"),
    "other-group-size": (
        "awq",
        _option(group_size=8),
        r"qzeros': shape \[2, 4\], but the config wants \[4, 4\]",
    ),
    "awq-missing": ("awq", _edit("qzeros", lambda a: False), f"missing tensor '{DOWN}.qzeros'"),
    "awq-dtype": ("awq", _edit("qweight", lambda a: a.astype(np.int64)), "dtype I64 is not I32"),
    "nothing-packed": ("awq", lambda t, o: _floats(t), "says 'awq', but no weight is quantized"),
    "zero-scale": ("awq", _edit("scales", _put((1, 3), 0)), f"{DOWN}: scales that are 0"),
    "negative-scale": ("awq", _edit("scales", _put((1, 3), -1)), f"{DOWN}: negative scales"),
    "nan-scale": ("awq", _edit("scales", _put((1, 3), np.nan)), f"{DOWN}: scales that are NaN"),
    "infinite-scale": ("gptq-act-order", _edit("scales", _put((1, 3), np.inf)), "NaN or infinite"),
    "gptq-bits": ("gptq", _option(bits=3), "bits = 3: not supported; supported: 4, 8"),
    "gptq-marlin": ("gptq", _option(checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    "gptq-pack-dtype": ("gptq", _option(pack_dtype="int16"), "pack_dtype = 'int16': only 'int32'"),
    "gptq-rotation": ("gptq", _option(rotation="hadamard"), "rotation = 'hadamard'"),
    "gptq-dynamic": ("gptq", _option(dynamic={"+:(": {}}), "no regular expression"),
    "gptq-dynamic-bits": ("gptq", _option(dynamic={"+:.*down": {"bits": 2}}), "bits = 2"),
    "g_idx-high": ("gptq-act-order", _edit("g_idx", _put(5, 3)), "groups 0 to 3, but there"),
    "g_idx-negative": ("gptq-act-order", _edit("g_idx", _put(5, -1)), "groups -1 to 2"),
    "g_idx-short": ("gptq-act-order", _edit("g_idx", lambda a: a[:-1]), r"shape \[47\]"),
    "qweight-short": ("gptq", _edit("qweight", lambda a: a[:-1]), r"shape \[5, 32\]"),
    "bias": (
        "gptq",
        lambda t, o: t.update({f"{DOWN}.bias": np.ones(32, np.float16)}),
        "bias': not zero, and the config has no bias",
    ),
    "unexpected": (
        "gptq",
        lambda t, o: t.update({f"{DOWN}.perm": np.ones(32, np.int32)}),
        f"unexpected tensors: {DOWN}.perm",
    ),
    "both": (
        "gptq",
        lambda t, o: t.update({f"{DOWN}.weight": np.ones((32, 48), np.float32)}),
        f"unexpected tensors: {DOWN}.weight",
    ),
    "neither": ("gptq", _edit("qweight", lambda a: False), f"missing tensor '{DOWN}.qweight'"),
    "ct-status": ("packed", _option(quantization_status="frozen"), "_status = 'frozen'"),
    "ct-format": ("packed", _option(format="marlin-24"), "'marlin-24' is not supported"),
    "ct-kv": ("packed", _option(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme = "),
    "ct-sparse": ("packed", _option(sparsity_config={"format": "sparse"}), "sparsity_config"),
    "ct-transform": ("packed", _option(transform_config={"u": {}}), "transform_config"),
    "ct-bits": ("packed", _weights(num_bits=3), "num_bits = 3: int codes of 4 or 8 bits only"),
    "ct-fp4": ("packed", _weights(type="float"), "num_bits = 4: float codes of 8 bits only"),
    "ct-strategy": ("packed", _weights(strategy="tensor_group"), "strategy = 'tensor_group'"),
    "ct-w4a4": ("packed", _inputs({**TOKEN, "num_bits": 4}), "only 8-bit activations"),
    "ct-asymmetric": ("int8-tokens", _inputs({**TOKEN, "symmetric": False}), "asymmetric"),
    "ct-dynamic-tensor": (
        "int8-tokens",
        _inputs({**TOKEN, "strategy": "tensor"}),
        "supported: token",
    ),
    "ct-outputs": (
        "packed",
        lambda t, o: o["config_groups"]["g"].update(output_activations=TOKEN),
        "output_activations",
    ),
    "ct-ignored": ("packed", _option(ignore=["re:.*down_proj"]), f"missing tensors: {DOWN}.weight"),
    "ct-regex": ("packed", _option(ignore=["re:*"]), "no regular expression"),
    "ct-shape": ("packed", _edit("weight_shape", _put(1, 40)), r"\[32, 40\] is not \[32, 48\]"),
    "ct-no-zeros": ("packed", _weights(symmetric=False), "missing tensor .*weight_zero_point"),
    "ct-short": ("packed", _edit("weight_packed", lambda a: a[:, :-1]), r"shape \[32, 5\]"),
    "ct-input-scale": ("int8-static", _edit("input_scale", _put(0, 0)), "0.0 is no scale"),
    "ct-no-input-scale": (
        "int8-static",
        _edit("input_scale", lambda a: False),
        "missing tensor .*input_scale",
    ),
    "fp8-e5m2": ("fp8-blocks", _option(fmt="e5m2"), "fmt = 'e5m2': only 'e4m3'"),
    "fp8-ue8m0": ("fp8-blocks", _option(scale_fmt="ue8m0"), "scale_fmt = 'ue8m0'"),
    "fp8-block": ("fp8-blocks", _option(weight_block_size=[16]), "expected two positive sizes"),
    "fp8-static-blocks": (
        "fp8-blocks",
        _option(activation_scheme="static"),
        "not supported with weight_block_size",
    ),
    "fp8-missing": (
        "fp8-blocks",
        _edit("weight_scale_inv", lambda a: False),
        "missing tensor .*weight_scale_inv",
    ),
    "fp8-scheme": ("fp8-scalar", _option(activation_scheme="token"), "activation_scheme = 'token'"),
    "fp8-scale": ("fp8-scalar", _edit("weight_scale_inv", lambda a: -a), "negative scales"),
}


def _stored(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    return oracle.load(folder), config


@pytest.mark.core
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    case, change, words = DAMAGE[damage]
    tensors, config = tensors_of(case)
    change(tensors, config["quantization_config"])
    oracle.save(tmp_path / "m", tensors, config)
    with pytest.raises(JaxLlamaError, match=words) as caught:
        hf.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value) and "\n" not in str(caught.value)


def test_a_zero_bias_a_zero_group_and_nan_words_are_no_damage(tmp_path: Path) -> None:
    """AutoGPTQ writes biases of zeros; a group of zeros may have scale 0; NaN words only warn."""
    folder, (tensors, config) = tmp_path / "m", tensors_of("fp8-channel-tokens")
    tensors[f"{DOWN}.bias"] = np.zeros(32, np.float16)
    tensors[f"{DOWN}.weight"].view(np.uint8)[3] = 0
    tensors[f"{DOWN}.weight_scale"][3] = 0
    oracle.save(folder, tensors, config)
    down = hf.load(folder)[1]["layer_0"]["mlp"]["down"]["weight"]
    assert not floats_of(down)[3].any() and floats_of(down)[4].any()
    tensors[f"{DOWN}.weight"].view(np.uint8)[5, 7] = 0x7F
    oracle.save(folder, tensors, config)
    with pytest.warns(WeightWarning, match="1 of 1536 weights are NaN"):
        hf.load(folder)


def test_native_damage_is_named(tmp_path: Path) -> None:
    params = quantized(
        CFG,
        lambda path, w: dataclasses.replace(
            words_of(w.shape, group=16, zeros=True), columns=np.arange(w.shape[1], dtype=np.int32)
        ),
    )
    out = packed.save(tmp_path / "out", CFG, params)
    name = "layer_0.mlp.down.weight"
    path = name.replace(".", "/")

    def entry(value: Any) -> Any:
        return lambda t, o: o["weights"].update({path: value})

    for change, words in (
        (lambda t, o: o.update(version=2), "version = 2: only 1"),
        (lambda t, o: o["weights"].update({"layer_9/x": {}}), "'layer_9/x' is no parameter"),
        (entry({"words": "int3"}), "words 'int3'; supported: int4"),
        (entry({"words": "int4", "activations": "int4"}), "activations 'int4' with words 'int4'"),
        (lambda t, o: t.update({f"{name}.unit": np.ones((32, 1), np.float32)}), "F16 is not I8"),
        (entry("int4"), "expected an object or null"),
        (entry(None), f"missing tensors: {name}"),
        (entry([{"words": "int4"}]), f"missing tensor '{name}.0.q'"),
        (lambda t, o: t.pop(f"{name}.scale"), f"missing tensor '{name}.scale'"),
        (lambda t, o: t.pop("norm.weight"), "missing tensors: norm.weight"),
        (lambda t, o: t.update({"norm.weight": np.ones(31, np.float32)}), r"shape \[31\]"),
        (lambda t, o: t.update({"norm.weight": np.ones(32, np.int32)}), "no floating-point type"),
        (lambda t, o: t[f"{name}.columns"].__setitem__(0, 5), "no order of 48 columns"),
        (lambda t, o: t[f"{name}.scale"].__setitem__((0, 0), np.nan), "NaN"),
        (lambda t, o: t.update({f"{name}.extra": np.ones(3, np.float32)}), "unexpected tensors"),
        (
            lambda t, o: t.update({f"{name}.scale": np.ones((32, 5), np.float16)}),
            "5 groups do not divide 48 columns",
        ),
    ):
        tensors, config = _stored(out)
        change(tensors, config["quantization_config"])
        oracle.save(tmp_path / "bad", tensors, config)
        with pytest.raises(JaxLlamaError, match=words) as caught:
            hf.load(tmp_path / "bad")
        assert "bad" in str(caught.value)


_VALUES = (None, True, -1, 0, 3, 4.5, "", "int", "x" * 5, [], ["Linear"], [16, 16], {}, {"a": {}})


def _shake(rng: np.random.Generator, node: Any) -> Any:
    """The JSON value with one thing in it changed, dropped or added."""
    if isinstance(node, dict) and node and rng.random() < 0.8:
        key = list(node)[rng.integers(len(node))]
        if rng.random() < 0.2:
            return {k: v for k, v in node.items() if k != key}
        return {**node, key: _shake(rng, node[key])}
    return _VALUES[rng.integers(len(_VALUES))]


@pytest.mark.parametrize(
    "case",
    [
        "awq",
        "gptq-act-order",
        "packed-zeros",
        "packed-act-order",
        "int8-static",
        "fp8-blocks",
        "native",
    ],
)
@pytest.mark.filterwarnings("ignore::jaxllama.errors.WeightWarning")
def test_fuzz_gives_nothing_but_our_errors(tmp_path: Path, case: str) -> None:
    rng = np.random.default_rng(0)
    source = "gptq-v2-uneven-groups" if case == "native" else case
    folder, _ = write_case(tmp_path / "m", source)
    if case == "native":
        folder = packed.save(tmp_path / "n", *hf.load(folder))
    tensors, config = _stored(folder)
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(40):
        damaged, options = dict(tensors), config["quantization_config"]
        kind = rng.integers(3)
        name = list(damaged)[rng.integers(len(damaged))]
        if kind == 0:
            options = _shake(rng, options)
        elif kind == 1:  # the values of a tensor
            value = damaged[name].copy()
            raw = value.reshape(-1).view(np.uint8)
            raw[rng.integers(raw.size, size=3)] = rng.integers(256, size=3)
            damaged[name] = value
        else:  # its shape or type
            value = damaged[name]
            choice = rng.integers(5)
            damaged[name] = (
                value[..., :-1]
                if choice == 0
                else value[None]
                if choice == 1
                else value.astype(np.float32)
                if choice == 2
                else value.reshape(-1)
                if choice == 3
                else np.zeros(value.shape, np.int32)
            )
        oracle.save(tmp_path / "f", damaged, {**config, "quantization_config": options})
        try:
            hf.load(tmp_path / "f")
            outcomes["loaded"] += 1
        except JaxLlamaError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 3, outcomes
