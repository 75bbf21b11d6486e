"""Gated Linear Attention as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class GatedLinearAttention(MixerModule):
    """Gated Linear Attention with the options ``cfg.gla``; see ``mix``.  Its state does not
    grow with the context."""

    kind: ClassVar[str] = "gla"


MIXER = GatedLinearAttention
