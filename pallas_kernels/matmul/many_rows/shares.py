"""An even share of a product for every cluster: tiles that two clusters compute, and how they meet.

With 112 tiles on 132 multiprocessors 15% of them are idle. So the tiles of the last round are
divided in groups of L tiles and L + 1 clusters. A group's steps of K, one tile behind the other,
are cut into L + 1 even parts:

    cluster 0      | tile 0, first 6/7 |
    cluster 1      | tile 0, last 1/7 | tile 1, first 5/7 |
    ...
    cluster 6      | tile 5, last 6/7 |

A cluster computes the last part of a tile first, and leaves its sums in device memory. The first
part of a tile is its cluster's last work. At its end the feeder waits for the tile's counter, and
copies the sums of the other cluster through the ring, as if they were further steps. Then the
order of additions is always the same, and so are the bits.

A cluster waits for the one behind it alone, which has left its sums before it waits itself. The
clusters are numbered from the grid's last, so the blocks that are waited for begin first, and no
order in which the device starts blocks can stop the kernel. ``exchange`` has the copies.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive steps of one tile; integers of the kernel, or of the host.

    first: step of K.  steps: their number.  begun: steps of the cluster before it.
    shared: index of the tile among those that two clusters compute.
    sends: the other cluster finishes the tile.  receives: the other cluster's sums are added.
    """

    tile: jax.Array
    first: jax.Array | int
    steps: jax.Array | int
    begun: jax.Array | int
    shared: jax.Array | int = 0
    sends: jax.Array | bool = False
    receives: jax.Array | bool = False


@dataclasses.dataclass(frozen=True)
class Shares:
    """How ``tiles`` of ``steps`` each are divided among ``clusters``.

    unit: steps that no cut divides.  More than half of the last round's clusters have a tile.
    """

    tiles: int
    clusters: int
    steps: int
    unit: int

    @property
    def rest(self) -> int:
        """Tiles of the last round, which are shared."""
        return self.tiles % self.clusters

    @property
    def longest(self) -> int:
        """Steps of the cluster that has the most."""
        full, units = self.tiles // self.clusters, self.steps // self.unit
        length = -(-self.rest // (self.clusters - self.rest))
        return full * self.steps + -(-length * units // (length + 1)) * self.unit

    def parts(self, cluster: jax.Array) -> list[jax.Array]:
        """Tile of the last round whose first steps are the cluster's; how many; and how many steps
        it has of the tile before."""
        groups = self.clusters - self.rest
        length, wider = divmod(self.rest, groups)
        clusters = wider * (length + 2)
        of_wider = self._parts_of(cluster, 0, length + 1)
        of_others = self._parts_of(cluster - clusters, wider * (length + 1), length)
        pairs = zip(of_wider, of_others, strict=True)
        return [jnp.where(cluster < clusters, a, b) for a, b in pairs]

    def _parts_of(self, cluster: jax.Array, begin: int, length: int) -> tuple[jax.Array, ...]:
        """The same where all groups have ``length`` tiles.  Divisors are constants: a division by
        another number is a call, beside which wgmma waits."""
        units = self.steps // self.unit
        group = lax.div(cluster, length + 1)
        i = cluster - group * (length + 1)

        def cut(i: jax.Array) -> jax.Array:
            return lax.div(i * (length * units) + length, length + 1)

        tile = begin + group * length + i
        return tile, (cut(i + 1) - i * units) * self.unit, (i * units - cut(i)) * self.unit

    def segments(
        self, cluster: jax.Array, t: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, Segment]:
        """The cluster's number of segments and of steps, and its t-th segment."""
        full = self.tiles // self.clusters
        tile, head, tail = self.parts(cluster)
        has_tail = (tail > 0).astype(jnp.int32)
        count = has_tail + full + (head > 0).astype(jnp.int32)
        kind = t + 1 - has_tail  # 0: the tail; full + 1: the head
        is_tail, is_head = kind == 0, kind == full + 1
        shared = jnp.where(is_tail, tile - 1, tile)
        last_round = full * self.clusters + shared
        whole = (kind - 1) * self.clusters + cluster
        receives = is_head & (head < self.steps)
        segment = Segment(
            tile=jnp.where(is_tail | is_head, last_round, whole),
            first=jnp.where(is_tail, self.steps - tail, 0),
            steps=jnp.where(is_tail, tail, jnp.where(is_head, head, self.steps)),
            begun=jnp.where(is_tail, 0, tail + (kind - 1) * self.steps),
            shared=shared,
            sends=is_tail,
            receives=receives,
        )
        return count, tail + full * self.steps + head, segment
