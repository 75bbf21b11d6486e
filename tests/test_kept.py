"""Programs kept from one process for the next, and how many tokens a streamed call writes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc

import jax
import numpy as np
import pytest

from jaxllama import kept
from jaxllama.decoding.gain import DRAFT
from jaxllama.decoding.sampling import Sampling
from jaxllama.executors import batches
from jaxllama.executors.resident import ResidentDecoding
from jaxllama.kept import KeptPrograms, collector_paused
from jaxllama.language_model import LanguageModel
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.cards import architecture
from tests.helpers.models import LLAMA, params_of


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    cfg = LLAMA.replace(n_layers=1, layer_types=("attention",), vocab_size=260)
    return LanguageModel(cfg, jax.device_put(params_of(cfg)), Tokenizer.byte_level())


def with_programs(lm: LanguageModel) -> LanguageModel:
    programs = KeptPrograms("facts")
    programs.wait()
    return dataclasses.replace(lm, programs=programs)


def test_what_one_process_compiled_the_next_one_reads(lm, tmp_path, monkeypatch):
    path = tmp_path / "models" / "m.pickle"
    monkeypatch.setattr(kept, "_path", lambda facts: path)
    want = lm.generate("abc", 5)
    first = with_programs(lm)
    assert first.generate("abc", 5) == want
    first.programs._pool.shutdown()  # all is written
    assert len(kept._stored(path)[1]) == 3

    def never(lowered):
        raise AssertionError("compiled again")

    compiled = kept.compiled_here
    monkeypatch.setattr(kept, "compiled_here", never)
    assert with_programs(lm).generate("abc", 5) == want
    assert "".join(with_programs(lm).stream("abc", 5)) == want[0].text
    # Other weights' shapes, other sampling and other settings are other programs.
    with pytest.raises(AssertionError, match="compiled again"):
        with_programs(lm).generate("abc", 5, Sampling(temperature=0.5))
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), lm.params)
    with pytest.raises(AssertionError, match="compiled again"):
        with_programs(dataclasses.replace(lm, params=half)).generate("abc", 5)
    # A file that is damaged is made again.
    monkeypatch.setattr(kept, "compiled_here", compiled)
    path.write_bytes(path.read_bytes()[:100])
    monkeypatch.setattr(kept.warnings, "warn", lambda *_, **__: None)
    assert with_programs(lm).generate("abc", 5) == want


@pytest.mark.parametrize(
    "step_seconds, calls",
    [
        (0.5, [3, 4, 5, 6]),  # a slow model shows each token
        (0.01, [3, 10, 17, 24]),  # about PIECE_SECONDS a call
        (0.001, [3, 11, 43, 122]),  # four times more at most
    ],
)
def test_a_call_takes_about_as_long_as_a_reader_waits(step_seconds, calls, monkeypatch):
    monkeypatch.setattr(batches, "PIECE_SECONDS", 0.08)
    clock = [0.0]
    monkeypatch.setattr(batches.time, "perf_counter", lambda: clock[0])
    pieces, found, before = batches._Pieces(1000, is_read=True, gain=None), [], 1
    pieces.arrived(np.array([before]), np.array([False]))  # of the prompt
    for _ in calls:
        until, _ = pieces.next(np.array([before]))
        clock[0] += step_seconds * (until - before) * 1.001
        pieces.arrived(np.array([until]), np.array([False]))
        found.append(until)
        before = until
    assert found == calls
    took = pieces._step_seconds
    pieces.next(np.array([before]))
    clock[0] += took / 100
    pieces.arrived(np.array([before]), np.array([False]))  # correct drafts had written all
    assert pieces._step_seconds == took
    whole = batches._Pieces(1000, is_read=False, gain=None)
    assert whole.next(np.array([1])) == (1000, DRAFT)


def test_the_device_has_the_next_call_before_the_host_reads_one(lm, monkeypatch):
    """But for the first piece, which waits for no loop; a text is the same however it is cut."""
    monkeypatch.setattr(batches, "PIECE_SECONDS", 0.0)
    order, advance, fetch = [], ResidentDecoding.advance, batches.fetch
    monkeypatch.setattr(
        ResidentDecoding, "advance", lambda *args: order.append("call") or advance(*args)
    )
    monkeypatch.setattr(batches, "fetch", lambda tree: order.append("read") or fetch(tree))
    [want] = lm.generate("abc", 6)
    assert order == ["read", "call", "read"]
    order.clear()
    heard = []
    [got] = lm.generate("abc", 6, on_text=lambda _, text: heard.append(text))
    assert got == want and "".join(heard) == want.text
    assert order == ["read", "call", "call", "read", "call", "read", "read"]


def test_a_start_makes_ready_what_the_last_process_called(tmp_path, monkeypatch):
    """Older programs wait for a call; it makes them the newest of the file."""
    path = tmp_path / "model-0.pickle"
    names = [f"program {i}" for i in range(kept.EARLY + 2)]  # the oldest first
    kept._write(path, ((), {name: name.encode() for name in names}))
    monkeypatch.setattr(kept, "_path", lambda facts: path)
    loaded = []
    monkeypatch.setattr(kept, "_loaded", lambda blob: loaded.append(blob.decode()) or blob)
    programs = KeptPrograms("facts")
    programs.wait()
    assert sorted(loaded) == names[2:]
    assert programs._is_ready("program 0") and programs._is_ready("program 0")
    assert not programs._is_ready("another")
    assert loaded.count("program 0") == 1 and "program 1" not in loaded
    programs._pool.shutdown()  # all is written
    assert list(kept._stored(path)[1]) == [*names[1:], "program 0"]


@pytest.mark.core
@pytest.mark.parametrize("damage", [b"", b"\x80\x05", b"x" * 300])
def test_damaged_programs_are_left_alone(tmp_path, damage):
    """Machine code of a damaged file must not run: it would end the process."""
    path = tmp_path / "model-0.pickle"
    kept._write(path, ((), {"name": b"code"}))
    assert kept._stored(path) == ((), {"name": b"code"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + damage if damage else whole[:-1])
    with pytest.warns(UserWarning, match="compiling again"):
        assert kept._stored(path) == ((), {})


def test_programs_for_another_target_are_others(monkeypatch):
    here = kept.digest("facts")
    monkeypatch.setenv(architecture.TARGET, "sm_80")
    assert kept.digest("facts") != here


def test_the_collector_rests_within_and_goes_on_behind() -> None:
    assert gc.isenabled()
    with contextlib.suppress(ValueError), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
