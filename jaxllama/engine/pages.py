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
of the state was taken. ``snapshot`` gives the last published page one of the rows ``states`` for
its snapshot. If there are any, only prefixes with snapshots are found. The length of a prefix is a
multiple of ``unit`` tokens.

Where pages of less than a unit have no state, ``publish`` also keeps the rest of a whole prompt
behind its last unit. Only the same prompt finds it. Its last page may not be full, so the caller
copies that page (``Held.source``) before the device does anything else with the new pages.

With ``tiers``, ``begin`` also finds the pages and the state that have left the device
(``Held.missing``); the caller copies them into pages of the sequence and then publishes these.
``unsaved`` gives the pages and snapshots that no tier has yet.

Contract: a node with references is never evicted, and no node is evicted before its children. Among
the other nodes, the node with the oldest release is evicted first. Sources: vLLM's pages and hashed
blocks (arXiv 2309.06180), SGLang's RadixAttention (2312.07104).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllama.engine.tiers import Tiers, after, state_of
from jaxllama.errors import JaxLlamaError


@dataclasses.dataclass(eq=False)
class Node:
    """A page that may be shared. state: row of its snapshot, if it has one.

    A root has neither page nor parent; its ``tokens`` field holds the key. tier_key: key of the
    page's record among the tiers; None if none is kept.
    """

    tokens: Hashable
    page: int
    parent: Node | None
    children: dict[Hashable, Node] = dataclasses.field(default_factory=dict)
    references: int = 0
    state: int | None = None
    tier_key: bytes | None = None


@dataclasses.dataclass(frozen=True)
class Missing:
    """The rest of a known prefix, which has left the device.

    end: number of pages of the whole prefix. pages: keys of the records of its last pages. state:
    key of the state after them, unless the device has it or none is needed.
    """

    end: int
    pages: tuple[bytes, ...]
    state: bytes | None

    @property
    def keys(self) -> tuple[bytes, ...]:
        """All records."""
        return self.pages if self.state is None else (*self.pages, self.state)


@dataclasses.dataclass(frozen=True)
class Save:
    """A page, or a row of the snapshots, whose record goes to the tiers under ``key``."""

    index: int
    key: bytes


@dataclasses.dataclass
class Held:
    """A sequence's pages, in order. nodes: the tree's nodes for the first of these pages.

    A node's page differs from the sequence's page where two sequences wrote the same tokens at the
    same time. missing: what the tiers have of the prefix that ``begin`` found. source: a page that
    the sequence's first page of its own must be a copy of; then all tokens were found.
    """

    pages: list[int] = dataclasses.field(default_factory=list)
    nodes: list[Node] = dataclasses.field(default_factory=list)
    missing: Missing | None = None
    source: int | None = None

    @property
    def unshared(self) -> Iterable[int]:
        """Yield the pages that no other sequence shares."""
        for index, page in enumerate(self.pages):
            if index >= len(self.nodes) or self.nodes[index].page != page:
                yield page


class KVPages:
    """The pages of one engine. share: False if a prefix's keys and values depend on what follows
    it. tiers: where pages and snapshots are kept that leave the device. has_keys: False if a page
    holds no bytes, because no layer is attention.
    """

    def __init__(
        self,
        count: int,
        size: int,
        *,
        states: range = range(0),
        unit: int = 1,
        share: bool = True,
        tiers: Tiers | None = None,
        has_keys: bool = True,
    ) -> None:
        self.count, self.size, self.unit = count, size, unit
        self.states, self.share = states, share
        self.tiers, self._has_keys = tiers, has_keys
        # Nodes whose page or snapshot no tier has yet, oldest first.
        self._unsaved: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._unsaved_states: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self._needs_state = len(states) > 0
        self._keeps_rests = unit > 1 and has_keys and not states
        self._roots: dict[Hashable, Node] = {}
        self._free = list(reversed(range(count)))
        self._free_states = list(reversed(states))
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
        nodes, missing = self._known(tokens, key)
        source = None
        rest = self._known_rest(nodes, tokens, key) if missing is None else []
        if rest and len(tokens) % self.size:
            last = rest.pop()
            source = last.page
            if last in self._leaves:
                self._leaves[last] = self._leaves.pop(last)
        nodes += rest
        for node in nodes:
            self._acquire(node)
        return Held([node.page for node in nodes], nodes, missing, source)

    def _known_rest(self, nodes: list[Node], tokens: Sequence[int], key: Hashable) -> list[Node]:
        """Return the nodes of all pages behind the last unit, or none of them."""
        units = len(tokens) // self.unit * self.unit // self.size
        node = nodes[-1] if nodes else self._roots.get(key)
        if not self.share or node is None or len(nodes) != units:
            return []
        rest = []
        for page in self._rest(tokens):
            node = node.children.get(page)
            if node is None:
                return []
            rest.append(node)
        return rest

    def _rest(self, tokens: Sequence[int]) -> list[Hashable]:
        """Return the keys of the pages behind the last unit, which all of its tokens determine."""
        if not self._keeps_rests:
            return []
        rest = tuple(tokens[len(tokens) // self.unit * self.unit :])
        return [(index, rest) for index in range(self.need(len(rest)))]

    def places(self, tokens: Sequence[int], key: Hashable) -> Mapping[str, int]:
        """Return how many tokens ``begin`` would find, by "device", "host" and "disk"."""
        nodes, missing = self._known(tokens, key)
        found = collections.Counter[str]()
        if missing is not None:
            assert self.tiers is not None
            states = (missing.state,) * (missing.end - len(nodes))
            for record in missing.pages if self._has_keys else states:
                tier = None if record is None else self.tiers.where(record)
                found[tier or "disk"] += self.size
        found["device"] = len(nodes) * self.size
        return found

    def missing(self, tokens: Sequence[int], key: Hashable) -> tuple[bytes, ...]:
        """Return the keys of the records that ``begin`` would find among the tiers."""
        _, missing = self._known(tokens, key)
        return () if missing is None else missing.keys

    def _known(self, tokens: Sequence[int], key: Hashable) -> tuple[list[Node], Missing | None]:
        """Return the nodes of the longest known prefix, and what the tiers have of it."""
        nodes = self._path(tokens, key)
        missing = None if self.tiers is None else self._missing(tokens, key, nodes)
        if missing is not None:
            return nodes[: missing.end], missing
        while nodes and not self._may_end(nodes):
            nodes.pop()
        return nodes, None

    def _path(self, tokens: Sequence[int], key: Hashable) -> list[Node]:
        """Return the nodes of the pages with which ``tokens`` begin."""
        node, nodes = self._roots.get(key), []
        if self.share and node is not None:
            for page in self._in_pages(tokens):
                child = node.children.get(page)
                if child is None:
                    break
                node = child
                nodes.append(node)
        return nodes

    def _in_pages(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each whole page."""
        for first in range(0, len(tokens) - self.size + 1, self.size):
            yield tuple(tokens[first : first + self.size])

    def _may_end(self, nodes: Sequence[Node]) -> bool:
        """Whether a prefix may end after these nodes, with what the device has."""
        if len(nodes) * self.size % self.unit:
            return False
        return not self._needs_state or nodes[-1].state is not None

    def _missing(self, tokens: Sequence[int], key: Any, nodes: Sequence[Node]) -> Missing | None:
        """Return what the tiers have of a longer prefix than the device has alone."""
        assert self.tiers is not None
        root = self.tiers.root(*key) if self.share else None
        if root is None:
            return None
        keys: list[bytes] = []
        for index, page in enumerate(self._in_pages(tokens)):
            last = keys[-1] if keys else root
            known = nodes[index].tier_key if index < len(nodes) else None
            found = after(last, page) if known is None else known
            if index >= len(nodes) and self._has_keys and not self.tiers.has(found):
                break
            keys.append(found)
        for end in range(len(keys), 0, -1):
            if end <= len(nodes) and self._may_end(nodes[:end]):
                return None
            if end * self.size % self.unit:
                continue
            pages = tuple(keys[len(nodes) : end]) if self._has_keys else ()
            if not self._needs_state:
                return Missing(end, pages, None)
            if self.tiers.has(state_of(keys[end - 1])):
                return Missing(end, pages, state_of(keys[end - 1]))
        return None

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

    def publish(
        self, held: Held, tokens: Sequence[int], key: Hashable = None, *, is_whole: bool = False
    ) -> None:
        """Make the first pages, which hold these tokens, known to later prompts, in whole units.

        is_whole: these are all tokens of a prompt, so that the rest may be known too.
        """
        if not self.share:
            return
        units = len(tokens) // self.unit * self.unit // self.size
        rest = self._rest(tokens) if is_whole else []
        for index in range(len(held.nodes), units + len(rest)):
            page: Hashable = tuple(tokens[index * self.size : (index + 1) * self.size])
            if index >= units:
                page = rest[index - units]
            if held.nodes:
                parent = held.nodes[-1]
            else:
                parent = self._roots.setdefault(key, Node(key, -1, None))
            node = parent.children.get(page)
            if node is None:
                self._leaves.pop(parent, None)
                node = parent.children[page] = Node(page, held.pages[index], parent)
                self.known += 1
                self._unreferenced += 1
                if index < units:
                    self._to_save(node, key)
            self._acquire(node)
            held.nodes.append(node)

    def _to_save(self, node: Node, key: Any) -> None:
        """Give a new node its key among the tiers."""
        root = None if self.tiers is None else self.tiers.root(*key)
        parent = node.parent
        assert parent is not None
        last = root if parent.parent is None else parent.tier_key
        if root is None or last is None:  # other weights computed it, or a page before it
            return
        assert isinstance(node.tokens, tuple)
        node.tier_key = after(last, node.tokens)
        if self._has_keys:
            self._unsaved[node] = None

    def unsaved(self, pages: int, states: int) -> tuple[list[Save], list[Save]]:
        """Return the oldest pages and snapshots that no tier has, at most so many of each.

        The device must copy them before it runs the plan that follows, which may evict them.
        """
        found = []
        for nodes, most in ((self._unsaved, pages), (self._unsaved_states, states)):
            saves: list[Save] = []
            while nodes and len(saves) < most:
                node, _ = nodes.popitem(last=False)
                key, index = node.tier_key, node.page
                assert self.tiers is not None and key is not None
                if nodes is self._unsaved_states:
                    assert node.state is not None
                    key, index = state_of(key), node.state
                if not self.tiers.knows(key):
                    saves.append(Save(index, key))
            found.append(saves)
        return found[0], found[1]

    @property
    def has_unsaved(self) -> bool:
        """Whether there are pages or snapshots that no tier has."""
        return bool(self._unsaved or self._unsaved_states)

    def forget_unsaved(self) -> None:
        """Save nothing of the pages and snapshots so far: the device has lost them."""
        self._unsaved.clear()
        self._unsaved_states.clear()

    def snapshot(self, held: Held, tokens: int, *, saves: bool = True) -> int | None:
        """Return the row for a snapshot of the state after ``tokens`` tokens, which were just
        published.

        Returns None if no snapshot is wanted, if it exists already, or if there is no row for it.
        saves: whether the tiers get the snapshot too.
        """
        at = tokens // self.size
        if not self._needs_state or tokens % self.unit or not 0 < at <= len(held.nodes):
            return None
        node = held.nodes[at - 1]
        if tokens % self.size or node.state is not None:
            return None
        if not self._free_states:
            # Tiers want a sequence's last snapshot, so it may take the row of an earlier one.
            earlier = [] if self.tiers is None else held.nodes[: at - 1]
            own = (other for other in earlier if other.references == 1)
            candidates = itertools.chain(self._idle(), own)
            idle = next((other for other in candidates if other.state is not None), None)
            if idle is None:
                return None
            self._drop_state(idle)
        node.state = self._free_states.pop()
        if saves and node.tier_key is not None:
            self._unsaved_states[node] = None
        return node.state

    def release(self, held: Held) -> None:
        """All of a sequence's pages."""
        self._free += held.unshared
        # Children before parents, so that of two that fall idle together the child goes first.
        for node in reversed(held.nodes):
            node.references -= 1
            self._unreferenced += not node.references
            self._offer(node)
        held.pages, held.nodes, held.missing, held.source = [], [], None, None

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
        if self._unsaved.pop(node, self) is None:
            assert self.tiers is not None
            self.tiers.counts.lost += 1
        self._free.append(node.page)
        self._unreferenced -= 1
        self.known -= 1
        del node.parent.children[node.tokens]
        self._offer(node.parent)

    def _drop_state(self, node: Node) -> None:
        if node.state is not None:
            self._unsaved_states.pop(node, None)
            self._free_states.append(node.state)
            node.state = None

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        if node.parent is None:  # clients choose the salts, so an empty tree must not stay
            del self._roots[node.tokens]
        elif not node.references:
            self._leaves[node] = None
