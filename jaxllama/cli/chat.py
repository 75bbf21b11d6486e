"""``jaxllama chat``: a conversation in the terminal, by the checkpoint's chat template.

    converse(lm, sampling, max_new_tokens, system, options)

Lines come from stdin, answers go to stdout as they are decoded; without a terminal there is no
prompt, so that a script can pipe its lines in.  ``/reset`` begins anew, ``/exit`` or the end of the
input ends; a line that is to begin with a slash may begin with two.  Ctrl-C ends an answer, which
stays in the conversation as far as it came.  Every turn prefills the whole conversation: the model
holds no state between calls.  An answer that would not fit the context is refused with a note, and
the conversation goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxllama.cli import common
from jaxllama.cli.domains import Parser
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import Working, working

if TYPE_CHECKING:
    from jaxllama.language_model import LanguageModel
    from jaxllama.sampling import Sampling

HELP = "Talk to a model: /reset begins anew, /exit ends."

Message = dict[str, str]


def options(sub: Parser) -> None:
    sub.add_argument("--system", metavar="TEXT", help="the system message")
    common.mesh_option(sub)
    common.model_options(sub)
    common.policy_option(sub)
    common.cache_options(sub)
    common.sampling_options(sub, max_new_tokens=512)


def run(args: argparse.Namespace) -> None:
    sampling = common.sampling(args)
    kwargs = {"kv_dtype": common.kv_dtype(args), **common.chunk(args)}
    converse(common.load(args), sampling, args.max_new_tokens, args.system, kwargs)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ids_of(lm: LanguageModel, messages: list[Message]) -> list[int]:
    """The prompt for ``messages`` as token ids; the template writes the special tokens.

    Raises JaxLlamaError without a tokenizer or a template.
    """
    if lm.tokenizer is None:
        raise JaxLlamaError(f"{lm.config.name} has no tokenizer, so it cannot chat")
    return lm.tokenizer.encode(lm.tokenizer.apply_chat_template(messages), add_special=False)


def converse(
    lm: LanguageModel,
    sampling: Sampling,
    max_new_tokens: int,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Read, answer, repeat.  ``options`` go to ``LanguageModel.generate``."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    ids_of(lm, [*opening, user("?")])  # a model that cannot chat says so at once
    messages = list(opening)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # some Pythons are built without
            import readline  # noqa: F401 - input() edits lines and has a history where it is
    elif isinstance(sys.stdin, io.TextIOWrapper):
        # A byte that is no text is then its line's fault, whatever PYTHONIOENCODING says.
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
        elif re.fullmatch("/[a-z]*", line):
            _note(f"{line} is not a command; there are /reset and /exit, and /{line} says {line}")
        elif line:
            asked = user(line[1:] if line.startswith("//") else line)
            try:
                answer = _answer(lm, [*messages, asked], sampling, max_new_tokens, options or {})
            except JaxLlamaError as error:
                _note(str(error))
                continue
            messages += [asked, {"role": "assistant", "content": answer}]


def _answer(
    lm: LanguageModel,
    messages: list[Message],
    sampling: Sampling,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> str:
    ids = ids_of(lm, messages)
    room = lm.config.max_position - len(ids)
    if room < 1:
        raise JaxLlamaError(
            f"the conversation has {len(ids)} tokens and the context {lm.config.max_position}: "
            "/reset begins anew"
        )
    told: list[str] = []
    with working("answering") as sign:
        show = shown(sign, told)
        try:
            lm.generate([ids], min(max_new_tokens, room), sampling, on_text=show, **options)
        except KeyboardInterrupt:
            sign.close()
            _note(" (interrupted)")
    print(flush=True)
    return "".join(told)


def shown(sign: Working, told: list[str] | None = None) -> Callable[[int, str], None]:
    """``on_text`` for ``generate``: text to stdout (and to ``told``), from which on no other sign
    of life is needed."""

    def show(_: int, text: str) -> None:
        sign.close()
        if told is not None:
            told.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    return show


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
