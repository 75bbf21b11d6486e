"""Gated Linear Attention as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class GatedLinearAttention(MixerModule):
    """Gated Linear Attention with the options ``cfg.gla``, a ``GLAConfig``.

    The op is ``pallas_kernels.gla``. The state is one matrix for each head; its size does not
    depend on the number of tokens. ``__call__`` has the shapes.
    """

    kind: ClassVar[str] = "gla"


MIXER = GatedLinearAttention
