"""Pages: who owns the cache's memory, and which pages new prompts may begin with. No jax.

    pages = KVPages(count, size)
    held = pages.begin(tokens, key)       the longest known prefix, shared
    pages.grow(held, n)                   adds n pages; False if there are too few
    pages.publish(held, tokens, key)      full pages of these tokens may be shared from now on
    pages.release(held)

A page holds ``size`` tokens of every attention layer. Known prefixes form a tree: a node is one
full page that follows the pages of its parents. A node has one reference for each sequence that
holds it. A page is free, belongs to one sequence, or belongs to a node. Each key has a tree of its
own, and nothing is shared between two keys. A key is an adapter with a cache salt
(``Request.cache_key``).

GLA layers keep one state a row and not one a token. So a prefix can be reused only where a snapshot
of the state was taken. ``snapshot`` gives the last published page one of ``states`` rows for its
snapshot. If ``states`` is positive, only prefixes with snapshots are found. The length of a prefix
is a multiple of ``unit`` tokens.

Contract: a node with references is never evicted, and no node is evicted before its children. Among
the other nodes, the node with the oldest release is evicted first. Sources: vLLM's pages and hashed
blocks (arXiv 2309.06180), SGLang's RadixAttention (2312.07104).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence

from jaxllama.errors import JaxLlamaError


@dataclasses.dataclass(eq=False)
class Node:
    """A page that may be shared. state: row of its snapshot, if it has one.

    A root has neither page nor parent; its ``tokens`` field holds the key.
    """

    tokens: Hashable
    page: int
    parent: Node | None
    children: dict[Hashable, Node] = dataclasses.field(default_factory=dict)
    references: int = 0
    state: int | None = None


@dataclasses.dataclass
class Held:
    """A sequence's pages, in order. nodes: the tree's nodes for the first of these pages.

    A node's page differs from the sequence's page where two sequences wrote the same tokens at the
    same time.
    """

    pages: list[int] = dataclasses.field(default_factory=list)
    nodes: list[Node] = dataclasses.field(default_factory=list)

    @property
    def unshared(self) -> Iterable[int]:
        """Yield the pages that no other sequence shares."""
        for index, page in enumerate(self.pages):
            if index >= len(self.nodes) or self.nodes[index].page != page:
                yield page


class KVPages:
    """The pages of one engine. share: False if a prefix's keys and values depend on what follows
    it.
    """

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
        # nodes without references and children, longest idle first
        self._leaves: dict[Node, None] = {}

    @property
    def available(self) -> int:
        """Number of pages that are free or may be evicted."""
        return len(self._free) + self._unreferenced

    @property
    def used(self) -> int:
        """Number of pages that running sequences hold."""
        return self.count - self.available

    @property
    def free(self) -> list[int]:
        """Pages that neither a sequence nor a node holds."""
        return list(self._free)

    @property
    def free_states(self) -> list[int]:
        return list(self._free_states)

    def need(self, tokens: int) -> int:
        """Return the number of pages that ``tokens`` tokens take."""
        return -(-tokens // self.size)

    def begin(self, tokens: Sequence[int], key: Hashable = None) -> Held:
        """Acquire the longest known prefix of ``tokens``."""
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
        """Add ``count`` pages, evicting unreferenced nodes, longest idle first, if free pages run
        out.

        Returns False, and changes nothing, if too few pages are available.
        """
        if count > self.available:
            return False
        while len(self._free) < count:
            self._evict(next(iter(self._leaves)))
        held.pages += [self._free.pop() for _ in range(count)]
        return True

    def publish(self, held: Held, tokens: Sequence[int], key: Hashable = None) -> None:
        """Make the first pages, which hold these tokens, known to later prompts, in whole units."""
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
        """Return the row for a snapshot of the state after ``tokens`` tokens, which were just
        published.

        Returns None if no snapshot is wanted, if it exists already, or if there is no row for it.
        """
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
        self._free += held.unshared
        # Children before parents, so that of two that fall idle together the child goes first.
        for node in reversed(held.nodes):
            node.references -= 1
            self._unreferenced += not node.references
            self._offer(node)
        held.pages, held.nodes = [], []

    def gain(self, helds: Iterable[Held]) -> int:
        """Pages that would be available if all of these were released."""
        references: collections.Counter[Node] = collections.Counter()
        freed = 0
        for held in helds:
            freed += sum(1 for _ in held.unshared)
            references.update(held.nodes)
        return freed + sum(node.references == count for node, count in references.items())

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
