"""Training of an EAGLE-3 head on a model's own answers, with test-time steps.

    data = answered(config, prompts, run)              the model answers, once for the run
    head, params, fixed = begin(config, target, data)  the head, its first parameters, the model
    loss, parts = objective(head, target, config, params, fixed, batch)

The rows are packed prompts with their answers.  The model reads them without gradients and gives
the states g_t before the head's layers and its own distribution p of each next token.  Step k of
``depth`` is what the head does for the (k + 1)-th token of a draft:

    x_0 = fc(g_t);  x_k = the head's output of step k - 1 at place t
    row t reads the embedding of token t + 1 + k, and the keys of step 0 up to t, and those of the
    steps 1 to k at place t itself, whose position is t + k
    loss = sum over k of 0.8^k  mean over answers of KL(p_{t + 1 + k} || q_k)

p has the tokens of the head's vocabulary only.  Places where the model's likeliest token is not
among them do not count.  The head begins with the model's last norm, the rows of its head, and its
last layer's o and feed-forward where they fit.  fc begins at random, over the size of each state's
features, so that x_0 is small beside what the layer adds (``docs/lab/training.md``).

Source: EAGLE-3 (arXiv 2503.01840) and its published code.  Left out: a mesh, other losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.config import Eagle, ModelConfig, RopeConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.files import whole_file
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load
from jaxllama.model import decoder, linear
from jaxllama.model.eagle3 import TARGETS, Drafter, Eagle3Head, published_taps, table
from jaxllama.model.forms.eagle import FORM
from jaxllama.model.linear import Stream
from jaxllama.model.params import nested
from jaxllama.model.records import places_in_segments
from jaxllama.model.rope import rope_tables
from jaxllama.model.stacked import embed
from jaxllama.progress import working
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.conversations import Example, Unit
from jaxllama.training.loss import draft_divergence, likeliest
from jaxllama.training.packing import Conversations
from jaxllama.training.prompts import PromptFile
from jaxllama.training.run_directory import ANSWERS
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.attention.plain import attention_scores, rotate

DECAY = 0.8  # weight of a step beside the step before
_TOKENS = 2**18  # of the cache for answers at a time, of which one has all at least
_ROWS = 8  # that measure the size of the model's states
_STREAM = 0.1  # size of a feature of x_0 at first
# Parameters that begin as those of the model's last layer.
_OF_LAST = (
    ("mixer", "o", "weight"),
    ("mlp_norm", "weight"),
    ("mlp", "gate_up", "weight"),
    ("mlp", "down", "weight"),
)
KeysValues = tuple[jax.Array, jax.Array]  # [B, T, K, H] each


class Answer(NamedTuple):
    """tokens int32 ``[T]``: a prompt with its answer, which begins at ``begin``."""

    tokens: np.ndarray
    begin: int


def answered(config: TrainConfig, prompts: PromptFile, run: Path, progress: bool) -> Conversations:
    """Return the prompts with the model's answers, which the run's folder keeps."""
    path, count = run / ANSWERS, len(config.drafting.temperatures)
    if not path.exists():
        assert config.init_from is not None
        lm = load(config.init_from, config.dtype, progress=progress)
        asked = [prompt.tokens for prompt in prompts.prompts]
        with working("answering", len(asked), progress, unit="prompts") as sign:
            rows = list[Answer]()
            for group in answers(lm, config, asked):
                rows += group
                sign(len(group) // count)
        keep(path, rows)
    with np.load(path) as kept:
        ends = np.cumsum(kept["lengths"])
        tokens = np.split(kept["tokens"], ends[:-1])
        units = [
            Unit((Example(row, np.arange(len(row)) >= begin),))
            for row, begin in zip(tokens, kept["begins"], strict=True)
        ]
    lines = [units[at : at + count] for at in range(0, len(units), count)]
    length = config.sequence_length + 1
    return Conversations(prompts.tokenizer, lines, prompts.sha256, length)


def answers(
    lm: LanguageModel, config: TrainConfig, prompts: Sequence[Sequence[int]]
) -> Iterator[list[Answer]]:
    """Yield the answers to the prompts in order, one at each temperature, in groups."""
    temperatures = config.drafting.temperatures
    rows = [(prompt, temperature) for prompt in prompts for temperature in temperatures]
    size = min(max(_TOKENS // config.sequence_length, 1), len(rows))
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        asked = [*group, *[group[-1]] * (size - len(group))]
        found = lm.generate(
            [prompt for prompt, _ in asked],
            config.drafting.max_new_tokens,
            [Sampling(temperature=temperature) for _, temperature in asked],
            [(config.seed << 24) + first + index for index in range(size)],
        )
        yield [
            Answer(np.array([*prompt, *answer.tokens], np.int32), len(prompt))
            for (prompt, _), answer in zip(group, found, strict=False)
        ]


def keep(path: Path, rows: Sequence[Answer]) -> None:
    """Write answers, which ``answered`` reads."""
    tokens = np.concatenate([row.tokens for row in rows])
    lengths, begins = [len(row.tokens) for row in rows], [row.begin for row in rows]
    with whole_file(path) as file:
        np.savez(file, tokens=tokens, lengths=lengths, begins=begins)


def begin(
    config: TrainConfig, name: str, target: ModelConfig, params: Params, data: Conversations
) -> tuple[Eagle3Head, ParamsDict, ParamsDict]:
    """Return (the head, its first parameters in float32, what does not learn).

    name: of the head.  The latter are the model's parameters, and the head's tokens as
    ``eagle3.TARGETS``.
    """
    head = head_of(config, name, target)
    targets = tokens_of(data, config.data.held_out, head.model.vocab_size, target.vocab_size)
    key, own = jax.random.key(config.seed), dict[tuple[str, ...], jax.Array]()
    for number, (path, spec) in enumerate(table(head).items()):
        noise = jax.random.normal(jax.random.fold_in(key, number), spec.shape, jnp.float32)
        own[path] = spec.mean + spec.std * noise
    # The step donates the head's arrays, so they are copies.
    for path in _OF_LAST:
        found = functools.reduce(
            lambda node, name: node.get(name, {}), path, params[f"layer_{target.n_layers - 1}"]
        )
        if isinstance(found, jax.Array) and found.shape == own["layer_0", *path].shape:
            own["layer_0", *path] = jnp.array(found, jnp.float32)
    weight = decoder.rows_of_table(decoder.head(params)["weight"], targets, jnp.float32)
    own["head", "weight"] = jnp.array(weight)
    if target.norm.kind == "rms" and target.norm.weight:
        own["norm", "weight"] = jnp.array(params["norm"]["weight"], jnp.float32)
    rows, _ = data.split(config.data.held_out)
    sizes = _sizes(head, target, params, rows.rows(range(_ROWS)), jnp.dtype(config.dtype))
    noise = jax.random.normal(jax.random.fold_in(key, len(own)), own["fc", "weight"].shape)
    own["fc", "weight"] = _STREAM * len(sizes) ** -0.5 * noise / sizes
    return head, nested(own), {"target": params, TARGETS: targets}


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _sizes(
    head: Eagle3Head, target: ModelConfig, params: Params, batch: Batch, dtype: jnp.dtype
) -> jax.Array:
    """Return the size of each feature of the states before the head's layers, float32 ``[3 D]``."""
    _, taps = _states(head, target, dtype, params, batch)
    segments = batch.input_segments
    assert segments is not None
    is_token = (segments > 0).astype(jnp.float32)[..., None]
    squares = jnp.sum(jnp.square(taps.astype(jnp.float32)) * is_token, axis=(0, 1))
    return jnp.sqrt(squares / jnp.sum(is_token)) + jnp.float32(1e-6)


def head_of(config: TrainConfig, name: str, target: ModelConfig) -> Eagle3Head:
    """Return the head for a model: its layer has the sizes of the model's."""
    n, options = target.n_layers, config.drafting
    taps = published_taps(n) if n >= 6 else (n // 3, n // 2, n - 1)
    plain = ModelConfig.of(
        name=name,
        vocab_size=min(options.vocab_size, target.vocab_size),
        d_model=target.d_model,
        n_layers=1,
        n_heads=target.n_heads,
        n_kv_heads=target.n_kv_heads,
        head_dim=target.head_dim,
        d_ff=target.feed_width,
        norm_eps=target.norm_eps,
        max_position=target.max_position,
        rope=RopeConfig(theta=target.rope.theta),
        tie_embeddings=False,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )
    model = plain.of_layers([plain.layers[0].replace(form=Eagle())])
    return Eagle3Head(model, taps, target.d_model, target.vocab_size)


def tokens_of(data: Conversations, held_out: int, count: int, vocab: int) -> jax.Array:
    """Return the ``count`` most frequent tokens of the answers to learn from, in order."""
    seen = np.zeros(vocab, np.int64)
    for line in data.lines[: len(data.lines) - held_out]:
        for unit in line:
            for example in unit.examples:
                np.add.at(seen, example.tokens[example.answers], 1)
    most = np.argsort(-seen, kind="stable")[:count]
    return jnp.asarray(np.sort(most), jnp.int32)


def drafter_of(config: TrainConfig, head: Eagle3Head, params: Params, fixed: Params) -> Drafter:
    """Return the head with its parameters in the run's dtype."""
    weights = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    return Drafter(head, {**weights, TARGETS: fixed[TARGETS]})


def objective(
    head: Eagle3Head,
    target: ModelConfig,
    config: TrainConfig,
    params: Params,
    fixed: Params,
    batch: Batch,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (the loss of the module docstring, its parts).

    "right_k": share of places whose k-th drafted token is the model's likeliest one.
    "tokens_a_pass": 1 + right_1 + right_1 right_2 + ..., what a greedy pass would give.
    """
    dtype, tokens, whole = jnp.dtype(config.dtype), batch.inputs, fixed["target"]
    states, taps = _states(head, target, dtype, whole, batch)
    vocabulary, weight = fixed[TARGETS], decoder.head(whole)["weight"]
    teacher = decoder.rows_of_table(weight, vocabulary, dtype)
    best = likeliest(states, weight, target.logit_softcap)
    has = jnp.zeros((target.vocab_size,), bool).at[vocabulary].set(True)
    segments = batch.input_segments
    segments = jnp.ones_like(tokens) if segments is None else segments
    weights = jnp.ones(tokens.shape) if batch.weights is None else jnp.asarray(batch.weights)
    weights = jnp.where(has[best], weights, 0.0).astype(jnp.float32)

    read = functools.partial(decoder.rows_of_table, whole["embed"]["weight"], dtype=dtype)
    outputs = unrolled(head, config, params, taps, tokens, segments, read)
    total, parts = jnp.float32(0), dict[str, jax.Array]()
    reached = tokens_a_pass = jnp.float32(1)
    for step, x in enumerate(outputs):
        ahead = functools.partial(_ahead, count=step + 1)
        y, _ = linear.norm(Stream(x), params["norm"], head.model)
        counted = jnp.where(ahead(segments) == segments, ahead(weights), 0.0)
        value, found = draft_divergence(
            y, params["head"]["weight"], counted, ahead(states), teacher, target.logit_softcap
        )
        total = total + DECAY**step * value
        parts[f"right_{step + 1}"] = found["right"]
        reached = reached * jnp.minimum(found["right"], 1.0)
        tokens_a_pass = tokens_a_pass + reached
    return total, {**parts, "tokens_a_pass": tokens_a_pass}


def unrolled(
    head: Eagle3Head,
    config: TrainConfig,
    params: Params,
    taps: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    read: Callable[[jax.Array], jax.Array],
) -> Iterator[jax.Array]:
    """Yield the head's outputs ``[B, T, D]`` of each test-time step, before its last norm.

    taps ``[B, T, 3 D]``: the model's states of ``tokens[B, T]``. read: the embeddings of tokens.
    """
    run = functools.partial(_step, head)
    run = jax.checkpoint(run, static_argnums=1) if config.remat else run
    x, kept = linear.linear(taps, params["fc"], taps.dtype), list[KeysValues]()
    for step in range(config.drafting.depth):
        embedded = read(_ahead(tokens, step + 1))
        x, keys_values = run(params["layer_0"], step, x, embedded, segments, tuple(kept))
        kept.append(keys_values)
        yield x


def _states(
    head: Eagle3Head, target: ModelConfig, dtype: jnp.dtype, params: Params, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return the model's states before its head, and those before the head's layers."""
    segments, begins = batch.input_segments, batch.input_begins
    stream, at = embed(target, params, batch.inputs, dtype, segments, begins)
    run, cfg = decoder.block_of_a_program(target), target.replace(taps=head.taps)
    stream, _, taps = decoder.walk(cfg, params, stream, None, at, run)
    assert taps is not None
    return lax.stop_gradient((decoder.final_norm(target, params, stream), taps))


def _ahead(x: jax.Array, count: int) -> jax.Array:
    """Return ``x[B, T, ...]`` so that place t has what stood at ``t + count``; zeros at the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, count), *((0, 0),) * (x.ndim - 2)))


def _step(
    head: Eagle3Head,
    p: Params,
    step: int,
    x: jax.Array,
    embedded: jax.Array,
    segments: jax.Array,
    kept: tuple[KeysValues, ...],
) -> tuple[jax.Array, KeysValues]:
    """Run the head's layer in test-time step ``step``, from 0; kept: of the steps before it."""
    layer = head.model.layers[0]
    cfg, (batch, length) = layer.mixer, x.shape[:2]
    projected, stream = FORM.read(layer, p, Stream(x, embedded=embedded), p["mixer"]["qkv"])
    heads = projected.reshape(batch, length, -1, cfg.head_dim)
    places = places_in_segments(segments) + step
    qk, v = jnp.split(heads, (cfg.n_heads + cfg.n_kv_heads,), axis=2)
    qk = rotate(qk, *rope_tables(cfg.rope, cfg.head_dim, places, jnp.max(places, axis=1) + 1))
    q, k = jnp.split(qk, (cfg.n_heads,), axis=2)
    mixed = _attended(q, [*kept, (k, v)], segments)
    stream = linear.linear_add(mixed, p["mixer"]["o"], stream, layer)
    return FORM.feed(layer, p, stream, stream).total, (k, v)


def _attended(q: jax.Array, kept: list[KeysValues], segments: jax.Array) -> jax.Array:
    """Return the heads' outputs ``[B, T, N H]``; kept: keys and values of each step up to now.

    A row sees those of the first step up to its own place, and of later ones at its place.
    """
    (first_k, first_v), later = kept[0], kept[1:]
    batch, length, n, h = q.shape
    grouped = q.reshape(batch, length, first_k.shape[2], -1, h)
    scores = attention_scores(q, first_k)
    place = jnp.arange(length, dtype=jnp.int32)
    seen = (place[:, None] >= place) & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = [
        jnp.einsum("btkgh,btkh->bkgt", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
        for k, _ in later
    ]
    scores = jnp.concatenate([scores, *(part[..., None] for part in own)], axis=-1)
    shares: Tree = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bkgts,bskh->btkgh", shares[..., :length], first_v)
    for index, (_, v) in enumerate(later):
        mixed = mixed + jnp.einsum("bkgt,btkh->btkgh", shares[..., length + index], v)
    return mixed.reshape(batch, length, n * h)
