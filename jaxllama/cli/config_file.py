"""Options of ``serve`` from a TOML file: the same names, the same checks.

    expanded(argv) -> argv with the file's options in place of ``--config FILE``

Keys are the options' names without dashes in front: ``max-slots = 8``. A list gives an option that
may be repeated several times, ``true`` an option without a value. The file's options stand before
those of the command line, which therefore have the last word. ``[[model]]`` tables are models of a
server of several (``serve_models``).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

OPTION = "--config"
MODEL_TABLE = "--model-table"  # a [[model]] table as JSON; the file alone writes it


def expanded(argv: Sequence[str], check: Callable[[list[str]], object] | None = None) -> list[str]:
    """Return a command line with the options of its file.

    check: parses a command line. Raises JaxLlamaError, which names the file and the key, for an
    option that ``check`` refuses, for tables, and for other values than texts, numbers and truth
    values. Raises it for a file that is missing or no TOML too.
    """
    if not argv or argv[0] != "serve":
        return list(argv)
    command, *rest = argv
    for index, word in enumerate(rest):
        if word == "--":
            break
        if word == OPTION or word.startswith(f"{OPTION}="):
            name = word.partition("=")[2]
            end = index + 1
            if word == OPTION:
                name, end = rest[end] if end < len(rest) else "", end + 1
            if not name:
                raise JaxLlamaError(f"{OPTION}: expected a TOML file")
            if any(more == OPTION or more.startswith(f"{OPTION}=") for more in rest[end:]):
                raise JaxLlamaError(f"{OPTION}: names one file, and several are given")
            words = None if check is None else lambda words: check([command, *words])
            return [command, *_words(Path(name), words), *rest[:index], *rest[end:]]
    return list(argv)


def _words(path: Path, check: Callable[[list[str]], object] | None) -> list[str]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxLlamaError(f"{OPTION}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise JaxLlamaError(f"{OPTION}: {path}: no TOML: {error}") from None
    models = table.get("model")
    if isinstance(models, list) and all(isinstance(entry, dict) for entry in models):
        del table["model"]
        return [*words_of(table, f"{OPTION}: {path}", check), *map(_model_word, models)]
    return words_of(table, f"{OPTION}: {path}", check)


def _model_word(table: JsonObject) -> str:
    try:
        return f"{MODEL_TABLE}={json.dumps(table)}"
    except TypeError:
        raise JaxLlamaError("[[model]]: expected texts, numbers and truth values") from None


def words_of(
    table: JsonObject, where: str, check: Callable[[list[str]], object] | None = None
) -> list[str]:
    """Return a table's keys as options. Raises JaxLlamaError beginning with ``where`` and the key.

    check: raises JaxLlamaError for the words of a wrong option.
    """
    words: list[str] = []
    for key, value in table.items():
        begin = len(words)
        option = f"--{key.replace('_', '-')}"
        if option == OPTION:
            raise JaxLlamaError(f"{where}: {key}: a file names no other file")
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(option)
            elif isinstance(item, (str, int, float)) and item is not False:
                words.append(f"{option}={item}")
            elif item is not False:
                kind = "a table" if isinstance(item, dict) else type(item).__name__
                raise JaxLlamaError(f"{where}: {key}: expected a value, not {kind}")
        if check is not None:
            try:
                # A flag that is off adds no word, but there must be one.
                check([option] if value is False else words[begin:])
            except JaxLlamaError as error:
                raise JaxLlamaError(f"{where}: {key}: {error}") from None
    return words
