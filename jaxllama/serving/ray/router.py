"""The choice of a replica by the beginning of the prompt, as a request router of Ray Serve.

A request goes to the replica that has read the beginning of its prompt before, unless that has
more than ``SLACK`` requests more than the least busy one. Otherwise Serve takes the less busy of
two replicas. ``ipc.replicas`` has the same rule for one host. Ray's own prefix router compares
texts, in an actor of its own; this one compares tokens and the cache's key, in the caller.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from jaxllama.engine.request import Request
from jaxllama.serving.ipc.replicas import SLACK, KnownPrefixes


class PrefixRouter(RequestRouter):
    """Serve's router; the module docstring has the rule."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._known = KnownPrefixes[ReplicaID]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas in the order in which Serve tries them."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        request = _request(pending_request)
        if request is None or len(two) < 2:
            return [two]
        cache = self.replica_queue_len_cache
        busy = {
            replica.replica_id: cache.get(replica.replica_id) or 0 for replica in candidate_replicas
        }
        most = min(busy.values()) + SLACK
        for reader in self._known.readers(request):
            if busy.get(reader, most + 1) <= most:
                first = [replica for replica in candidate_replicas if replica.replica_id == reader]
                return [first, two]
        return [two]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        request = _request(pending_request)
        if request is not None:
            self._known.remember(request, replica_id)


def _request(pending: PendingRequest | None) -> Request | None:
    """Return the request of a call of ``EngineReplica.generate``, or None for another call."""
    if pending is None or not pending.args or not isinstance(pending.args[0], Request):
        return None
    return pending.args[0]
