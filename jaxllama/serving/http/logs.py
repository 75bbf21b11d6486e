"""Structured logs: one JSON object a line on stderr.

``configuration(level)`` is for ``logging.config.dictConfig`` (uvicorn takes it too).  A record's
``extra={"fields": {...}}`` become keys.  Prompts and answers are never logged.
"""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any


class JsonLines(logging.Formatter):
    """time (UTC), level, event, what the record brought, and an exception's text."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configuration(level: str = "INFO") -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": level, "propagate": False}
            for name in ("jaxllama", "uvicorn")
        },
    }
