"""Domains: the valid values of a word of the command line. Nothing here needs jax.

    Parser                      argparse's parser, whose errors are JaxLlamaErrors
    Number, OutFile, filled...  domains, used as an option's ``type``
    add_value, add_list         options with a value, with a list of values

Contract: an option's ``type`` (or ``choices``) is its domain. An invalid word is refused here,
while the words are read. Only checks that depend on other options, the model or the machine are
left to the command. tests/cli/test_options.py checks this for every parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from jaxllama import extras
from jaxllama.errors import JaxLlamaError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser that raises JaxLlamaError where argparse would print its usage and exit."""

    _words: Sequence[str] = ()
    inner: str | None = None  # name under which the word of an inner command is stored

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it is overloaded
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Also refuse options before the inner command's word, where they have no effect."""
        args = self._words = sys.argv[1:] if args is None else list(args)
        parsed, rest = super().parse_known_args(args, namespace)
        word = None if self.inner is None else getattr(parsed, self.inner)
        if word is not None and args[0] != word:
            self.error(f"{args[0]} has no effect before {word}, which takes its own options")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        # A domain's text follows the option's name: "= 3: why", "'x' is not ..." or ": why".
        message = re.sub(r"^argument (\S+):(?: (?=:)|(?= [='\"]))", r"\1", message)
        raise JaxLlamaError(f"{message}{self._meant(message)} (see {self.prog} --help)")

    def _meant(self, message: str) -> str:
        """Return the word nearest to an unknown option, command or value."""
        option = re.match(r"unrecognized arguments: (?:.* )?(--?[\w-]+)", message)
        value = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if option is not None:
            unknown, known = option[1], self._options()
        elif value is not None:
            unknown, known = value[1], re.findall(r"[\w.+-]+", value[2])
        else:
            return ""
        near = difflib.get_close_matches(unknown, known, n=1)
        return f"; did you mean {near[0]}?" if near else ""

    def _options(self) -> list[str]:
        """Return the options of the command that the words name."""
        parser: argparse.ArgumentParser = self
        for word in self._words:
            inner = [
                action
                for action in parser._actions
                if isinstance(action, argparse._SubParsersAction)  # pyright: ignore[reportPrivateUsage]
            ]
            parser = next((a.choices[word] for a in inner if word in a.choices), parser)
        return [
            text
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            for text in action.option_strings
        ]


class OptionGroup(Protocol):
    """A parser, or a group of its options."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def add_value(
    group: OptionGroup,
    name: str,
    read: Callable[[str], object],
    unit: str,
    help: str,
    default: object = None,
) -> None:
    """Add an option with a value that ``read`` reads. The help shows a default."""
    shown = "" if default is None else " (default %(default)s)"
    group.add_argument(name, type=read, metavar=unit, help=help + shown, default=default)


def add_list(
    group: OptionGroup, name: str, read: Callable[[str], object], unit: str, help: str
) -> None:
    """Add an option that may be given several times; its value is a list."""
    group.add_argument(name, type=read, metavar=unit, help=help, action="append", default=[])


class Bad(argparse.ArgumentTypeError):
    """The text after the option's name, as ``Parser.error`` joins them."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number from ``least`` to ``most``, never NaN. above: ``least`` itself is excluded."""

    kind: type = int
    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    def __call__(self, text: str) -> Any:
        try:
            value = self.kind(text)
        except ValueError:
            what = "whole number" if self.kind is int else "number"
            raise Bad(f"{text!r} is not a {what}") from None
        low = self.least < value if self.above else self.least <= value
        if not (low and value <= self.most):
            start = f"{'above' if self.above else 'at least'} {self.least}"
            end = "" if self.most == math.inf else f" and at most {self.most}"
            raise Bad(f"= {value}: must be {start}{end}")
        return value


COUNT = Number(least=1)
SEED = Number(least=-(2**63), most=2**64 - 1)
SHARE = Number(float, 0, 1, above=True)
POSITIVE = Number(float, 0, above=True)


def refusing(check: Callable[[str], T]) -> Callable[[str], T]:
    """Turn JaxLlamaErrors of ``check`` into argparse's, without the word that they begin with."""

    @functools.wraps(check)
    def read(text: str) -> T:
        try:
            return check(text)
        except JaxLlamaError as error:
            raise Bad(re.sub("^(scheme|mesh|hosts|policy) ?", "", str(error))) from None

    return read


def pair(text: str, key: Callable[[str], T], value: Number, form: str) -> tuple[T, Any]:
    name, equals, number = text.partition("=")
    try:
        if equals:
            return key(name), value(number)
    except Bad:
        pass
    raise Bad(f"{text!r}: expected {form}")


def filled(text: str) -> str:
    if not text:
        raise Bad("'': must not be empty")
    return text


def api_key(text: str) -> str:
    if not (text and text.isascii() and text.isprintable() and text.strip() == text):
        raise Bad(": must be printable ASCII without spaces around it, and not empty")
    return text


def text_file(text: str) -> Path:
    """Return the path of a readable file. A pipe is not opened here."""
    path = Path(text)
    try:
        path.stat()
        reason = "Is a directory" if path.is_dir() else "Permission denied"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if not path.is_dir() and os.access(path, os.R_OK):
            return path
    raise Bad(f"= {text}: {reason}")


def text_input(text: str) -> Path:
    """Return the path of a readable file, or "-" for the standard input."""
    return Path(text) if text == "-" else text_file(text)


def texts_folder(text: str) -> Path:
    """Return the path of a folder with .txt files."""
    path = Path(text)
    if not path.is_dir():
        raise Bad(f"= {text}: not a folder")
    if not any(path.glob("*.txt")):
        raise Bad(f"= {text}: no .txt file in it")
    return path


def json_table(text: str) -> dict[str, Any]:
    """Return an object of JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Bad(": expected an object of JSON")
    return value


def state_folder(text: str) -> Path:
    """Return the path of a folder that is there."""
    if not Path(text).is_dir():
        raise Bad(f"= {text}: no such folder")
    return Path(text)


def out_folder(text: str) -> Path:
    """Return the path of a folder that exists or can be made."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise Bad(f"= {text}: not a folder")
    return _writable(path)


def new_folder(text: str) -> Path:
    """Return the path of a folder that does not exist yet or is empty."""
    path = Path(text)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Bad(f"= {text}: already exists; nothing is overwritten")
    return out_folder(text)


@dataclasses.dataclass(frozen=True)
class OutFile:
    """A file to write, with one of these suffixes."""

    suffixes: tuple[str, ...]

    def __call__(self, text: str) -> Path:
        path = Path(text)
        if path.suffix not in self.suffixes or path.is_dir():
            raise Bad(f"= {text}: not a {' or '.join(self.suffixes)} file")
        if not path.absolute().parent.is_dir():
            raise Bad(f"= {text}: no such folder")
        if (
            path.suffix not in (".json", ".jsonl")
            and importlib.util.find_spec("matplotlib") is None
        ):
            raise Bad(f"= {text}: {extras.missing('matplotlib', 'a picture')}")
        return _writable(path)


def _writable(path: Path) -> Path:
    """Return ``path`` if it, or its nearest existing parent folder, can be written to."""
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if there != path and not there.is_dir():
        raise Bad(f"= {path}: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise Bad(f"= {path}: {there}: Permission denied")
    return path
