"""Recorder: the begin and end of each load, computation and store of an offloaded run.

    executor = dataclasses.replace(lm.executor, recorder=(recorder := Recorder()))
    dataclasses.replace(lm, executor=executor).generate(...)
    recorder.events;  draw(recorder.events, "timeline.png")

Most loads and stores are timed where they run. A computation or a load of weights is dispatched and
ends later, so a thread waits for its result. It begins when it has been dispatched and the one
before is done. Recording costs these threads; ``NO_RECORD`` costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxllama import extras
from jaxllama.offload.units import ModelUnit
from jaxllama.typing import Tree

LANES = (
    "load weights",
    "load cache",
    "load hidden",
    "compute",
    "experts on CPU",
    "store cache",
    "store hidden",
)


@dataclasses.dataclass(frozen=True)
class TimelineBar:
    """One bar of the picture; times in seconds since the recorder was made."""

    lane: str
    unit: str
    batch: int | None
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Recorder:
    """Collects events from every thread."""

    def __init__(self) -> None:
        self.events: list[TimelineBar] = []
        self._zero = time.perf_counter()
        self._lock = threading.Lock()
        self._watchers = {
            lane: ThreadPoolExecutor(1, "offload-watch") for lane in ("load weights", "compute")
        }
        self._free_at = dict.fromkeys(self._watchers, 0.0)  # time at which the last of them ended

    @contextlib.contextmanager
    def __call__(
        self, lane: str, unit: ModelUnit | None, batch: int | None = None
    ) -> Generator[None]:
        begin = time.perf_counter()
        yield
        self._add(lane, unit, batch, begin, time.perf_counter())

    @contextlib.contextmanager
    def watching(
        self, lane: str, unit: ModelUnit, batch: int | None = None
    ) -> Generator[list[Tree]]:
        """Yield a list, into which the caller puts the dispatched arrays."""
        begin = time.perf_counter()
        out: list[Tree] = []
        yield out
        self._watchers[lane].submit(self._watch, lane, unit, batch, begin, out)

    def finish(self) -> list[TimelineBar]:
        """Wait for all dispatched work, and return every event in order of beginning."""
        for watcher in self._watchers.values():
            watcher.shutdown(wait=True)
        return sorted(self.events, key=lambda event: event.begin)

    def _watch(
        self, lane: str, unit: ModelUnit, batch: int | None, begin: float, out: list[Tree]
    ) -> None:
        with contextlib.suppress(RuntimeError):  # donated meanwhile, so it was done
            jax.block_until_ready(out)
        end = time.perf_counter()
        self._add(lane, unit, batch, max(begin, self._free_at[lane]), end)
        self._free_at[lane] = end

    def _add(
        self, lane: str, unit: ModelUnit | None, batch: int | None, begin: float, end: float
    ) -> None:
        with self._lock:
            name = "" if unit is None else str(unit)
            self.events.append(TimelineBar(lane, name, batch, begin - self._zero, end - self._zero))


class _NoRecord:
    """Records nothing."""

    @contextlib.contextmanager
    def __call__(self, *_: object) -> Generator[None]:
        yield

    @contextlib.contextmanager
    def watching(self, *_: object) -> Generator[list[Tree]]:
        yield []


NO_RECORD = _NoRecord()
Recording = Recorder | _NoRecord


def draw(events: Sequence[TimelineBar], path: str | Path, title: str = "") -> None:
    """Draw one lane for each kind of work and one bar for each event, coloured by unit.

    Needs matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise extras.missing("matplotlib", "a timeline picture") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = [lane for lane in LANES if any(event.lane == lane for event in events)]
    units = list(dict.fromkeys(event.unit for event in events if event.unit))
    colors = pyplot.get_cmap("tab20")
    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.6 * len(lanes)), layout="constrained")
    zero = min(event.begin for event in events)
    span = max(event.end for event in events) - zero
    for event in events:
        color = colors(units.index(event.unit) % 20) if event.unit else "0.6"
        row, left = lanes.index(event.lane), (event.begin - zero) * 1e3
        axes.barh(
            row,
            event.seconds * 1e3,
            left=left,
            height=0.8,
            color=color,
            edgecolor="white",
            linewidth=0.3,
        )
        if event.unit and event.seconds > span / 45:
            axes.text(
                left + event.seconds * 5e2,
                row,
                event.unit.replace("layer_", ""),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
