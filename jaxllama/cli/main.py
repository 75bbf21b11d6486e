"""The ``jaxllama`` command: parse the words and call the module that does the work.

    main(argv) -> exit status

Contract: results go to stdout, everything else to stderr. The status is 0 on success and 130 after
Ctrl-C. It is 2, with one line "error: ...", for bad input or a missing extra. A user's mistake
never shows a traceback. A closed pipe (``| head``) ends quietly. ``generate`` prints only the
continuation, exactly as the model wrote it, and a newline. Values are checked before slow work
begins.

A command is a module with ``HELP``, ``options(parser)`` and ``run(args)``. jax is imported when a
command runs and not before, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from jaxllama import extras
from jaxllama.cli import (
    batch,
    bench,
    chat,
    common,
    completion,
    convert,
    doctor,
    experiment,
    generate,
    plan,
    quantize,
    serve,
    tokenize,
    train,
)
from jaxllama.cli import eval as evaluate
from jaxllama.cli.config_file import expanded
from jaxllama.cli.domains import Parser
from jaxllama.errors import JaxLlamaError

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "batch": batch,
    "bench": bench,
    "quantize": quantize,
    "convert": convert,
    "eval": evaluate,
    "experiment": experiment,
    "tokenize": tokenize,
    "train": train,
    "plan": plan,
    "doctor": doctor,
    "completion": completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; see the module docstring."""
    # A start makes some 300,000 permanent objects. Searching them for garbage would take 0.15 s.
    gc.set_threshold(common.START_OBJECTS, *gc.get_threshold()[1:])
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # for characters that its encoding lacks, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            words = sys.argv[1:] if argv is None else argv
            args = parser().parse_args(expanded(words or ["--help"]))
            args.run(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left: the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except JaxLlamaError as error:
        return _fail(str(error))
    except ImportError as error:
        if not extras.is_optional(error.name):
            raise
        return _fail(str(extras.missing(str(error.name), _command(argv))))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except (RuntimeError, MemoryError, AssertionError) as error:
        # The device's allocator has no exception type of its own.
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return _fail(f"out of memory: {error}")
        if (reason := _missing_device()) is not None:
            return _fail(reason)
        raise
    return 0


def _missing_device() -> str | None:
    """Return why jax has no device of the kind that JAX_PLATFORMS asks for; None if it has one."""
    import jax

    asked = jax.config.jax_platforms  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError, AssertionError):
        jax.devices()
        return None
    return (
        f"JAX_PLATFORMS = {asked!r}: jax finds no such device on this machine: unset it, set cpu, "
        "or install the driver and jax's package for the device"
    )


def _command(argv: Sequence[str] | None) -> str:
    words = sys.argv[1:] if argv is None else argv
    return next((word for word in words if word in COMMANDS), "jaxllama")


def _fail(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print("warning:", " ".join(str(message).split()), file=sys.stderr)


class _Version(argparse.Action):
    """Prints the version, which is looked up only when this option is given."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import jaxllama

        print(f"jaxllama {jaxllama.__version__}")
        parser.exit()


def parser() -> Parser:
    """Return the parser of all commands; wrong words raise JaxLlamaErrors naming the option."""
    top = Parser(
        prog="jaxllama",
        allow_abbrev=False,
        description="Run, serve, quantize and train language models in JAX.",
    )
    top.add_argument("--version", action=_Version)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.HELP, description=command.HELP, allow_abbrev=False
        )
        sub.set_defaults(run=command.run, top=top)
        command.options(sub)
    return top
