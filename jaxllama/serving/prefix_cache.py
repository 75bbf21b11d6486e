"""PrefixCache: which blocks of which prompts are in the pool, and in which of its rows.

The pool itself is device memory (``slots.init_pool``); this is its index, a tree in which every
node is one block of ``block`` tokens below the blocks before it.  Attention needs every block of
a prefix, GLA the state at its last border; a node's row of the pool holds both.

    nodes = match(tokens)                      the longest known prefix, acquired
    node, is_new = extend(nodes, block)        one more block below it, acquired; None: no room
    release(nodes)

Contract: a node with references, or with children, is never evicted; of the others the one that was
released longest ago goes first.  Sources: SGLang's RadixAttention (arXiv 2312.07104), vLLM's hashed
blocks.  Left out: sharing inside a running row (rows are copies, so nothing is copied on write).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(eq=False)
class Node:
    """One block.  ``row``: of the pool.  ``references``: sequences that use it now."""

    tokens: tuple[int, ...]
    row: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = dataclasses.field(default_factory=dict)
    references: int = 0


class PrefixCache:
    def __init__(self, rows: int, block: int) -> None:
        self.block = block
        self.rows = rows
        self._root = Node((), -1, None)
        self._free = list(range(rows))
        self._idle: dict[Node, None] = {}  # leaves without references, longest idle first

    @property
    def used(self) -> int:
        """Rows of the pool that hold a block."""
        return self.rows - len(self._free)

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes of the longest known prefix of ``tokens``, acquired."""
        node, nodes = self._root, []
        for begin in range(0, len(tokens) - self.block + 1, self.block):
            child = node.children.get(tuple(tokens[begin : begin + self.block]))
            if child is None:
                break
            node = child
            self._acquire(node)
            nodes.append(node)
        return nodes

    def extend(self, nodes: Sequence[Node], tokens: Sequence[int]) -> tuple[Node, bool] | None:
        """The block ``tokens`` below the acquired ``nodes``, acquired, and whether it is new (its
        row of the pool is then to be written); None when every row is in use."""
        parent, key = nodes[-1] if nodes else self._root, tuple(tokens)
        child = parent.children.get(key)
        if child is not None:
            self._acquire(child)
            return child, False
        if not self._free:
            if not self._idle:
                return None
            self._evict(next(iter(self._idle)))
        self._idle.pop(parent, None)
        child = parent.children[key] = Node(key, self._free.pop(), parent, references=1)
        return child, True

    def release(self, nodes: Iterable[Node]) -> None:
        # Children before parents, so that of two that fall idle together the child goes first.
        for node in reversed(list(nodes)):
            node.references -= 1
            self._offer(node)

    def _acquire(self, node: Node) -> None:
        node.references += 1
        self._idle.pop(node, None)

    def _evict(self, node: Node) -> None:
        del self._idle[node]
        self._free.append(node.row)
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self._offer(node.parent)

    def _offer(self, node: Node) -> None:
        if node is not self._root and not node.references and not node.children:
            self._idle[node] = None

    # For snapshots.  The order of rows and of evictions is part of the state: a replay must make
    # the same choices.

    def to_json(self) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = []
        index = {self._root: -1}
        stack = [self._root]
        while stack:
            node = stack.pop()
            for child in node.children.values():
                index[child] = len(nodes)
                nodes.append({"parent": index[node], "tokens": child.tokens, "row": child.row})
                stack.append(child)
        idle = [index[node] for node in self._idle]
        return {"nodes": nodes, "free": list(self._free), "idle": idle}

    def restore(self, data: dict[str, Any]) -> None:
        """Become what ``to_json`` described; whoever held references acquires them again by
        ``match``."""
        made: list[Node] = []
        for entry in data["nodes"]:
            parent = self._root if entry["parent"] < 0 else made[entry["parent"]]
            key = tuple(entry["tokens"])
            made.append(Node(key, entry["row"], parent))
            parent.children[key] = made[-1]
        self._free = list(data["free"])
        self._idle = {made[index]: None for index in data["idle"]}
