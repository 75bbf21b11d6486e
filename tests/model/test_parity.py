"""The same numbers as transformers (every family and option) and llama.cpp (SmolLM2).

Live against transformers where torch is installed, against its golden answers everywhere.
Bound: 1e-4 of the largest logit in float32, greedy tokens identical.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints import hub
from jaxllama.checkpoints.gguf import load as gguf
from jaxllama.checkpoints.hf import load as hf
from jaxllama.config import CheckpointForm, ModelConfig
from jaxllama.errors import JaxLlamaError
from tests.helpers import dense_cases
from tests.helpers.arrays import as_jax
from tests.helpers.parity_cases import (
    CASES,
    GOLDEN,
    LENGTH,
    NEW,
    PROMPT,
    SCORED,
    Answer,
    Golden,
    for_transformers,
    params_of,
    reference,
    their_class,
    tokens_of,
)
from tests.helpers.seeded import hf_tensors

BOUND = 1e-4


def config_of(name: str) -> ModelConfig:
    """The case with room for all of its tokens; transformers has no limit.

    Without how its files differ, which no computation reads, and which transformers' answers tell
    of already: families that are the same function are one program.
    """
    cfg = CASES[name]
    longest = cfg.max_position if cfg.rope.scaling in ("dynamic", "longrope") else 128
    return cfg.replace(
        name="tiny",
        max_position=max(longest, PROMPT + NEW),
        stored=CheckpointForm(),
        eos_token_ids=(),
        bos_token_id=None,
    )


@functools.cache
def ours(name: str) -> Answer:
    cfg, params = config_of(name), jax.device_put(params_of(name))
    tokens = tokens_of(name)[None]
    logits = jl.logits(cfg, params, tokens, np.array([LENGTH], np.int32))
    state = jl.generate(
        cfg,
        params,
        tokens[:, :PROMPT],
        np.array([PROMPT], np.int32),
        jl.init_cache(cfg, 1, PROMPT + NEW, dtype=jnp.float32),
        jl.Sampling(),
        0,
        NEW,
    )
    return Answer(np.asarray(logits[0]), np.asarray(state.tokens[0]))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as arrays:
        return Golden(arrays)


def test_a_missing_answer_or_class_says_what_to_do(golden):
    with pytest.raises(AssertionError, match=r"no answer of new-case: .*make_llama_golden.py new-"):
        golden["new-case/logits"]
    pytest.importorskip("transformers")
    stored = dataclasses.replace(CASES["llama-gqa"].stored, family="no_such_type")
    with pytest.raises(LookupError, match="no class for 'no_such_type': .*ORACLES"):
        for_transformers(CASES["llama-gqa"].replace(stored=stored))
    assert for_transformers(CASES["minicpm"]).stored.family == dense_cases.ORACLES["minicpm"]


CORE = ("llama-gqa", "qwen2-late-window", "gemma3_text", "qwen3_next")
# Each of these is a mechanism, or two, that a case beside it has too.
ALSO = (
    "llama-attention-bias",
    "mistral-window",
    "embedding-scale",
    "qwen3-window-bias",
    "phi3-window",
    "cwm",
    "ernie4_5-bias",
    "olmo2",
    "stablelm",
    "qwen3_5_text-bias",
    "llama-mha",
    "llama-mqa",
    "llama-wide-heads",
    "smollm2-tied",
    "llama-mlp-bias",
    "qwen2-bias",
    "qwen2-window",
    "qwen2-alternating",
    "ministral",
    "rope-yarn",
    "rope-yarn-amplitude",
    "phi3-longrope",
    "qwen3",
    "smollm3-window-bias",
    "granite",
    "seed_oss",
    "ernie4_5",
    "helium",
    "olmo2-bias-yarn",
    "olmo3",
    "gemma2-uncapped",
    "gemma3_text-layer-types",
    "glm",
    "glm4-no-bias",
    "cohere",
    "cohere2-pattern",
    "qwen3_5_text",
    "mixtral",
    "mixtral-window",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next-experts",
    "qwen3_next-mixed-experts",
    "glm4_moe",
    "kimi_linear-experts",
    "qwen3_5_moe_text",
    "olmoe-normalized-bias",
    "granitemoe",
    "ernie4_5_moe",
    "qwen3_next-bias",
    "qwen3_moe-mixed-window",
    "mamba2",
    "mamba2-bias",
    "granitemoehybrid",
    "granitemoehybrid-experts",
    "bamba",
    "gemma",
    "gemma-bias",
)
ALSO += tuple(name for name in dense_cases.NAMES if name not in dense_cases.DEFAULT)
MARKS = {**dict.fromkeys(CORE, pytest.mark.core), **dict.fromkeys(ALSO, pytest.mark.slow)}


@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS.get(x, ())) for x in CASES])
def test_golden(name: str, golden: dict[str, np.ndarray]) -> None:
    """One call scores the text and, as its second row, the prompt with transformers' answer: every
    greedy token is the argmax behind what precedes it."""
    cfg, params, greedy = config_of(name), params_of(name), golden[f"{name}/greedy"]
    if cfg.rope.scaling in ("dynamic", "longrope"):  # a step's tables depend on the row's length
        scores, answer = ours(name).logits, ours(name).greedy
    else:
        tokens = np.zeros((2, PROMPT + NEW), np.int32)
        tokens[0, :LENGTH] = tokens_of(name)
        tokens[1] = np.concatenate([tokens_of(name)[:PROMPT], greedy])
        lengths = np.array([LENGTH, PROMPT + NEW], np.int32)
        scores, walked = np.asarray(jl.logits(cfg, jax.device_put(params), tokens, lengths))
        answer = walked[PROMPT - 1 : -1].argmax(-1)
    assert relative_error(scores[SCORED], golden[f"{name}/logits"]) <= BOUND
    assert answer.tolist() == greedy.tolist()


# One of each mechanism; the others have no other.
WALKED = ("rope-dynamic", "phi3-partial-longrope")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in WALKED else [pytest.mark.slow]) for x in CASES]
)
def test_golden_step_by_step(name: str, golden: dict[str, np.ndarray]) -> None:
    """``generate`` gives transformers' greedy tokens."""
    assert ours(name).greedy.tolist() == golden[f"{name}/greedy"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_transformers(name: str) -> None:
    """The live oracle, of which the golden file is a copy."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    want = reference(name)
    assert relative_error(ours(name).logits, want.logits) <= BOUND
    assert ours(name).greedy.tolist() == want.greedy.tolist()


# Each way to name, fuse, order or scale tensors.
WRITTEN = (
    "phi3-partial-longrope",
    "gemma3_text",
    "cohere2",
    "qwen3_next",
    "qwen2_moe-mixed",
    "llama-mha",
    "llama-attention-bias",
    "mistral-window",
    "ministral",
    "qwen2-late-window",
    "qwen2-alternating",
    "rope-llama3",
    "rope-dynamic",
    "qwen3",
    "smollm3-window-bias",
    "granite",
    "rope-yarn-options",
    "kimi_linear",
    "olmo3-yarn",
    "gemma2",
    "glm4",
    "stablelm-parallel-bias",
    "ernie4_5-bias",
    "qwen3_5_text-bias",
    "mixtral",
    "olmoe-normalized-bias",
    "qwen3_moe-mixed-window",
    "qwen3_next-mixed-experts",
    "qwen3_5_moe_text",
    "granitemoe",
    "glm4_moe-groups",
    "kimi_linear-experts",
    "gpt_oss",
    "ernie4_5_moe",
    "phimoe",
    "mamba2-bias",
    "bamba",
    "granitemoehybrid",
    "granitemoehybrid-experts",
    "nemotron_h",
    *(name for name in dense_cases.NAMES if name not in dense_cases.UNWRITTEN),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_a_directory_that_transformers_writes(name: str, tmp_path) -> None:
    """There and back through transformers' own config classes and names: of a model that it loaded,
    which keeps the names of the file, and of one that it made."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    cfg, params = CASES[name], params_of(name)
    path = hf.save(tmp_path / "ours", cfg, params)
    model = their_class(path).from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    made.save_pretrained(tmp_path / "made" / "theirs")
    exact = cfg.stored == CheckpointForm(
        family=cfg.stored.family, interleaved=cfg.stored.interleaved
    )
    close = functools.partial(np.testing.assert_allclose, rtol=0 if exact else 3e-7, atol=0)
    for folder in (tmp_path, tmp_path / "made"):
        got_cfg, got = hf.load(folder / "theirs")
        # A family that has end tokens by default writes them.
        assert got_cfg.replace(eos_token_ids=()) == cfg.replace(name="theirs", eos_token_ids=())
        jax.tree.map(close, got, params)


# Families: prompts in chunks, ragged rows, one token after the other


# Windows; test_model has layers of the delta rule, and the others have no other mechanism.
RAGGED = ("gemma3_text",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[] if x in RAGGED else [pytest.mark.slow])
        for x in CASES
        if "-" not in x or x.endswith("longrope")
    ],
)
def test_ragged_rows_in_chunks_give_the_logits_of_whole_ones(name: str) -> None:
    cfg, params = CASES[name], jax.device_put(params_of(name))
    tokens = np.stack([tokens_of(name)[:40], tokens_of(name)[40:]])
    lengths = np.array([26, 17], np.int32)
    want = np.asarray(jl.logits(cfg, params, tokens, lengths + 4))
    cache = jl.init_cache(cfg, 2, 40, dtype=jnp.float32)
    got, cache = jl.prefill(cfg, params, tokens, lengths, cache, chunk=11)
    for step in range(4):
        at = lengths + step
        for row in range(2):
            assert relative_error(np.asarray(got[row]), want[row, at[row] - 1]) <= BOUND
        got, cache = jl.decode_step(cfg, params, tokens[np.arange(2), at], cache)


# SmolLM2 from its GGUF file


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelConfig, dict[str, Any]]:
    """(config, float32 weights); fetched once into the user's cache."""
    try:
        path = hub.resolve("smollm2-135m")
    except JaxLlamaError as error:
        pytest.skip(str(error))
    cfg = gguf.read_config(path)
    return cfg, jax.device_put(gguf.load_params(path, cfg, np.float32))


@pytest.fixture
def prompts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens ``[20, T]`` padded with 0, lengths, transformers' greedy tokens ``[20, 24]``)."""
    with np.load(GOLDEN.with_name("smollm2.npz")) as golden:
        lengths, greedy = golden["lengths"].astype(np.int32), golden["greedy"].astype(np.int32)
        pieces = np.split(golden["prompts"].astype(np.int32), np.cumsum(lengths)[:-1])
    tokens = np.stack([np.pad(piece, (0, lengths.max() - len(piece))) for piece in pieces])
    return tokens, lengths, greedy


@pytest.mark.slow
def test_smollm2_continues_prompts_like_transformers(smollm2, prompts) -> None:
    """transformers read the same file with its own GGUF reader (see the golden's script)."""
    cfg, params = smollm2
    tokens, lengths, greedy = prompts
    rows, new = greedy.shape
    state = jl.generate(
        cfg,
        params,
        as_jax(tokens),
        as_jax(lengths),
        jl.init_cache(cfg, rows, tokens.shape[1] + new, dtype=jnp.float32),
        jl.Sampling(),
        0,
        new,
        stop_tokens=(),
    )
    np.testing.assert_array_equal(state.tokens, greedy)


@pytest.mark.slow
def test_smollm2_live(smollm2, prompts) -> None:
    """Greedy is identical exactly if transformers' argmax is our token at every step."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    cfg, params = smollm2
    with torch.device("meta"):
        config = {k: v for k, v in hf.config_to_hf(cfg).items() if k != "architectures"}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    tensors = hf_tensors(cfg, jax.tree.map(np.asarray, params))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's arrays are read-only, which torch mentions
        state = {name: torch.from_numpy(value) for name, value in tensors.items()}
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # off the meta device
    tokens, lengths, greedy = prompts
    new = greedy.shape[1]
    ends = lengths + new
    batch = np.zeros((len(lengths), int(ends.max())), np.int32)
    for row, n in enumerate(lengths):
        batch[row, : n + new] = np.concatenate((tokens[row, :n], greedy[row]))
    with torch.no_grad():
        want = model.eval()(torch.from_numpy(batch.astype(np.int64))).logits.numpy()
    got = np.asarray(jl.logits(cfg, params, as_jax(batch), as_jax(ends)))
    for row, end in enumerate(ends):
        assert relative_error(got[row, :end], want[row, :end]) <= BOUND
        steps = slice(end - new - 1, end - 1)
        assert want[row, steps].argmax(-1).tolist() == greedy[row].tolist()
        assert got[row, steps].argmax(-1).tolist() == greedy[row].tolist()


@pytest.mark.slow
def test_smollm2_predicts_like_llamacpp(smollm2) -> None:
    """llama.cpp's most likely next token after each of 510 tokens of English.

    With the weights in float32 it rounds only the cache (to float16): 509 of 510 agree.  With the
    Q4_1 file itself it also rounds activations to 8 bits, and 494 agree with us as with
    transformers: where the two best tokens are within 0.3, its rounding decides.
    """
    cfg, params = smollm2
    with np.load(GOLDEN.with_name("smollm2_llamacpp.npz")) as golden:
        tokens, float32, as_shipped = (golden[k] for k in ("tokens", "float32", "as_shipped"))
    tokens = as_jax(tokens, jnp.int32)[None]
    logits = jl.logits(cfg, params, tokens, as_jax([tokens.shape[1]], jnp.int32))
    best = np.asarray(jnp.argmax(logits[0], axis=-1))
    assert (best == float32).mean() >= 0.99
    assert (best == as_shipped).mean() >= 0.96
