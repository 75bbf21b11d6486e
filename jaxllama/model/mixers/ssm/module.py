"""Mamba-2 as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class Mamba2(MixerModule):
    """Mamba-2 with the options ``[mixers.ssm]``; see ``mix``.  Its state does not grow with the
    context."""

    kind: ClassVar[str] = "ssm"


MIXER = Mamba2
