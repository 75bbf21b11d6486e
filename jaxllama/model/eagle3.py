"""EAGLE-3: a head that is trained beside a model, and reads the states of three of its layers.

    g_t    = fc(concat(states before the layers ``taps``))             or the head's own last output
    hidden = the layer of ``forms.eagle``(stream g_t, embedded embed(token t + 1))
    scores = head(norm(hidden))                      of the head's own tokens, a part of the model's

The embedding is the model's unless the head has one of its own.  ``targets`` has the id in the
model's vocabulary of each of the head's tokens.

Source: EAGLE-3 (arXiv 2503.01840); published code of SafeAILab/EAGLE, SpecForge, vLLM and SGLang.
Left out: trees of drafts, several layers, a mesh.
"""

from __future__ import annotations

import dataclasses

import jax

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder, linear
from jaxllama.model.cache import Cache
from jaxllama.model.forms.parameters import layer_table
from jaxllama.model.heads import HeadScores, run_layer
from jaxllama.model.linear import Stream
from jaxllama.model.names import Names, Source
from jaxllama.model.param import Param, Path, norm_rows, tensor
from jaxllama.model.records import Hidden
from jaxllama.typing import Params

NAMES = Names(layer="midlayer", mixer_norm="hidden_norm", embedded_norm="input_layernorm")
TARGETS = "targets"  # of the parameters: int32 ``[vocab_size]``


@dataclasses.dataclass(frozen=True)
class Eagle3Head:
    """The head's sizes (``heads.Head``).

    model: its layer, last norm and own vocabulary, as the config of a model of one layer.
    taps: the layers of the other model before which it reads the states; () for the published
        ones, which ``fitted`` sets: 2, half, and all but 3.
    target_width, target_vocab: the other model's ``d_model`` and ``vocab_size``.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    target_width: int
    target_vocab: int

    @property
    def layer_config(self) -> ModelConfig:
        return self.model

    def fitted(self, cfg: ModelConfig, has_embedding: bool) -> Eagle3Head:
        """Return the head for a model of this config, with its taps.

        Raises JaxLlamaError if it cannot read the states of such a model.
        """
        name = self.model.name
        head = dataclasses.replace(self, taps=self.taps or published_taps(cfg.n_layers))
        for key, want, found in (
            ("d_model", self.target_width, cfg.d_model),
            ("vocab_size", self.target_vocab, cfg.vocab_size),
        ):
            if want != found:
                raise JaxLlamaError(
                    f"draft: {name} is for {key} {want}, but {cfg.name} has {found}"
                )
        if not all(0 <= layer <= cfg.n_layers for layer in head.taps):
            raise JaxLlamaError(
                f"draft: {name} reads the states before layers {list(head.taps)}, "
                f"but {cfg.name} has {cfg.n_layers} layers"
            )
        if not has_embedding and self.model.d_model != cfg.d_model:
            raise JaxLlamaError(
                f"draft: {name} has d_model {self.model.d_model} and no embedding of its own; "
                f"that of {cfg.name} has width {cfg.d_model}"
            )
        return head

    def weights(self, model: Params, draft: Params | None) -> Params:
        assert draft is not None
        return {"embed": {"weight": model["embed"]["weight"]}, **draft}

    def combined(self, params: Params, hidden: Hidden) -> jax.Array:
        """Return the model's states of three layers as one vector a token, ``[..., D]``."""
        assert hidden.taps is not None
        return linear.linear(hidden.taps, params["fc"], decoder.activation_dtype(params))

    def embedded(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return the embeddings of ``tokens [...]`` as the head reads them, ``[..., D]``."""
        dtype = decoder.activation_dtype(params)
        return decoder.rows_of_table(params["embed"]["weight"], tokens, dtype)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        before: Hidden,
        lengths: jax.Array,
        cache: Cache,
        *,
        is_own: bool = False,
        is_prompt: bool = False,
        fresh: bool = False,
    ) -> tuple[Hidden, Cache]:
        x = before.x if is_own else self.combined(params, before)
        stream = Stream(x, embedded=self.embedded(params, tokens))
        layer = self.model.layers[0]
        return run_layer(
            layer, params["layer_0"], stream, lengths, cache, is_prompt=is_prompt, fresh=fresh
        )

    def scores(self, params: Params, hidden: Hidden) -> HeadScores:
        logits = decoder.logits(self.model, params, hidden)
        return HeadScores(logits, self.target_vocab, params[TARGETS])


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A head and its parameters; ``jl.load_drafter`` reads one, and training writes one."""

    head: Eagle3Head
    params: Params

    @property
    def config(self) -> ModelConfig:
        """The config of a model of the head's layer."""
        return self.head.model


def published_taps(n_layers: int) -> tuple[int, ...]:
    """Return the layers before which published heads read the states of a model."""
    return 2, n_layers // 2, n_layers - 3


def table(head: Eagle3Head) -> dict[Path, Param]:
    """Return the parameters, without ``targets`` and an embedding."""
    cfg, source = head.model, Source(NAMES)
    d, width = cfg.d_model, (len(head.taps) or 3) * head.target_width
    layer = layer_table(cfg, 0, source)
    return {
        ("fc", "weight"): tensor("fc.weight", d, width),
        **{("layer_0", *path): param for path, param in layer.items()},
        **norm_rows(("norm",), "norm", d, cfg.norm, 0.0, 1.0),
        ("head", "weight"): tensor("lm_head.weight", cfg.vocab_size, d),
    }
