"""Ctrl-C at every moment of a command: status 130 and one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllama import __version__

CHECKOUT = Path(__file__).resolve().parents[2]
# A shell that starts a job in the background has it ignore SIGINT.
BEGIN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            ctrl_c()
from jaxllama import cli
"""
RUN = """
sys.meta_path.insert(0, AtImport())
sys.argv = ["jaxllama", *WORDS]
cli.run()
"""
REPLACED = """
from jaxllama.cli import plan
def replaced(args):
    %s
plan.run = replaced
"""
# (the module at whose import it comes, what the command does instead, its words)
MOMENTS = {
    "the command line's modules": ("jaxllama.cli.main", "", ["doctor"]),
    "numpy": ("numpy", "", ["generate", "--random", "hi"]),
    "jaxlib": ("jaxlib.xla_client", "", ["generate", "--random", "hi"]),
    "at work": ("", REPLACED % "ctrl_c(); print('on')", ["plan"]),
    "twice": ("", REPLACED % "\n    try: ctrl_c()\n    finally: ctrl_c()", ["plan"]),
    "in a destructor": (
        "",
        REPLACED % "\n    class X: __del__ = lambda self: ctrl_c()\n    X()\n    print('on')",
        ["plan"],
    ),
    "as output is flushed": ("", REPLACED % "print('on'); sys.stdout.flush = ctrl_c", ["plan"]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_is_one_line_and_130(moment):
    module, replaced, words = MOMENTS[moment]
    program = f"MODULE, WORDS = {module!r}, {words!r}\n{BEGIN}{replaced}{RUN}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(CHECKOUT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n"), ended
    assert ended.stdout == ("on\n" if moment == "as output is flushed" else "")


def test_a_command_that_ends_keeps_its_status():
    for words, status in ((["--version"], 0), (["plan", "--zzz"], 2)):
        ended = subprocess.run(
            [sys.executable, "-m", "jaxllama", *words], capture_output=True, text=True, cwd=CHECKOUT
        )
        assert ended.returncode == status
        assert ended.stdout == (f"jaxllama {__version__}\n" if status == 0 else "")
