"""Sessions that return: first tokens from the device, host memory, the disk, and by prefill again.

    python -m benchmarks.tiers --disk DIR [--model llama-3.1-8b --quantize w8a8]    on one GPU
    python -m benchmarks.tiers --disk DIR --small                                   on a CPU

``--sessions`` prompts of ``--tokens`` random tokens take turns; each turn adds a few tokens. The
device holds ``--device-sessions`` of them, so every turn finds its session gone from there. The
phases, one line of JSON each, and ``$OUT/tiers.json`` after each of them:

    cold      the first turn of all sessions
    device    a turn right behind a turn of the same session
    host      a turn of each session, whose pages are in host memory
    again     the same without tiers: prefilled again
    load      requests a second, four sessions at a time, with tiers and without
    moves     tokens/s of rows that decode alone, beside sessions that come back from host memory,
              and beside as many sessions that are on the device
    disk      turns from the disk, with and without the system's cache of files

With ``--kill`` the process then kills itself. The next call with this folder begins there:

    restarted    a turn of each session that the killed process has left
    damaged      the same of one session, of which a file has a wrong bit

The answers of device, host and disk must be the same tokens. Those of prefill are too on a CPU, and
on a GPU up to rounding: it reads the prompt in other chunks. ``--limit`` ends the phases early.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxllama as jl
from jaxllama.engine.pages import Held
from jaxllama.engine.request import Event
from jaxllama.engine.runner import Runner
from jaxllama.language_model import LanguageModel

NEW = 8  # tokens of a session's answer
MORE = 24  # tokens that each turn adds
AT_ONCE = 4  # sessions at a time in ``load``
EVERY = 0.25  # seconds between two sessions beside rows that decode
ANSWERS = "answers.json"  # of a process that was killed
SMALL = {
    "model": "smollm2-135m",
    "quantize": "none",
    "kv_dtype": "float32",
    "sessions": 6,
    "tokens": 200,
    "device_sessions": 3,
    "host_gb": 0.2,
    "rows": 2,
    "seconds": 2.0,
}


class Bench:
    """The sessions of one engine, and what was measured of them."""

    def __init__(self, args: argparse.Namespace, lm: LanguageModel) -> None:
        self.args, self.begun = args, time.perf_counter()
        length = args.tokens + MORE * 12 + NEW
        max_len = max(length, args.rows and 256 + 4 * NEW)
        page = 16 if args.small else 64
        room = args.device_sessions * -(-length // page) * page
        self.engine = jl.Engine(
            lm,
            max_slots=args.rows + AT_ONCE,
            max_len=max_len,
            kv_dtype=args.kv_dtype if lm.config.layer_types.count("attention") else None,
            page_size=page,
            cache_tokens=max(room, -(-max_len // page) * page) + args.rows * max_len,
            host_cache_gb=args.host_gb,
            disk_cache=str(args.disk),
            disk_cache_gb=args.disk_gb,
            max_queue=512,
        )
        draw, vocab = np.random.default_rng(0), lm.config.vocab_size
        self.sessions = draw.integers(3, vocab, (args.sessions, args.tokens)).tolist()
        self.more = draw.integers(3, vocab, (args.sessions, MORE * 12)).tolist()
        self.turns = [0] * args.sessions
        self.n_asked, self.lines = 0, []
        assert isinstance(self.engine.runner, Runner) and self.engine.runner.transfers is not None
        self.transfers = self.engine.runner.transfers
        self.tiers = self.transfers.tiers

    def say(self, phase: str, **figures: Any) -> None:
        line = {"phase": phase, "at_s": round(time.perf_counter() - self.begun, 1), **figures}
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        out = Path(os.environ.get("OUT", self.args.disk)) / self.args.name
        out.write_text(json.dumps(self.lines, indent=1))

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.args.limit - (time.perf_counter() - self.begun)

    def prompt(self, session: int, turn: int) -> tuple[int, ...]:
        return (*self.sessions[session], *self.more[session][: MORE * (turn + 1)])

    def ask(self, session: int, turn: int, events: list[Event], new: int = NEW) -> None:
        request = jl.Request(f"s{self.n_asked}", self.prompt(session, turn), new, ignore_eos=True)
        self.n_asked += 1
        self.engine.submit(request, events.append)

    def turn(self, session: int, turn: int) -> tuple[list[int], float, int]:
        """Return the tokens of a turn that runs alone, seconds to the first, and tokens found."""
        events: list[Event] = []
        self.ask(session, turn, events)
        while not events or events[-1].finish_reason is None:
            self.engine.step()
        self.rest()
        times = events[-1].times
        assert times is not None
        tokens = [token for event in events for token in event.tokens]
        return tokens, times[2] - times[0], events[-1].cached_tokens

    def rest(self) -> None:
        """Run until nothing is left to do, and all copies are in host memory."""
        while self.engine.step():
            pass
        self.transfers.settle()

    def forget_device(self) -> None:
        """Let the device forget its prefixes, as other sessions would make it do."""
        self.rest()
        pages = self.engine.runner.pools[0]
        held = Held()
        pages.grow(held, pages.available)
        pages.release(held)

    def phase(self, name: str, sessions: list[int], turn: int, **more: Any) -> list[list[int]]:
        """Run a turn of each session, one after the other, and say how long the first took."""
        found = [self.turn(session, turn) for session in sessions]
        seconds = sorted(ttft for _, ttft, _ in found)
        self.say(
            name,
            turns=len(found),
            ttft_ms_median=round(1e3 * seconds[len(seconds) // 2], 2),
            ttft_ms_least=round(1e3 * seconds[0], 2),
            ttft_ms_most=round(1e3 * seconds[-1], 2),
            found_tokens=found[-1][2],
            **more,
        )
        return [tokens for tokens, *_ in found]

    def load(self, sessions: list[int], turn: int) -> float:
        """Return the requests a second of a turn of these sessions, ``AT_ONCE`` at a time."""
        events: dict[int, list[Event]] = {session: [] for session in sessions}
        waiting, begun = list(sessions), time.perf_counter()
        while True:
            ended = sum(
                bool(some) and some[-1].finish_reason is not None for some in events.values()
            )
            if ended == len(sessions):
                return ended / (time.perf_counter() - begun)
            while waiting and len(sessions) - len(waiting) - ended < AT_ONCE:
                session = waiting.pop(0)
                self.ask(session, turn, events[session])
            self.engine.step()

    @contextlib.contextmanager
    def without_tiers(self):
        identity, self.tiers.identity = self.tiers.identity, None
        try:
            yield
        finally:
            self.tiers.identity = identity

    def decode(self, seconds: float, beside: str) -> dict[str, float]:
        """Return the rate of rows that decode beside sessions that come back, one at a time.

        beside: where these are: "none", "host" or "device".
        """
        written, gaps, last = [0], [], [time.perf_counter()]

        def count(event: Event) -> None:
            now = time.perf_counter()
            if event.tokens and event.id == "row0":
                gaps.append(now - last[0])
                last[0] = now
            written[0] += len(event.tokens)

        vocab = self.engine.lm.config.vocab_size
        draw = np.random.default_rng(1)
        new = self.args.tokens + MORE * 12 + NEW - 129
        for row in range(self.args.rows):
            tokens = tuple(draw.integers(3, vocab, 128).tolist())
            self.engine.submit(jl.Request(f"row{row}", tokens, new, ignore_eos=True), count)
        while len(self.engine.scheduler.running) < self.args.rows or not written[0]:
            self.engine.step()
        for _ in range(8):
            self.engine.step()
        events: list[Event] | None = None
        session = came = 0
        bytes_before = self.tiers.counts.host_hit_bytes
        written[0], begun, steps = 0, time.perf_counter(), self.engine.steps
        gaps.clear()
        while (now := time.perf_counter() - begun) < seconds:
            if events and events[-1].finish_reason is not None:
                came, events = came + 1, None
            if beside != "none" and events is None and now >= EVERY * came:
                events = []
                session = 0 if beside == "device" else (session + 1) % self.args.sessions
                self.ask(session, 3, events, 1)
            self.engine.step()
        took = time.perf_counter() - begun
        rate = written[0] / took
        moved = self.tiers.counts.host_hit_bytes - bytes_before
        for row in range(self.args.rows):
            self.engine.cancel(f"row{row}")
        self.rest()
        gaps.sort()
        return {
            "tokens_per_second": rate,
            "came_per_second": came / took,
            "moved_gb_per_second": moved / took / 1e9,
            "call_ms": 1e3 * took / max(self.engine.steps - steps, 1),
            "gap_ms_median": 1e3 * gaps[len(gaps) // 2] if gaps else 0.0,
            "gap_ms_most": 1e3 * gaps[-1] if gaps else 0.0,
        }

    def files_of(self, session: int, turn: int) -> list[Path]:
        """Return the files of a session that the device has forgotten."""
        files, key = self.tiers.files, (self.engine.scheduler.weights, (None, ""))
        assert files is not None
        records = self.engine.runner.pools[0].missing(self.prompt(session, turn), key)
        return [path for path in map(files.path, records) if path.exists()]

    def drop_files(self, sessions: list[int], turn: int) -> int:
        """Let the system forget these sessions' files, and return their bytes."""
        total = 0
        for path in [path for session in sessions for path in self.files_of(session, turn)]:
            handle = os.open(path, os.O_RDONLY)
            os.fdatasync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(handle).st_size
            os.close(handle)
        return total

    def restarted(self, answers: list[list[int]]) -> None:
        """Find the sessions of a killed process, whose answers these were."""
        few = list(range(len(answers)))
        self.say("same", restarted=self.phase("restarted", few, 1) == answers)
        self.forget_device()
        self.tiers.forget_host()
        files = self.files_of(0, 1)
        data = bytearray(files[len(files) // 2].read_bytes())
        data[-1] ^= 1
        files[len(files) // 2].write_bytes(data)
        self.say("same", damaged=self.phase("damaged", few[:1], 1) == answers[:1])

    def run(self) -> None:
        args, tiers, everyone = self.args, self.tiers, list(range(self.args.sessions))
        self.phase("cold", everyone, 0)
        few = everyone[: max(args.few, 1)]
        self.say(
            "kept",
            host_gb=tiers.host_used / 1e9,
            records=tiers.n_host,
            lost=tiers.counts.lost,
            disk_gb=0 if tiers.files is None else tiers.files.nbytes / 1e9,
        )
        for _ in range(2):
            self.turn(0, 1)
        device = self.phase("device", [0] * 5, 1)
        self.forget_device()
        host = self.phase("host", everyone, 1)
        self.forget_device()
        with self.without_tiers():
            again = self.phase("again", few, 1)
        self.say("same", host=all(x == host[0] for x in device), prefill=shared(host, again))
        self.forget_device()
        with_tiers = self.load(everyone, 2)
        self.forget_device()
        with self.without_tiers():
            without = self.load(few, 2)
        self.say("load", requests_per_second=with_tiers, without=without, at_once=AT_ONCE)
        if args.rows and self.left > 4 * args.seconds:
            self.load(everyone, 3)
            self.forget_device()
            alone = self.decode(args.seconds, "none")
            self.turn(0, 3)
            device = self.decode(args.seconds, "device")
            self.forget_device()
            moving = self.decode(args.seconds, "host")
            rate = alone["tokens_per_second"]
            self.say(
                "moves",
                alone=alone,
                device=device,
                host=moving,
                loss_beside_alone=1 - moving["tokens_per_second"] / rate,
                loss_beside_device=1 - moving["tokens_per_second"] / device["tokens_per_second"],
            )
        if self.left < 20 and not args.small:
            return
        begun, before = time.perf_counter(), 0 if tiers.files is None else tiers.files.nbytes
        is_done = tiers.settle(min(40.0, self.left - 15))
        if tiers.files is not None:
            after = tiers.files.nbytes
            self.say(
                "written",
                all=is_done,
                disk_gb=after / 1e9,
                gb_per_second=(after - before) / max(time.perf_counter() - begun, 1e-9) / 1e9,
                lost=tiers.counts.lost,
            )
            self.forget_device()
            tiers.forget_host()
            dropped = self.drop_files(few, 1)
            disk = self.phase("disk", few, 1, dropped_gb=dropped / 1e9)
            self.say("same", disk=disk == host[: len(few)])
            self.forget_device()
            tiers.forget_host()
            self.phase("disk, cached by the system", few, 1)
            if args.kill:
                (args.disk / ANSWERS).write_text(json.dumps(disk))
                os.kill(os.getpid(), signal.SIGKILL)
        stats = self.engine.stats()
        self.say("stats", **{k: v for k, v in vars(stats).items() if "tier" in k})


def shared(some: list[list[int]], others: list[list[int]]) -> float:
    """Return the share of answers, of those in both lists, that are the same tokens."""
    equal = [a == b for a, b in zip(some, others, strict=False)]
    return sum(equal) / len(equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset; weights are random")
    parser.add_argument("--quantize", default="w8a8", help="a scheme, or none")
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--few", type=int, default=6, help="sessions of the slow phases")
    parser.add_argument("--tokens", type=int, default=16000, help="tokens of a session")
    parser.add_argument("--device-sessions", type=int, default=6, help="that the device holds")
    parser.add_argument("--host-gb", type=float, default=48.0)
    parser.add_argument(
        "--disk", type=Path, required=True, help="folder, which is deleted at the end"
    )
    parser.add_argument("--disk-gb", type=float, default=50.0)
    parser.add_argument("--rows", type=int, default=4, help="rows that decode beside the moves")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each rate of decoding")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for all phases")
    parser.add_argument("--kill", action="store_true", help="end by SIGKILL and keep the folder")
    parser.add_argument("--name", default="tiers.json", help="of the file in $OUT")
    parser.add_argument(
        "--small", action="store_true", help="the first layers of a small model, on a CPU"
    )
    args = parser.parse_args()
    if args.small:
        parser.set_defaults(**SMALL)
        args = parser.parse_args()
    else:
        pinned = str(int(args.host_gb) + 16)
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", pinned)
    scheme = None if args.quantize == "none" else args.quantize
    begun = time.perf_counter()
    lm = jl.load(args.model, quantize=scheme, random=True)
    needed = args.tokens + MORE * 12 + NEW
    if lm.config.max_position < needed:
        lm = LanguageModel(lm.config.replace(max_position=needed), lm.params, lm.tokenizer)
    if args.small:
        kinds = lm.config.layer_types
        lm = lm.first_layers(max(2, *(1 + kinds.index(kind) for kind in kinds)))
    loaded = time.perf_counter() - begun
    bench = Bench(args, lm)
    bench.engine.warm_up()
    bench.say(
        "about",
        model=args.model,
        quantize=scheme,
        kv_dtype=bench.engine.options.kv_dtype,
        sessions=args.sessions,
        tokens=args.tokens,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        load_s=loaded,
        warm_up_s=time.perf_counter() - begun - loaded,
    )
    bench.begun = begun
    left = args.disk / ANSWERS
    try:
        if left.exists():
            bench.restarted(json.loads(left.read_text()))
        else:
            bench.run()
    finally:
        bench.tiers.forget_host()
        bench.engine.stop()
        shutil.rmtree(args.disk, ignore_errors=True)


if __name__ == "__main__":
    main()
