"""Presets: published parameter counts, round trips through HF's config.json, and the loader."""

from __future__ import annotations

import functools
import math
import runpy
import tomllib
from pathlib import Path

import jax
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.config import check_preset, config_from_hf, config_to_hf
from jaxllama.config import (
    ModelConfig,
    RopeConfig,
    load_config,
    of_last_version,
    preset_names,
)
from jaxllama.errors import JaxLlamaError
from jaxllama.generation import init_params
from jaxllama.model.mixers import has_states
from jaxllama.model.params import param_table
from pallas_kernels import ClampedGate
from tests.helpers import models
from tests.helpers.parity_cases import CASES

# Parameters as the model cards' files count them (a tied head once).
PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.7-flash": 29_943_393_920,  # of transformers' class, without the head for drafts
    "gemma-3-4b": 3_880_263_168,  # without the image encoder
}


@pytest.mark.core
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_count(name: str) -> None:
    cfg = load_config(name)
    assert sum(spec.size for spec in param_table(cfg).values()) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama-2-70b", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_the_model_has_the_same_parameters_as_the_table(name: str) -> None:
    """eval_shape over the whole model; a few layers say as much as eighty."""
    cfg = load_config(name)
    cfg = cfg.replace(n_layers=3)
    shapes = jax.eval_shape(functools.partial(init_params, cfg), jax.random.key(0))
    leaves = {
        tuple(part.key for part in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    assert leaves == {path: spec.shape for path, spec in param_table(cfg).items()}


def test_every_preset_of_the_llama_families_has_a_published_count() -> None:
    attention_only = {name for name in preset_names() if not has_states(load_config(name))}
    assert attention_only == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_round_trip_through_hf(name: str) -> None:
    cfg = load_config(name)
    assert config_from_hf(config_to_hf(cfg), name) == cfg
    assert check_preset(cfg, config_from_hf(config_to_hf(cfg), "copy")) == cfg


def test_facts_of_some_presets() -> None:
    assert load_config("mistral-7b-v0.1").sliding_window == 4096
    assert load_config("mistral-7b-v0.3").sliding_window is None
    assert load_config("llama-3.2-1b").rope == RopeConfig(
        theta=500000.0, scaling="llama3", factor=32.0, original_max_position=8192
    )
    assert load_config("qwen2.5-7b").qkv_bias and not load_config("qwen2.5-7b").o_bias


def toml(tmp_path, text: str):
    path = tmp_path / "m.toml"
    path.write_text(text)
    return path


GOOD = """
vocab_size = 8
d_model = 8
n_layers = 2
n_heads = 2
n_kv_heads = 1
head_dim = 4
d_ff = 8
norm_eps = 1e-5
max_position = 16
tie_embeddings = true
[rope]
theta = 10000.0
"""


def test_toml_file(tmp_path) -> None:
    cfg = load_config(toml(tmp_path, GOOD))
    assert cfg.name == "m" and cfg.layer_types == ("attention", "attention")
    assert math.isclose(cfg.norm_eps, 1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("vocab_size = 8", "vocab_size = 0"), "vocab_size = 0"),
        (("vocab_size = 8", "vocab_size = true"), "vocab_size = True"),
        (("vocab_size = 8", ""), "missing key 'vocab_size'"),
        (("vocab_size = 8", "vocab_size = 8\nvocabulary = 8"), "unknown key 'vocabulary'"),
        (("vocab_size = 8", "vocab_sise = 8"), "did you mean 'vocab_size'?"),
        (("theta = 10000.0", 'theta = "big"'), "rope.theta"),
        (("theta = 10000.0", 'theta = 1e4\nscaling = "ntk"'), "rope.scaling = 'ntk'"),
        (("theta = 10000.0", 'theta = 1e4\nscaling = "yarn"'), "rope.original_max_position"),
        (("n_kv_heads = 1", "n_kv_heads = 3"), "n_kv_heads = 3"),
        (("head_dim = 4", "head_dim = 3"), "head_dim = 3"),
        (("n_layers = 2", 'n_layers = 2\nlayer_types = ["mamba", "gla"]'), "layer_types"),
        (("n_layers = 2", "n_layers = 2\nwindow_layers = [2]"), "window_layers = (2,)"),
        (("n_layers = 2", "n_layers = ="), "not a TOML file"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else value.replace(" ", ""),
)
def test_bad_toml_is_one_line_naming_file_and_key(tmp_path, change, words) -> None:
    path = toml(tmp_path, GOOD.replace(*change))
    with pytest.raises(JaxLlamaError) as caught:
        load_config(path)
    message = str(caught.value)
    assert words in message and "m.toml" in message and "\n" not in message


def test_a_config_in_python_is_checked_as_a_file_is() -> None:
    cfg = jl.load_config("smollm2-135m")
    with pytest.raises(JaxLlamaError, match=r"^rope = None: expected RopeConfig$"):
        cfg.replace(rope=None)
    with pytest.raises(JaxLlamaError, match=r"^d_model = '64': expected int$"):
        cfg.replace(d_model="64")
    with pytest.raises(JaxLlamaError, match=r"^rope.scaling = 'ntk': allowed values are none, lin"):
        RopeConfig(theta=1e4, scaling="ntk")  # type: ignore[arg-type]
    listed = cfg.replace(eos_token_ids=[*cfg.eos_token_ids], layer_types=[*cfg.layer_types])
    assert listed == cfg and hash(listed) == hash(cfg)
    with pytest.raises(JaxLlamaError, match=r"^experts.gate_limit = -7.0: must be positive$"):
        jl.ExpertsConfig(n_experts=4, n_active=2, d_ff=8, gate_limit=-7.0)
    with pytest.raises(ValueError, match=r"^ClampedGate: limit = -7.0: must be positive$"):
        ClampedGate(limit=-7.0)


def test_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(
        JaxLlamaError,
        match="no preset 'llama-9b'; presets: .*smollm2-135m.*did you mean 'llama-7b'",
    ):
        load_config("llama-9b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_ff": 16}, "d_ff: preset 'm' says 16, the checkpoint 'c' says 8"),
        ({"rope": RopeConfig(theta=5.0)}, "rope.theta: preset 'm' says 5.0"),
        ({"sliding_window": 4}, "sliding_window: preset 'm' says 4, the checkpoint 'c' says None"),
    ],
    ids=["d_ff", "rope.theta", "sliding_window"],
)
def test_a_preset_that_differs_names_the_key_and_both_values(tmp_path, change, words) -> None:
    cfg = load_config(toml(tmp_path, GOOD))
    with pytest.raises(JaxLlamaError) as caught:
        check_preset(cfg.replace(**change), cfg.replace(name="c"))
    assert words in str(caught.value)


def test_a_preset_keeps_its_options_and_takes_the_checkpoints_token_ids(tmp_path) -> None:
    cfg = load_config(toml(tmp_path, GOOD))
    got = check_preset(cfg.replace(attn_sparsity=0.5), cfg.replace(name="c", eos_token_ids=(3, 4)))
    assert isinstance(got, ModelConfig)
    assert (got.name, got.attn_sparsity, got.eos_token_ids) == ("m", 0.5, (3, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_v": 9}, r"d_v = 9: must not exceed head_dim \(8\)"),
        ({"d_v": 0}, "d_v = 0: must be positive"),
        ({"d_v": 4, "attn_gate": True}, "attn_gate = True: .* values are narrower than keys"),
        ({"d_v": 4, "k_is_v": True}, "k_is_v = True: .* values are narrower than keys"),
        ({"norm_bias": True}, "norm_bias = True: needs norm = "),
        ({"shared_kv_layers": 1, "inner_norms": True}, "inner_norms = True: .* layers share keys"),
        ({"shared_kv_layers": 1, "qk_norm": "full"}, "qk_norm = 'full': .* layers share keys"),
    ],
)
def test_values_that_other_options_contradict_are_refused(changes, message) -> None:
    with pytest.raises(JaxLlamaError, match=rf"^{message}"):
        models.LLAMA.replace(**changes)


@pytest.mark.parametrize(
    "cfg",
    [
        *(models.LLAMA, models.GEMMA4, models.LATENT, models.HYBRIDS["kimi"]),
        *(CASES["gemma4_text-experts"], load_config("mixtral-8x7b")),
    ],
)
def test_a_run_directory_of_the_last_version_has_its_model(cfg: ModelConfig) -> None:
    """Its keys that went have the values that every model of this version has."""
    keys = cfg.flat.to_dict()
    parts, expert_layers = keys.pop("attention_parts"), keys.pop("expert_layers")
    keys |= {"v_norm": bool(parts), "first_norm": True, "sum_norms": "none", "embed_width": None}
    kinds = {"latent": "attention"}  # whose options were those of attention
    keys["layer_types"] = [kinds.get(kind, kind) for kind in keys["layer_types"]]
    if keys["experts"]:
        experts = {**keys["experts"], "layers": expert_layers}
        keys["experts"] = experts | {"beside": experts.pop("shared_norms")}
    assert ModelConfig.of(**of_last_version(keys)) == cfg
    with pytest.raises(JaxLlamaError, match="sum_norms"):
        ModelConfig.of(**of_last_version({**keys, "sum_norms": "mlp"}))


def test_a_printed_config_has_a_line_for_each_option_of_its_own() -> None:
    lines = str(load_config("granite-4.0-h-350m")).splitlines()
    assert lines[:3] == ["name: granite-4.0-h-350m", "vocab_size: 100352", "d_model: 768"]
    kinds = next(line for line in lines if line.startswith("layer_types"))
    assert kinds.startswith("layer_types: 10 x ssm, attention, 2 x ssm, attention")
    assert len(lines) < 20 and max(map(len, lines)) <= 120


def test_the_guide_lists_the_keys_of_shipped_models():
    where = Path(__file__).parent.parent
    page = runpy.run_path(str(where / "docs/reference.py"))["toml"]()
    keys = {
        key
        for path in where.glob("configs/models/*.toml")
        for key in tomllib.loads(path.read_text())
    }
    assert {key for key in keys if f"`{key}` |" not in page and f"`[{key}]`" not in page} == set()
    assert len(keys) > 30
