"""Attention as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class Attention(MixerModule):
    """Attention of ``cfg.n_heads`` query heads over ``cfg.n_kv_heads`` key heads (GQA).

    Queries and keys are rotated by ``cfg.rope``. The state is a ``KVCache``: the keys and values of
    up to ``max_len`` tokens. ``__call__`` has the shapes.
    """

    kind: ClassVar[str] = "attention"


MIXER = Attention
