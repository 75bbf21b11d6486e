"""The prefix cache: blocks of prompts that were filled before, for prompts that begin with them.

``PrefixCache`` is the index, a tree in which every node is one block of ``block`` tokens below the
blocks before it; it says which row of the pool holds what.

    nodes = match(tokens, model)               the longest known prefix, acquired
    node, is_new = extend(nodes, block, model) one more block below it, acquired; None: no room
    release(nodes)

The pool is device memory, a Cache of ``rows`` rows of ``block`` tokens.  ``load_blocks`` makes the
cache of a new row out of pool rows; ``store_blocks`` copies the blocks of prompts into the pool.
Attention needs every block of a prefix, GLA the state at its last border; a row holds both.  model:
whose keys and values they are, an adapter's name or None: nothing is shared between two.

Contract: a node with references, or with children, is never evicted; of the others the one that was
released longest ago goes first.  Sources: SGLang's RadixAttention (arXiv 2312.07104), vLLM's hashed
blocks.  Left out: sharing inside a running row (rows are copies, so nothing is copied on write).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from jaxllama.model.cache import Cache, GLAState, KVCache


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
        self._roots = collections.defaultdict(lambda: Node((), -1, None))
        self._free = list(range(rows))
        self._idle: dict[Node, None] = {}  # leaves without references, longest idle first

    @property
    def used(self) -> int:
        """Rows of the pool that hold a block."""
        return self.rows - len(self._free)

    def match(self, tokens: Sequence[int], model: str | None = None) -> list[Node]:
        """The nodes of the longest known prefix of ``tokens``, acquired."""
        node, nodes = self._roots[model], []
        for begin in range(0, len(tokens) - self.block + 1, self.block):
            child = node.children.get(tuple(tokens[begin : begin + self.block]))
            if child is None:
                break
            node = child
            self._acquire(node)
            nodes.append(node)
        return nodes

    def extend(
        self, nodes: Sequence[Node], tokens: Sequence[int], model: str | None = None
    ) -> tuple[Node, bool] | None:
        """The block ``tokens`` below the acquired ``nodes``, acquired, and whether it is new (its
        row of the pool is then to be written); None when every row is in use."""
        parent, key = nodes[-1] if nodes else self._roots[model], tuple(tokens)
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
        if node.parent is not None and not node.references and not node.children:
            self._idle[node] = None


# On the device


@jax.jit
def load_blocks(pool: Cache, rows: jax.Array, n_blocks: jax.Array, length: jax.Array) -> Cache:
    """One row with room for ``len(rows)`` blocks, of which the first ``n_blocks`` (at least 1) are
    the pool's ``rows``: ``length`` tokens.  What follows is beyond its length."""

    def joined(leaf: jax.Array) -> jax.Array:  # [rows, block, ...] -> [1, n * block, ...]
        return leaf[rows].reshape(1, -1, *leaf.shape[2:])

    def last(leaf: jax.Array) -> jax.Array:
        return leaf[rows[n_blocks - 1]][None]

    layers = tuple(
        jax.tree.map(joined if isinstance(layer, KVCache) else last, layer) for layer in pool.layers
    )
    return Cache(layers, length[None])


@functools.partial(jax.jit, donate_argnums=0)
def store_blocks(
    pool: Cache, source: Cache, begin: jax.Array, rows: jax.Array, state_rows: jax.Array
) -> Cache:
    """The blocks of each row r of ``source`` from token ``begin`` on go to the pool's
    ``rows[r, :]``, and its GLA states to ``state_rows[r]``; row numbers past the pool's end are
    dropped."""

    def put_blocks(old: jax.Array, new: jax.Array) -> jax.Array:
        where = begin + jnp.arange(rows.shape[1] * old.shape[1], dtype=jnp.int32)
        blocks = jnp.take(new, where, axis=1, mode="clip").reshape(rows.size, *old.shape[1:])
        return old.at[rows.reshape(-1)].set(blocks, mode="drop")

    def put_state(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[state_rows].set(new, mode="drop")

    layers = tuple(
        jax.tree.map(put_state if isinstance(old, GLAState) else put_blocks, old, new)
        for old, new in zip(pool.layers, source.layers, strict=True)
    )
    return Cache(layers, pool.lengths)
