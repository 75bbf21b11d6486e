"""``python -m tests.slow_lane`` says what became of every test, also where a process crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import os
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("n", range(5))
def test_one(n):
    if n == 1:
        os.abort()
    if n == 2:
        pytest.skip("no reason")
    assert n != 3, "three"
"""


def test_a_crash_costs_one_test(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.slow_lane", "--each", "9", "--out", "out", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    report = json.loads((tmp_path / "out").read_text())
    kinds = [report["tests"][f"tests/test_it.py::test_one[{n}]"]["outcome"] for n in range(5)]
    assert kinds == ["passed", "crashed", "skipped", "failed", "passed"]
    assert report["count"] == {**dict.fromkeys(kinds, 1), "passed": 2, "not run": 0}
    assert "three" in report["tests"]["tests/test_it.py::test_one[3]"]["text"]
    assert done.returncode == 1 and report["left"] == []
