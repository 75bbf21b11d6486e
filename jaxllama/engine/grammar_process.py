"""Grammars are compiled under limits: in child processes, which the system ends at a limit.

    compiled(kind, source, vocabulary) -> Compiled       raises JaxLlamaError, so do both
    enforceable(schemas) -> (schema, notes) of each      as in ``best_effort``

The library has limits of its own, but they do not bound every grammar. For the schema ``{"type":
"integer", "multipleOf": 99999989}`` it builds as many states as the number says. A child process
therefore compiles every grammar before the engine does, and makes its first mask. A child may take
``CPU_SECONDS`` for a grammar and ``MEMORY`` bytes beside its vocabulary. A child that reached a
limit is dead, and the next grammar starts another one. Up to ``PROCESSES`` grammars compile at a
time, and children stay for further grammars.

The child imports this module, ``best_effort`` and the library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jaxllama.engine import best_effort
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

CPU_SECONDS = 4  # for one grammar; a schema of 9,000 properties takes one second
MEMORY = 128 * 2**20  # bytes for one grammar; a schema of 9,000 properties takes 90 MiB
PROCESSES = 4
# Bytes of a grammar after which a child is replaced: the memory that it reuses is not measured.
SCHEMA = "failed to compile JSON schema: "  # in the library's message
LARGE = 8 * 2**20
# A schema without what the library lacks, and notes of that.
Enforceable: TypeAlias = tuple[JsonObject, tuple[str, ...]]


class Vocabulary(NamedTuple):
    """A tokenizer as the library needs it. tokens: the bytes of each id. special: ids without text.

    eos: the stop tokens, at least one.
    """

    tokens: list[bytes]
    special: list[int]
    eos: list[int]
    bos: int | None


class Compiled(NamedTuple):
    """A grammar that has been compiled within the limits.

    source: the grammar in the library's own format. size: bytes of memory that it took.
    """

    source: str
    size: int


def compiled(kind: str, source: str, vocabulary: Vocabulary) -> Compiled:
    """Return a grammar in the library's format. Raises JaxLlamaError if it is wrong or too large.

    kind, source: as in ``request.Grammar``.
    """
    return _asked(kind, vocabulary, _compile, kind, source)


def enforceable(schemas: Sequence[JsonObject]) -> list[Enforceable]:
    """Return ``best_effort.enforceable`` of each schema.

    Raises JaxLlamaError if all of them together take more than one grammar may.
    """
    return _asked("json_schema", None, _enforceable, schemas) if schemas else []


# In the parent


class _Child:
    """A child process, and the parent's side of it."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what an allocation writes that fails
            start_new_session=True,  # Ctrl-C goes to the parent only
        )

    def ask(self, vocabulary: Vocabulary | None, job: Callable[..., Any], *arguments: Any) -> Any:
        """Return the job's result. Raises EOFError or OSError if the child is dead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        news = None if vocabulary is self._vocabulary else vocabulary
        limits = CPU_SECONDS, MEMORY
        pickle.dump((news, limits, job.__name__, arguments), self._process.stdin)
        self._process.stdin.flush()
        self._vocabulary = vocabulary or self._vocabulary
        return pickle.load(self._process.stdout)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def died(self) -> int:
        """Return the status of a child that has closed its pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return self.end()

    def end(self) -> int:
        """End the child, and return its status."""
        self._process.kill()
        with contextlib.suppress(OSError):  # a pipe to a dead child
            self._process.communicate()
        return self._process.wait()


_idle: list[_Child] = []
_turns = threading.BoundedSemaphore(PROCESSES)


def _asked(kind: str, vocabulary: Vocabulary | None, job: Callable[..., Any], *arguments: Any):
    with _turns:
        child = _idle.pop() if _idle else _Child()
        if not child.is_alive:
            child.end()
            child = _Child()
        try:
            result, size = child.ask(vocabulary, job, *arguments)
        except (EOFError, OSError, pickle.UnpicklingError):
            limit = f"{MEMORY // 2**20} MiB of memory"
            if child.died() == -signal.SIGXCPU:
                limit = f"{CPU_SECONDS} s of computing"
            raise JaxLlamaError(
                f"{kind}: compiling it takes more than {limit}: send a simpler one"
            ) from None
        except BaseException:
            child.end()
            raise
        if size > LARGE:
            child.end()
        else:
            _idle.append(child)
    if isinstance(result, JaxLlamaError):
        _, is_schema, reason = str(result).partition(SCHEMA)
        raise JaxLlamaError(f"json_schema: {reason}" if is_schema else f"{kind}: {result}")
    return result


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().end()


# In the child


def main() -> None:
    """Run the jobs of the parent until it closes the pipe."""
    jobs = {job.__name__: job for job in (_compile, _enforceable)}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read, write = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = None
    with contextlib.suppress(EOFError):
        while True:
            vocabulary, limits, name, arguments = pickle.load(read)
            if vocabulary is not None:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
                tokenizer = library_tokenizer(vocabulary, lambda text: list(text.encode()))
            _limit(*limits)
            before = _memory()[1]
            try:
                result = jobs[name](tokenizer, *arguments)
            except MemoryError:
                raise  # the parent names the limit, as where the library cannot allocate
            except Exception as error:
                result = JaxLlamaError(one_line(error))
            pickle.dump((result, max(_memory()[1] - before, 0)), write)
            write.flush()


def _limit(seconds: int, memory: int) -> None:
    """Let this process compute and grow so much more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, -1))
    if size := _memory()[0]:
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, -1))


def _memory() -> tuple[int, int]:
    """Return the bytes of this process's address space and of its memory; zeros outside Linux."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def library_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> Any:
    """Return a vocabulary as the library's tokenizer."""
    import llguidance

    class Wrapped:
        eos_token_id, bos_token_id = vocabulary.eos[0], vocabulary.bos
        tokens, special_token_ids = vocabulary.tokens, vocabulary.special

        def __call__(self, text: str | bytes) -> list[int]:
            return encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Wrapped()),
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.eos,
    )


def _compile(tokenizer: Any, kind: str, source: str) -> Compiled:
    from llguidance import LLMatcher

    before = _memory()[1]
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(source)
    elif kind == "lark":
        grammar = _lark(source)
    else:
        # Only one spelling of white space is allowed: a weak model would go on writing blanks.
        grammar = LLMatcher.grammar_from_json_schema(
            source, defaults={"whitespace_flexible": False}
        )
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        # The library prints the grammar around a schema, which may be the server's own.
        raise ValueError(error.partition("\n")[0] if SCHEMA in error else error)
    return Compiled(grammar, max(_memory()[1] - before, 0))


def _lark(source: str) -> str:
    """Return the grammar in the library's format. GBNF is accepted too."""
    from llguidance.gbnf_to_lark import any_to_lark

    several = {"grammars": [{"lark_grammar": source}]}
    if source.startswith('{"grammars"'):
        several = json.loads(source)
    for grammar in several["grammars"]:
        if "lark_grammar" in grammar:
            grammar["lark_grammar"] = any_to_lark(grammar["lark_grammar"])
    return json.dumps(several)


def _enforceable(_: Any, schemas: Sequence[JsonObject]) -> list[Enforceable]:
    return [best_effort.enforceable(schema) for schema in schemas]


def one_line(error: object) -> str:
    """Return an error without the dump of the library's state, which holds the written text."""
    return " ".join(str(error).partition("<state>")[0].split())[:300]
