"""Attention as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class Attention(MixerModule):
    """Attention with rotary positions over ``cfg.n_heads`` heads, GQA by ``cfg.n_kv_heads``; see
    ``mix``.  Its state is a ``KVCache``."""

    kind: ClassVar[str] = "attention"


MIXER = Attention
