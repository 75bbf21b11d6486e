"""What families add works everywhere: engine, offloading, packed checkpoints there and
back.  Parity with transformers is test_parity's."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import save as packed
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.offload.policy import Policy
from jaxllama.quantization.quantize import quantize_params
from pallas_kernels.qtensor import QTensor
from tests.helpers import dense_cases
from tests.helpers.cases import slow
from tests.helpers.parity_cases import CASES, params_of, tokens_of

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
# Two RoPEs and windows, four norms, norms of q and k, GeGLU; then what that one lacks.
FIRST = "gemma3_text"
REST = (
    "qwen3",
    "qwen3_next",
    "kimi_linear",
    "granite",
    "olmo2",
    "gemma2",
    "cohere2",
    "stablelm-parallel-bias",
    "phi3",
    "glm4",
)
LATER = tuple(
    dict.fromkeys(kind for kind, case, _ in dense_cases.FAMILY_CASES if kind and not case)
)
# The first case of each family, and the mixtures of families whose first case is dense.
OF_FAMILY = {cfg.stored.family: name for name, cfg in reversed(CASES.items())}
MIXTURES = tuple(name for name in CASES if name.endswith("-experts"))
EACH = tuple(dict.fromkeys((*REST, *OF_FAMILY.values(), *MIXTURES)))
# Experts of compressed-tensors are refused, and groups of 16 do not divide these cases' experts.
DENSE = (*REST, *(name for name in LATER if CASES[name].experts is None))
PACKED = [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in DENSE)]


def prompts_of(name: str) -> list[list[int]]:
    tokens = tokens_of(name).tolist()
    return [tokens[:20], tokens[30:37]]


def tokens_from(lm: jl.LanguageModel, name: str) -> list[list[int]]:
    return [one.tokens for one in lm.generate(prompts_of(name), max_new_tokens=10)]


@pytest.fixture
def directory(request, tmp_path):
    name = request.getfixturevalue("name")
    return hf.save(tmp_path / "model", CASES[name], params_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_offloading_and_the_engine_give_the_same_tokens(name, directory) -> None:
    lm = jl.load(directory, "float32")
    want = tokens_from(lm, name)
    policy = Policy.parse("0 100 0 100 100 0")
    if not lm.config.needs_model:
        assert tokens_from(jl.load(directory, "float32", policy=policy), name) == want
    else:
        with pytest.raises(JaxLlamaError, match="one device or a mesh only"):
            jl.load(directory, "float32", policy=policy)
    engine, got = jl.Engine(lm, max_slots=2, max_len=64), [[], []]
    for row, prompt in enumerate(prompts_of(name)):
        engine.submit(
            Request(str(row), tuple(prompt), 10),
            lambda event, row=row: got[row].extend(event.tokens),
        )
    while engine.step():
        pass
    assert got == want


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("scheme", ["w4a16-g16", *slow("w8a16", "w8a8")])
def test_packed_there_and_back(name, scheme, tmp_path) -> None:
    """What loading folds into scales saving takes out again."""
    cfg, params = CASES[name], jax.device_put(params_of(name))
    params = quantize_params(params, scheme, cfg=cfg)
    format = "native" if cfg.tie_embeddings else "compressed-tensors"
    path = packed.save(tmp_path / "packed", cfg, params, format=format)
    _, got = hf.load(path)
    is_quantized = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731

    def same(a, b) -> None:
        for one, two in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            one, two = (np.asarray(x).astype(np.float32) for x in (one, two))
            np.testing.assert_allclose(one, two, rtol=3e-7, atol=0)

    jax.tree.map(same, got, params, is_leaf=is_quantized)
