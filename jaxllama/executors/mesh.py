"""Mesh: the resident executor of parameters that are split over several devices.

The programs are ``resident``'s: jax splits them by where their arguments are.
"""

from __future__ import annotations

import dataclasses

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import Params
from jaxllama.executors.resident import Resident
from jaxllama.model.shardings import gather_params
from jaxllama.parallel.mesh import MODEL_AXIS


@dataclasses.dataclass(frozen=True)
class OnMesh(Resident):
    """All parameters are on ``mesh``."""

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        assert self.mesh is not None
        return gather_params(cfg, params, self.mesh.shape[MODEL_AXIS])
