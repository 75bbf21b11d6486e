"""The ``jaxllama`` command: words to one call of the module that does the work.

    main(argv) -> exit status

Contract: results go to stdout, everything else to stderr; status 0, or 2 with one line
"error: ..." for bad input, 130 after Ctrl-C; never a traceback for what a user can cause.  A closed
pipe (``| head``) ends quietly.  ``generate`` prints the continuation alone, exactly as the model
wrote it, and a newline.  Values are checked before anything slow begins.

jax is imported by the commands, not here: ``--help`` answers at once.  The words are in
``cli_options``; each command's function names the module of its work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllama.cli_options import parser
from jaxllama.errors import JaxLlamaError

if TYPE_CHECKING:
    from jaxllama.language_model import LanguageModel
    from jaxllama.offload.policy import Policy
    from jaxllama.sampling import Sampling


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see the module docstring."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            args = parser(_COMMANDS).parse_args(argv)
            args.run(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads on: the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except JaxLlamaError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except (RuntimeError, MemoryError) as error:
        # The device's allocator has no exception type of its own.
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return _fail(f"out of memory: {error}")
        raise
    return 0


def _fail(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print("warning:", " ".join(str(message).split()), file=sys.stderr)


# From words to values


def _sampling(args: argparse.Namespace) -> Sampling:
    from jaxllama.sampling import Sampling

    if args.max_new_tokens < 1:
        raise JaxLlamaError(f"--max-new-tokens = {args.max_new_tokens}: must be at least 1")
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logit_bias=dict(_bias(entry) for entry in args.logit_bias),
        seed=args.seed,
    )
    if sampling.temperature == 0:
        for flag, used in (("--top-k", args.top_k != 0), ("--top-p", args.top_p != 1),
                           ("--min-p", args.min_p != 0)):  # fmt: skip
            if used:
                raise JaxLlamaError(f"{flag} needs --temperature above 0, which is greedy")
    return sampling


def _bias(entry: str) -> tuple[int, float]:
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise JaxLlamaError(f"--logit-bias {entry!r}: expected ID=NUMBER") from None


def _check_model(args: argparse.Namespace) -> None:
    """What is wrong with the model's options, before anything is loaded."""
    from jaxllama.quantization.scheme import parse

    if args.quantize is not None:
        try:
            parse(args.quantize)
        except JaxLlamaError as error:
            raise JaxLlamaError(str(error).replace("scheme ", "--quantize ", 1)) from None
    if not hasattr(args, "chunk"):  # a command without a cache
        return
    if args.attn_sparsity is not None and not 0 < args.attn_sparsity <= 1:
        raise JaxLlamaError(f"--attn-sparsity = {args.attn_sparsity}: must be in (0, 1]")
    if args.chunk is not None and args.chunk < 1:
        raise JaxLlamaError(f"--chunk = {args.chunk}: must be at least 1")


def _load(args: argparse.Namespace, random: bool = False) -> LanguageModel:
    import dataclasses

    from jaxllama.loading import load

    _join(args)
    lm = load(
        args.model, args.dtype, args.quantize, policy=_policy(args), mesh=args.mesh, random=random,
        progress=True,
    )  # fmt: skip
    if getattr(args, "attn_sparsity", None) is not None:
        config = lm.config.replace(attn_sparsity=args.attn_sparsity)
        lm = dataclasses.replace(lm, config=config)
    return lm


def _policy(args: argparse.Namespace) -> Policy | None:
    if getattr(args, "policy", None) is None:
        return None
    from jaxllama.offload.policy import Policy

    return Policy.parse(args.policy)


def _join(args: argparse.Namespace) -> None:
    """Meet the processes of the other hosts; only the first one prints."""
    if getattr(args, "hosts", None) is None:
        return
    if args.mesh is None:
        raise JaxLlamaError("--hosts needs --mesh: how the devices of all hosts share the work")
    from jaxllama import parallel_hosts

    if parallel_hosts.join(args.hosts) > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def _kv_dtype(args: argparse.Namespace) -> str | None:
    return "float8_e4m3fn" if args.kv_dtype == "fp8" else args.kv_dtype


def _read_text(path: Path) -> str:
    """A UTF-8 file's text; "-" is the standard input.  JaxLlamaError naming the file."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None


# Commands


def _generate(args: argparse.Namespace) -> None:
    from jaxllama import chat

    prompts = _prompts(args)
    if args.stream and args.json:
        raise JaxLlamaError("--stream and --json exclude each other")
    if args.stream and len(prompts) > 1:
        raise JaxLlamaError(f"--stream shows one prompt, and there are {len(prompts)}")
    if "" in args.stop:
        raise JaxLlamaError("--stop '': a stop string must not be empty")
    sampling = _sampling(args)
    _check_model(args)
    lm = _load(args)
    rows = [chat.ids_of(lm, [chat.user(prompt)]) for prompt in prompts] if args.chat else prompts
    with _working("generating", show=not args.stream):
        outs = lm.generate(
            rows, args.max_new_tokens, sampling, stop=args.stop, kv_dtype=_kv_dtype(args),
            on_text=_show if args.stream else None, **_chunk(args),
        )  # fmt: skip
    if args.json:
        rows = [
            {"prompt": prompt, "text": out.text, "tokens": out.tokens, "logprobs": out.logprobs,
             "finish_reason": out.finish_reason}
            for prompt, out in zip(prompts, outs, strict=True)
        ]  # fmt: skip
        _print_json({"model": args.model, "generations": rows})
    elif args.stream:
        print()
    else:
        for index, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
            if len(prompts) > 1:
                print(f"{chr(10) if index else ''}=== {json.dumps(prompt, ensure_ascii=False)}")
            print(out.text)


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.file is None:
        prompts = args.prompts
    elif args.prompts:
        raise JaxLlamaError("prompts and --file exclude each other")
    else:
        lines = _read_text(args.file).replace("\r\n", "\n").split("\n")
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise JaxLlamaError(f"{args.file}: no prompts in it")
    if not prompts:
        raise JaxLlamaError("no prompt: give one, or --file")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise JaxLlamaError(f"prompt {index} is empty")
    return prompts


def _chunk(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.chunk is None else {"chunk": args.chunk}


@contextlib.contextmanager
def _working(what: str, show: bool = True) -> Iterator[None]:
    """A sign of life on a terminal's stderr, gone when the work is done."""
    if not show or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} ..."):
        yield


def _show(_: int, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_json(value: Any) -> None:
    """NaN and infinities, which JSON has no word for, become null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [plain(entry) for entry in item]
        bad = isinstance(item, float) and (item != item or item in (float("inf"), -float("inf")))
        return None if bad else item

    print(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def _chat(args: argparse.Namespace) -> None:
    from jaxllama import chat

    sampling = _sampling(args)
    _check_model(args)
    options = {"kv_dtype": _kv_dtype(args), **_chunk(args)}
    chat.converse(_load(args), sampling, args.max_new_tokens, args.system, options)


def _serve(args: argparse.Namespace) -> None:
    from jaxllama.serving.command import ServeOptions, serve

    _check_model(args)
    engine = {"max_slots": args.slots, "max_len": args.max_len, "max_queue": args.max_queue,
              "kv_dtype": _kv_dtype(args), "prefill_chunk": args.chunk}  # fmt: skip
    options = ServeOptions(
        args.model, args.host, args.port, tuple(args.api_key), args.max_body, args.drain_timeout,
        args.state, engine,
    )  # fmt: skip
    serve(options, lambda: _load(args, random=args.random), _working)


def _bench_serve(args: argparse.Namespace) -> None:
    from jaxllama.serving import load_generator

    load = load_generator.from_words(args)
    with _working("measuring"):
        report = load_generator.run(load)
    _print_json(report) if args.json else print(load_generator.table(report))


def _bench(args: argparse.Namespace) -> None:
    from jaxllama import bench

    if args.what == "serve":
        return _bench_serve(args)
    for key in ("batch", "prompt_tokens", "new_tokens", "runs"):
        least = 2 if key == "new_tokens" else 1
        if getattr(args, key) < least:
            flag = "--" + key.replace("_", "-")
            raise JaxLlamaError(f"{flag} = {getattr(args, key)}: must be at least {least}")
    _check_model(args)
    lm = _load(args, random=args.random)
    with _working("measuring"):
        report = bench.run(
            lm, batch=args.batch, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens,
            runs=args.runs, kv_dtype=_kv_dtype(args), chunk=args.chunk, context=args.context,
            trace=args.trace,
        )  # fmt: skip
    report["model"] = args.model  # as the user calls it, not as the checkpoint does
    _print_json(report) if args.json else print(bench.table(report))


def _eval(args: argparse.Namespace) -> None:
    from jaxllama.evaluate import perplexity

    if args.window is not None and args.window < 2:
        raise JaxLlamaError(f"--window = {args.window}: must be at least 2")
    text = _read_text(args.text)
    _check_model(args)
    lm, reference = _load(args), None
    if args.reference is not None:
        from jaxllama.loading import load

        reference = load(args.reference, args.dtype, mesh=args.mesh, progress=True)
    with _working("scoring"):
        report = perplexity(
            lm, text, args.window, args.stride, reference=reference, kv_dtype=_kv_dtype(args)
        )
    if args.json:
        _print_json({"model": args.model, **report})
    else:
        print(f"perplexity {report['perplexity']:.4f} over {report['tokens']} tokens")
        if reference is not None:
            print(f"against {args.reference}: KL {report['kl']:.4f} nats, "
                  f"top-1 {100 * report['top1']:.1f}%")  # fmt: skip


def _quantize(args: argparse.Namespace) -> None:
    from jaxllama.loading import load
    from jaxllama.quantization import checkpoint

    text = None if args.calibration is None else _read_text(args.calibration)
    request = checkpoint.Request(
        args.out, args.scheme, args.method, args.format, text, args.samples, args.window,
        tuple(args.report),
    )  # fmt: skip
    lm = load(args.model, args.dtype, progress=True)
    report = checkpoint.quantize_checkpoint(lm, request, progress=True)
    _print_json({"model": args.model, **report}) if args.json else print(checkpoint.table(report))


def _experiment(args: argparse.Namespace) -> None:
    from jaxllama.experiments.command import command

    text, value = command(args.file, args.out, args.dry_run, args.compare)
    _print_json(value) if args.json else print(text, end="")


def _tokenize(args: argparse.Namespace) -> None:
    from jaxllama.training import command

    report = command.tokenize_files(args.texts, args.out, args.tokenizer)
    _print_json(report) if args.json else print(command.table(report))


def _train(args: argparse.Namespace) -> None:
    from jaxllama.training import command

    report = command.run_file(args.file, args.out, args.mesh)
    _print_json(report) if args.json else print(command.table(report))


def _plan(args: argparse.Namespace) -> None:
    from jaxllama.offload import plan

    report = plan.command(args, _policy(args), _kv_dtype(args))
    _print_json(report) if args.json else print(plan.table(report))


def _doctor(args: argparse.Namespace) -> None:
    from jaxllama import doctor

    report = doctor.examine(args.model)
    _print_json(report) if args.json else print(doctor.table(report))


_COMMANDS = {
    "generate": _generate,
    "chat": _chat,
    "serve": _serve,
    "bench": _bench,
    "quantize": _quantize,
    "eval": _eval,
    "experiment": _experiment,
    "tokenize": _tokenize,
    "train": _train,
    "plan": _plan,
    "doctor": _doctor,
}
