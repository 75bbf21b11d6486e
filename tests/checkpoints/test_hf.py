"""HF directories: what config.json means, loading into the fused tree, saving, damaged files."""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import inspect
import json
import re
import resource
import shutil
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import check_preset, config_from_hf, config_to_hf
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.config import RopeConfig, load_config, preset_names
from jaxllama.decoding.sampling import Sampling
from jaxllama.errors import JaxLlamaError, WeightWarning
from tests.helpers import models
from tests.helpers.dense_cases import ORACLES, WRAPPED
from tests.helpers.parity_cases import CASES
from tests.helpers.parity_cases import params_of as parity_params
from tests.helpers.seeded import hf_tensors, seeded_params

TINY = models.LLAMA.replace(
    vocab_size=24,
    d_model=16,
    head_dim=6,
    d_ff=20,
    max_position=64,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    bos_token_id=1,
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GOLDEN = Path(__file__).parents[1] / "golden" / "hf_configs.json.gz"


def facts(config: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return config_from_hf(config, "m", **kwargs).to_dict()


# config.json


@pytest.mark.core
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, {"head_dim": 4, "n_kv_heads": 2, "qkv_bias": False, "eos_token_ids": (2,)}),
        ({**LLAMA, "num_key_value_heads": None}, {"n_kv_heads": 4}),
        ({**LLAMA, "head_dim": 6}, {"head_dim": 6}),
        ({**LLAMA, "attention_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        ({**LLAMA, "mlp_bias": True}, {"qkv_bias": False, "o_bias": False, "mlp_bias": True}),
        ({**LLAMA, "tie_word_embeddings": False}, {"tie_embeddings": False}),
        ({**LLAMA, "eos_token_id": [7, 8]}, {"eos_token_ids": (7, 8)}),
        ({**LLAMA, "eos_token_id": None}, {"eos_token_ids": ()}),
        ({**MISTRAL, "sliding_window": 8}, {"sliding_window": 8, "window_layers": ()}),
        (
            {**MISTRAL, "sliding_window": 8, "layer_types": None},
            {"sliding_window": 8, "window_layers": ()},
        ),
        (
            {
                **MISTRAL,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            {"sliding_window": 8, "window_layers": (0,)},
        ),
        (
            {**MISTRAL, "sliding_window": None, "layer_types": ["full_attention"] * 2},
            {"sliding_window": None},
        ),
        ({**MISTRAL, "sliding_window": None}, {"sliding_window": None}),
        (MISTRAL, {"sliding_window": 4096, "qkv_bias": False}),
        ({**QWEN, "sliding_window": 8, "max_window_layers": 1}, {"sliding_window": None}),
        (QWEN, {"qkv_bias": True, "o_bias": False, "mlp_bias": False}),
        (
            {**QWEN, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"sliding_window": 8, "window_layers": (1,)},
        ),
        (
            {**QWEN, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            {"sliding_window": None, "window_layers": ()},
        ),
        (
            {
                **QWEN,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            {"sliding_window": 8, "window_layers": (0,)},
        ),
    ],
    ids=[
        "llama",
        "mha",
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "untied",
        "eos-list",
        "no-eos",
        "mistral-window",
        "ministral-all-windows",
        "ministral",
        "ministral-no-window",
        "mistral-no-window",
        "mistral-default-window",
        "qwen-window-off",
        "qwen-bias",
        "qwen-window-late-layers",
        "qwen-window-no-layer",
        "qwen-layer-types",
    ],
)
def test_config_means(config, expected) -> None:
    got = facts(config)
    assert {key: got[key] for key in expected} == expected


def test_generation_config_names_the_tokens() -> None:
    got = facts(LLAMA, generation={"eos_token_id": [2, 9], "bos_token_id": None})
    assert got["eos_token_ids"] == (2, 9) and got["bos_token_id"] == 1


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
}
ROPES = {
    "default": ({}, RopeConfig(5000.0), 64),
    "linear": ({"factor": 2}, RopeConfig(5000.0, "linear", 2.0), 64),
    "dynamic": ({"factor": 2.0}, RopeConfig(5000.0, "dynamic", 2.0, 64), 128),
    "llama3": (LLAMA3, RopeConfig(5000.0, "llama3", 8.0, 32), 64),
    "yarn": (
        YARN,
        RopeConfig(5000.0, "yarn", 4.0, 32, beta_fast=16.0, mscale=0.7, mscale_all_dim=0.5),
        128,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters", "nested"])
def test_rope_in_every_spelling(kind: str, spelling: str) -> None:
    options, expected, context = ROPES[kind]
    config = dict(LLAMA)
    if spelling in ("type", "rope_type"):
        config["rope_scaling"] = {spelling: kind, **options}
    else:
        del config["rope_theta"]
        config["rope_parameters"] = {"rope_type": kind, "rope_theta": 5000.0, **options}
    if spelling == "nested":
        config["rope_parameters"] = {"full_attention": config["rope_parameters"]}
    cfg = config_from_hf(config, "m")
    assert cfg.rope == expected and cfg.max_position == context
    assert config_from_hf(config_to_hf(cfg), "m") == cfg


def test_yarn_factor_defaults_to_the_ratio_of_contexts() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    assert config_from_hf({**LLAMA, "rope_scaling": scaling}, "m").rope.factor == 4.0


@pytest.mark.core
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {**LLAMA, "model_type": "rwkv"},
            "model_type = 'rwkv': not supported: mixer: RWKV-4's time mixing; supported: llama",
        ),
        ({**LLAMA, "architectures": ["LlamaForTokenClassification"]}, "architectures = "),
        ({}, "model_type = None"),
        ({**LLAMA, "hidden_size": None}, "missing key 'hidden_size'"),
        ({**LLAMA, "hidden_size": 18}, "num_attention_heads = 4: must divide hidden_size (18)"),
        ({**LLAMA, "hidden_size": True}, "hidden_size = True"),
        ({**LLAMA, "vocab_size": 0}, "vocab_size = 0"),
        ({**LLAMA, "vocab_size": 1e9}, "vocab_size = 1000000000.0"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({**LLAMA, "num_key_value_heads": 3}, "n_kv_heads = 3"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5: only 1.0",
        ),
        (
            {
                **LLAMA,
                "model_type": "glm",
                "architectures": None,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5},
            },
            "rope_parameters.partial_rotary_factor = 1.5: must leave",
        ),
        ({**LLAMA, "eos_token_id": [1, "x"]}, "eos_token_id = [1, 'x']"),
        ({**LLAMA, "rope_theta": float("nan")}, "rope_theta = nan"),
        ({**LLAMA, "rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({**LLAMA, "rope_scaling": {"type": "ntk"}}, "rope_scaling.type = 'ntk'"),
        ({**LLAMA, "rope_scaling": {"type": "longrope"}}, "rope_scaling.short_factor = None"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "missing key 'rope_scaling.factor'"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor = 0"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {**QWEN, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
            "layer_types",
        ),
        ({**QWEN, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({**MISTRAL, "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({**LLAMA, "is_causal": False}, "is_causal = False: only True is supported"),
        ({**QWEN, "is_causal": None}, "is_causal = None"),
        ({**LLAMA, "per_layer_config": {"0": {"num_key_value_heads": 4}}}, "per_layer_config = "),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(" =")[0].replace(" ", "-"),
)
def test_unsupported_config_names_the_key(config, words) -> None:
    with pytest.raises(JaxLlamaError) as caught:
        config_from_hf(config, "m")
    assert words in str(caught.value) and "\n" not in str(caught.value)


_EXPERTS = "a mixture of experts, which is not supported"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gpt_oss", "num_local_experts": 8}, _EXPERTS),
        ({"model_type": "ernie4_5_moe"}, _EXPERTS),
        ({"model_type": "unknown", "n_routed_experts": 256}, _EXPERTS),
        ({"model_type": "unknown", "is_moe": True, "num_experts": 16384}, _EXPERTS),
        ({"model_type": "unknown", "enable_moe_block": True, "num_experts": 128}, _EXPERTS),
        # Types whose reason is known
        (
            {"model_type": "deepseek_v4", "n_routed_experts": 256},
            "not supported: form: hyper-connections, and sparse attention over compressed keys",
        ),
        *(
            ({"model_type": kind}, "not supported: an encoder, also if it runs as a decoder")
            for kind in ("xmod", "bert", "roberta", "modernbert-decoder")
        ),
        *(
            ({"model_type": kind}, "not supported: an early decoder, which newer models have")
            for kind in ("openai-gpt", "ctrl", "xglm", "biogpt", "persimmon", "gpt-sw3")
        ),
        # Dense models with the keys of experts
        (
            {"model_type": "unknown", "enable_moe_block": False, "num_experts": None},
            "not supported",
        ),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0},
            "not supported",
        ),
        (
            {
                "model_type": "unknown",
                "is_moe": False,
                "num_experts": 16384,
                "num_experts_per_tok": 64,
            },
            "not supported",
        ),
        # Decoders by other names, and what is none
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "not supported"),
        ({"model_type": "rwkv", "architectures": None}, "not supported"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "no decoder-only language model",
        ),
        (
            {"model_type": "t5", "architectures": None, "is_encoder_decoder": True},
            "no decoder-only language model",
        ),
        ({"model_type": "pixtral", "vision_config": {"depth": 2}}, "a multimodal model whose"),
        ({"model_type": "x", "vision_config": None}, "not supported"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_the_reason_why_a_model_is_not_supported_is_its_own(config, reason) -> None:
    config = {**LLAMA, "architectures": ["OtherForCausalLM"], **config}
    with pytest.raises(JaxLlamaError, match=rf"= .*: {re.escape(reason)}.*; supported: llama"):
        config_from_hf(config, "m")


def test_gemma_3_does_not_cap_attention_as_transformers_does_not() -> None:
    """Its class reads the key and never uses it; the other cap it applies."""
    config = {
        **LLAMA,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 8,
        "final_logit_softcapping": 3.0,
    }
    with pytest.warns(WeightWarning, match="ignored, as by its own library: 'attn_logit_softcappi"):
        cfg = config_from_hf({**config, "attn_logit_softcapping": 2.0}, "m")
    assert cfg == config_from_hf(config, "m")
    assert (cfg.attn_softcap, cfg.logit_softcap) == (None, 3.0)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        *(
            (name, "mtp.layers.0.{}")
            for name in ("qwen3_5_text", "qwen3_next", "nemotron_h", "olmo_hybrid")
        ),
        ("ernie4_5_moe", "model.mtp_block.0.{}"),
        ("gemma4_text", "model.layers.{last}.self_attn.{}_proj"),  # which borrows its keys
    ],
)
def test_tensors_that_a_family_does_not_use_are_counted_in_a_warning(
    name, prefix, tmp_path
) -> None:
    """transformers leaves these of the family out; other names are still unexpected."""
    params = parity_params(name)
    path = hf.save(tmp_path / "model", CASES[name], params)
    file = path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    names = [prefix.format(part, last=CASES[name].n_layers - 1) + ".weight" for part in "kv"]
    extra = {one: np.ones((2, 2), np.float32) for one in names}
    safetensors.numpy.save_file({**tensors, **extra}, file)
    with pytest.warns(
        WeightWarning, match=f"2 tensors are not used, as in transformers: {names[0]}"
    ):
        _, got = hf.load(path)
    want = hf.load(hf.save(tmp_path / "plain", CASES[name], params))[1]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    safetensors.numpy.save_file({**tensors, "other.weight": np.ones(2, np.float32)}, file)
    with pytest.raises(JaxLlamaError, match="unexpected tensors: other.weight"):
        hf.load(path)


OTHERS = {
    "logit_scale": 0.5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "no_rope_layers": [1, 0],
    "use_qk_norm": True,
    "clip_qkv": 8.0,
    "scale_emb": 12,
    "num_local_experts": 8,
}
OFF = {"clip_qkv": None, "use_qk_norm": False, "num_local_experts": 0, "no_rope_layers": []}


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({**LLAMA, **OTHERS}, [*OTHERS]),
        ({**LLAMA, "sliding_window": 8}, ["sliding_window"]),
        ({**QWEN, "mlp_bias": True}, ["mlp_bias"]),
        ({**config_to_hf(load_config("gla-340m")), "logit_scale": 0.5}, ["logit_scale"]),
    ],
    ids=["llama", "llama-window", "qwen2-mlp-bias", "gla"],
)
def test_keys_of_another_architecture_are_one_warning(config, keys) -> None:
    with pytest.warns(WeightWarning) as caught:
        cfg = config_from_hf(config, "m")
    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith("m: config.json: ") and "\n" not in message
    assert message.endswith(": " + ", ".join(map(repr, keys)))
    # Nothing is meant by them that is off, and they change nothing.
    assert cfg == config_from_hf({k: v for k, v in config.items() if k not in keys} | OFF, "m")


KINDS = sorted(set(FAMILIES) - set(ORACLES))


# Types whose config has a class of its own, and whose model is another type's.
MODEL_OF = {
    "exaone": "llama",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "sarvam_moe": "glm4_moe",
    "sarvam_mla": "deepseek_v3",
}


def transformers_reads(kind: str) -> dict[str, Any]:
    """{"config": transformers' default config.json of a model type, "keys": the names that its
    model reads of a config}."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    given = {
        "qwen3_next": {"num_experts": 0},
        "kimi_linear": {"first_k_dense_replace": 99},
        "glm4_moe": {"head_dim": 128},
        "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "deepseek_v2": {"num_experts_per_tok": 6},
    }
    config = transformers.AutoConfig.for_model(kind, **given.get(kind, {})).to_dict()
    config.pop("transformers_version")
    name = MODEL_OF.get(kind, kind.removesuffix("_text")).replace("-", "_")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    found = set(re.findall(r"config\.([a-z]\w+)|config, \"(\w+)\"", inspect.getsource(module)))
    # Its masks read is_causal; layer_types it looks for in classes that share the code.
    others = {"layer_types"}
    if kind in ("aria_text", "apertus1p5_text", *WRAPPED):  # the same file has the multimodal model
        others |= {name for pair in found for name in pair} - {*config}
    if kind in ("falcon_h1", "nemotron_h", "zamba2"):
        others |= {"get_text_config"}  # a method
    if kind == "dbrx":
        others |= {*config["attn_config"], *config["ffn_config"]}  # which it reads of these
    if kind == "minicpm3":
        others |= {"logits_scaling"}  # computed from other keys
    if kind == "gemma3_text":  # the same file has the multimodal model
        others |= {
            "text_config",
            "get_text_config",
            "vision_config",
            "image_token_id",
            "mm_tokens_per_image",
            "use_cache",
        }
        others |= {"attn_logit_softcapping"}  # which it reads and never uses
    if kind.startswith("gemma4"):  # the same file has the multimodal model
        vision = transformers.AutoConfig.for_model(kind.replace("text", "vision")).to_dict()
        audio = transformers.AutoConfig.for_model(kind.replace("text", "audio")).to_dict()
        around = transformers.AutoConfig.for_model(kind.removesuffix("_text")).to_dict()
        others |= {"get_text_config", *vision, *audio, *around} - {*config}
        others |= {"use_cache", "kv_sharing_modes", "pad_token_id", "model_patch_size"}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        vision = transformers.AutoConfig.for_model(kind.replace("text", "vision")).to_dict()
        others |= {
            "text_config",
            "get_text_config",
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            *vision,
        } - {*config}
    keys = {name for pair in found for name in pair if name} - others | {"is_causal"}
    return {"config": config, "keys": sorted(keys)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_reads_of_a_config_is_known(kind) -> None:
    """Its own files warn of nothing, and no attribute that its model reads is passed over."""
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as file:
        said = json.load(file)[kind]
    config = said["config"]
    cfg = config_from_hf(config, "m")
    if kind != "nemotron_h":  # whose file has the kinds of its layers instead
        n_layers = FAMILIES[kind].shared(config)["num_hidden_layers"]
        assert cfg.n_layers == n_layers + len(cfg.beside_layers)
    for key in said["keys"]:
        with contextlib.suppress(JaxLlamaError):  # a warning is an error here
            config_from_hf({**config, "architectures": None, key: "x"}, "m")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_golden_configs_are_transformers_own(kind) -> None:
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as file:
        assert json.load(file)[kind] == json.loads(json.dumps(transformers_reads(kind)))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "llama"),
        ({"qkv_bias": False, "o_bias": False}, "llama"),
        ({"qkv_bias": False, "o_bias": False, "mlp_bias": False, "sliding_window": 8}, "mistral"),
        ({"o_bias": False, "mlp_bias": False}, "qwen2"),
        (
            {
                "qkv_bias": False,
                "o_bias": False,
                "mlp_bias": False,
                "sliding_window": 8,
                "window_layers": (1,),
            },
            "ministral",
        ),
        ({"o_bias": False, "mlp_bias": False, "sliding_window": 8, "window_layers": (1,)}, "qwen2"),
    ],
    ids=["bias", "llama", "mistral", "qwen2", "ministral", "qwen2-window"],
)
def test_config_to_hf_finds_the_architecture(changes, kind) -> None:
    cfg = TINY.replace(**changes)
    config = json.loads(json.dumps(config_to_hf(cfg)))
    assert config["model_type"] == kind
    assert config_from_hf(config, "tiny") == cfg


def test_layers_that_no_interval_names_are_refused_by_the_rule() -> None:
    """Every second layer from the first one on has one distance, and still no key can say it."""
    cfg = CASES["ernie4_5_moe"].replace(n_layers=5)
    assert config_from_hf(config_to_hf(cfg.replace(expert_layers=(1, 3))), "m").n_layers == 5
    with pytest.raises(JaxLlamaError, match=r"\(0, 2, 4\): .* \(i \+ 1\) % interval = 0"):
        config_to_hf(cfg.replace(expert_layers=(0, 2, 4)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_scale": True}, "embedding_scale"),
        ({"o_bias": False}, "mlp_bias"),
        ({"qkv_bias": False, "mlp_bias": False}, "o_bias"),
    ],
    ids=["embedding_scale", "mlp_bias", "o_bias"],
)
def test_config_without_an_hf_architecture_names_the_option(changes, words) -> None:
    with pytest.raises(JaxLlamaError, match=words):
        config_to_hf(TINY.replace(**changes))


# Loading


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    """A directory as other programs write it: config.json, and the safetensors package's file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return seeded_params(TINY)


@pytest.fixture
def folder(tmp_path: Path, params) -> Path:
    return write(tmp_path / "tiny", hf_tensors(TINY, params), config_to_hf(TINY))


def assert_trees_equal(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.core
def test_load_fuses_rows_and_aligns(folder, params) -> None:
    cfg, got = hf.load(folder)
    assert cfg == TINY
    assert_trees_equal(got, params)
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    qkv = [stored[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    np.testing.assert_array_equal(got["layer_1"]["mixer"]["qkv"]["weight"], np.concatenate(qkv))
    up = stored["model.layers.0.mlp.up_proj.bias"]
    np.testing.assert_array_equal(got["layer_0"]["mlp"]["gate_up"]["bias"][20:], up)
    assert all(leaf.ctypes.data % 64 == 0 for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_load_converts(tmp_path, params, stored, wanted) -> None:
    tensors = {name: t.astype(stored) for name, t in hf_tensors(TINY, params).items()}
    path = write(tmp_path / "m", {}, config_to_hf(TINY))
    hf.save(tmp_path / "n", TINY, jax.tree.map(lambda leaf: leaf.astype(stored), params))
    shutil.copy(tmp_path / "n" / "model.safetensors", path)
    _, got = hf.load(path, dtype=wanted)
    head = got["head"]["weight"]
    assert head.dtype == wanted
    np.testing.assert_array_equal(head, tensors["lm_head.weight"].astype(wanted))


@pytest.mark.core
def test_sharded_equals_single(tmp_path, folder, params) -> None:
    sharded = hf.save(tmp_path / "sharded", TINY, params, max_shard_bytes=4000)
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 2
    cfg, got = hf.load(sharded)
    assert cfg == TINY.replace(name="sharded")
    assert_trees_equal(got, hf.load(folder)[1])


def test_every_parameter_passes_through_place(folder, params) -> None:
    _, got = hf.load(folder, place=lambda path, array: ("/".join(path), jax.device_put(array)))
    name, array = got["layer_0"]["mixer"]["o"]["weight"]
    assert name == "layer_0/mixer/o/weight"
    np.testing.assert_array_equal(array, params["layer_0"]["mixer"]["o"]["weight"])


def test_derived_tables_and_a_tied_head_are_ignored(tmp_path, params) -> None:
    cfg = TINY.replace(tie_embeddings=True)
    tensors = hf_tensors(TINY, params)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    got_cfg, got = hf.load(write(tmp_path / "m", tensors, config_to_hf(cfg)))
    assert got_cfg.tie_embeddings and "head" not in got
    np.testing.assert_array_equal(got["embed"]["weight"], params["embed"]["weight"])


def with_head(folder: Path, params: dict[str, Any], head: str) -> Path:
    """A directory that says that its head is tied, and has this head."""
    cfg = TINY.replace(tie_embeddings=True, qkv_bias=False, o_bias=False)
    tensors = hf_tensors(cfg, {k: v for k, v in params.items() if k != "head"})
    embed = tensors["model.embed_tokens.weight"]
    heads = {
        "equal": embed.copy(),
        "rounded": embed.astype(ml_dtypes.bfloat16),
        "different": params["head"]["weight"],
    }
    if head in heads:
        tensors["lm_head.weight"] = heads[head]
    return write(folder, tensors, config_to_hf(cfg))


# Whether transformers ties it.
TIES = {"equal": True, "rounded": False, "different": False, "absent": True}


@pytest.mark.parametrize("head", TIES)
def test_a_tied_flag_beside_a_head_means_what_transformers_takes_it_to_mean(
    tmp_path, params, head
) -> None:
    """It ties equal tensors only."""
    path, is_tied = with_head(tmp_path / "m", params, head), TIES[head]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got_cfg, got = hf.load(path)
        assert hf.read_config(path) == got_cfg
    assert ("head" not in got) == got_cfg.tie_embeddings == is_tied
    messages = {str(warning.message) for warning in caught}
    assert len(messages) == (not is_tied) and all("'lm_head.weight' differs" in m for m in messages)
    stored = safetensors.numpy.load_file(path / "model.safetensors")
    want = stored["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    np.testing.assert_array_equal(got["embed" if is_tied else "head"]["weight"], want)


@pytest.mark.slow
@pytest.mark.parametrize("head", TIES)
def test_what_transformers_ties(tmp_path, params, head) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = with_head(tmp_path / "m", params, head)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == TIES[head]
    stored = safetensors.numpy.load_file(path / "model.safetensors")
    name = "model.embed_tokens.weight" if TIES[head] else "lm_head.weight"
    np.testing.assert_array_equal(model.lm_head.weight.detach(), stored[name].astype(np.float32))


def test_preset_must_agree(folder) -> None:
    with pytest.raises(JaxLlamaError, match="d_ff: preset 'mine' says 22, .* 'tiny' says 20"):
        hf.load(folder, cfg=TINY.replace(name="mine", d_ff=22))
    assert hf.load(folder, cfg=TINY.replace(attn_sparsity=0.5))[0].attn_sparsity == 0.5


def test_nan_and_overflow_are_warnings(tmp_path, params) -> None:
    tensors = {name: t.copy() for name, t in hf_tensors(TINY, params).items()}
    tensors["model.norm.weight"][3] = np.nan
    path = write(tmp_path / "m", tensors, config_to_hf(TINY))
    with pytest.warns(WeightWarning, match=r"'model.norm.weight': 1 of 16 weights are NaN"):
        hf.load(path)
    tensors["model.norm.weight"][2:4] = 1e6
    write(path, tensors, config_to_hf(TINY))
    with pytest.warns(WeightWarning, match=r"'model.norm.weight': 2 of 16 .* in float16"):
        hf.load(path, dtype=np.float16)


# Damage


def parts(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(folder: Path, header: Any, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


NORM = "model.norm.weight"


def edit(key: str, value: Any):
    def damage(folder: Path) -> None:
        header, data = parts(folder)
        header[NORM] = {**header[NORM], key: value}
        join(folder, header, data)

    return damage


def rename(old: str, new: str):
    def damage(folder: Path) -> None:
        header, data = parts(folder)
        join(folder, {new if name == old else name: v for name, v in header.items()}, data)

    return damage


def raw(change):
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def overlap(folder: Path) -> None:
    header, data = parts(folder)
    norms = [value for name, value in header.items() if name.endswith("norm.weight")]
    first, second, *_ = sorted(norms, key=lambda value: value["data_offsets"])
    second["data_offsets"] = first["data_offsets"]
    join(folder, header, data)


def twice(folder: Path) -> None:
    header, data = parts(folder)
    text = json.dumps(header)
    join(folder, (text[:-1] + "," + json.dumps({NORM: header[NORM]})[1:]).encode(), data)


def config(**changes: Any):
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def index(weight_map: Any):
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


DAMAGE = {
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors and no"),
    "no-config": (lambda f: (f / "config.json").unlink(), "no config.json in this folder"),
    "config-not-json": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "config-not-object": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
    "config-deep": (lambda f: (f / "config.json").write_text('{"a":' * 10**5), "config.json: not"),
    "config-digits": (lambda f: (f / "config.json").write_text('{"a":' + "1" * 5000 + "}"), "not"),
    "empty": (raw(lambda b: b""), "model.safetensors: 0 bytes"),
    "truncated-header": (raw(lambda b: b[:100]), "the header length is"),
    "truncated-data": (raw(lambda b: b[:-1]), "would end at byte"),
    "longer": (raw(lambda b: b + b"x"), "1 bytes after the last tensor"),
    "huge-header": (
        raw(lambda b: b"\xff" * 8 + b[8:]),
        "header length is 18446744073709551615",
    ),
    "header-not-json": (raw(lambda b: b[:8] + b"x" + b[9:]), "header: not JSON"),
    "duplicate": (twice, "the key 'model.norm.weight' is there twice"),
    "dtype": (edit("dtype", "F12"), "tensor 'model.norm.weight': unknown dtype 'F12'"),
    "integers": (edit("dtype", "I32"), "tensor 'model.norm.weight': dtype I32"),
    "shape-type": (edit("shape", [-16]), "bad shape [-16]"),
    "shape-size": (edit("shape", [2**62, 2**62]), "needs 850705917302346158658436518579420528"),
    "shape-wrong": (edit("shape", [4, 4]), "shape [4, 4], but the config wants [16]"),
    "offsets-beyond": (edit("data_offsets", [2**60, 2**60 + 64]), "would end at byte 1152921504"),
    "offsets-reversed": (edit("data_offsets", [64, 0]), "bad data_offsets [64, 0]"),
    "offsets-float": (edit("data_offsets", [0.0, 64.0]), "bad data_offsets [0.0, 64.0]"),
    "overlap": (overlap, "its data overlaps"),
    "missing": (
        rename("model.layers.1.mlp.down_proj.bias", "x.inv_freq"),
        "missing tensors: model.layers.1.mlp.down_proj.bias",
    ),
    "unexpected": (config(num_hidden_layers=1), "unexpected tensors: model.layers.1."),
    "layers": (config(num_hidden_layers=4000), "num_hidden_layers = 4000, but there are only"),
    "config-shape": (config(intermediate_size=2**30), "but the config wants [16, 1073741824]"),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config"),
    "index-outside": (index({NORM: "../a.safetensors"}), "'../a.safetensors' is no file beside it"),
    "index-no-file": (index({NORM: "b.safetensors"}), "b.safetensors: No such file"),
    "index-wrong": (index({"ghost": "a.safetensors"}), "tensor 'ghost' is not in 'a.saf"),
    "index-type": (index([1]), "weight_map: expected an object"),
}


@pytest.mark.core
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_naming_the_place(folder, damage) -> None:
    change, words = DAMAGE[damage]
    change(folder)
    with pytest.raises(JaxLlamaError) as caught:
        hf.load(folder)
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 600
    assert message.startswith(str(folder))


def outcome(folder: Path) -> str:
    """Load, and say how it ended; any exception but our own escapes.  Checks memory on the way."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightWarning)
            hf.load(folder)
        return "loaded"
    except JaxLlamaError as error:
        assert "\n" not in str(error)
        return "refused"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * size + 500_000  # the tree, the header's objects, and Python's own


def fuzz(check: Any) -> tuple[Any, Any]:
    """``check(folder, data)`` of a few examples, and of many under ``slow``."""

    def of(examples: int) -> Any:
        def test(folder, data) -> None:
            check(folder, data)

        return hypothesis.settings(
            deadline=None,
            max_examples=examples,
            suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
        )(hypothesis.given(data=st.data())(test))

    return of(60), pytest.mark.slow(of(1000))


numbers = st.one_of(
    st.integers(-2, 40), st.integers(), st.sampled_from([2**31, 2**63, 2**64, 10**400])
)
junk = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.floats(),
    st.text(max_size=5),
    st.lists(numbers, max_size=4),
    st.dictionaries(st.text(max_size=3), numbers, max_size=2),
)


def fuzzed_bytes(folder, data) -> None:
    hf_bytes = (folder / "model.safetensors").read_bytes()
    damaged = bytearray(hf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        # Most of a file is weights; half of the changes go where the structure is.
        span = len(damaged) if data.draw(st.booleans()) else min(400, len(damaged))
        at = data.draw(st.integers(0, max(span - 1, 0)))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "cut":
            del damaged[at : at + data.draw(st.integers(1, 1000))]
        elif action == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif damaged:
            damaged[at] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        assert outcome(folder) == "refused" or len(damaged) == len(hf_bytes)
    finally:
        (folder / "model.safetensors").write_bytes(hf_bytes)


def fuzzed_header(folder, data) -> None:
    hf_bytes = (folder / "model.safetensors").read_bytes()
    header, values = parts(folder)
    name = data.draw(st.sampled_from(sorted(header)))
    if data.draw(st.booleans()):
        header[name] = data.draw(junk)
    else:
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header[name] = {**header[name], key: data.draw(junk)}
    join(folder, header, values)
    try:
        # Only the metadata may hold anything.
        assert outcome(folder) == ("loaded" if name == "__metadata__" else "refused") or (
            header == json.loads(hf_bytes[8 : -len(values)])
        )
    finally:
        (folder / "model.safetensors").write_bytes(hf_bytes)


def fuzzed_config(folder, data) -> None:
    path = folder / "config.json"
    text = path.read_text()
    config = json.loads(text)
    keys = ["rope_parameters", "layer_types", "partial_rotary_factor", "sliding_window"]
    keys += [*config, "is_causal", "logit_scale"]
    for _ in range(data.draw(st.integers(1, 2))):
        config[data.draw(st.sampled_from(keys))] = data.draw(junk)
    scaling = data.draw(st.sampled_from([None, "yarn", "llama3", "dynamic", "linear"]))
    if scaling:
        keys = ["factor", "original_max_position_embeddings", "beta_fast", "mscale", "truncate"]
        config["rope_scaling"] = {"rope_type": scaling, "factor": 2.0}
        config["rope_scaling"][data.draw(st.sampled_from(keys))] = data.draw(junk)
    try:
        path.write_text(json.dumps(config))
    except ValueError:  # an integer too long for JSON
        return
    try:
        assert outcome(folder) in ("loaded", "refused")
    finally:
        path.write_text(text)


test_fuzz_bytes, test_fuzz_many_bytes = fuzz(fuzzed_bytes)
test_fuzz_header, test_fuzz_many_headers = fuzz(fuzzed_header)
test_fuzz_config, test_fuzz_many_configs = fuzz(fuzzed_config)


# Memory


def test_loading_holds_little_beside_the_tree(tmp_path) -> None:
    """What numpy holds at most, of a directory of 6 MB."""
    cfg = TINY.replace(vocab_size=1000, d_model=256, d_ff=768)
    folder = hf.save(tmp_path / "m", cfg, seeded_params(cfg))
    tracemalloc.start()
    _, got = hf.load(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(got))


@pytest.mark.slow
def test_peak_memory_of_a_float32_directory(tmp_path) -> None:
    """Loading and handing to JAX takes at most 1.3 times the directory's size."""
    cfg = TINY.replace(
        vocab_size=16000,
        d_model=1024,
        n_heads=8,
        n_kv_heads=8,
        head_dim=128,
        d_ff=3072,
        n_layers=4,
        layer_types=(),
    )
    half = np.full((), 0.5, np.float32)
    tree: dict[str, Any] = {}
    for path, spec in hf.tensor_table(cfg).items():
        *rooms, leaf = path
        room = tree
        for key in rooms:
            room = room.setdefault(key, {})
        room[leaf] = np.broadcast_to(half, spec.shape)
    folder = hf.save(tmp_path / "m", cfg, tree)
    program = """
        import sys
        import jax
        from jaxllama.checkpoints.hf import load as hf
        def peak():
            with open("/proc/self/status") as file:
                line = next(line for line in file if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        jax.block_until_ready(jax.numpy.ones(8) + 1)
        before = peak()
        _, params = hf.load(sys.argv[1])
        params = jax.block_until_ready(jax.device_put(params))
        after = peak()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        value = float(params["layer_3"]["mlp"]["down"]["weight"][-1, -1])
        print(size, after - before, value)
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    size, grown, value = result.stdout.split()
    assert int(size) > 200e6 and float(value) == 0.5
    assert int(grown) <= 1.3 * int(size)


# Saving


@pytest.mark.core
def test_save_round_trips(tmp_path, params) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    cfg = TINY.replace(eos_token_ids=(2, 5))
    path = hf.save(tmp_path / "sub" / "tiny", cfg, jax.device_put(params), [tokenizer])
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    got_cfg, got = hf.load(path)
    assert got_cfg == cfg
    assert_trees_equal(got, params)
    stored = safetensors.numpy.load_file(path / "model.safetensors")
    want = hf_tensors(cfg, params)
    assert stored.keys() == want.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(value, want[name])


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_saved_and_read_again(tmp_path, name) -> None:
    """Its config at full size, and a small model of its structure with its weights."""
    preset = load_config(name)
    assert check_preset(preset, config_from_hf(config_to_hf(preset, "float32"), name)) == preset
    cfg = models.shrunk(preset)
    params = seeded_params(cfg)
    hf.save(tmp_path / "saved", cfg, params)
    _, read = hf.load(tmp_path / "saved", cfg=cfg)
    # A multiplier that is folded into a weight (Granite's) rounds it twice.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=3e-7), read, params)


def test_save_in_bfloat16_keeps_the_bits(tmp_path, params) -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params)
    _, got = hf.load(hf.save(tmp_path / "m", TINY, low), dtype=ml_dtypes.bfloat16)
    assert_trees_equal(got, low)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"


SAMPLINGS = [
    ({}, None),
    ({"eos_token_id": 2, "top_k": None}, None),
    ({"do_sample": False, "temperature": 9.0}, Sampling()),
    ({"temperature": 0.6, "repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
    ({"do_sample": True}, Sampling(1.0)),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(0.6, top_p=0.9)),
    (
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.05,
        },
        Sampling(0.7, 20, 1.0, 0.05, 1.05),
    ),
    ({"do_sample": True, "temperature": "hot"}, "temperature = 'hot': expected a finite"),
    ({"do_sample": True, "top_k": -1}, "top_k = -1: expected an integer"),
    ({"do_sample": True, "top_p": 2}, "top_p = 2.0: must be a number above 0 to 1"),
    ({"do_sample": "yes"}, "do_sample = 'yes': expected true or false"),
]


@pytest.mark.parametrize(("said", "want"), SAMPLINGS)
def test_generation_config_s_sampling(tmp_path, params, said, want) -> None:
    path = tmp_path / "generation_config.json"
    assert hf.read_sampling(tmp_path) is None
    path.write_text(json.dumps(said))
    if isinstance(want, str):
        with pytest.raises(JaxLlamaError, match=f"^{re.escape(f'{path}: {want}')}"):
            hf.read_sampling(tmp_path)
        return
    assert hf.read_sampling(tmp_path) == want
    assert hf.read_sampling(hf.save(tmp_path / "saved", TINY, params, sampling=want)) == want


@pytest.mark.slow
def test_transformers_reads_a_saved_sampling(tmp_path, params) -> None:
    transformers = pytest.importorskip("transformers")
    for number, (_, want) in enumerate(SAMPLINGS):
        if isinstance(want, str):
            continue
        saved = hf.save(tmp_path / str(number), TINY, params, sampling=want)
        theirs = transformers.GenerationConfig.from_pretrained(saved)
        theirs.validate(strict=True)
        if want is not None:
            assert theirs.do_sample == (want.temperature > 0)
            for key in ("temperature", "top_k", "top_p", "min_p") if want.temperature else ():
                assert getattr(theirs, key) == getattr(want, key)
            assert theirs.repetition_penalty == want.repetition_penalty


def test_save_overwrites_nothing(tmp_path, folder, params) -> None:
    before = {file: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(JaxLlamaError, match="already exists"):
        hf.save(folder, TINY, params)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert hf.load(hf.save(tmp_path / "empty", TINY, params))[0].n_layers == 2


@pytest.mark.core
def test_disk_full_leaves_nothing(tmp_path, params) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))
    try:
        with pytest.raises(JaxLlamaError, match="m: not written: File too large"):
            hf.save(tmp_path / "m", TINY, params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(JaxLlamaError, match="not written: No such file"):
        hf.save(tmp_path / "m", TINY, params, [tmp_path / "tokenizer.json"])
    assert list(tmp_path.iterdir()) == []


def test_save_checks_the_tree(tmp_path, params) -> None:
    with pytest.raises(JaxLlamaError, match="params: missing: head/weight"):
        hf.save(tmp_path / "m", TINY, {k: v for k, v in params.items() if k != "head"})
    with pytest.raises(JaxLlamaError, match=r"norm/weight: shape \[15\], but .* \[16\]"):
        hf.save(tmp_path / "m", TINY, {**params, "norm": {"weight": np.ones(15, np.float32)}})
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("name", "whole", "shape"),
    [
        ("dbrx", "transformer.blocks.1.ffn.experts.mlp.w2", (6 * 24, 32)),
        ("lara_mini", "model.layers.2.linear_attn.in_proj.weight", (2 * 16 + 2 * 48 + 2 * 4, 32)),
    ],
)
def test_parameters_that_share_a_tensor_have_rows_of_it(name, whole, shape, tmp_path) -> None:
    cfg, params = CASES[name], parity_params(name)
    path = hf.save(tmp_path / "m", cfg, params)
    written = safetensors.numpy.load_file(path / "model.safetensors")
    assert written[whole].shape == shape
    assert not [tensor for tensor in written if "[" in tensor]
    again, got = hf.load(path)
    assert again.replace(name=cfg.name) == cfg
    jax.tree.map(np.testing.assert_array_equal, got, params)
    changed = json.loads((path / "config.json").read_text())
    if name == "dbrx":
        changed["ffn_config"]["ffn_hidden_size"] = 16
    else:
        changed["linear_num_key_heads"] = 4
    (path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(JaxLlamaError, match=rf"shape \[{shape[0]}, 32\], but the config wants"):
        hf.load(path)
