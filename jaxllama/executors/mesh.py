"""Mesh: the resident executor of parameters that are split over several devices.

The programs are ``resident``'s: jax splits them by where their arguments are.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from jaxllama.config import ModelConfig
from jaxllama.decoding.forward import Params
from jaxllama.executors.resident import Resident
from jaxllama.model.shardings import gather_params
from jaxllama.parallel.mesh import MODEL_AXIS


@dataclasses.dataclass(frozen=True)
class OnMesh(Resident):
    """mesh: that the parameters are on."""

    mesh: Mesh

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        return gather_params(cfg, params, self.mesh.shape[MODEL_AXIS])
