"""Slow tests in a fresh process each few, on the cores that are given, until the time is up.

    python -m tests.slow_lane tests/engine tests/decoding/test_drafts.py::test_300_prompts
    taskset -c 24-63 python -m tests.slow_lane --seconds 400 --out slow.json @ids.txt

XLA's compiler ends a process with a segmentation fault after hundreds of programs, so one process
cannot run the whole lane.  Each process here has cores of its own, and what a process left undone
when it crashed goes to another; a test that crashes alone is a failure.  Tests run in the order of
the arguments: a path, a test's name, or ``@FILE`` with one of these a line.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.helpers.compiling import environment

Item = TypeVar("Item")
OUTCOMES = "JAXLLAMA_TEST_OUTCOMES"  # the file to which a process writes a line a test
# The options of pyproject.toml, without its workers and its choice of tests.  A warning of another
# version of a library is no failure.
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-n0", "-m", "slow", "-p", "tests.slow_lane"),
    *("-o", "addopts=--import-mode=importlib -p no:schemathesis -p no:anyio"),
    *("-o", "filterwarnings=default", "-p", "no:cacheprovider"),
)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say that a test begins."""
    tell(nodeid, "crashed")


def pytest_runtest_logreport(report: Any) -> None:
    """Say how a test ended."""
    if report.failed or report.when == "call" or report.skipped:
        text = report.longreprtext or str(report.longrepr or "")
        tell(report.nodeid, report.outcome, report.duration, text[-4000:])


def outcome(test: str, kind: str, seconds: float = 0, text: str = "") -> dict[str, Any]:
    return {"test": test, "outcome": kind, "seconds": round(seconds, 1), "text": text}


def tell(test: str, kind: str, seconds: float = 0, text: str = "") -> None:
    if name := os.environ.get(OUTCOMES):
        with open(name, "a") as file:
            file.write(json.dumps(outcome(test, kind, seconds, text)) + "\n")


@dataclasses.dataclass
class Process:
    """Some tests in one process, which writes what became of them into ``folder``."""

    tests: list[str]
    cores: list[int]
    folder: Path
    started: float = dataclasses.field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        env = {**environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        env |= {"OMP_NUM_THREADS": str(len(self.cores)), OUTCOMES: str(self.folder / "outcomes")}
        with open(self.folder / "log", "w") as log:
            self.child = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, self.cores)), *PYTEST, *self.tests],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Return what became of each test that began; "crashed" if its process could not tell."""
        found: dict[str, dict[str, Any]] = {}
        file = self.folder / "outcomes"
        for line in file.read_text().splitlines() if file.exists() else ():
            told = json.loads(line)
            before = found.get(told["test"], {}).get("outcome")
            if before != "failed":
                found[told["test"]] = told
        return found


def collected(args: list[str]) -> list[str]:
    """Return the names of the slow tests in the order of ``args``."""
    paths: list[str] = []
    for arg in args:
        paths += Path(arg[1:]).read_text().split("\n") if arg[0] == "@" else [arg]
    paths = [path for path in paths if path]
    done = subprocess.run(
        [*PYTEST, "--collect-only", *dict.fromkeys(path.split("::")[0] for path in paths)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    known = re.findall(r"^tests/.*::.*", done.stdout, re.MULTILINE)
    if done.returncode:  # a file that cannot be imported; its tests are not known
        print(done.stdout[-3000:], flush=True)
    within = ([test for test in known if test.startswith(path)] for path in paths)
    return list(dict.fromkeys(itertools.chain.from_iterable(within)))


def batched(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def parts(tests: list[str], size: int) -> list[list[str]]:
    """Divide into at most ``size`` neighbours of one function."""
    groups = itertools.groupby(tests, key=lambda test: test.split("[")[0])
    return [part for _, group in groups for part in batched(list(group), size)]


class Lane:
    """A queue of tests in parts, and what became of them.  cores: those of each process."""

    def __init__(self, queue: list[list[str]], cores: list[list[int]]) -> None:
        self.queue, self.free = collections.deque(queue), cores
        self.running: list[Process] = []
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, seconds: float, limit: float, folder: Path) -> None:
        """Run until nothing is left or the time is up.  limit: seconds of a process."""
        end, names = time.monotonic() + seconds, itertools.count()
        try:
            while (self.queue or self.running) and time.monotonic() < end:
                while self.queue and self.free:
                    own = folder / str(next(names))
                    own.mkdir()
                    process = Process(self.queue.popleft(), self.free.pop(), own)
                    self.running.append(process)
                time.sleep(0.2)
                for process in list(self.running):
                    if process.child.poll() is not None:
                        self._ended(process, "crashed")
                    elif time.monotonic() - process.started > limit:
                        self._ended(process, "too long")
        except KeyboardInterrupt:  # SIGTERM, too
            pass
        for process in list(self.running):
            self._ended(process, "stopped")

    def _ended(self, process: Process, how: str) -> None:
        """Keep what the process told, and queue what it left undone.

        how: "crashed" if it ended by itself, else "too long" or, with all others, "stopped".
        """
        process.stop()
        self.running.remove(process)
        self.free.append(process.cores)
        told = process.outcomes()
        undone = [test for test in process.tests if test not in told]
        if not told and how != "stopped":
            told = {test: outcome(test, how, text=process.log()[-4000:]) for test in undone}
        elif how != "stopped" and undone:
            self.queue.append(undone)
        for test, one in told.items():
            if one["outcome"] == "crashed":  # it began, and did not end
                if how == "stopped":
                    continue
                if how == "crashed" and len(process.tests) > 1:
                    self.queue.appendleft([test])
                    continue
                one |= outcome(test, how, one["seconds"], process.log()[-4000:])
            self.results[test] = one
            print(f"{one['outcome']:8} {one['seconds']:6.1f} {test}", flush=True)


def main() -> int:
    """Run the tests; return 1 if one failed or none ran."""
    parser = argparse.ArgumentParser(description="Slow tests, a fresh process each few")
    parser.add_argument("tests", nargs="+", help="paths, names of tests, @FILE of them")
    parser.add_argument("--seconds", type=float, default=1e6, help="when to stop; none")
    parser.add_argument("--limit", type=float, default=900, help="seconds of one process; 900")
    parser.add_argument("--each", type=int, default=4, help="tests of a process; 4")
    parser.add_argument("--cores", type=int, default=1, help="cores of a process; 1")
    parser.add_argument("--out", type=Path, help="a file of JSON to write")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()
    tests = collected(args.tests)
    lane = Lane(parts(tests, args.each), batched(sorted(os.sched_getaffinity(0)), args.cores))
    print(
        f"{len(tests)} tests in {len(lane.queue)} processes, {len(lane.free)} at once", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        lane.run(args.seconds - (time.monotonic() - begun), args.limit, Path(folder))
    count = collections.Counter(told["outcome"] for told in lane.results.values())
    left = [test for test in tests if test not in lane.results]
    print({**count, "not run": len(left)}, flush=True)
    if args.out:
        report = {"count": {**count, "not run": len(left)}, "left": left, "tests": lane.results}
        args.out.write_text(json.dumps(report, indent=1))
    return int(bool(left) or not set(count) <= {"passed", "skipped"} or not count)


if __name__ == "__main__":
    sys.exit(main())
