"""MTP: the head for multi-token prediction that Qwen3-Next and Qwen3.5 checkpoints carry.

    x = fc(concat(norm(embed(token t + 1)), norm(h_t)));  layer of full attention;  norm;  head

``h_t`` is the model's output for token t behind its final norm, or the head's own behind its own
norm.  The embedding and the last product are the model's.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2); Qwen3-Next and Qwen3.5 as vLLM runs them
(``qwen3_next_mtp``, ``qwen3_5_mtp``).  transformers has no class for it.  Left out: several layers,
a head with an embedding of its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllama.config import ModelConfig
from jaxllama.model import decoder, linear
from jaxllama.model.cache import Cache, cache_specs
from jaxllama.model.heads import HeadScores, run_layer
from jaxllama.model.linear import Stream
from jaxllama.model.records import Hidden
from jaxllama.model.sharded import over_mesh
from jaxllama.parallel.mesh import traced_mesh
from jaxllama.typing import Params, Tree

_READ = ("mtp", "embed", "norm", "head")


@dataclasses.dataclass(frozen=True)
class MTPHead:
    """The head of the model with this config, whose parameters have it (``heads.Head``)."""

    cfg: ModelConfig

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def layer_config(self) -> ModelConfig:
        return self.cfg.draft_head()

    def weights(self, model: Params, draft: Params | None) -> Params:
        """Return those of the model that the head reads, without adapters."""
        del draft

        def bare(node: Tree) -> Tree:
            if not isinstance(node, dict):
                return node
            return {name: bare(part) for name, part in node.items() if name != "lora"}

        return {name: bare(model[name]) for name in _READ if name in model}

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
        cfg, mesh = self.cfg, traced_mesh(params)
        options = {"is_own": is_own, "is_prompt": is_prompt, "fresh": fresh}
        if mesh is not None:
            return over_mesh(
                lambda local, *given, **options: MTPHead(local).forward(*given, **options),
                mesh,
                cfg,
                params,
                tokens,
                before,
                lengths,
                cache,
                **options,
                out=lambda rows: (P(rows), cache_specs(cache, rows)),
            )
        mtp, layer = params["mtp"], cfg.mtp
        assert layer is not None
        dtype = decoder.activation_dtype(params)
        embedded = Stream(decoder.embed_tokens(cfg, params, tokens, dtype))
        known = Stream(decoder.final_norm(cfg, mtp if is_own else params, before))
        pair = [
            linear.norm(embedded, mtp["embed_norm"], cfg)[0],
            linear.norm(known, mtp["hidden_norm"], cfg)[0],
        ]
        x = linear.linear(jnp.concatenate(pair, axis=-1), mtp["fc"], dtype)
        return run_layer(
            layer, mtp["layer_0"], Stream(x), lengths, cache, is_prompt=is_prompt, fresh=fresh
        )

    def scores(self, params: Params, hidden: Hidden) -> HeadScores:
        params = {**params, "norm": params["mtp"]["norm"]}
        return HeadScores(decoder.logits(self.cfg, params, hidden), self.cfg.vocab_size)
