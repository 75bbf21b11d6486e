"""A conversation in the terminal, over ``LanguageModel`` and the checkpoint's chat template.

    converse(lm, sampling, max_new_tokens, system, options)

Lines come from stdin, answers go to stdout as they are decoded; without a terminal there is no
prompt, so that a script can pipe its lines in.  ``/reset`` begins anew, ``/exit`` or the end of the
input ends.  Every turn prefills the whole conversation: the model holds no state between calls.
An answer that would not fit the context is refused with a note, and the conversation goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.sampling import Sampling

Message = dict[str, str]


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
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            _note(f"{line.split()[0]} is not a command; there are /reset and /exit")
        elif line:
            try:
                answer = _answer(
                    lm, [*messages, user(line)], sampling, max_new_tokens, options or {}
                )
            except JaxLlamaError as error:
                _note(str(error))
                continue
            messages += [user(line), {"role": "assistant", "content": answer}]


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
    [out] = lm.generate([ids], min(max_new_tokens, room), sampling, on_text=_show, **options)
    print(flush=True)
    return out.text


def _show(_: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
