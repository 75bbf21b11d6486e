"""The memory of the responses that clients can continue, which all front ends share."""

from __future__ import annotations

import collections
import dataclasses

STORED_BYTES = 64 * 2**20  # bytes of responses that can be continued


class StoredResponses:
    """The newest ``STORED_BYTES`` of responses that can be continued, as JSON with conversations.

    Everything that is stored counts. Each conversation is stored whole, so it outlives the response
    that it continues. A response of another owner counts as missing.
    """

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[str, _Kept] = collections.OrderedDict()
        self._size = 0

    def __contains__(self, id: str) -> bool:
        return id in self._kept

    def keep(self, id: str, owner: str, response: bytes, conversation: bytes, items: bytes) -> None:
        """Store a response with its conversation and its input items, as JSON."""
        kept = _Kept(owner, response, conversation, items)
        if id in self._kept:
            self._size -= self._kept[id].size
        self._kept[id] = kept
        self._size += kept.size
        while self._size > STORED_BYTES:
            self._size -= self._kept.popitem(last=False)[1].size

    def recall(self, id: str, owner: str) -> tuple[bytes, bytes] | None:
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            return None
        return kept.response, kept.conversation

    def replace(
        self, id: str, owner: str, response: bytes, conversation: bytes, items: bytes
    ) -> None:
        """Store the end of a response in the background, unless it was deleted meanwhile."""
        if self.recall(id, owner) is not None:
            self.keep(id, owner, response, conversation, items)

    def items(self, id: str, owner: str) -> bytes | None:
        """Return the response's input items, as JSON."""
        return None if self.recall(id, owner) is None else self._kept[id].items

    def forget(self, id: str, owner: str) -> bool:
        """Drop a response; returns whether it existed."""
        if self.recall(id, owner) is None:
            return False
        self._size -= self._kept.pop(id).size
        return True


@dataclasses.dataclass(frozen=True)
class _Kept:
    owner: str
    response: bytes
    conversation: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation) + len(self.items)
