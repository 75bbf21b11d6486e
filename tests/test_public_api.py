"""The public API is the one that ``golden/public_api.txt`` records."""

from __future__ import annotations

import difflib

from tests.golden.make_public_api import GOLDEN, public_api

HOW = (
    "The public API changed. If that is meant, add a line to CHANGELOG.md, keep removed names for "
    "a while with a DeprecationWarning, and run: python -m tests.golden.make_public_api"
)


def test_the_public_api_is_the_recorded_one():
    recorded, found = GOLDEN.read_text(encoding="utf-8"), public_api()
    names = "recorded", "found"
    lines = difflib.unified_diff(recorded.splitlines(), found.splitlines(), *names, lineterm="")
    assert recorded == found, "\n".join([HOW, *lines])
