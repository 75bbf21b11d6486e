"""A family with a step of attention of its own, as docs/howto/family.md writes it: an entry and one
file make it load, compute, train, quantize and save."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import config as hf_config
from jaxllama.checkpoints.hf import families, family
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.save import save
from jaxllama.config import CheckpointForm
from jaxllama.model.mixers.attention import parameters, parts
from jaxllama.model.module import Decoder
from jaxllama.quantization.quantize import quantize_params
from tests.helpers.models import LLAMA, params_of, relative_error, tokens_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "family.md"
ENTRY, FILE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1:]
CFG = LLAMA.replace(
    attention_parts=("q_scale",), stored=CheckpointForm(family="scaled_llama"), name="scaled"
)


@pytest.fixture(autouse=True)
def _family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's two files, as if they were there."""
    name = f"{parts.__name__}.q_scale"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    exec(FILE, vars(sys.modules[name]))
    monkeypatch.setattr(parts, "NAMES", (*parts.NAMES, "q_scale"))
    split = sys.modules[name].SPLIT
    monkeypatch.setattr(parameters, "SPLIT", {**parameters.SPLIT, **split})
    (entry,) = eval(f"{{{ENTRY}}}", vars(family)).values()
    monkeypatch.setitem(families.FAMILIES, "scaled_llama", entry)
    monkeypatch.setitem(hf_config._ARCHITECTURES, entry.architectures[0], "scaled_llama")
    parts.part.cache_clear()


def folded(params: dict) -> dict:
    """Return Llama's parameters with the scale in the rows of q."""
    width = CFG.n_heads * CFG.head_dim
    found = {**params}
    for index in range(CFG.n_layers):
        layer = params[f"layer_{index}"]
        mixer = {**layer["mixer"]}
        scale = mixer.pop("q_scale")["weight"]
        weight = mixer["qkv"]["weight"]
        mixer["qkv"] = {"weight": weight.at[:width].multiply(scale[:, None])}
        found[f"layer_{index}"] = {**layer, "mixer": mixer}
    return found


def test_prefill_and_steps_are_llamas_with_q_scaled() -> None:
    params = params_of(CFG)
    tokens = np.asarray(tokens_of(CFG, 2, 9))
    assert np.ptp(np.asarray(params["layer_0"]["mixer"]["q_scale"]["weight"])) > 0.1
    found = []
    for cfg, tree in ((CFG, params), (LLAMA, folded(params))):
        cache = jl.init_cache(cfg, 2, 9, dtype=jnp.float32)
        logits, cache = jl.prefill(cfg, tree, tokens[:, :8], np.full(2, 8, np.int32), cache)
        after, _ = jl.decode_step(cfg, tree, jnp.asarray(tokens[:, 8]), cache)
        found.append((logits, after))
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < 1e-5


def test_it_is_saved_and_loaded_by_its_name(tmp_path: Path) -> None:
    params = params_of(CFG)
    save(tmp_path / "m", CFG, params)
    cfg, loaded = hf.load(tmp_path / "m", dtype=np.float32)
    assert cfg == CFG.replace(name=cfg.name)
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree.map(np.asarray, params))


def test_it_is_quantized_and_has_a_gradient() -> None:
    params, tokens, lengths = params_of(CFG), tokens_of(CFG, 2, 8), np.full(2, 8, np.int32)
    module = Decoder(CFG)

    def one(p: dict) -> jax.Array:
        return module.apply({"params": p}, tokens, lengths)[0].x[0, 5, 0]

    gradient = jax.grad(one)(params)
    assert np.abs(np.asarray(gradient["layer_0"]["mixer"]["q_scale"]["weight"])).max() > 0
    quantized = quantize_params(params, "w8a16")
    assert quantized["layer_0"]["mixer"]["q_scale"]["weight"].dtype == jnp.float32
