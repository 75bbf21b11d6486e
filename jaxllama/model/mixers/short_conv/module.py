"""A gated short convolution as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class ShortConvolution(MixerModule):
    """A gated short convolution (LFM2), with the options ``cfg.mixers["short_conv"]``.

    The options are ``width`` of the streams, and ``taps`` of the convolution (default 3), such as
    ``cfg.replace(mixers={"short_conv": {"width": 512}})``. The state is the convolution's last
    inputs. ``__call__`` has the shapes.
    """

    kind: ClassVar[str] = "short_conv"


MIXER = ShortConvolution
