"""Structured logs: one JSON object a line on stderr, or a short line if that is a terminal.

``configuration(level)`` is for ``logging.config.dictConfig``; uvicorn takes it too. The keys of a
record's ``extra={"fields": {...}}`` become keys of the line. Prompts and answers are never logged.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
from collections.abc import Generator, Sequence

from jaxllama import progress
from jaxllama.typing import JsonObject


class TerminalLines(logging.Formatter):
    """Formats a record for a reader: local time, level if it is no news, event, fields."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        fields: JsonObject = getattr(record, "fields", {})
        words = [f"{key}={value}" for key, value in fields.items() if value not in (None, "")]
        event = f"{level}{record.getMessage()}"
        line = " ".join([self.formatTime(record, "%H:%M:%S"), event, *words])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Formats a record: time (UTC), level, event, the record's own fields, an exception's text."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: JsonObject = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _formatter() -> type[logging.Formatter]:
    return TerminalLines if sys.stderr.isatty() else JsonLines


@contextlib.contextmanager
def progress_lines() -> Generator[None]:
    """Write the progress of loading and compiling as lines of the log instead of a bar."""
    write, log = progress.write, _formatter()()

    def record(line: str) -> None:
        write(
            log.format(
                logging.makeLogRecord({"levelname": "INFO", "levelno": logging.INFO, "msg": line})
            )
        )

    progress.write = record
    try:
        yield
    finally:
        progress.write = write


def configuration(
    level: str = "INFO", loggers: Sequence[str] = ("jaxllama", "uvicorn")
) -> JsonObject:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": _formatter()}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        # Of libraries: a line of another form would break the log.
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            name: {"handlers": ["stderr"], "level": level, "propagate": False} for name in loggers
        },
    }
