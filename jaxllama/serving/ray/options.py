"""ClusterOptions: a Ray cluster and the replicas on it, checked without Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxllama.errors import JaxLlamaError


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """A Ray cluster and the replicas on it.

    address: as for ``ray.init``, "auto" for the cluster of this host. replicas, most: the least and
    the largest number of replicas. hosts: number of hosts of a replica. devices: of a replica on
    each of its hosts. resources: Ray's resources of a replica on each of its hosts; by default
    ``devices`` GPUs if the cluster has GPUs, and otherwise a CPU.
    """

    address: str
    replicas: int = 1
    most: int = 1
    devices: int = 1
    hosts: int = 1
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.most < self.replicas:
            raise JaxLlamaError(f"--max-replicas = {self.most}: fewer than --replicas")
