"""A GLA student of a Llama teacher: its shape, its first weights, and how its mixers learn.

The student is the teacher with attention replaced by GLA of the same heads, kv groups and head
size, without an output gate. Embeddings, norms, MLPs, head, and q, k, v, o are copied. Rotations
and biases of q, k, v are dropped, and the softmax becomes the decayed sum. Two parts are new. The
gate's low-rank projection is random, with a bias that gives each head's channels memories from a
few tokens to a thousand. The norm of a head's output is scaled so that the first outputs have the
size of the teacher's (``answer_scales``).

Two objectives are meant to follow each other (as in MOHAWK, arXiv 2408.10189, and The Mamba in the
Llama, 2408.15237):

1. "mixers": each GLA mixer gets the input of the teacher's attention and imitates its output. The
loss is the mean over layers of |student - teacher|^2 / |teacher|^2. Layers learn independently, so
this converges in a small part of the tokens.
2. "logits": the whole student learns the teacher's distribution (``loss.distillation``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxllama.checkpoints.hf.fla import config_to_fla
from jaxllama.config import CheckpointForm, GLAConfig, LayerConfig, ModelConfig, RopeConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.decoder import block, walk
from jaxllama.model.linear import Stream, linear, norm_linear
from jaxllama.model.mixers import has_states
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.mixers.gla import mix as gla
from jaxllama.model.observer import Observer
from jaxllama.model.records import At, whole_rows
from jaxllama.model.stacked import embed
from jaxllama.quantization.random_params import random_params
from jaxllama.typing import Params, Tree

# Gate biases of a head's channels, evenly spaced. A decay of sigmoid(bias) ** (1 / 16) a token is a
# half-life of 5 tokens at the lower end and of 600 at the upper one.
GATE_BIAS = (-2.0, 4.0)


def student_config(teacher: ModelConfig, attention_layers: tuple[int, ...] = ()) -> ModelConfig:
    """Return the student's config.

    attention_layers: layers that stay attention. Raises JaxLlamaError for a layer that the teacher
    lacks, a teacher with GLA layers, or a teacher whose options GLA's files cannot express.
    """
    if has_states(teacher):
        raise JaxLlamaError(f"distill.teacher: {teacher.name} has GLA layers: give it as init_from")
    for layer in attention_layers:
        if not 0 <= layer < teacher.n_layers:
            raise JaxLlamaError(
                f"distill.attention_layers: {layer} is not a layer of {teacher.name}; allowed: 0 "
                f"to {teacher.n_layers - 1}"
            )
    if len(set(attention_layers)) == teacher.n_layers:
        raise JaxLlamaError("distill.attention_layers: every layer: nothing is left to replace")
    expand = teacher.n_heads * teacher.head_dim / teacher.d_model
    gla = GLAConfig(
        n_heads=teacher.n_heads,
        n_kv_heads=teacher.n_kv_heads,
        expand_k=expand,
        expand_v=expand,
        use_output_gate=False,
        norm_eps=teacher.norm_eps,
    )
    own = enumerate(teacher.layer_types)
    kinds = tuple(kind if i in attention_layers else "gla" for i, kind in own)
    student = teacher.replace(
        name=f"{teacher.name}-gla", layer_types=kinds, gla=gla, stored=CheckpointForm()
    )
    # options that only attention reads, and that GLA's files cannot express
    if not attention_layers:
        student = student.replace(
            rope=RopeConfig(teacher.rope.theta),
            qkv_bias=False,
            sliding_window=None,
            qk_norm="none",
            window_rope=None,
            nope_layers=(),
            latent=None,
        )
    if teacher.stored.family != CheckpointForm().family:
        config_to_fla(student)
    return student


def student_params(student: ModelConfig, teacher_params: Params, key: jax.Array) -> Params:
    """Return the student's first weights, float32; see the module docstring."""
    params = dict(random_params(student, key))
    for name, part in teacher_params.items():
        part = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), part)
        index = name.removeprefix("layer_")
        if index != name and student.layer_types[int(index)] == "gla":
            part["mixer"] = _mixer_params(student, params[name]["mixer"], part["mixer"])
        params[name] = part
    return params


def _mixer_params(cfg: ModelConfig, fresh: Params, attention: Params) -> Params:
    gla = cfg.gla
    assert gla is not None
    d_k, _ = gla.head_dims(cfg.d_model)
    rows = (gla.n_heads * d_k, (gla.n_heads + gla.n_kv_heads) * d_k)
    q, k, v = jnp.split(attention["qkv"]["weight"], rows)
    bias = jnp.tile(jnp.linspace(*GATE_BIAS, d_k, dtype=jnp.float32), gla.n_kv_heads)
    taken = {name: {"weight": weight} for name, weight in (("q", q), ("k", k), ("v", v))}
    taken["o"] = {"weight": attention["o"]["weight"]}
    return {**fresh, **taken, "gk_1": {**fresh["gk_1"], "bias": bias}}


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def answer_scales(
    student: ModelConfig,
    teacher: ModelConfig,
    params: Params,
    teacher_params: Params,
    tokens: jax.Array,
    dtype: str = "float32",
) -> jax.Array:
    """Return the best multiplier of each GLA mixer's output, float32 ``[n_layers]``.

    It brings the output on ``tokens[B, T]`` closest to the teacher's; attention layers have 1. A
    normed head has size 1 whatever the teacher's size, so unscaled outputs are several times too
    large at first. The multiplier is the least-squares solution, but at least a tenth of the one
    that makes the sizes equal.
    """
    scales = [jnp.float32(1.0)] * student.n_layers
    seen = _teacher_layers(teacher, teacher_params, tokens, jnp.dtype(dtype))
    for index, (x, answer) in enumerate(seen):
        if student.layer_types[index] == "gla":
            answer = answer.astype(jnp.float32)
            mine = _answer(student.layers[index], params[f"layer_{index}"]["mixer"], x)
            size = jnp.sum(mine**2)
            best = jnp.sum(mine * answer) / size
            scales[index] = jnp.maximum(best, 0.1 * jnp.sqrt(jnp.sum(answer**2) / size))
    return jnp.stack(scales)


def scaled(params: Params, scales: jax.Array) -> Params:
    """Return the student with ``answer_scales`` in its heads' norms."""
    params = dict(params)
    for index, scale in enumerate(scales):
        mixer = params[f"layer_{index}"]["mixer"]
        if "g_norm" in mixer:
            mixer = {**mixer, "g_norm": {"weight": mixer["g_norm"]["weight"] * scale}}
            params[f"layer_{index}"] = {**params[f"layer_{index}"], "mixer": mixer}
    return params


def mixer_loss(
    student: ModelConfig,
    teacher: ModelConfig,
    params: Params,
    teacher_params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    remat: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of the objective "mixers" on ``tokens[B, T]``, and no parts."""
    losses = []
    seen = _teacher_layers(teacher, teacher_params, tokens, dtype)
    for index, (x, answer) in enumerate(seen):
        if student.layer_types[index] == "gla":
            loss = functools.partial(_imitation, student.layers[index])
            loss = jax.checkpoint(loss) if remat else loss
            losses.append(loss(params[f"layer_{index}"]["mixer"], x, answer))
    return jnp.asarray(sum(losses) / len(losses)), {}


def _imitation(layer: LayerConfig, params: Params, x: jax.Array, answer: jax.Array) -> jax.Array:
    answer = answer.astype(jnp.float32)
    return jnp.sum((_answer(layer, params, x) - answer) ** 2) / jnp.sum(answer**2)


def _answer(layer: LayerConfig, params: Params, x: jax.Array) -> jax.Array:
    """Return a GLA mixer's output, float32."""
    batch, length, _ = x.shape
    at = whole_rows(layer, batch, length)
    projected, _ = norm_linear(Stream(x), None, gla.inputs(layer, params), layer)
    heads, _ = gla.mix(layer, params, projected, None, at)
    return linear(heads, params["o"]).astype(jnp.float32)


def _teacher_layers(
    cfg: ModelConfig, params: Params, tokens: jax.Array, dtype: jnp.dtype
) -> list[tuple[jax.Array, jax.Array]]:
    """Return (mixer's input, mixer's output) of every layer of an attention model."""
    seen = []

    def teacher_layer(
        layer: LayerConfig, p: Params, stream: Stream, state: LayerState, at: At
    ) -> tuple[Stream, LayerState]:
        watch = Observer()
        out = block(layer, p, stream, state, at, watch)
        seen.append((watch.inputs[id(p["mixer"]["qkv"])], watch.outputs[id(p["mixer"]["o"])]))
        return out

    stream, at = embed(cfg, params, tokens, dtype)
    walk(cfg, params, stream, None, at, teacher_layer)
    return seen


def learned(student: ModelConfig, params: Params) -> Tree:
    """Return a tree of booleans that is True at the GLA mixers, which objective "mixers" trains."""
    mixers = [f"layer_{i}" for i, kind in enumerate(student.layer_types) if kind == "gla"]

    def is_learned(path: tuple[Tree, ...], _: object) -> bool:
        keys = [key.key for key in path]
        return keys[0] in mixers and keys[1] == "mixer"

    return jax.tree_util.tree_map_with_path(is_learned, params)
