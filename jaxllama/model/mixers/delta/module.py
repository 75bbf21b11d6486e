"""The gated delta rule as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class GatedDeltaNet(MixerModule):
    """The gated delta rule with the options ``cfg.delta``, a ``DeltaConfig``.

    The op is ``pallas_kernels.gated_delta``. The state is one matrix for each head; its size does
    not depend on the number of tokens. ``__call__`` has the shapes.
    """

    kind: ClassVar[str] = "delta"


MIXER = GatedDeltaNet
