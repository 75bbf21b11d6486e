"""Answers and streams of all APIs are those of ``golden/transcripts.txt``, to the byte."""

from __future__ import annotations

import difflib

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")
pytest.importorskip("python_multipart")

from tests.golden import make_transcripts


@pytest.mark.core
def test_all_apis_answer_to_the_byte_as_recorded():
    want = make_transcripts.FILE.read_text(encoding="utf-8")
    got = make_transcripts.transcripts()
    changed = difflib.unified_diff(want.splitlines(), got.splitlines(), "golden", "now", n=1)
    assert got == want, "\n".join(changed) + "\npython -m tests.golden.make_transcripts writes it"
