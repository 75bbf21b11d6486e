"""A gated short convolution as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class ShortConvolution(MixerModule):
    """A gated short convolution with the options ``[mixers.short_conv]``; see ``mix``.  Its state
    is the last inputs."""

    kind: ClassVar[str] = "short_conv"


MIXER = ShortConvolution
