"""End-to-end tuning: fit a quantized model's scales and norms to its floats' predictions.

    tune(cfg, exact, params, tokens) -> (params, losses)

A layer-by-layer method knows one product's error and not the effect of later layers; tuning uses
the logits. The codes stay. Every scale becomes s (1 + a) and every norm's weight g (1 + b). Adam
minimizes over a and b, with a rate that falls along half a cosine:

    KL(exact || quantized), the mean over a window's positions, one window a step

Sources: scales end to end after a layer-wise method (EfficientQAT, arXiv 2407.11062, its second
phase), the model as its own teacher (LLM-QAT, 2305.17888), norms too (Norm Tweaking, 2309.02784).
The backward pass goes layer by layer through two programs that all layers of a kind share. It
recomputes each layer from its input and updates the layer before it continues (LOMO, 2306.09782).
So the memory is the two models, one layer's gradients and the states between layers.

Products with quantized activations are tuned as if the activations were floats. Left out: the
codes, the head, the embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model.decoder import block, head, logits
from jaxllama.model.linear import Stream
from jaxllama.model.records import Hidden, whole_rows
from jaxllama.quantization.calibration import advance, embed, windows
from jaxllama.quantization.work import QuantizeWork
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import DictKey, Params, ParamsDict
from pallas_kernels.qtensor import QTensor, dequantize

RATE = 1e-3  # relative change of a scale or a norm in the first step
_RULE = optax.scale_by_adam(b2=0.95)
_POSITIONS = 64  # positions whose logits exist at a time
_KEPT = 8  # steps between two stored states, from which a killed run continues

# by path: relative change of a scale ``[N, groups]`` or a norm ``[D]``
Learned = dict[str, jax.Array]


def tune(
    cfg: ModelConfig,
    exact: Params,
    params: Params,
    tokens: np.ndarray,
    *,
    work: QuantizeWork | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[ParamsDict, list[float]]:
    """Tune the layers' scales and the norms.

    Parameters
    ----------
    cfg : ModelConfig
        Config of the model.
    exact : dict
        The parameters in floats.
    params : dict
        The quantized parameters.
    tokens : int32[n, T]
        One row for each step, in order.
    work : QuantizeWork or None
        Storage from which a killed run continues, to the same bits.
    progress : callable
        Called with the number of further finished steps.

    Returns
    -------
    (dict, list of float)
        The tuned parameters, and the loss of every step in nats.
    """
    names = [f"layer_{index}" for index in range(cfg.n_layers)]
    parts = {name: params[name] for name in names} | {"last": {"norm": params["norm"]}}
    learned = {name: _nothing(part) for name, part in parts.items()}
    state = {name: _RULE.init(part) for name, part in learned.items()}
    losses: list[float] = []
    stored = None if work is None else work.load_step()
    if stored is not None:
        losses, leaves = stored
        learned, state = jax.tree.unflatten(jax.tree.structure((learned, state)), leaves)
        progress(len(losses))
    heads = tuple({"norm": of["norm"], "head": head(of)} for of in (exact, params))
    for index in range(len(losses), len(tokens)):
        row = tokens[index : index + 1]
        rate = jnp.float32(RATE * (0.5 + 0.5 * math.cos(math.pi * index / len(tokens))))
        wanted, (h,) = embed(cfg, exact, row), embed(cfg, params, row)
        borders = []
        for name, layer in zip(names, cfg.layers, strict=True):
            wanted = advance(layer, exact[name], wanted)
            borders.append(h)
            h = _forward(layer, parts[name], learned[name], h)
        loss, grad, learned["last"], state["last"] = _last(
            cfg, heads, learned["last"], state["last"], wanted[0], h, rate
        )
        for name, layer in reversed(list(zip(names, cfg.layers, strict=True))):
            grad, learned[name], state[name] = _backward(
                layer, parts[name], learned[name], state[name], borders.pop(), grad, rate
            )
        losses.append(float(loss))
        if work is not None and (index + 1) % _KEPT == 0:
            work.save_step(losses, jax.tree.leaves((learned, state)))
        progress(1)
    out = {name: _applied(part, learned[name]) for name, part in parts.items()}
    return {**params, **out.pop("last"), **out}, losses


def steps(tokenizer: Tokenizer | None, text: str, window: int, count: int) -> np.ndarray:
    """Return ``count`` windows of the text in a shuffled order, int32 ``[count, window]``.

    They are evenly spread over the text. If the text has fewer windows, all of them repeat.
    """
    rows = windows(tokenizer, text, window, max(count, 1))
    rng = np.random.default_rng(0)
    epochs = [rng.permutation(rows) for _ in range(1 + count // len(rows))]
    return np.concatenate(epochs)[:count]


@functools.partial(jax.jit, static_argnums=0)
def _forward(config: LayerConfig, layer: Params, learned: Learned, h: jax.Array) -> jax.Array:
    return _through(config, layer, learned, h)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _backward(
    config: LayerConfig,
    layer: Params,
    learned: Learned,
    state: optax.OptState,
    h: jax.Array,
    grad: jax.Array,
    rate: jax.Array,
) -> tuple[jax.Array, Learned, optax.OptState]:
    """Return (gradient before the layer, its learned values, its Adam state).

    grad: the gradient after the layer.
    """
    _, pull = jax.vjp(functools.partial(_through, config, layer), learned, h)
    grads, before = pull(grad)
    return before, *_moved(learned, state, grads, rate)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _last(
    cfg: ModelConfig,
    heads: tuple[Params, Params],
    learned: Learned,
    state: optax.OptState,
    wanted: jax.Array,
    h: jax.Array,
    rate: jax.Array,
) -> tuple[jax.Array, jax.Array, Learned, optax.OptState]:
    """Return the loss, and the same values as ``_backward`` for the last norm."""
    exact, params = (_plain(of, h.dtype) for of in heads)

    def loss(learned: Learned, h: jax.Array) -> jax.Array:
        return _divergence(cfg, (exact, _applied(params, learned)), wanted, h)

    value, (grads, before) = jax.value_and_grad(loss, argnums=(0, 1))(learned, h)
    return value, before, *_moved(learned, state, grads, rate)


def _through(config: LayerConfig, layer: Params, learned: Learned, h: jax.Array) -> jax.Array:
    layer = _plain(_applied(layer, learned, jnp.float32), h.dtype)
    at = whole_rows(config, h.shape[0], h.shape[1])
    stream = Stream.unpacked(h, config.d_model)
    return block(config, layer, stream, None, at)[0].packed


def _plain(part: Params, dtype: DTypeLike) -> ParamsDict:
    """Return the part with dequantized weights, whose products can be differentiated."""

    def plain_leaf(leaf: jax.Array | QTensor) -> jax.Array | QTensor:
        return dequantize(leaf, dtype) if _is_packed(leaf) else leaf

    return jax.tree.map(plain_leaf, part, is_leaf=_is_packed)


def _moved(
    learned: Learned, state: optax.OptState, grads: Learned, rate: jax.Array
) -> tuple[Learned, optax.OptState]:
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        moves, state = _RULE.update(grads, state, learned)
    return jax.tree.map(lambda a, move: a - rate * move, learned, moves), state


def _is_packed(leaf: object) -> TypeGuard[QTensor]:
    return isinstance(leaf, QTensor)


def _nothing(part: Params) -> Learned:
    """Return the initial learned values of a part's quantized weights and norms: zeros."""
    leaves = jax.tree_util.tree_leaves_with_path(part, is_leaf=_is_packed)
    return {
        _path(keys): jnp.zeros((_outer(leaf) if _is_packed(leaf) else leaf).shape, jnp.float32)
        for keys, leaf in leaves
        if _is_packed(leaf) or keys[-2].key.endswith("norm")
    }


def _outer(w: QTensor) -> jax.Array:
    """Return the floating-point scales: of the groups, or of the rows above them."""
    return w.scale if w.unit is None else w.unit


def _applied(part: Params, learned: Learned, dtype: DTypeLike | None = None) -> ParamsDict:
    """Return the part with its learned values. dtype: of the scales, by default their own."""

    def applied_leaf(keys: tuple[DictKey, ...], leaf: jax.Array | QTensor) -> jax.Array | QTensor:
        if _path(keys) not in learned:
            return leaf
        old = _outer(leaf) if isinstance(leaf, QTensor) else leaf
        new = old.astype(jnp.float32) * (1.0 + learned[_path(keys)])
        if not isinstance(leaf, QTensor):
            return new.astype(old.dtype)
        field = "scale" if leaf.unit is None else "unit"
        changed: dict[str, Any] = {field: new.astype(dtype or old.dtype), "blocked": None}
        return dataclasses.replace(leaf, **changed)

    return jax.tree_util.tree_map_with_path(applied_leaf, part, is_leaf=_is_packed)


def _path(keys: tuple[DictKey, ...]) -> str:
    return "/".join(entry.key for entry in keys)


def _divergence(
    cfg: ModelConfig, models: tuple[Params, Params], wanted: jax.Array, got: jax.Array
) -> jax.Array:
    """Return the mean of KL(exact || quantized) over positions, ``_POSITIONS`` at a time.

    wanted, got: hidden states ``[B, T, D]`` after the last blocks. models: norm and head of each.
    """

    @jax.checkpoint
    def divergence_of(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        p, q = (
            jax.nn.log_softmax(logits(cfg, of, Hidden(x)))
            for of, x in zip(models, pair, strict=True)
        )
        return jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * (p - q), 0.0))

    count = wanted.size // wanted.shape[-1]
    size = next(size for size in range(min(_POSITIONS, count), 0, -1) if count % size == 0)
    pairs = (x.reshape(count // size, size, -1) for x in (wanted, got))
    return jnp.sum(lax.map(divergence_of, tuple(pairs))) / count
