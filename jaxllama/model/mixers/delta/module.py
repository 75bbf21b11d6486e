"""The gated delta rule as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class GatedDeltaNet(MixerModule):
    """The gated delta rule with the options ``cfg.delta``; see ``mix``.  Its state does not
    grow with the context."""

    kind: ClassVar[str] = "delta"


MIXER = GatedDeltaNet
