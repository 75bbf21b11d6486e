"""The same models and the same training in plain torch, for test_training: the oracle.

``_logits`` writes GLA out from its equations (arXiv 2312.06635) in the parallel form, over our own
parameter tree; every other model is transformers', of a folder that ``hf.save`` wrote.
``reference`` is what ``golden/training.npz`` holds of it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from jaxllama.config import ModelConfig
from jaxllama.training.config import TrainConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.optimizer import learning_rate
from tests.helpers.seeded import seeded_params
from tests.helpers.training_cases import (
    byte_model,
    family_case,
    first_params,
    rows_of,
    run_config,
    sampled,
)

Leaves = dict[tuple[str, ...], torch.Tensor]
Model = Callable[[torch.Tensor], torch.Tensor]


def gla_model(cfg: ModelConfig, params: dict[str, Any], dtype: torch.dtype) -> tuple[Model, Leaves]:
    """(tokens -> logits, trainable leaves by path)."""
    leaves: Leaves = {}
    for path in param_table(cfg):
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        leaves[path] = torch.tensor(np.asarray(leaf), dtype=dtype, requires_grad=True)
    return lambda tokens: _logits(cfg, leaves, tokens), leaves


def _logits(cfg: ModelConfig, w: Leaves, tokens: torch.Tensor) -> torch.Tensor:
    x = w["embed", "weight"][tokens]
    for index in range(cfg.n_layers):
        layer = f"layer_{index}"
        mixer = {path[2:]: leaf for path, leaf in w.items() if path[:2] == (layer, "mixer")}
        x = x + _gla(cfg, mixer, _norm(x, w[layer, "mixer_norm", "weight"], cfg.norm_eps))
        y = _norm(x, w[layer, "mlp_norm", "weight"], cfg.norm_eps)
        gate, up = (y @ w[layer, "mlp", "gate_up", "weight"].T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w[layer, "mlp", "down", "weight"].T
    x = _norm(x, w["norm", "weight"], cfg.norm_eps)
    return x @ w["embed" if cfg.tie_embeddings else "head", "weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _gla(cfg: ModelConfig, w: Leaves, x: torch.Tensor) -> torch.Tensor:
    gla = cfg.gla
    batch, length, _ = x.shape
    q, k, v, gate = (
        (x @ w[name, "weight"].T).reshape(batch, length, gla.n_heads, -1) for name in "qkvg"
    )
    decay = (x @ w["gk_0", "weight"].T) @ w["gk_1", "weight"].T + w["gk_1", "bias"]
    decay = F.logsigmoid(decay).reshape(q.shape) / gla.gate_logit_normalizer
    b = decay.cumsum(1)
    exponent = b[:, :, None] - b[:, None]  # [B, i, j, H, Dk]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, :, :, None, None]
    exponent = exponent.masked_fill(~causal, -math.inf)
    scores = torch.einsum("bihd,bjhd,bijhd->bijh", q, k, exponent.exp()) / math.sqrt(q.shape[-1])
    o = torch.einsum("bijh,bjhe->bihe", scores, v)
    o = _norm(o, w["g_norm", "weight"], gla.norm_eps) * F.silu(gate)
    return o.reshape(batch, length, -1) @ w["o", "weight"].T


def transformers_model(
    cfg: ModelConfig, params: dict[str, Any], dtype: torch.dtype, folder: Path
) -> tuple[Model, dict[str, torch.Tensor]]:
    """transformers' model of any family: (tokens -> logits, its parameters by their names in a
    checkpoint)."""
    from transformers import AutoModelForCausalLM

    hf.save(folder, cfg, params)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return lambda tokens: model(tokens, use_cache=False).logits, dict(model.named_parameters())


def loss(model: Model, batch: np.ndarray) -> torch.Tensor:
    """Mean cross entropy of ``batch[B, T + 1]``."""
    tokens = torch.tensor(batch, dtype=torch.long)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def losses(
    config: TrainConfig, model: Model, leaves: dict[Any, torch.Tensor], batches: list[np.ndarray]
) -> list[float]:
    """The curve of torch's AdamW under the same settings."""
    options = config.optimizer
    groups = [
        {
            "params": [leaf for leaf in leaves.values() if (leaf.ndim >= 2) is matrices],
            "weight_decay": options.weight_decay if matrices else 0.0,
        }
        for matrices in (True, False)
    ]
    rule = torch.optim.AdamW(groups, betas=(options.b1, options.b2), eps=options.eps)
    curve = []
    for step, batch in enumerate(batches):
        for group in rule.param_groups:
            group["lr"] = config.learning_rate * _share(config, step)
        value = loss(model, batch)
        rule.zero_grad()
        value.backward()
        if options.clip_norm:
            torch.nn.utils.clip_grad_norm_(leaves.values(), options.clip_norm)
        rule.step()
        curve.append(value.item())
    return curve


def _share(config: TrainConfig, step: int) -> float:
    warmup, last = config.optimizer.warmup_steps, config.optimizer.final_share
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (config.steps - warmup)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))


def reference(case: str) -> dict[str, np.ndarray]:
    """torch's answer to a case of ``training_cases.CASES``; large arrays are ``sampled``."""
    goal, _, name = case.partition("/")
    with tempfile.TemporaryDirectory() as folder:
        answer = {"gradients": _gradients, "curve": _curve, "steps": _steps}[goal]
        return answer(name, Path(folder))


def _gradients(family: str, folder: Path) -> dict[str, np.ndarray]:
    """The loss and the gradient of every leaf, in float64."""
    cfg = byte_model(family)
    params = seeded_params(cfg)
    if family == "gla":
        model, leaves = gla_model(cfg, params, torch.float64)
    else:
        model, leaves = transformers_model(cfg, params, torch.float64, folder / "model")
    value = loss(model, rows_of(cfg, 3, 21))
    value.backward()
    answer = {"loss": np.float64(value.item())}
    for path, spec in param_table(cfg).items():
        parts = [leaves[path]] if family == "gla" else [leaves[s.name] for s in spec.sources]
        gradient = np.concatenate([part.grad.numpy() for part in parts])
        answer["/".join(path)] = sampled(gradient).astype(np.float32)
    return answer


def _curve(family: str, folder: Path) -> dict[str, np.ndarray]:
    """The losses of a whole run on English bytes."""
    cfg = byte_model(family)
    config = run_config(folder, cfg)
    if family == "gla":
        model, leaves = gla_model(cfg, first_params(cfg), torch.float32)
    else:
        model, leaves = transformers_model(cfg, first_params(cfg), torch.float32, folder / "model")
    data = TokenFile.open(config.data.tokens)
    batches = [
        data.batch(step, config.batch_size, config.sequence_length, config.seed)
        for step in range(config.steps)
    ]
    return {"losses": np.asarray(losses(config, model, leaves, batches))}


def _steps(name: str, folder: Path) -> dict[str, np.ndarray]:
    """A family's first loss, its losses over the steps, and its weights behind them."""
    cfg, config, batches = family_case(name, folder)
    model, leaves = transformers_model(cfg, seeded_params(cfg), torch.float32, folder / "model")
    answer = {"held": np.float64(loss(model, batches[0]).item())}
    answer["losses"] = np.asarray(losses(config, model, leaves, batches))
    return answer | {name: sampled(leaf.detach().numpy()) for name, leaf in leaves.items()}


def rule_of(net: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """The optimizer of a run, whose rate ``torch_step`` sets."""
    own = config.optimizer
    return torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad],
        lr=1.0,
        betas=(own.b1, own.b2),
        eps=own.eps,
        weight_decay=own.weight_decay,
    )


def torch_step(
    net: torch.nn.Module,
    rule: torch.optim.AdamW,
    config: TrainConfig,
    step: int,
    value: torch.Tensor,
) -> float:
    """Step along the gradient of a loss by the run's schedule and clipping, and return the loss."""
    rule.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), config.optimizer.clip_norm)
    for group in rule.param_groups:
        group["lr"] = float(learning_rate(config, step))
    rule.step()
    return float(value.detach())
