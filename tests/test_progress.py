"""Signs of life: lines where stderr is a file, one live display where it is a terminal."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest

import jaxllama
import pallas_kernels
from jaxllama import progress
from jaxllama.progress import working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_that_takes_long_says_so_while_it_is_in_one_call(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 0.01)
    with working("reading", 3_000_000) as bar:
        bar(1_000_000)
        bar.note("layer 3")
        time.sleep(0.5)  # as in a compilation: nobody reports
    assert capsys.readouterr().err == "reading: 1 of 3 MB, 0 s: layer 3\n"
    with working("training", 20, unit="steps", done=4):
        time.sleep(0.5)
    assert capsys.readouterr().err == "training: 4 of 20 steps, 0 s\n"


def test_short_or_unwatched_work_leaves_nothing(monkeypatch, capsys):
    with working("reading", 3):
        pass
    monkeypatch.setattr(progress, "QUIET", 0.01)
    with working("reading", show=False) as bar:
        bar.say("a line")
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_outer_and_inner_work_and_keeps_what_is_said(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with working("measuring") as outer, working("reading", 10) as inner:
        inner(5)
        outer.say("decode  [12] tokens/s")
        inner.close()  # before its end, as when text begins to appear
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "decode  [12] tokens/s" in text and "measuring" in text and "reading" in text
    assert progress._display is None


@pytest.mark.parametrize("package", [jaxllama, pallas_kernels])
def test_the_packages_say_that_they_are_typed(package):
    assert (Path(package.__file__).parent / "py.typed").read_bytes() == b""
