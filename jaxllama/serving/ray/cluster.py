"""The connection to a Ray cluster, and what a replica takes of it."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import ray

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.ray.options import ClusterOptions


def connect(address: str) -> None:
    """Connect this process to a cluster. Raises JaxLlamaError if there is none."""
    try:
        ray.init(address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        raise JaxLlamaError(f"--ray {address}: no Ray cluster answers there: {reason}") from None


def resources_of(cluster: ClusterOptions) -> Mapping[str, float]:
    """Return the resources of a replica. Raises JaxLlamaError if the cluster has too few."""
    total = ray.cluster_resources()
    wanted = cluster.resources
    if wanted is None:
        wanted = {"GPU": cluster.devices} if total.get("GPU") else {"CPU": 1}
    for name, number in wanted.items():
        number *= cluster.hosts
        if total.get(name, 0) < number * cluster.replicas:
            raise JaxLlamaError(
                f"--replicas = {cluster.replicas}: the cluster has {total.get(name, 0):g} {name}, "
                f"and a replica takes {number:g}"
            )
    if cluster.hosts > len([node for node in ray.nodes() if node["Alive"]]):
        raise JaxLlamaError(f"--hosts-per-replica = {cluster.hosts}: more than the cluster's nodes")
    return wanted


def free_port(host: str = "") -> int:
    """Return a port of the host that no program listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
