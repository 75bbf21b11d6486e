"""Mamba-2 as a Flax module."""

from __future__ import annotations

from typing import ClassVar

from jaxllama.model.mixers.module import MixerModule


class Mamba2(MixerModule):
    """Mamba-2 (arXiv 2405.21060), with the options ``cfg.mixers["ssm"]``.

    The options are the fields of ``model.mixers.ssm.parameters.SSMOptions``, for example
    ``cfg.replace(mixers={"ssm": {"n_heads": 8, "head_dim": 64, "state": 128}})``. The state is one
    matrix for each head; its size does not depend on the number of tokens. ``__call__`` has the
    shapes.
    """

    kind: ClassVar[str] = "ssm"


MIXER = Mamba2
