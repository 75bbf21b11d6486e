"""Runs kernels that are written by warpgroups, in Pallas, on the CPU: a warpgroup is a thread.

``warp_emulator`` has the bodies that are written in ``pallas_kernels.ptx``.  Here the source of a
kernel runs on numpy: the modules' ``plgpu``, ``pl``, ``lax``, ``jnp`` and ``launch`` are replaced
by what stands below.  One warpgroup runs at a time.  Before each barrier, copy or product a seeded
choice says which one goes on.  Products and copies from shared memory happen as late as the program
allows, copies into it after a time that is chosen too.  So an order that the barriers do not ensure
gives other values for some seed, and a wait for nobody is an error.  The blocks of a cluster run
together.  Within a warpgroup all warps are in step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.helpers.emulated_memory import Barriers, Ref, memory_of


class Sums:
    """An accumulator of wgmma: a value, and products that are under way."""

    def __init__(self, value: np.ndarray, block: _Block):
        self.value, self.block = value, block

    def __getitem__(self, place: Any) -> np.ndarray:
        assert place is Ellipsis
        self.block.finish_products()
        return np.copy(self.value)


class _Warpgroup:
    """What a warpgroup has under way."""

    def __init__(self, axes: Mapping[str, int], cluster: list[Mapping[str, int]]):
        self.axes = axes
        self.cluster = cluster  # each block's place in it
        self.products: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []

    def along(self, axis: str | None) -> list[int]:
        """The cluster's blocks along an axis through this one; None: this one."""
        return [
            i
            for i, place in enumerate(self.cluster)
            if all(self.axes[name] == x for name, x in place.items() if name != axis)
        ]


class _Block:
    """The warpgroups of a block, or of a cluster of blocks, of which one runs at a time."""

    def __init__(self, choose: random.Random, without: str = ""):
        self.choose, self.turn, self.without = choose, threading.Condition(), without
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.current: int | None = None
        self.favourite = 0
        self.clock = 0
        # Copies into shared memory, and when they come at the latest.
        self.landing: list[tuple[int, Callable[[], None]]] = []
        self.error: BaseException | None = None
        self.own = threading.local()  # n, state: of the thread

    def run(
        self,
        work: Callable[[int], None],
        axes: list[Mapping[str, int]],
        cluster: list[Mapping[str, int]],
    ) -> None:
        """work: takes the block's number in the cluster."""

        def thread(n: int) -> None:
            self.own.n, self.own.state = n, _Warpgroup(axes[n], cluster)
            try:
                self.go_on(first=True)
                work(*self.own.state.along(None))
                assert not self.own.state.copies, "copies from shared memory at the end"
            except BaseException as error:
                self.error = self.error or error
            finally:
                with self.turn:
                    del self.waiting[n]
                    self.next()

        self.waiting = {n: lambda: True for n in range(len(axes))}
        threads = [threading.Thread(target=thread, args=(n,)) for n in self.waiting]
        for one in threads:
            one.start()
        with self.turn:
            self.next()
        for one in threads:
            one.join()
        if self.error is not None:
            raise self.error
        assert not self.landing, "copies into shared memory for which nobody waited"

    def next(self) -> None:
        """Choose who goes on."""
        try:
            ready = self.land()
        except AssertionError as error:
            ready, self.error = [], self.error or error
        if self.waiting and not ready:
            self.error = self.error or RuntimeError("every warpgroup waits")
        self.current = self.choose.choice(ready) if ready else None
        if self.choose.random() < 1 / 16:
            self.favourite = self.choose.randrange(len(self.waiting) or 1)
        if self.favourite in ready and self.choose.random() < 7 / 8:
            self.current = self.favourite  # so that one may be far ahead
        self.turn.notify_all()

    def land(self) -> list[int]:
        """End the copies that are due, and more if nobody can go on.  Returns who can."""
        self.clock += 1
        due = [land for when, land in self.landing if when <= self.clock]
        self.landing = [x for x in self.landing if x[0] > self.clock]
        for land in due:
            land()
        while True:
            ready = [n for n, condition in self.waiting.items() if condition()]
            if ready or not self.waiting or not self.landing:
                return ready
            self.landing.pop(self.choose.randrange(len(self.landing)))[1]()

    def go_on(self, condition: Callable[[], bool] = lambda: True, first: bool = False) -> None:
        """Let others run, and come back when ``condition`` holds."""
        with self.turn:
            self.waiting[self.own.n] = condition
            if not first:
                self.next()
            self.turn.wait_for(lambda: self.current == self.own.n or self.error is not None)
            if self.error is not None:
                raise RuntimeError("another warpgroup failed")
            self.waiting[self.own.n] = lambda: True

    def finish_products(self, pending: int = 0) -> None:
        products = self.own.state.products
        done = max(len(products) - pending, 0)
        for product in products[:done]:
            product()
        del products[:done]

    def finish_copies(self, pending: int) -> None:
        copies = self.own.state.copies
        for copy in copies[: len(copies) - pending]:
            copy()
        del copies[: len(copies) - pending]

    # --- plgpu ---

    def copy_gmem_to_smem(
        self, source: Ref, to: Ref, barrier: Any, collective_axes: str | None = None
    ) -> None:
        self.go_on()
        state = self.own.state
        blocks = state.along(collective_axes)
        [here], whole = state.along(None), np.zeros_like(to.array)
        whole[tuple(map(slice, source.shape))] = source.array  # past the end are zeros
        of, i = barrier if isinstance(barrier, tuple) else (barrier, 0)
        of.add(i, 1, len(blocks))
        rows = len(whole) // len(blocks)
        part = slice(blocks.index(here) * rows, (blocks.index(here) + 1) * rows)

        def land(block: int) -> None:
            (to.blocks[block] if to.blocks else to.array)[part] = whole[part]
            of.blocks[block].add(i, 0, -1)

        for block in blocks:  # each block's part comes to all, and to each at a time of its own
            when = self.clock + self.choose.choice((0, 2, 8, 500))
            self.landing.append((when, functools.partial(land, block)))

    def copy_smem_to_gmem(self, source: Ref, to: Ref) -> None:
        def copy() -> None:
            to.array[...] = source.array[tuple(map(slice, to.shape))]

        self.own.state.copies.append(copy)
        self.go_on()

    def wait_smem_to_gmem(self, pending: int, wait_read_only: bool = False) -> None:
        del wait_read_only
        self.go_on()
        if self.without != "stores":
            self.finish_copies(pending)

    def arrive(self, barrier: Any) -> None:
        of, i = barrier if isinstance(barrier, tuple) else (barrier, 0)
        for block in self.own.state.along(of.axis):
            of.blocks[block].add(i, 1)

    def async_store_smem(
        self, value: Any, to: Ref, barrier: Any, cluster_idx: int, cluster_dim: str
    ) -> None:
        self.go_on()
        block = self.own.state.along(cluster_dim)[cluster_idx]
        to.blocks[block][...] = value
        barrier.blocks[block].add(0, 1)

    def barrier_arrive(self, barrier: Any) -> None:
        self.go_on()
        self.arrive(barrier)

    def barrier_wait(self, barrier: Any) -> None:
        of, i = barrier if isinstance(barrier, tuple) else (barrier, 0)
        if of.name == self.without:
            return self.go_on()
        key = self.own.n, i
        target = of.waited.get(key, 0) + 1
        self.go_on(lambda: of.phase[i] >= target)
        assert of.phase[i] == target, "a phase of a barrier was missed"
        of.waited[key] = target
        return None

    def wgmma(self, acc: Sums, left: Any, right: Ref) -> None:
        def product() -> None:
            a, b = (
                np.asarray(x.array if isinstance(x, Ref) else x, np.float64) for x in (left, right)
            )
            # In the same order for any number of columns.
            acc.value = (acc.value + np.einsum("ik,kj->ij", a, b)).astype(np.float32)

        self.own.state.products.append(product)
        self.go_on()

    def wgmma_wait(self, pending: int) -> None:
        if self.without != "products":
            self.finish_products(pending)
        self.go_on()

    def wgmma_accumulator_load(self, acc: Sums, wait_n: int | None = 0) -> np.ndarray:
        if wait_n is not None:
            self.finish_products(wait_n)
        return np.copy(acc.value)

    # --- pl, lax ---

    def run_scoped(self, f: Callable[..., Any], *kinds: Any) -> Any:
        out = f(*(Sums(np.zeros(shape, np.float32), self) for shape in kinds))
        self.finish_products()
        return out

    def run_state(self, f: Callable[[Any], None]) -> Callable[[Any], Any]:
        def run(values: Any) -> Any:
            many = isinstance(values, list)
            sums = [Sums(np.copy(x), self) for x in (values if many else [values])]
            f(sums if many else sums[0])
            out = [x[...] for x in sums]
            return out if many else out[0]

        return run


def _fori(start: int, stop: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
    for i in range(int(start), int(stop)):
        carry = body(np.int32(i), carry)
    return carry


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: list[int]) -> np.ndarray:
    return np.broadcast_to(x.reshape([n if i in axes else 1 for i, n in enumerate(shape)]), shape)


def _iota(dtype: Any, shape: tuple[int, ...], axis: int, layout: object) -> np.ndarray:
    del layout
    return _broadcast(np.arange(shape[axis]).astype(dtype), shape, [axis])


def _accumulator(shape: tuple[int, ...], dtype: object) -> tuple[int, ...]:
    del dtype
    return shape


@functools.cache
def _snake(index: int, grid: tuple[int, int], minor: int, width: int) -> tuple[int, ...]:
    return tuple(map(int, plgpu.planar_snake(jnp.int32(index), grid, minor, width)))


def _names(block: _Block) -> dict[str, object]:
    """What a kernel's module finds under these names."""
    accumulator: Any = _accumulator
    accumulator.init = lambda x: x
    names = "copy_gmem_to_smem copy_smem_to_gmem wait_smem_to_gmem barrier_arrive barrier_wait"
    products = "wgmma wgmma_wait wgmma_accumulator_load async_store_smem"
    own = {name: getattr(block, name) for name in (*names.split(), *products.split())}
    constants = "SMEM Barrier ClusterBarrier Layout ShapeDtypeStruct TilingTransform"
    constants = (*constants.split(), "SwizzleTransform")
    return {
        "plgpu": SimpleNamespace(
            **own,
            **{name: getattr(plgpu, name) for name in constants},
            ACC=accumulator,
            commit_smem=block.go_on,
            load=lambda ref, layout: ref[...],
            layout_cast=lambda x, layout: x,
            broadcasted_iota=_iota,
            set_max_registers=lambda n, action: None,
            warp_map=lambda f: f(0),  # what only the first warp does
            planar_snake=lambda index, *x: _snake(int(index), *x),
        ),
        "pl": SimpleNamespace(
            ds=lambda start, size: slice(int(start), int(start) + size),
            when=lambda condition: lambda f: f() if condition else None,
            cdiv=pl.cdiv,
            run_scoped=block.run_scoped,
            run_state=block.run_state,
        ),
        "lax": SimpleNamespace(
            axis_index=lambda name: block.own.state.axes[name],
            fori_loop=_fori,
            div=np.floor_divide,
            rem=np.remainder,
            broadcast_in_dim=_broadcast,
        ),
        "jnp": SimpleNamespace(
            **{name: getattr(jnp, name) for name in "bfloat16 float32 int4 int8 dtype".split()},
            **{name: getattr(np, name) for name in "where zeros zeros_like ones_like full".split()},
            int32=np.int32,
            asarray=np.asarray,
            minimum=min,
            maximum=max,
        ),
    }


def _places(axes: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(axes, x, strict=True)) for x in itertools.product(*map(range, axes.values()))]


def _launch(block: _Block):
    def launch(body, operands, out, *, name, grid, scratch, warpgroups=None, cluster=None, **_):
        cluster = cluster if isinstance(cluster, Mapping) else {}
        given = {key: x if x is None else Ref(np.array(x)) for key, x in operands.items()}
        made = {key: memory_of(x, {})[0] for key, x in out.items()}
        gmem, ranks = SimpleNamespace(**given, **made), _places(cluster)
        for place in _places(grid):
            memory = {key: memory_of(kind, cluster) for key, kind in scratch.items()}
            barriers = {key for key, x in memory.items() if isinstance(x[0], Barriers)}
            for key in barriers:
                for one in memory[key]:
                    one.name = key

            def work(rank: int, memory=memory, barriers=barriers) -> None:
                smem, barrier = (
                    SimpleNamespace(
                        **{key: x[rank] for key, x in memory.items() if (key in barriers) == one}
                    )
                    for one in (False, True)
                )
                body(gmem, smem, barrier)

            axes = [
                place | rank | {"warpgroup": w} for rank in ranks for w in range(warpgroups or 1)
            ]
            block.run(work, axes, ranks)
        return [x if x is None else x.array for x in made.values()]

    return launch


@contextlib.contextmanager
def emulated(
    *modules: ModuleType, seed: int, without: str = "", **others: object
) -> Iterator[None]:
    """Within, the launches of these modules run here.  others: further names to replace.

    without: the barriers of scratch memory, "products" or "stores", for which nobody waits: what is
    under way ends only when its result is read.
    """
    block = _Block(random.Random(seed), without)
    names = _names(block) | {"launch": _launch(block)} | others
    with contextlib.ExitStack() as patches:
        for module in modules:
            here = {name: x for name, x in names.items() if hasattr(module, name)}
            patches.enter_context(mock.patch.multiple(module, **here))
        yield
