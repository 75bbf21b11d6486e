"""Runs kernels that are written by warpgroups, in Pallas, on the CPU: a warpgroup is a thread.

``warp_emulator`` has the bodies that are written in ``pallas_kernels.ptx``.  Here the source of a
kernel runs on numpy: the modules' ``plgpu``, ``pl``, ``lax``, ``jnp`` and ``launch`` are replaced
by what stands below.  One warpgroup runs at a time.  Before each barrier, copy or product a seeded
choice says which one goes on.  What is asynchronous happens as late as the program allows (products
and copies from shared memory), or as early (copies into it).  So an order that the barriers do not
ensure gives other values for some seed, and a wait for nobody is an error.
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

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.launch import Views


class Ref:
    """A view of memory."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def at(self) -> Any:
        return _At(lambda place: Ref(self.array[place]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def transpose(self, order: tuple[int, ...]) -> Ref:
        return Ref(self.array.transpose(order))

    def __getitem__(self, place: Any) -> Any:
        return np.copy(self.array[place])

    def __setitem__(self, place: Any, value: Any) -> None:
        self.array[place] = value


class _At:
    """``x.at[...]``."""

    def __init__(self, get: Callable[[Any], Any]):
        self.get = get

    def __getitem__(self, place: Any) -> Any:
        places = place if isinstance(place, tuple) else (place,)
        return self.get(tuple(x if isinstance(x, slice) else int(x) for x in places))


class Barriers:
    """``arrivals`` of each of ``n``; a thread counts the phases that it has waited for."""

    def __init__(self, arrivals: int, n: int):
        self.arrivals, self.left, self.phase = arrivals, [arrivals] * n, [0] * n
        self.waited: dict[tuple[int, int], int] = {}

    @property
    def at(self) -> Any:
        return _At(lambda place: (self, *place))


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

    def __init__(self, axes: Mapping[str, int]):
        self.axes = axes
        self.products: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []


class _Block:
    """The warpgroups of a block, of which one runs at a time."""

    def __init__(self, choose: random.Random):
        self.choose, self.turn = choose, threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.current: int | None = None
        self.favourite = 0
        self.error: BaseException | None = None
        self.own = threading.local()  # n, state: of the thread

    def run(self, work: Callable[[], None], axes: list[Mapping[str, int]]) -> None:
        def thread(n: int) -> None:
            self.own.n, self.own.state = n, _Warpgroup(axes[n])
            try:
                self.go_on(first=True)
                work()
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

    def next(self) -> None:
        """Choose who goes on."""
        ready = [n for n, condition in self.waiting.items() if condition()]
        if self.waiting and not ready:
            self.error = self.error or RuntimeError("every warpgroup waits")
        self.current = self.choose.choice(ready) if ready else None
        if self.choose.random() < 1 / 16:
            self.favourite = self.choose.randrange(len(self.waiting) or 1)
        if self.favourite in ready and self.choose.random() < 7 / 8:
            self.current = self.favourite  # so that one may be far ahead
        self.turn.notify_all()

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

    def finish_products(self) -> None:
        for product in self.own.state.products:
            product()
        self.own.state.products.clear()

    def finish_copies(self, pending: int) -> None:
        copies = self.own.state.copies
        for copy in copies[: len(copies) - pending]:
            copy()
        del copies[: len(copies) - pending]

    # --- plgpu ---

    def copy_gmem_to_smem(self, source: Ref, to: Ref, barrier: Any) -> None:
        self.go_on()
        to.array[...] = 0
        to.array[: source.shape[0]] = source.array  # rows past the end are zeros
        self.arrive(barrier)

    def copy_smem_to_gmem(self, source: Ref, to: Ref) -> None:
        def copy() -> None:
            to.array[...] = source.array[: to.shape[0]]

        self.own.state.copies.append(copy)
        self.go_on()

    def wait_smem_to_gmem(self, pending: int, wait_read_only: bool = False) -> None:
        del wait_read_only
        self.go_on()
        self.finish_copies(pending)

    def arrive(self, barrier: Any) -> None:
        of, i = barrier if isinstance(barrier, tuple) else (barrier, 0)
        of.left[i] -= 1
        if of.left[i] == 0:
            of.phase[i], of.left[i] = of.phase[i] + 1, of.arrivals

    def barrier_arrive(self, barrier: Any) -> None:
        self.go_on()
        self.arrive(barrier)

    def barrier_wait(self, barrier: Any) -> None:
        of, i = barrier if isinstance(barrier, tuple) else (barrier, 0)
        key = self.own.n, i
        target = of.waited.get(key, 0) + 1
        self.go_on(lambda: of.phase[i] >= target)
        assert of.phase[i] == target, "a phase of a barrier was missed"
        of.waited[key] = target

    def wgmma(self, acc: Sums, left: Any, right: Ref) -> None:
        def product() -> None:
            a, b = (
                np.asarray(x.array if isinstance(x, Ref) else x, np.float64) for x in (left, right)
            )
            # In the same order for any number of columns.
            acc.value = (acc.value + np.einsum("ik,kj->ij", a, b)).astype(np.float32)

        self.own.state.products.append(product)
        self.go_on()

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
        carry = body(i, carry)
    return carry


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: list[int]) -> np.ndarray:
    return np.broadcast_to(x.reshape([n if i in axes else 1 for i, n in enumerate(shape)]), shape)


def _iota(dtype: Any, shape: tuple[int, ...], axis: int, layout: object) -> np.ndarray:
    del layout
    return _broadcast(np.arange(shape[axis]).astype(dtype), shape, [axis])


def _accumulator(shape: tuple[int, ...], dtype: object) -> tuple[int, ...]:
    del dtype
    return shape


def _names(block: _Block) -> dict[str, object]:
    """What a kernel's module finds under these names."""
    accumulator: Any = _accumulator
    accumulator.init = lambda x: x
    names = "copy_gmem_to_smem copy_smem_to_gmem wait_smem_to_gmem barrier_arrive barrier_wait"
    own = {name: getattr(block, name) for name in (*names.split(), "wgmma")}
    constants = "SMEM Barrier ClusterBarrier Layout ShapeDtypeStruct".split()
    return {
        "plgpu": SimpleNamespace(
            **own,
            **{name: getattr(plgpu, name) for name in constants},
            ACC=accumulator,
            commit_smem=block.go_on,
            load=lambda ref, layout: ref[...],
            layout_cast=lambda x, layout: x,
            broadcasted_iota=_iota,
        ),
        "pl": SimpleNamespace(
            ds=lambda start, size: slice(int(start), int(start) + size),
            when=lambda condition: lambda f: f() if condition else None,
            run_scoped=block.run_scoped,
            run_state=block.run_state,
        ),
        "lax": SimpleNamespace(
            axis_index=lambda name: block.own.state.axes[name],
            fori_loop=_fori,
            broadcast_in_dim=_broadcast,
        ),
        "jnp": SimpleNamespace(
            **{name: getattr(jnp, name) for name in ("bfloat16", "float32", "int32")},
            **{name: getattr(np, name) for name in "where zeros zeros_like ones_like full".split()},
            minimum=min,
            maximum=max,
        ),
    }


def _memory(kind: Any) -> Any:
    """An entry of a table of results or scratch memory, filled with NaN."""
    if kind is None:
        return None
    if isinstance(kind, Views):
        return SimpleNamespace(**dict.fromkeys(kind, _memory(next(iter(kind.values())))))
    if isinstance(kind, plgpu.Barrier):
        return Barriers(kind.num_arrivals, int(np.prod(kind.num_barriers)))
    if isinstance(kind, int):
        kind = jax.ShapeDtypeStruct((kind,), jnp.float32)
    return Ref(np.full(kind.shape, np.nan).astype(kind.dtype))


def _launch(block: _Block):
    def launch(body, operands, out, *, name, grid, scratch, warpgroups=None, cluster=1):
        assert cluster == 1, name
        given = {
            key: x if x is None else Ref(np.array(x)) if x.ndim != 1 else np.array(x)
            for key, x in operands.items()
        }
        made = {key: _memory(x) for key, x in out.items()}
        for place in itertools.product(*map(range, grid.values())):
            memory = {key: _memory(kind) for key, kind in scratch.items()}
            gmem = SimpleNamespace(**given, **made)
            places = [
                dict(zip(grid, place, strict=True)) | {"warpgroup": w}
                for w in range(warpgroups or 1)
            ]
            barriers = {key for key, x in memory.items() if isinstance(x, Barriers)}
            smem, barrier = (
                SimpleNamespace(**{key: x for key, x in memory.items() if (key in barriers) == one})
                for one in (False, True)
            )
            block.run(functools.partial(body, gmem, smem, barrier), places)
        return [x if x is None else x.array for x in made.values()]

    return launch


@contextlib.contextmanager
def emulated(*modules: ModuleType, seed: int, **others: object) -> Iterator[None]:
    """Within, the launches of these modules run here.  others: further names to replace."""
    block = _Block(random.Random(seed))
    names = _names(block) | {"launch": _launch(block)} | others
    with contextlib.ExitStack() as patches:
        for module in modules:
            here = {name: x for name, x in names.items() if hasattr(module, name)}
            patches.enter_context(mock.patch.multiple(module, **here))
        yield
