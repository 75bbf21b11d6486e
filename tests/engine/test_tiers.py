"""Prefixes that leave the device: the same tokens from every tier, and what a disk may do."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.engine import tier_files
from jaxllama.engine.engine import Engine
from jaxllama.engine.pages import Held
from jaxllama.engine.records import record_bytes
from jaxllama.engine.request import Event, Request
from jaxllama.engine.tier_files import TierFiles
from jaxllama.engine.tiers import Block, Identity, Tiers, after
from jaxllama.errors import JaxLlamaError
from pallas_kernels.rows.words import of_words, words_of
from tests.helpers.engine_cases import (
    OPTIONS,
    PROMPTS,
    check_answer,
    model,
    poison,
    run_schedule,
    written,
)

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
LONG = tuple(np.random.default_rng(1).integers(3, 97, 70).tolist())  # 64 tokens in four chunks
MB = 1e-3  # GB
PLACES = ("device", "host", "disk", "restart", "again")
FAMILIES = ["llama", pytest.param("gla", marks=pytest.mark.slow), "hybrid"]


def tiered(family: str, folder: Path | None = None, **options) -> Engine:
    tiers = {"host_cache_gb": 4 * MB, "disk_cache": None if folder is None else str(folder)}
    return Engine(model(family), **{**OPTIONS, **tiers, **options})


def ask(eng: Engine, prompt=LONG, family: str = "llama", **more) -> tuple[list[int], int]:
    """The answer, which is the request's alone, and the number of tokens that were found."""
    request = Request(f"r{eng.arrivals}", prompt, 5, **more)
    events = eng.generate([request])[request.id]
    check_answer(family, request, events, 1e-4)
    return written(events)[0], events[-1].cached_tokens


def forget_device(eng: Engine) -> None:
    """Every page and snapshot is given away, and then holds NaN."""
    pages, held = eng.scheduler.pages, Held()
    eng.runner.transfers.settle()
    assert not pages.has_unsaved and pages.grow(held, pages.available)
    pages.release(held)
    assert pages.known == 0
    poison(eng)


def tiers_of(eng: Engine) -> Tiers:
    return eng.runner.transfers.tiers


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.page"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_from_every_tier(family, tmp_path):
    eng = tiered(family, tmp_path)
    request = Request("why", LONG, 5)
    first, found = ask(eng, family=family)
    assert found == 0
    assert ask(eng, family=family) == (first, 64)
    assert eng.explain(request).startswith("70 prompt tokens: 64 on the device, 0 in host")
    forget_device(eng)
    assert eng.explain(request) == (
        "70 prompt tokens: 0 on the device, 64 in host memory, 0 on disk, 6 to compute"
    )
    assert ask(eng, family=family) == (first, 64)
    stats = eng.stats()
    assert stats.host_tier_hits > 0 == stats.disk_tier_hits and stats.host_tier_hit_bytes > 900
    forget_device(eng)
    assert tiers_of(eng).settle()
    tiers_of(eng).forget_host()
    assert "0 in host memory, 64 on disk" in eng.explain(request)
    assert ask(eng, family=family) == (first, 64)
    assert eng.stats().disk_tier_hits == stats.host_tier_hits
    eng.stop()
    again = tiered(family, tmp_path)
    assert ask(again, family=family) == (first, 64)
    assert again.stats().disk_tier_hits == stats.host_tier_hits
    again.stop()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gla", "hybrid"])
def test_sessions_go_on_with_the_same_tokens_wherever_they_were(family, tmp_path):
    """Turn after turn, of several sessions: on the device, in each tier, after a restart, and
    prefilled again."""
    options = {"max_len": 160, "cache_tokens": 320}
    plain = Engine(model(family), **{**OPTIONS, **options}, prefix_cache=False)
    eng, draw, found = tiered(family, tmp_path, **options), random.Random(0), set()
    sessions = [[draw.randrange(3, 250) for _ in range(30)] for _ in range(3)]

    def answer(eng: Engine, prompt: list[int]) -> tuple[list[int], int]:
        request = Request(f"r{eng.arrivals}", tuple(prompt), 5, ignore_eos=True)
        events = eng.generate([request])[request.id]
        return written(events)[0], events[-1].cached_tokens

    for turn in range(40):
        session, where = draw.choice(sessions), PLACES[turn % len(PLACES)]
        if where != "device":
            forget_device(eng)
        if where in ("disk", "restart"):
            assert tiers_of(eng).settle()
            tiers_of(eng).forget_host()
        if where == "restart":
            eng.stop()
            eng = tiered(family, tmp_path, **options)
        identity = tiers_of(eng).identity
        if where == "again":
            tiers_of(eng).identity = None
        tokens, cached = answer(eng, session)
        tiers_of(eng).identity = identity
        found |= {where} if cached else set()
        assert tokens == answer(plain, session)[0], (turn, where)
        session += [*tokens, *(draw.randrange(3, 250) for _ in range(3))]
        del session[140:]
    assert found == {*PLACES} - {"again"}
    eng.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "float8_e4m3fn"])
def test_a_record_holds_every_bit(dtype):
    codes = np.random.default_rng(0).integers(-7, 7, (3, 5, 8))
    leaf = jnp.asarray(codes, dtype)
    packed = words_of(leaf)
    assert (packed.dtype, packed.shape) == (jnp.uint32, (3, record_bytes([leaf]) // 4))
    back = of_words(packed, leaf)
    assert back.dtype == leaf.dtype
    np.testing.assert_array_equal(back.astype(jnp.float32), leaf.astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_records_have_the_caches_own_codes(kv_dtype, tmp_path):
    eng = tiered("llama", tmp_path, kv_dtype=kv_dtype)
    events = [eng.generate([Request(f"{n}", LONG, 5)])[f"{n}"] for n in range(2)]
    forget_device(eng)
    events.append(eng.generate([Request("2", LONG, 5)])["2"])
    assert [event[-1].cached_tokens for event in events] == [0, 64, 64]
    assert written(events[1]) == written(events[2])
    attention = model("llama").config.layers[0].mixer
    codes = attention.head_dim if kv_dtype == "int8" else attention.head_dim // 2
    assert tiers_of(eng).host_used == 4 * 16 * 2 * attention.n_kv_heads * (codes + 4)
    eng.stop()


def test_other_rows_run_while_pages_come_back(tmp_path, monkeypatch):
    """Rows that decode, and requests behind the one that waits. A request with the same beginning
    waits for it, and shares its pages."""
    eng = tiered("llama", tmp_path, cache_tokens=192)
    ask(eng)
    forget_device(eng)
    assert tiers_of(eng).settle()
    tiers_of(eng).forget_host()
    files, go = tiers_of(eng).files, []
    read = files.read

    def slowly(key, out):
        while not go:
            time.sleep(0.001)
        return read(key, out)

    monkeypatch.setattr(files, "read", slowly)
    events: dict[str, list[Event]] = {}
    requests = [
        Request("runs", PROMPTS[2], 20),
        Request("comes", LONG, 5),
        Request("same", LONG[:66], 5),
        Request("passes", PROMPTS[4], 5),
    ]
    for request in requests:
        eng.submit(request, events.setdefault(request.id, []).append)
    while not (events["runs"] and events["runs"][-1].finish_reason):
        eng.step()
    assert events["passes"][-1].finish_reason and not events["comes"] and not events["same"]
    assert [sequence.request.id for sequence in eng.scheduler.loading] == ["comes"]
    go.append(True)
    while eng.step():
        pass
    for request in requests:
        check_answer("llama", request, events[request.id])
    assert events["comes"][-1].cached_tokens == events["same"][-1].cached_tokens == 64
    assert eng.stats().disk_tier_hits == 4  # once for both
    eng.stop()


def test_a_request_that_is_cancelled_takes_its_pages_along(tmp_path):
    eng = tiered("hybrid", tmp_path)
    first, _ = ask(eng, family="hybrid")
    for _ in range(5):  # more than the groups that may be on the device at once
        forget_device(eng)
        events: list[Event] = []
        eng.submit(Request("gone", LONG, 5), events.append)
        eng.step()
        assert eng.scheduler.loading
        eng.cancel("gone")
        while eng.step():
            pass
        assert events[-1].finish_reason == "cancelled" and not eng.scheduler.loading
    forget_device(eng)
    assert ask(eng, family="hybrid") == (first, 64)
    forget_device(eng)
    events = []
    eng.submit(Request("gone", LONG, 5), lambda event: None)
    eng.submit(Request("waits", LONG, 5), events.append)
    eng.step()
    eng.runner.transfers._in.submit(lambda: None).result()  # its pages are on the device
    eng.cancel("gone")
    for _ in range(100):
        eng.step()
    assert written(events)[0] == first
    eng.stop()


@pytest.mark.parametrize("family", ["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_damaged_files_are_computed_again(family, tmp_path, caplog):
    """Cut, changed, empty, and gone: the log has a sentence for each file, and the next request
    finds new ones."""
    eng = tiered(family, tmp_path)
    first, _ = ask(eng, family=family)
    eng.stop()
    files = records(tmp_path)
    files[0].write_bytes(files[0].read_bytes()[:-1])
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    files[2].write_bytes(b"")
    eng = tiered(family, tmp_path)
    tiers_of(eng).files.find(bytes.fromhex(files[3].stem))
    files[3].unlink()
    with caplog.at_level("WARNING", "jaxllama.serving"):
        assert ask(eng, family=family)[0] == first
    told = [record.getMessage() for record in caplog.records]
    assert told and all("cannot be read (" in text and "computed again" in text for text in told)
    eng.stop()
    assert len(records(tmp_path)) == len(files)
    again = tiered(family, tmp_path)
    assert ask(again, family=family) == (first, 64)
    again.stop()


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch, caplog):
    """The tokens and the host's memory stay, and nothing is left of the files."""
    monkeypatch.setattr(tier_files, "PAUSE", 0.2)

    def full(path, data):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = tier_files._write
    monkeypatch.setattr(tier_files, "_write", full)
    eng = tiered("llama", tmp_path)
    with caplog.at_level("WARNING", "jaxllama.serving"):
        first, _ = ask(eng)
        assert tiers_of(eng).settle()
    told = {record.getMessage() for record in caplog.records}
    assert len(told) == 1 and "cannot be written to (No space left on device)" in told.pop()
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    forget_device(eng)
    assert ask(eng) == (first, 64)
    monkeypatch.setattr(tier_files, "_write", write)
    time.sleep(0.25)
    ask(eng, LONG[1:])
    assert tiers_of(eng).settle() and len(records(tmp_path)) == 4
    eng.stop()


def test_two_engines_share_a_folder(tmp_path):
    one, other = tiered("llama", tmp_path), tiered("llama", tmp_path)
    first, _ = ask(one)
    one.runner.transfers.settle()
    assert tiers_of(one).settle()
    assert ask(other) == (first, 64)
    for file in records(tmp_path):
        file.unlink()  # as the other's limit may do
    forget_device(one)
    tiers_of(one).forget_host()
    assert ask(one)[0] == first
    one.stop()
    other.stop()


def test_nobody_finds_what_another_salt_or_other_weights_left(tmp_path):
    eng = tiered("llama", tmp_path)
    first, _ = ask(eng, cache_salt="a")
    forget_device(eng)
    assert ask(eng, cache_salt="b") == (first, 0)
    assert ask(eng) == (first, 0)
    assert ask(eng, cache_salt="a") == (first, 64)
    eng.stop()
    others = [tiered("llama", tmp_path, kv_dtype="int8"), tiered("llama", tmp_path, page_size=8)]
    for other in others:
        assert "0 in host memory, 0 on disk" in other.explain(Request("x", LONG, 5, cache_salt="a"))
        other.stop()


def test_new_weights_find_their_own_prefixes_alone():
    """And those of before, when they return: also after a sleep, which forgets the device's."""
    eng, lm = tiered("llama"), model("llama")
    first, _ = ask(eng)
    changed = {**lm.params, "embed": {"weight": lm.params["embed"]["weight"] * 1.5}}
    eng.update_params(changed)
    assert "0 on the device, 0 in host memory" in eng.explain(Request("x", LONG, 5))
    eng.generate([Request("changed", LONG, 5)])
    eng.update_params(lm.params)
    assert ask(eng) == (first, 64)
    eng.sleep()
    eng.wake()
    assert ask(eng) == (first, 64)
    eng.stop()


@pytest.mark.parametrize("family", ["llama", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_schedules_have_the_tokens_of_each_request_alone(family, tmp_path):
    """Preempted and cancelled rows, prompts that share beginnings, and little host memory."""
    eng = tiered(family, tmp_path, host_cache_gb=0.02 * MB)
    schedule = [
        (prompt, sampling, 20, arrival, priority, cancel)
        for arrival, (prompt, sampling, priority, cancel) in enumerate(
            [(9, 0, 0, None), (7, 1, 0, None), (8, 2, 1, None), (9, 3, 0, 6), (6, 0, 1, None)] * 2
        )
    ]
    run_schedule(family, eng, schedule)
    run_schedule(family, eng, schedule)
    stats = eng.stats()
    assert stats.preemptions > 0 and stats.host_tier_hits + stats.disk_tier_hits > 0
    assert stats.host_tier_bytes <= 20_000
    eng.stop()


KILLED = """
import sys
from tests.engine.test_tiers import ask, tiered, tiers_of
eng = tiered("llama", sys.argv[1])
tokens, found = ask(eng)
eng.runner.transfers.settle()
assert tiers_of(eng).settle()
print(tokens, found, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_server_that_is_killed_finds_its_prefixes_again(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    told = child.stdout.readline().strip()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    eng = tiered("llama", tmp_path)
    tokens, found = ask(eng)
    assert (told, found) == (f"{tokens} 0", 64)
    eng.stop()


def test_options_that_have_no_effect_are_refused(tmp_path):
    for options, says in (
        ({"disk_cache_gb": 1.0}, "disk_cache_gb = 1.0 needs disk_cache"),
        ({"host_cache_gb": 1.0, "prefix_cache": False}, "prefix_cache is False"),
        ({"host_cache_gb": -1.0}, r"host_cache_gb = -1.0: must be a number in \(0, 1e\+09\]"),
        ({"disk_cache_gb": float("inf")}, r"disk_cache_gb = inf: must be a number in"),
        ({"disk_cache": ""}, "disk_cache = '': must be the name of a folder"),
        ({"host_cache_gb": 1e-12}, r"host_cache_gb = 1e-09: a record takes .* GB"),
        (
            {"disk_cache": str(tmp_path), "disk_cache_gb": 1e-7},
            r"disk_cache_gb = 1e-07: a record takes .* GB",
        ),
    ):
        with pytest.raises(JaxLlamaError, match=says):
            Engine(model("llama"), **{**OPTIONS, **options})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JaxLlamaError, match="name a folder that can be written to"):
        tiered("llama", tmp_path / "file")


# Without a model


def key_of(number: int) -> bytes:
    return bytes([number] * 20)


def data(*numbers: int) -> tuple[list[bytes], np.ndarray]:
    """The keys and the records of a block."""
    rows = np.repeat(np.array(numbers, np.uint8)[:, None], 100, axis=1)
    return [key_of(number) for number in numbers], rows


def plain_tiers(host_bytes: int, files: TierFiles | None = None, most: int = 1) -> Tiers:
    return Tiers(host_bytes, files, most, lambda found: found, lambda found: found)


def fetched(tiers: Tiers, *numbers: int) -> list[tuple[list[int], int]]:
    """The numbers that each block has of these, and the number of its records."""
    found = []
    for keys, block in tiers.fetch([key_of(number) for number in numbers]):
        block = block if isinstance(block, Block) else block.result()
        rows = {key: block.data[block.rows[key]] for key in keys if key in block.rows}
        assert all((row == key[0]).all() for key, row in rows.items())
        found.append(([key[0] for key in rows], len(block.data)))
    return found


def test_each_tier_forgets_what_was_used_longest_ago(tmp_path):
    files = TierFiles(tmp_path, limit=3 * 164)
    tiers = plain_tiers(200, files)
    for key in (1, 2, 3):
        tiers.put(*data(key))
        assert tiers.settle()
    assert [tiers.where(key_of(key)) for key in (1, 2, 3)] == ["disk", "host", "host"]
    assert fetched(tiers, 1) == [([1], 1)]
    assert [tiers.where(key_of(key)) for key in (1, 2, 3)] == ["host", "disk", "host"]
    tiers.put(*data(4))
    assert tiers.settle()
    assert [tiers.where(key_of(key)) for key in (1, 2, 3, 4)] == ["host", None, "disk", "host"]
    assert (tiers.host_used, files.nbytes) == (200, 3 * 164)
    assert fetched(tiers, 2) == [([], 1)]
    found = TierFiles(tmp_path, limit=3 * 164)  # as a new server finds them
    assert [found.find(key_of(key)) for key in (1, 2, 3, 4)] == [True, False, True, True]
    tiers.close()


def test_records_that_lie_scattered_come_in_new_blocks(tmp_path):
    """Those of few other records move as they are, and all together leave the host's memory."""
    files = TierFiles(tmp_path)
    tiers = plain_tiers(3000, files, most=8)
    assert tiers.sizes == [8, 2, 1]
    tiers.put(*data(*range(8)))
    tiers.put(*data(8, 9))
    for number in range(10, 16):
        tiers.put(*data(number))
    assert tiers.host_used == 1600 and tiers.settle()
    assert fetched(tiers, *range(7)) == [([*range(7)], 8)]
    assert fetched(tiers, 8, 9, 10) == [([8, 9], 2), ([10], 1)]
    pair = ([8, 9], 2)
    assert fetched(tiers, *range(18)) == [([*range(8)], 8), pair, ([*range(10, 16)], 8), ([], 2)]
    assert tiers.host_used == 1800  # nothing is there twice, and two rows are empty
    assert fetched(tiers, 3, 9) == [([3, 9], 2)]
    assert tiers.host_used == 2000
    counts = tiers.counts
    assert (counts.host_hits, counts.disk_hits, counts.host_hit_bytes) == (28, 0, 2800)
    tiers.forget_host()
    assert tiers.host_used == 0
    assert fetched(tiers, *range(11)) == [([*range(8)], 8), ([8, 9], 2), ([10], 1)]
    assert (counts.host_hits, counts.disk_hits) == (28, 11)
    tiers.prefetch([key_of(number) for number in range(9, 16)])
    assert fetched(tiers, *range(11, 16)) == [([11, 12], 2), ([13, 14], 2), ([15], 1)]
    tiers.put(*data(*range(20, 28)))
    tiers.put(*data(*range(30, 38)))
    assert tiers.host_used <= 3000 and tiers.settle()
    where = {number: tiers.where(key_of(number)) for number in (*range(16), *range(20, 28))}
    assert {*where.values()} == {"host", "disk"} and where[20] == where[27] == "host"
    tiers.close()


def test_a_slow_disk_gets_what_has_left_the_hosts_memory(tmp_path, monkeypatch):
    files, go = TierFiles(tmp_path), []
    write = files.write

    def slowly(key, record):
        while not go:
            time.sleep(0.001)
        return write(key, record)

    monkeypatch.setattr(files, "write", slowly)
    monkeypatch.setattr("jaxllama.engine.tiers.BEHIND", 250)
    tiers = plain_tiers(100, files)
    keys = range(10)
    for key in keys:
        tiers.put(*data(key))
    go.append(True)
    assert tiers.settle()
    kept = [key for key in keys if files.find(key_of(key))]
    # Four threads hold one each, two wait, the last is in memory, and the others are lost.
    assert tiers.counts.lost == 10 - len(kept) and 0 < tiers.counts.lost <= 4
    assert 9 in kept
    tiers.close()


def test_a_record_that_goes_before_it_is_read_leaves_the_others(tmp_path):
    """Another thread or server may delete it while a block of several waits for a reader."""
    files = TierFiles(tmp_path)
    tiers = plain_tiers(3000, files, most=4)
    tiers.put(*data(*range(4)))
    assert tiers.settle()
    tiers.forget_host()
    read = tiers._made

    def later(keys, size):
        files.path(keys[0]).unlink()
        files._forget(keys[0].hex())
        return read(keys, size)

    tiers._made = later
    assert fetched(tiers, *range(4)) == [([1, 2, 3], 4)]
    assert len(records(tmp_path)) == 3
    tiers.close()


def test_a_look_at_the_folder_keeps_what_others_do_meanwhile(tmp_path, monkeypatch):
    files = TierFiles(tmp_path)
    for number in (1, 2):
        files.write(key_of(number), data(number)[1][0])
    entries = tier_files._entries

    def slowly(folder):
        found = list(entries(folder))
        assert all(entry.stat().st_size for entry in found)  # which an entry keeps
        files.write(key_of(3), data(3)[1][0])
        files.path(key_of(1)).unlink()
        files._forget(key_of(1).hex())
        return iter(found)

    monkeypatch.setattr(tier_files, "_entries", slowly)
    files._look()
    assert (len(files), files.nbytes) == (2, 2 * 164)
    assert [files.find(key_of(number)) for number in (1, 2, 3)] == [False, True, True]


def test_a_process_without_descriptors_deletes_nothing(tmp_path, monkeypatch, caplog):
    files = TierFiles(tmp_path)
    files.write(key_of(1), data(1)[1][0])

    def refused(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tier_files, "open", refused, raising=False)
    assert not files.read(key_of(1), np.empty(100, np.uint8))
    assert "Too many open files" in caplog.text
    monkeypatch.undo()
    assert files.read(key_of(1), np.empty(100, np.uint8))


def test_a_dead_writers_file_is_deleted(tmp_path):
    TierFiles(tmp_path).write(key_of(1), data(1)[1][0])
    old, new = (tmp_path / "01" / f".{letter * 32}" for letter in "ab")
    mine = tmp_path / ".profile"
    for file in (old, new, mine):
        file.write_bytes(b"half")
    for file in (old, mine):
        os.utime(file, (0, 0))
    files = TierFiles(tmp_path)
    assert len(files) == 1 and new.exists() and mine.exists() and not old.exists()
    assert oct((tmp_path / "01").stat().st_mode & 0o777) == "0o700"
    assert oct(files.path(key_of(1)).stat().st_mode & 0o777) == "0o600"


def test_servers_share_the_limit_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_files, "LOOK", 0.0)
    limit = 8 * 164
    servers = [TierFiles(tmp_path, limit) for _ in range(3)]
    for number in range(48):
        assert servers[number % 3].write(key_of(number), np.zeros(100, np.uint8))
    assert sum(file.stat().st_size for file in records(tmp_path)) == limit


def test_writers_at_once_keep_the_limit(tmp_path):
    files = TierFiles(tmp_path, 2 * 164)
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda n: files.write(key_of(n), np.zeros(100, np.uint8)), range(40)))
    assert files.nbytes == sum(file.stat().st_size for file in records(tmp_path)) <= files.limit


def test_keys_depend_on_everything_that_records_depend_on():
    identity = Identity(b"weights", 3, ("sql",), b"process")
    roots = {identity.root(3, (name, salt)) for name in (None, "sql", "x#1") for salt in ("", "a")}
    assert len(roots) == 6 and None not in roots
    assert identity.root(2, (None, "")) is None
    other = Identity(b"weights", 4, ("sql",), b"another")
    assert other.root(4, ("sql", "a")) == identity.root(3, ("sql", "a"))
    assert other.root(4, ("x#1", "a")) != identity.root(3, ("x#1", "a"))
    root = identity.root(3, (None, ""))
    assert after(root, [1, 2]) != after(root, [2, 1]) != after(after(root, [1]), [2])
