"""GGUF files of every family are the model that its Hugging Face directory is, and damaged files
and configs of all of them are our errors alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import struct
import tracemalloc
import warnings
from pathlib import Path
from struct import calcsize
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, pre_tokenizers

import jaxllama as jl
from jaxllama.checkpoints.gguf import tokenizer
from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES
from jaxllama.checkpoints.gguf.config import eos_ids
from jaxllama.checkpoints.gguf.file import GGUFFile
from jaxllama.checkpoints.gguf.load import load_params, read_config
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.config import ModelConfig, RopeConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.arrays import as_jax
from tests.helpers.gguf_cases import ARCHITECTURES as WRITTEN
from tests.helpers.gguf_cases import write_gguf
from tests.helpers.parity_cases import CASES, tokens_of
from tests.helpers.seeded import seeded_params

# Cases whose every option a GGUF file can say.
NAMES = (
    "llama-attention-bias",
    "llama-mlp-bias",
    "mistral-window",
    "ministral",
    "qwen2-bias",
    "rope-linear",
    "rope-yarn",
    "qwen3",
    "phi3",
    "phi3-window",
    "phi3-longrope",
    "phi3-partial-longrope",
    "smollm3-4",
    "granite",
    "granite-bias",
    "seed_oss",
    "seed_oss-bias",
    "ernie4_5",
    "ernie4_5-bias",
    "olmo2",
    "olmo2-bias-yarn",
    "olmo3",
    "olmo3-yarn",
    "gemma2",
    "gemma3_text",
    "gemma3_text-layer-types",
    "glm",
    "glm4",
    "glm4-no-bias",
    "stablelm",
    "stablelm-parallel-bias",
    "cohere",
    "cohere-bias",
    "cohere2",
    "cohere2-pattern",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "glm4_moe",
    "glm4_moe-groups",
    "ernie4_5_moe",
    "phimoe",
    "lfm2",
    "lfm2_moe",
)
# Cases of ``test_gguf_delta``, damaged here.
HYBRIDS = ("qwen3_next-experts", "qwen3_5_moe_text", "kimi_linear-experts", "granitemoehybrid")
# What transformers' own reader knows of a file: no biases, no head size of Qwen3 but the default,
# no scale of q, no scaling of RoPE and no second pattern of Gemma 3.
LIVE = ("llama-gqa", "qwen3-128", "phi3", "gemma3-plain", "stablelm")


def case(name: str) -> ModelConfig:
    """Of the parity test; Gemma's q has the file's scale, SmolLM3 its four layers."""
    if name == "smollm3-4":
        return CASES["smollm3"].replace(n_layers=4, nope_layers=(3,))
    if name == "qwen3-128":
        return CASES["qwen3"].replace(head_dim=128)
    if name == "gemma3-plain":
        cfg = case("gemma3_text")
        rope = RopeConfig(1_000_000.0)
        local = RopeConfig(10000.0)
        return cfg.replace(rope=rope, window_rope=local, window_layers=(), head_dim=256)
    cfg = CASES[name]
    if name == "gpt_oss":  # no key says the limit
        assert cfg.experts is not None
        return cfg.replace(experts=dataclasses.replace(cfg.experts, gate_limit=7.0))
    if name == "phimoe":  # the file has llama.cpp's formula of the amplitude, and no jitter
        experts = dataclasses.replace(cfg.experts, jitter=0.01)
        rope = dataclasses.replace(cfg.rope, attention_factor=1.1022202)
        return cfg.replace(experts=experts, rope=rope)
    if name == "lfm2_moe":  # no key says the scale
        return cfg.replace(experts=dataclasses.replace(cfg.experts, scale=1.0))
    if name == "ernie4_5_moe":  # no key says the last layer with experts
        return cfg.replace(n_layers=4, expert_layers=(1, 3))
    return (
        cfg.replace(stored=dataclasses.replace(cfg.stored, query=1.0))
        if (name.startswith("gemma"))
        else cfg
    )


def written(name: str, folder: Path, **changes: Any) -> tuple[Path, Path]:
    """(the file, the Hugging Face directory that it was made of)."""
    cfg = case(name)
    directory = hf.save(folder / name, cfg, seeded_params(cfg, 3))
    path = folder / f"{name}.gguf"
    write_gguf(path, directory, **changes)
    return path, directory


def test_every_architecture_has_a_case() -> None:
    families = {arch.family for arch in ARCHITECTURES.values()}
    assert families <= set(WRITTEN) and set(WRITTEN.values()) | {"internlm2"} == set(ARCHITECTURES)


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_model_of_its_directory(name: str, tmp_path: Path) -> None:
    """Equal configs and weights to the bit, and therefore the same logits."""
    path, directory = written(name, tmp_path)
    want_cfg, want = hf.load(directory)
    cfg = read_config(path)
    got = load_params(path, cfg, np.float32)
    if (
        cfg.rope.attention_factor is not None and name != "phimoe"
    ):  # the file says what the directory implies
        assert cfg.rope.attention_factor == pytest.approx(
            np.sqrt(1 + np.log(cfg.rope.factor) / np.log(cfg.rope.original_max_position)), rel=1e-7
        )
        cfg = cfg.replace(rope=dataclasses.replace(cfg.rope, attention_factor=None))
    assert cfg.replace(name=name, bos_token_id=want_cfg.bos_token_id) == want_cfg
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Type.Q4_1) for name in ("granite", "glm", "cohere2", "gpt_oss", "glm4_moe")),
        ("mixtral", Type.Q4_0),
        ("gpt_oss", Type.MXFP4),
        ("granitemoe", Type.MXFP4),
    ],
    ids=str,
)
def test_kept_codes_take_multipliers_and_the_order_of_rows(
    name: str, kind: Type, tmp_path: Path
) -> None:
    path, _ = written(name, tmp_path, kind=kind)
    cfg = read_config(path)
    dense = load_params(path, cfg, np.float32)
    kept = load_params(path, cfg, np.float32, keep_quantized=True)
    assert isinstance(kept["layer_0"]["mixer"]["qkv"]["weight"], QTensor)
    if cfg.experts is not None:  # a router's rounded input could choose other experts
        assert isinstance(kept[f"layer_{cfg.n_layers - 1}"]["mlp"]["router"]["weight"], np.ndarray)
    is_leaf = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731
    floats = jax.tree.map(lambda w: dequantize(w) if is_leaf(w) else w, kept, is_leaf=is_leaf)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), floats, dense)


def test_a_head_for_drafts_of_glm_is_left_out(tmp_path: Path) -> None:
    """Its tensors are of the layer behind the last; other tensors without a place are errors."""
    _, directory = written("glm4_moe", tmp_path)
    file, n = directory / "model.safetensors", case("glm4_moe").n_layers
    more = {f"model.layers.{n}.nextn.eh_proj.weight": np.ones((32, 64), np.float32)}
    save_file({**load_file(file), **more}, file)
    heads = {"glm4moe.block_count": n + 1, "glm4moe.nextn_predict_layers": 1}
    write_gguf(tmp_path / "with.gguf", directory, **heads)
    cfg = read_config(tmp_path / "with.gguf")
    assert (cfg.n_layers, cfg.mtp_layers) == (n, 0)
    want = load_params(tmp_path / "glm4_moe.gguf", cfg, np.float32)
    jax.tree.map(
        np.testing.assert_array_equal, load_params(tmp_path / "with.gguf", cfg, np.float32), want
    )
    write_gguf(tmp_path / "without.gguf", directory)
    with pytest.raises(JaxLlamaError, match=f"unexpected: blk.{n}.nextn.eh_proj.weight"):
        load_params(tmp_path / "without.gguf", cfg, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVE)
def test_transformers_reads_the_same_file(name: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    vocabulary = {"tokens": [f"<{i}>" for i in range(64)], "padding_token_id": 0}
    changes = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    path, _ = written(name, tmp_path, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    tokens = tokens_of("llama-gqa")[None]
    with torch.no_grad():
        want = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    cfg = read_config(path)
    lengths = as_jax([tokens.shape[1]], jnp.int32)
    got = jl.logits(cfg, load_params(path, cfg, np.float32), as_jax(tokens), lengths)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_the_27b_gemmas_scale_q_by_another_size() -> None:
    for arch, largest in (("gemma2", 46), ("gemma3", 62)):
        more = ARCHITECTURES[arch].more
        sizes = {"hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}
        assert more is not None
        assert more({**sizes, "num_hidden_layers": largest}) == {"query_pre_attn_scalar": 144}
        assert more({**sizes, "num_hidden_layers": 26}) == {"query_pre_attn_scalar": 128}


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [(None, (0, 1, 2)), (2, (0, 2)), (0, ()), ([False, True, True, False, True], (1, 2))],
)
def test_patterns_of_windows(pattern: Any, layers: tuple[int, ...], tmp_path: Path) -> None:
    """Left out, the architecture's own; a number; a list, which may be longer than the layers."""
    changes = {"cohere2.attention.sliding_window_pattern": pattern}
    cfg = read_config(written("cohere2", tmp_path, **changes)[0])
    assert (cfg.sliding_window, cfg.window_layers) == (9, layers)
    assert cfg.nope_layers == tuple(i for i in range(4) if cfg.layers[i].window is None)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"qwen3.new_option": 1}, "qwen3.new_option: is not a key of 'qwen3' that is"),
        ("qwen3", {"qwen3.rope.freq_base": 0.5}, "qwen3.rope.freq_base = 0.5: must exceed 1"),
        ("qwen3", {"qwen3.attention.causal": False}, "qwen3.attention.causal: False is not"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned"),
        ("granite", {"granite.logit_scale": 0.0}, "granite.logit_scale = 0.0: must be positive"),
        ("granite", {"granite.attention.sliding_window": 4}, "granite.attention.sliding_window"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 5.0}, "gemma2.rope.freq_base_swa"),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("cohere2", {"cohere2.attention.sliding_window": None}, "None is not a window"),
        ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "glm4moe.expert_gating_func: 1.0 is not"),
        ("stablelm", {"stablelm.rope.dimension_count": 3}, "stablelm.rope.dimension_count"),
    ],
)
def test_unknown_and_unsupported_keys_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = written(name, tmp_path, **changes)
    with pytest.raises(JaxLlamaError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("glm4", ["I", "'LL", " pay", " ", "123", "45", " €\n", "aB"]),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", " €\n", "a", "B"]),
        ("seed-coder", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " €", "\n", "aB"]),
        ("lfm2", ["I", "'LL", " pay", " ", "123", "45", " €\n", "aB"]),
        ("deepseek-v3", ["I", "'LL", " pay", " ", "123", "45", " €\n", "aB"]),
        ("deepseek-llm", ["I", "'", "LL", " pay", " ", "12345", " ", "€", "\n", "aB"]),
        ("deepseek-coder", ["I", "'", "LL", " pay", " ", *"12345", " ", "€", "\n", "aB"]),
        ("tiny_aya", ["I'LL", " pay", " ", "12", "345", " €\n", "a", "B"]),
        ("viking", ["I'LL", " pay", " ", *"12345", " €", "\n", "aB"]),
    ],
)
def test_pre_tokenizers_of_the_families(pre: str, pieces: list[str]) -> None:
    assert cut(pre, "I'LL pay 12345 €\naB") == pieces


def cut(pre: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in tokenizer.PRE[pre]]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


def test_marks_stay_with_their_letters_and_han_stands_alone() -> None:
    text = "e\u0301t 漢字ab"
    assert cut("qwen35", text) == ["e\u0301t", " 漢字ab"]
    assert cut("qwen2", text) == ["e", "\u0301t", " 漢字ab"]
    assert cut("kimi-k2", text) == ["e\u0301t", " ", "漢字", "ab"]
    assert cut("kimi-k2", "a //\n/") == ["a", " //\n", "/"]
    assert cut("gpt-4o", "a //\n/") == ["a", " //\n/"]


def test_names_that_conversion_writes_for_the_listed_architectures_are_read() -> None:
    written = {
        "qwen35": "qwen35",
        "lfm2": "lfm2",
        "kimi-linear": "kimi-k2",
        "gpt-oss": "gpt-4o",
        "cohere2": "tiny_aya",
        "llama": "deepseek-coder",
        "glm4moe": "glm4",
    }
    assert written.keys() <= ARCHITECTURES.keys()
    assert set(written.values()) <= tokenizer.PRE.keys()


ENDS = [
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, [0, 2]),
    (["a", "</s>", "<|eot_id|>", "<|eom_id|>"], None, [0, 1, 2, 3]),
    (["<|im_end|>", "a", "<fim_pad>", "<reponame>"], [3, 1, 1, 3], [0, 2, 3]),
    (["<eos>", "</s>", "<end_of_turn>"], [3, 4, 3], [0, 2]),  # an HTML tag in Gemma's vocabulary
    (["a", "<|end|>"], [1, 1], [0, 1]),
    (["a", "<|end|>", "<|return|>", "<|call|>"], None, [0, 2, 3]),  # ends a message of several
]


@pytest.mark.parametrize(("tokens", "kinds", "ends"), ENDS)
def test_a_generation_ends_at_tokens_with_the_spelling_of_an_end(
    tokens: list[str], kinds: list[int] | None, ends: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "b", "bb"])
    writer.add_token_types([*(kinds or [3] * len(tokens)), 1, 1])
    writer.add_token_merges(["b b"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert list(eos_ids(file)) == ends
    own = Tokenizer.from_gguf(path)
    for end in ends[1:]:  # they are no text, whatever the file says of them
        assert own.encode(f"{tokens[end]}b") == [end, len(tokens)]
        assert own.decode([end, len(tokens)]) == "b"


# Damage

INTERESTING = (0, 1, 2, 3, 7, 31, 32, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-40, 0.25, 0.5, 2.0, 1e30, math.inf, math.nan)
SCALARS = {0: "B", 4: "I", 6: "f", 7: "?"}  # of the types that the writer uses
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    7,
    31,
    1 << 20,
    1 << 31,
    1 << 70,
    10**5000,
    0.0,
    -0.5,
    1.0,
    0.3,
    1e-300,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "x",
    "yarn",
    "longrope",
    "9" * 300,
    "\n",
    [],
    {},
    [0],
    [1, 2],
    [None],
    ["full_attention"],
    ["sliding_attention", "full_attention"],
    {"x": []},
    {"rope_type": "yarn"},
    {"full_attention": {}},
    {"full_attention": 3},
    [[]],
    [{}],
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("originals")
    return [written(name, folder)[0] for name in (*NAMES, *HYBRIDS)]


def damaged(original: Path, rng: random.Random) -> bytes:
    """One to three edits: of a metadata value or its type, of an entry of the tensor table, of a
    letter of a name, or of any bytes of the header."""
    content = bytearray(original.read_bytes())
    with GGUFFile(original) as file:
        values, tensors = list(file._values.values()), list(file.tensors)
        end = min(info.offset for info in file.tensors.values())
    for _ in range(rng.randint(1, 3)):
        kind, value = rng.choice(("value", "value", "tensor", "bytes")), rng.choice(INTERESTING)
        if kind == "value":
            entry = rng.choice(values)
            at = entry.offset - rng.choice((0, 4))
            if at == entry.offset and (code := SCALARS.get(entry.kind)):  # another of its type
                number = rng.choice(FLOATS) if code == "f" else value % 2 ** (8 * calcsize(code))
                struct.pack_into(f"<{code}", content, at, number)
                continue
        elif kind == "tensor":
            name = rng.choice(tensors).encode()
            at = content.find(name) + len(name) + rng.choice((-1, 0, 4, 12, 16, 20, 24, 28))
        else:
            at = rng.randrange(end)
        at = max(0, min(at, len(content) - 8))
        how = rng.choice(("byte", "u32", "u64", "f32", "cut", "insert"))
        if how == "byte":
            content[at] = rng.randrange(256)
        elif how == "u32":
            struct.pack_into("<I", content, at, value % 2**32)
        elif how == "u64":
            struct.pack_into("<Q", content, at, value)
        elif how == "f32":
            struct.pack_into("<f", content, at, rng.choice(FLOATS))
        elif how == "cut":
            del content[at : at + rng.randint(1, 8)]
        else:
            content[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(content)


@pytest.mark.parametrize("n", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_raise_only_our_error(n: int, originals: list[Path], tmp_path: Path) -> None:
    rng, path, failed = random.Random(n), tmp_path / "damaged.gguf", 0
    for index in range(n):
        content = damaged(originals[index % len(originals)], rng)
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WeightWarning)
                load_params(path, read_config(path), np.float32, keep_quantized=index % 2 == 0)
        except JaxLlamaError as error:
            failed += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 8 * len(content) + 2**21
    assert failed > n // 2


def mutated(config: dict[str, Any], keys: list[str], rng: random.Random) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for _ in range(rng.randint(1, 3)):
        inner = [value for value in config.values() if isinstance(value, dict)]
        target = rng.choice(inner) if inner and rng.random() < 0.3 else config
        own = list(target) or keys
        key = rng.choice(own if rng.random() < 0.7 else keys)
        if rng.random() < 0.15:
            target.pop(key, None)
        else:
            target[key] = copy.deepcopy(rng.choice(VALUES))
    return config


@pytest.mark.parametrize("n", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_configs_raise_only_our_error(n: int) -> None:
    cases = [cfg for name, cfg in CASES.items() if name != "embedding-scale"]
    configs = [hf.config_to_hf(cfg) for cfg in cases]
    names = {key for family in FAMILIES.values() for key in (*family.keys, *family.fixed)}
    keys = sorted({key for config in configs for key in config} | names | {"no_such_key"})
    rng, failed = random.Random(n), 0
    for index in range(n):
        config = mutated(configs[index % len(configs)], keys, rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WeightWarning)
                hf.config_to_hf(hf.config_from_hf(config, "mutated"))
        except JaxLlamaError as error:
            failed += 1
            assert "\n" not in str(error) and len(str(error)) < 2000
    assert failed > n // 2


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("gpt_neo", "attention_types", 0.5, "attention_types = 0.5: expected pairs"),
        ("gptj", "num_attention_heads", 2**20, "must not exceed hidden_size"),
        ("solar_open", "first_k_dense_replace", 31, "leaves no layer with experts"),
        ("granitemoehybrid", "layer_types", 7, "layer_types = 7: must be 3 entries"),
    ],
)
def test_values_that_mutations_found(case: str, key: str, value: Any, message: str) -> None:
    name = next(name for name in CASES if name.split("-")[0] == case)
    config = hf.config_to_hf(CASES[name]) | {key: value}
    names = {"num_attention_heads": "n_head"}  # GPT-J's own name of the key
    config |= {names[key]: value} if names.get(key) in config else {}
    with pytest.raises(JaxLlamaError, match=message):
        hf.config_from_hf(config, "mutated")
