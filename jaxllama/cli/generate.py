"""``jaxllama generate``: print the model's continuation of prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxllama.cli import chat, common, constrained
from jaxllama.cli.domains import Parser, add_list, add_value, filled, text_input
from jaxllama.config import preset_names
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import Working, working

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from jaxllama.language_model import LanguageModel

LONG = 8192  # number of prompt tokens from which the size of the cache is reported
Prompt = str | list[chat.Message]

HELP = "Continue one or many prompts."


def options(sub: Parser) -> None:
    sub.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    add_value(sub, "--file", text_input, "TXT", "prompts, one per line; - is the standard input")
    sub.add_argument(
        "--split",
        choices=("lines", "jsonl", "none"),
        help='form of --file: a prompt a line; a JSON object a line, {"prompt": TEXT} or '
        '{"messages": [...]}, and so with --json the answers; none: the file '
        "is one prompt, without its last newline (default: lines, of .jsonl "
        "files jsonl)",
    )
    sub.add_argument("--stream", action="store_true", help="print text as it is decoded")
    sub.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, in the model's template",
    )
    common.chat_option(sub)
    add_list(sub, "--stop", filled, "TEXT", "end before this text; may be given again")
    constrained.options(sub)
    common.hosts_options(sub)
    common.json_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.adapter_options(sub)
    common.policy_option(sub)
    common.draft_options(sub)
    common.cache_options(sub)
    common.sampling_options(sub, 64, "Greedy, unless --temperature says otherwise.")


def run(args: argparse.Namespace) -> None:
    prompts = _prompts(args)
    if args.stream and args.json:
        raise JaxLlamaError("--stream and --json exclude each other")
    if args.stream and len(prompts) > 1:
        raise JaxLlamaError(f"--stream shows one prompt, and there are {len(prompts)}")
    if args.parse_special and not (args.chat or any(isinstance(p, list) for p in prompts)):
        raise JaxLlamaError("--parse-special needs --chat or messages: plain prompts parse them")
    sampling = common.sampling(args)
    form = constrained.grammar(args)
    lm = common.load(args)
    # settings from a model's file may surprise
    defaults = None if args.model in preset_names() else lm.sampling
    if defaults is not None and defaults.temperature > 0 and args.temperature is None:
        print(f"sampling: greedy; chat and serve take the model's own: {defaults}", file=sys.stderr)
    rows = [_row(lm, prompt, args.chat) for prompt in prompts]
    draft = common.draft(args, lm)
    with working("generating") as sign:
        if form is not None:
            cache = {"kv_dtype": common.kv_dtype(args), "prefill_chunk": args.chunk}
            outs = constrained.generate(
                lm,
                rows,
                form,
                args.max_new_tokens,
                sampling,
                args.stop,
                common.only_adapter(lm),
                {name: value for name, value in cache.items() if value is not None},
            )
        else:
            outs = lm.generate(
                rows,
                args.max_new_tokens,
                sampling,
                stop=args.stop,
                kv_dtype=common.kv_dtype(args),
                on_text=chat.shown(sign) if args.stream else None,
                on_prompt=_reading(sign, lm, len(rows), common.kv_dtype(args)),
                adapter=common.only_adapter(lm),
                **common.chunk(args),
                **draft,
            )
    if args.json:
        answers = [
            {
                "prompt" if isinstance(prompt, str) else "messages": prompt,
                "text": out.text,
                "tokens": out.tokens,
                "logprobs": out.logprobs,
                "finish_reason": out.finish_reason,
                **({"drafted": out.drafted, "accepted": out.accepted} if draft else {}),
            }
            for prompt, out in zip(prompts, outs, strict=True)
        ]
        if _split(args) == "jsonl":
            for answer in answers:
                common.print_json(answer)
        else:
            common.print_json({"model": args.model, "generations": answers})
    elif args.stream:
        print()
    else:
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
            if len(prompts) > 1:
                print(f"{chr(10) if index else ''}=== {json.dumps(prompt, ensure_ascii=False)}")
            print(out.text)


def _reading(
    sign: Working, lm: LanguageModel, rows: int, kv_dtype: DTypeLike | None
) -> Callable[[int, int], None]:
    """Return ``on_prompt`` for ``LanguageModel.generate``.

    It shows the progress through long prompts, and once the size of their cache.
    """
    begun: list[tuple[float, int]] = []

    def on_prompt(done: int, total: int) -> None:
        now = time.monotonic()
        text = f"{done:,} of {total:,} prompt tokens"
        if not begun and kv_dtype is None and total >= LONG:
            sign.say(_cache_hint(lm, rows, total))
        elif begun:
            # The first piece is left out of the rate, because it includes compilation.
            first, at_first = begun[0]
            rate = (done - at_first) / max(now - first, 1e-9)
            text += f", {rate:,.0f} tokens/s, {(total - done) / rate:.0f} s left"
        begun.append((now, done))
        sign.note(text if done < total else "")

    return on_prompt


def _cache_hint(lm: LanguageModel, rows: int, total: int) -> str:
    """Return a line with the bytes of the prompts' cache, in the model's dtype and in int8."""
    import functools

    import jax

    from jaxllama.model.cache import init_cache
    from pallas_kernels.operands import size_text

    stored, small = (
        size_text(jax.eval_shape(functools.partial(init_cache, lm.config, rows, total, dtype)))
        for dtype in (lm.dtype, "int8")
    )
    return f"the cache of {total:,} tokens takes {stored}; --kv-dtype int8 makes that {small}"


def _row(lm: LanguageModel, prompt: Prompt, as_chat: bool) -> str | list[int]:
    """Return a prompt in the form that ``LanguageModel.generate`` takes."""
    if isinstance(prompt, str) and not as_chat:
        return prompt
    return lm.encode_chat([chat.user(prompt)] if isinstance(prompt, str) else prompt)


def _split(args: argparse.Namespace) -> str | None:
    """Return how --file is split; None without --file."""
    if args.file is None:
        return None
    return args.split or ("jsonl" if args.file.suffix == ".jsonl" else "lines")


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts: list[Prompt]
    if args.file is None:
        if args.split is not None:
            raise JaxLlamaError("--split needs --file, which it splits")
        prompts = args.prompts
    elif args.prompts:
        raise JaxLlamaError("prompts and --file exclude each other")
    else:
        text = common.read_text(args.file).replace("\r\n", "\n")
        lines = [text.removesuffix("\n")] if _split(args) == "none" else text.split("\n")
        if _split(args) == "jsonl":
            prompts = [
                _request(line, f"{args.file}: line {number}")
                for number, line in enumerate(lines, start=1)
                if line.strip()
            ]
        else:
            prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise JaxLlamaError(f"{args.file}: no prompts in it")
    if not prompts:
        raise JaxLlamaError("no prompt: give one, or --file")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise JaxLlamaError(f"prompt {index} is empty")
    return prompts


def _request(line: str, where: str) -> Prompt:
    """Return the prompt of one line of JSON. Raises JaxLlamaError that begins with ``where``."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise JaxLlamaError(f"{where}: not JSON: {error}") from None
    if not isinstance(request, dict) or len(request.keys() & {"prompt", "messages"}) != 1:
        raise JaxLlamaError(f'{where}: expected an object with "prompt" or "messages"')
    for key, value in request.items():
        if key not in ("prompt", "messages"):
            raise JaxLlamaError(f"{where}: {key!r} is not prompt or messages")
        kind, what = (str, "text") if key == "prompt" else (list, chat.MESSAGES)
        is_right = isinstance(value, kind) and len(value) > 0
        if not is_right or (kind is list and not all(map(chat.is_message, value))):
            raise JaxLlamaError(f"{where}: {key}: expected {what}")
    return request.get("prompt") or request["messages"]
