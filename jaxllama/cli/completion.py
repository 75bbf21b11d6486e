"""``jaxllama completion``: a shell script that completes the words of ``jaxllama``."""

from __future__ import annotations

import argparse

from jaxllama import extras
from jaxllama.cli import domains
from jaxllama.cli.domains import OutFile, Parser

HELP = "Print a shell's completion script: eval it in ~/.bashrc, or ~/.zshrc."
_FILES = (domains.text_file, domains.text_input)
_FOLDERS = (domains.new_folder, domains.out_folder)


def options(sub: Parser) -> None:
    sub.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError:
        raise extras.missing("shtab", "completion") from None
    top = args.top
    _mark_paths(top, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(top, args.shell))


def _mark_paths(parser: argparse.ArgumentParser, file: object, folder: object) -> None:
    """Mark the options and words that are paths for shtab, by their domains."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            for sub in action.choices.values():
                _mark_paths(sub, file, folder)
        elif action.type in _FOLDERS:
            action.complete = folder  # type: ignore[attr-defined]
        elif action.type in _FILES or isinstance(action.type, OutFile) or action.dest == "model":
            action.complete = file  # type: ignore[attr-defined]
