"""A model whose W4A8 weights have the order of a GPU's kernel: logits, files and updates."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.weights import replaced
from jaxllama.language_model import LanguageModel
from jaxllama.model import layout
from pallas_kernels.matmul import interleave
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.models import IDENTITIES, params_of, tokens_of


def quantized(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return [leaf for leaf in leaves if isinstance(leaf, QTensor)]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As where the kernels run, and with weights narrower than a kernel takes."""
    monkeypatch.setattr(layout, "handles", lambda dtype: False)
    monkeypatch.setattr(layout, "hopper_reason", lambda: None)
    monkeypatch.setattr(interleave, "_has_kernel", lambda w: w.columns is None)


def test_logits_files_and_updates(on_a_gpu, tmp_path):
    cfg = IDENTITIES["gqa"].replace(d_ff=64, n_layers=1)
    floats = params_of(cfg)
    params = jl.quantize_params(floats, "w4a8-g32,embed=w4a8-g32")
    plain, lm = LanguageModel(cfg, params, None, exact=True), LanguageModel(cfg, params, None)
    moved = quantized({k: v for k, v in lm.params.items() if k != "embed"})
    assert moved and all(w.interleaved for w in moved)
    assert not lm.params["embed"]["weight"].interleaved
    assert not any(w.interleaved for w in quantized(params))

    tokens, lengths = tokens_of(cfg, 2, 5), as_jax([5, 4])
    found, wanted = (np.asarray(model.logits(tokens, lengths)) for model in (lm, plain))
    np.testing.assert_array_equal(found, wanted)

    saved = [model.save(tmp_path / name) for name, model in (("a", lm), ("b", plain))]
    first, second = (sorted(path.glob("*.safetensors")) for path in saved)
    assert first and [f.read_bytes() for f in first] == [f.read_bytes() for f in second]

    again = replaced(lm, jax.tree.map(jnp.zeros_like, floats))
    assert jax.tree.structure(again.params) == jax.tree.structure(lm.params)
    kept = layout.lay_out(lm.params, donate=True)  # what is laid out is not given up
    assert all(map(operator.is_, jax.tree.leaves(kept), jax.tree.leaves(lm.params)))
