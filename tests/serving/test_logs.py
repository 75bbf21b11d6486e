"""Logs: JSON for programs, short lines for a terminal."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import sys

import pytest

from jaxllama import progress
from jaxllama.serving import logs


def record() -> logging.LogRecord:
    news = {"msg": "a front end has ended", "levelno": logging.ERROR, "levelname": "ERROR"}
    return logging.makeLogRecord({**news, "fields": {"status": 9, "key": None, "id": "a"}})


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_short_lines_and_a_file_json(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    formatter = logs.configuration()["formatters"]["lines"]["()"]()
    line = formatter.format(record())
    with logs.progress_lines():
        progress.write("loading")
    written = capsys.readouterr().err.strip()
    if is_terminal:
        assert re.fullmatch(r"\d\d:\d\d:\d\d error: a front end has ended status=9 id=a", line)
        assert re.fullmatch(r"\d\d:\d\d:\d\d loading", written)
    else:
        entry = json.loads(line)
        assert (entry["event"], entry["level"], entry["status"]) == (
            "a front end has ended",
            "error",
            9,
        )
        assert entry["key"] is None and json.loads(written)["event"] == "loading"
