"""A tiny model of Qwen3.5's shape with a head for multi-token prediction, and the head's reference.

transformers leaves ``mtp.*`` out.  ``proposed`` is a reference in torch: the layer is
transformers' own, and what is around it is written here as vLLM's ``qwen3_5_mtp`` has it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import ADAPTIVE
from jaxllama.language_model import LanguageModel
from jaxllama.model import decoder
from jaxllama.model.cache import init_cache
from jaxllama.model.mtp import MTPHead
from jaxllama.model.records import Hidden
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import HYBRIDS, params_of

CONFIG = HYBRIDS["qwen3.5"].replace(
    name="tiny-mtp",
    vocab_size=256,
    n_layers=2,
    layer_types=("delta", "attention"),
    mtp_layers=1,
)
HEAD = MTPHead(CONFIG)


def often_right(cfg: ModelConfig = CONFIG, seed: int = 0) -> dict[str, Any]:
    """Parameters whose head often proposes the model's own tokens.

    The layers add so little that mostly the last token decides the next.  The head passes the
    token's embedding on.
    """
    params = params_of(cfg, seed)
    layers = [params[f"layer_{index}"] for index in range(cfg.n_layers)]
    for layer, scale in (*((layer, 0.15) for layer in layers), (params["mtp"]["layer_0"], 0.05)):
        for room, name in (("mixer", "o"), ("mlp", "down")):
            layer[room][name]["weight"] = layer[room][name]["weight"] * np.float32(scale)
    head = params["mtp"]
    head["fc"]["weight"] = np.eye(cfg.d_model, 2 * cfg.d_model, dtype=np.float32)
    head["embed_norm"]["weight"] = np.ones(cfg.d_model, np.float32)
    head["norm"]["weight"] = params["norm"]["weight"]
    return params


@functools.cache
def model(**options: Any) -> LanguageModel:
    return LanguageModel(CONFIG, often_right(), Tokenizer.byte_level(), **options)


@functools.partial(jax.jit, static_argnums=3)
def _chain(params: Any, tokens: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """The head's greedy proposals ``[count]`` after ``tokens[1, :length]``, all read anew.

    ``test_the_head_is_the_reference`` compares the head with ``proposed``.
    """
    hidden, _ = decoder.forward(CONFIG, params, tokens, length[None])
    cache = init_cache(CONFIG.draft_head(), 1, tokens.shape[1] + count, jnp.float32)
    following, known = jnp.roll(tokens, -1, axis=1), length[None] - 1
    states, cache = HEAD.forward(
        params, following, hidden, known, cache, is_prompt=True, fresh=True
    )
    last, found, one = states.last(known), [], jnp.ones(1, jnp.int32)
    for index in range(count):
        token = jnp.argmax(HEAD.scores(params, last).logits, axis=-1).astype(jnp.int32)
        found.append(token)
        if index < count - 1:
            before = Hidden(last.x[:, None])
            states, cache = HEAD.forward(params, token[:, None], before, one, cache, is_own=True)
            last = states[:, 0]
    return jnp.concatenate(found)


def drafts_of(
    prompt: Sequence[int], answer: list[int], most: int, *, written: int, adapts: bool
) -> tuple[int, int]:
    """(drafted, accepted) tokens of a greedy answer, turn by turn, by ``_chain``'s proposals.

    most: longest draft.  written: tokens of the answer that are written without a draft.
    adapts: whether the row asks for as many tokens as ``Pace`` says, beginning with ``ADAPTIVE``.
    """
    text = np.zeros((1, 64 + 32), np.int32)
    whole = [*prompt, *answer]
    text[0, : len(whole)] = whole
    drafted = accepted = 0
    ask, wait, pause = ADAPTIVE if adapts else most, 0, 1
    while written < len(answer):
        wanted = min(ask, most, len(answer) - written - 1) if wait == 0 else 0
        wait, right = max(wait - 1, 0), 0
        if wanted > 0:
            length = len(prompt) + written
            found = np.asarray(_chain(model().params, text, np.int32(length), most)).tolist()
            rest = answer[written:]
            while right < wanted and found[right] == rest[right]:
                right += 1
            drafted, accepted = drafted + wanted, accepted + right
        if wanted > 0 and adapts:
            ask = min(4 * ask, most) if right else ask // 2
            if ask == 0:
                pause = min(2 * pause, 64)
                wait = pause
            pause, ask = (1 if right else pause), max(ask, 1)
        written += right + 1
    return drafted, accepted


def proposed(directory: Path, tokens: list[int], count: int) -> tuple[np.ndarray, list[int]]:
    """(logits ``[count, V]``, the head's greedy tokens) behind ``tokens``, of which the model has
    read all but the last; of a directory that ``hf.save`` wrote."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    files = load_file(next(directory.glob("*.safetensors")))
    weights = {name[4:]: x for name, x in files.items() if name.startswith("mtp.")}
    config = model.config
    layer = qwen.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
    own = {name[9:]: x for name, x in weights.items() if name.startswith("layers.0.")}
    layer.load_state_dict(own)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        rms = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        rms.load_state_dict({"weight": weights[f"{name}.weight"]})
        return rms(x)

    with torch.no_grad():
        read = torch.tensor([tokens])
        states = model.model(read[:, :-1]).last_hidden_state  # behind the model's last norm
        following, scores = list(tokens[1:]), []
        for _ in range(count):
            embedded = model.model.embed_tokens(torch.tensor([following]))
            pair = norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", states)
            x = torch.cat(pair, dim=-1) @ weights["fc.weight"].T
            places = torch.arange(x.shape[1])[None]
            turns = model.model.rotary_emb(x, places)
            x = norm("norm", layer(x, position_embeddings=turns, position_ids=places))
            scores.append(model.lm_head(x[0, -1]).numpy())
            states = torch.cat([states, x[:, -1:]], dim=1)
            following.append(int(scores[-1].argmax()))
    return np.stack(scores), following[-count:]
