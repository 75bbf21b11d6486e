"""Attention from latents as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class LatentAttention(MixerModule):
    """Attention of ``cfg.n_heads`` heads whose keys and values come from latents (MLA).

    The state is a ``LatentCache``: the latents of up to ``max_len`` tokens. ``__call__`` has the
    shapes.
    """

    kind: ClassVar[str] = "latent"


MIXER = LatentAttention
