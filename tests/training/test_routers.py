"""The routers' losses against transformers, their gradients in float64, and a balanced run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from jaxllama.config import ExpertsConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.stacked import stack_layers
from jaxllama.training import train
from jaxllama.training.routers import hidden_states, losses, routed
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import loss
from tests.helpers.models import LLAMA, params_of, relative_error, tokens_of
from tests.helpers.parity_cases import CASES
from tests.helpers.training_cases import byte_model, run_config

EXPERTS = ExpertsConfig(n_experts=6, n_active=2, d_ff=24)


def drawn(layers: int = 3, tokens: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Logits ``[layers, tokens, 6]`` and the two best experts of each."""
    logits = np.random.default_rng(0).normal(0, 2, (layers, tokens, 6)).astype(np.float32)
    return logits, np.argsort(-logits, axis=-1)[..., :2].astype(np.int32)


def test_the_losses_are_the_formulas_without_padding() -> None:
    logits, experts = drawn()
    valid = np.arange(40) < 31
    found = losses(
        [routed(*pair, jnp.asarray(valid)) for pair in zip(logits, experts, strict=True)]
    )
    flat = logits[:, valid].reshape(-1, 6).astype(np.float64)
    softmax = np.exp(flat) / np.exp(flat).sum(-1, keepdims=True)
    share = np.bincount(experts[:, valid].reshape(-1), minlength=6) / len(flat)
    np.testing.assert_allclose(found["balance"], 6 * share @ softmax.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["z"], np.mean(np.log(np.exp(flat).sum(-1)) ** 2), rtol=1e-6)


@pytest.mark.slow
def test_the_balance_is_transformers() -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits, experts = drawn()
    mask = np.ones((2, 20), np.int64)
    mask[1, 15:] = 0
    for valid in (None, mask):
        of_torch = None if valid is None else torch.from_numpy(valid)
        want = modeling.load_balancing_loss_func(
            tuple(map(torch.from_numpy, logits)), 6, 2, of_torch
        )
        own = None if valid is None else jnp.asarray(valid.reshape(-1) > 0)
        found = losses([routed(*pair, own) for pair in zip(logits, experts, strict=True)])
        np.testing.assert_allclose(found["balance"], want.numpy(), rtol=1e-6)


@pytest.mark.slow
def test_losses_of_layers_in_a_loop_are_those_of_layers_alone() -> None:
    cfg = LLAMA.replace(
        n_layers=3, layer_types=(), experts=dataclasses.replace(EXPERTS, layers=(1, 2))
    )
    params, tokens = params_of(cfg), tokens_of(cfg, 2, 12)
    want = hidden_states(cfg, params, tokens, jnp.float32)
    got = hidden_states(cfg, stack_layers(cfg, params), tokens, jnp.float32, remat=True)
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    for key in ("balance", "z"):
        np.testing.assert_allclose(got[1][key], want[1][key], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_the_mixture_are_torch_s_in_float64(remat, tmp_path) -> None:
    """Cross entropy, balance and z of transformers' Mixtral, by every parameter."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    cfg = CASES["mixtral"]
    params, rows = params_of(cfg), np.asarray(tokens_of(cfg, 3, 25))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf.save(tmp_path / "model", cfg, params),
        dtype=torch.float64,
        experts_implementation="eager",
    )
    out = model(torch.from_numpy(rows[:, :-1].astype(np.int64)), output_router_logits=True)
    targets = torch.from_numpy(rows[:, 1:].astype(np.int64)).reshape(-1)
    ce = torch.nn.functional.cross_entropy(out.logits.reshape(-1, cfg.vocab_size), targets)
    z = torch.stack([one.logsumexp(-1) for one in out.router_logits]).square().mean()
    assert cfg.experts is not None
    balance = balance_of(transformers, out.router_logits, cfg.experts)
    want = ce + 0.3 * balance + 0.2 * z
    want.backward()
    config = run_config(tmp_path, cfg, router={"balance": 0.3, "z": 0.2}, remat=remat)
    own = TrainingSetup(config, cfg)
    (value, parts), grads = jax.value_and_grad(loss, argnums=1, has_aux=True)(
        own, params, None, rows
    )
    for got, of_torch in (
        (value, want),
        (parts["ce"], ce),
        (parts["balance"], balance),
        (parts["z"], z),
    ):
        np.testing.assert_allclose(got, of_torch.detach().numpy(), rtol=1e-6)
    theirs = {name: leaf.grad.numpy() for name, leaf in model.named_parameters()}
    for path in param_table(cfg):
        gradient = grads
        for name in path:
            gradient = gradient[name]
        other = of_transformers(theirs, cfg, path)
        if other is not None:
            assert relative_error(gradient, other) < 1e-4, path


def balance_of(transformers, logits, experts):
    """transformers' loss of all layers' logits."""
    function = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    return function(logits, experts.n_experts, experts.n_active)


def of_transformers(theirs, cfg, path):
    """The gradient of one of our parameters, of those that transformers has under other names."""
    names = [source.name for source in param_table(cfg)[path].sources]
    layer = f"model.layers.{path[0].removeprefix('layer_')}.mlp"
    fused = {"experts_gate_up": "gate_up_proj", "experts_down": "down_proj"}
    if "router" in path:
        return theirs[f"{layer}.gate.weight"]
    for own, other in fused.items():
        if own in path:
            return theirs[f"{layer}.experts.{other}"]
    return np.concatenate([theirs[name] for name in names])


def test_what_a_run_refuses(tmp_path) -> None:
    with pytest.raises(JaxLlamaError, match="router.z"):
        run_config(tmp_path, router={"z": -1.0})
    config = run_config(tmp_path, byte_model("gqa"), router={"balance": 0.01})
    with pytest.raises(JaxLlamaError, match=r"^router = .*: .* has no experts"):
        train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_run_evens_its_experts(tmp_path) -> None:
    """From the same weights: with the loss the experts are taken more evenly, and text is learned
    as well."""
    cfg = byte_model("gqa", experts=EXPERTS, d_ff=24, stored=CASES["mixtral"].stored)
    ends = []
    for name, balance in (("plain", 1e-9), ("even", 0.1)):
        router = {"balance": balance, "z": 1e-3 if name == "even" else 0.0}
        config = run_config(tmp_path, cfg, router=router, steps=60)
        rows = train(config, tmp_path / name).metrics
        assert rows[-1]["ce"] < rows[0]["ce"] - 1
        ends.append(
            np.mean([[row[key] for key in ("ce", "balance", "z")] for row in rows[-10:]], 0)
        )
    plain, even = ends
    assert 2 <= even[1] < plain[1] and even[2] < plain[2]
    assert even[0] < plain[0] + 0.1
