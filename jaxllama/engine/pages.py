"""Pages: whose the cache's memory is, and which of it new prompts may begin with.  No jax.

    pages = Pages(count, size)
    held = pages.begin(tokens, key)       the longest known prefix, shared
    pages.grow(held, n)                   n more pages of its own, or False
    pages.publish(held, tokens, key)      full pages of these tokens may be shared from now on
    pages.release(held)

A page is ``size`` tokens of every attention layer.  Known prefixes are a tree: a node is one full
page below the pages before it; it has a reference for each sequence that holds it.  A page is free,
or its sequence's own, or a node's.  There is one tree for each key, an adapter with the salt of
those who may share (``Request.cache_key``): nothing is shared between two keys.

GLA layers keep one state a row and not one a token, so a prefix is of use where a snapshot of the
state was taken: ``snapshot`` gives the last published page one of ``states`` rows for it, and with
``states`` only such prefixes are found.  unit: prefixes are found in multiples of so many tokens.

Contract: a node with references is never evicted, and no node before its children; of the others
the one that was released longest ago goes first.  Sources: vLLM's pages and hashed blocks (arXiv
2309.06180), SGLang's RadixAttention (2312.07104).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence

from jaxllama.errors import JaxLlamaError


@dataclasses.dataclass(eq=False)
class Node:
    """A page that may be shared.  state: the snapshot's row, if there is one.  A root has no page
    and no parent; its key stands in place of tokens."""

    tokens: Hashable
    page: int
    parent: Node | None
    children: dict[Hashable, Node] = dataclasses.field(default_factory=dict)
    references: int = 0
    state: int | None = None


@dataclasses.dataclass
class Held:
    """A sequence's pages, in order.  nodes: of the first of them; a node's page may be another than
    the sequence's, where two have written the same tokens at the same time."""

    pages: list[int] = dataclasses.field(default_factory=list)
    nodes: list[Node] = dataclasses.field(default_factory=list)

    @property
    def own(self) -> Iterable[int]:
        """Pages that nobody else has."""
        for index, page in enumerate(self.pages):
            if index >= len(self.nodes) or self.nodes[index].page != page:
                yield page


class KVPages:
    """share: False where a prefix's keys and values depend on what follows it."""

    def __init__(
        self, count: int, size: int, *, states: int = 0, unit: int = 1, share: bool = True
    ) -> None:
        self.count, self.size, self.unit = count, size, unit
        self.states, self.share = states, share
        self._needs_state = states > 0
        self._roots: dict[Hashable, Node] = {}
        self._free = list(reversed(range(count)))
        self._free_states = list(reversed(range(states)))
        self.known = 0  # pages that may be shared
        self._unreferenced = 0
        self._leaves: dict[Node, None] = {}  # without references or children, longest idle first

    @property
    def available(self) -> int:
        """Pages that are free, or may be evicted."""
        return len(self._free) + self._unreferenced

    @property
    def used(self) -> int:
        """Pages that running sequences hold."""
        return self.count - self.available

    @property
    def free(self) -> list[int]:
        """Pages whose contents are nobody's."""
        return list(self._free)

    @property
    def free_states(self) -> list[int]:
        return list(self._free_states)

    def need(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.size)

    def begin(self, tokens: Sequence[int], key: Hashable = None) -> Held:
        """The longest known prefix of ``tokens``."""
        node, nodes = self._roots.get(key), []
        if self.share and node is not None:
            for first in range(0, len(tokens) - self.size + 1, self.size):
                child = node.children.get(tuple(tokens[first : first + self.size]))
                if child is None:
                    break
                node = child
                nodes.append(node)
        while nodes and (
            len(nodes) * self.size % self.unit or (self._needs_state and nodes[-1].state is None)
        ):
            nodes.pop()
        for node in nodes:
            self._acquire(node)
        return Held([node.page for node in nodes], nodes)

    def grow(self, held: Held, count: int) -> bool:
        """``count`` more pages; what is known and nobody's goes for them, the longest idle first.
        False, and nothing has happened, if there are not so many."""
        if count > self.available:
            return False
        while len(self._free) < count:
            self._evict(next(iter(self._leaves)))
        held.pages += [self._free.pop() for _ in range(count)]
        return True

    def publish(self, held: Held, tokens: Sequence[int], key: Hashable = None) -> None:
        """The first pages hold these tokens: others may begin with them, in whole units."""
        whole = len(tokens) // self.unit * self.unit // self.size
        for index in range(len(held.nodes), whole if self.share else 0):
            if held.nodes:
                parent = held.nodes[-1]
            else:
                parent = self._roots.setdefault(key, Node(key, -1, None))
            page = tuple(tokens[index * self.size : (index + 1) * self.size])
            node = parent.children.get(page)
            if node is None:
                self._leaves.pop(parent, None)
                node = parent.children[page] = Node(page, held.pages[index], parent)
                self.known += 1
                self._unreferenced += 1
            self._acquire(node)
            held.nodes.append(node)

    def snapshot(self, held: Held, tokens: int) -> int | None:
        """The row for the state after ``tokens``, which have just been published; None where it is
        not wanted, or known, or there is no room."""
        at = tokens // self.size
        if not self._needs_state or tokens % self.unit or not 0 < at <= len(held.nodes):
            return None
        if tokens % self.size or held.nodes[at - 1].state is not None:
            return None
        if not self._free_states:
            idle = next((node for node in self._idle() if node.state is not None), None)
            if idle is None:
                return None
            self._drop_state(idle)
        held.nodes[at - 1].state = self._free_states.pop()
        return held.nodes[at - 1].state

    def release(self, held: Held) -> None:
        """All of a sequence's pages."""
        self._free += held.own
        # Children before parents, so that of two that fall idle together the child goes first.
        for node in reversed(held.nodes):
            node.references -= 1
            self._unreferenced += not node.references
            self._offer(node)
        held.pages, held.nodes = [], []

    def gain(self, helds: Iterable[Held]) -> int:
        """Pages that would be available if all of these were released."""
        references: collections.Counter[Node] = collections.Counter()
        own = 0
        for held in helds:
            own += sum(1 for _ in held.own)
            references.update(held.nodes)
        return own + sum(node.references == count for node, count in references.items())

    def _idle(self) -> Iterable[Node]:
        """Nodes without references; of one branch, those after it first."""
        for leaf in list(self._leaves):
            node = leaf
            while node.parent is not None and not node.references:
                yield node
                node = node.parent

    def _acquire(self, node: Node) -> None:
        self._unreferenced -= not node.references
        node.references += 1
        self._leaves.pop(node, None)

    def _evict(self, node: Node) -> None:
        if node.references or node.children or node.parent is None:
            raise JaxLlamaError("a page was to be evicted that is in use")
        del self._leaves[node]
        self._drop_state(node)
        self._free.append(node.page)
        self._unreferenced -= 1
        self.known -= 1
        del node.parent.children[node.tokens]
        self._offer(node.parent)

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self._free_states.append(node.state)
            node.state = None

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        if node.parent is None:  # clients choose the salts, so an empty tree must not stay
            del self._roots[node.tokens]
        elif not node.references:
            self._leaves[node] = None
