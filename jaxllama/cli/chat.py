"""``jaxllama chat``: a conversation in the terminal, by the checkpoint's chat template.

    converse(lm, sampling, max_new_tokens, system, options)

Lines come from stdin, and answers go to stdout as they are decoded. Without a terminal there is no
prompt, so that a script can pipe its lines in. ``/reset`` starts a new conversation. ``/exit`` or
the end of the input ends. Two slashes begin a message that starts with one slash. Ctrl-C ends an
answer, and the conversation keeps the part that was shown. Every turn prefills the whole
conversation, because the model keeps no state between calls. An answer that would not fit the
context is refused with a note, and the conversation goes on.
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
    from jaxllama.decoding.sampling import Sampling
    from jaxllama.language_model import LanguageModel

HELP = "Talk to a model: /reset begins anew, /exit ends."

Message = dict[str, str]
MESSAGES = 'a list of {"role": ..., "content": ...}'


def options(sub: Parser) -> None:
    sub.add_argument("--system", metavar="TEXT", help="the system message")
    common.chat_option(sub)
    common.mesh_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.adapter_options(sub)
    common.policy_option(sub)
    common.draft_options(sub)
    common.cache_options(sub)
    common.sampling_options(
        sub, 512, "Options left out come from generation_config.json, else decoding is greedy."
    )


def run(args: argparse.Namespace) -> None:
    if args.temperature is not None:  # otherwise the valid combinations depend on the model
        common.sampling(args)
    lm = common.load(args)
    kwargs = {
        "kv_dtype": common.kv_dtype(args),
        "adapter": common.only_adapter(lm),
        **common.chunk(args),
        **common.draft(args, lm),
    }
    sampling = common.sampling(args, lm.sampling)
    if lm.sampling is not None:
        _note(f"sampling: {sampling} (the model's own, but for what is given)")
    converse(lm, sampling, args.max_new_tokens, args.system, kwargs)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def converse(
    lm: LanguageModel,
    sampling: Sampling,
    max_new_tokens: int,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Read messages and answer them until the end. ``options`` go to ``LanguageModel.chat``."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    lm.encode_chat([*opening, user("?")])  # raises at once for a model that cannot chat
    messages = list(opening)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # some Pythons are built without readline
            import readline  # noqa: F401 # pyright: ignore[reportUnusedImport] - input() edits lines and has a history where it is
    elif isinstance(sys.stdin, io.TextIOWrapper):
        # A byte that is not UTF-8 becomes an error of its line, whatever PYTHONIOENCODING is.
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
            _note("a new conversation")
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
    size = len(lm.encode_chat(messages))
    if size >= lm.config.max_position:
        raise JaxLlamaError(
            f"the conversation has {size} tokens and the context {lm.config.max_position}: "
            "/reset begins anew"
        )
    reasons: list[str] = []
    with working("answering") as sign:
        show = shown(sign, reasons)
        try:
            lm.chat(messages, max_new_tokens, sampling, on_text=show, **options)
        except KeyboardInterrupt:
            sign.close()
            _note(" (interrupted)")
    print(flush=True)
    return "".join(reasons)


def shown(sign: Working, reasons: list[str] | None = None) -> Callable[[int, str], None]:
    """Return an ``on_text`` for ``generate``.

    It writes the text to stdout and to ``reasons``, and closes the progress sign at the first text.
    """

    def show(_: int, text: str) -> None:
        sign.close()
        if reasons is not None:
            reasons.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    return show


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
