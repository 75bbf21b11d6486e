"""The ``jaxllama`` command: words to one call of the module that does the work.

    main(argv) -> exit status

Contract: results go to stdout, everything else to stderr; status 0, or 2 with one line
"error: ..." for bad input, 130 after Ctrl-C; never a traceback for what a user can cause.  A closed
pipe (``| head``) ends quietly.  ``generate`` prints the continuation alone, exactly as the model
wrote it, and a newline.  Values are checked before anything slow begins.

jax is imported by the commands, not here: ``--help`` answers at once.  The words are in
``cli.options``; each command's function names the module of its work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllama.cli.options import parser
from jaxllama.errors import JaxLlamaError
from jaxllama.progress import working

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllama.language_model import LanguageModel
    from jaxllama.offload.policy import Policy
    from jaxllama.sampling import Sampling


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; see the module docstring."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a character it lacks, as on stderr
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

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        logit_bias=dict(args.logit_bias),
        seed=args.seed or 0,
    )
    if sampling.temperature == 0:
        for flag, used in (("--top-k", args.top_k != 0), ("--top-p", args.top_p != 1),
                           ("--min-p", args.min_p != 0),
                           ("--seed", args.seed is not None)):  # fmt: skip
            if used:
                raise JaxLlamaError(f"{flag} needs --temperature above 0, which is greedy")
    return sampling


def _load(args: argparse.Namespace, random: bool = False) -> LanguageModel:
    import dataclasses

    from jaxllama.loading import load

    policy, sparsity = _policy(args), getattr(args, "attn_sparsity", None)
    adapters = _adapters(args)
    _join(args)
    lm = load(
        args.model, args.dtype, args.quantize, policy=policy, mesh=_mesh(args), random=random,
        progress=True, **adapters,
    )  # fmt: skip
    if "attention" not in lm.config.layer_types:
        for flag in ("kv_dtype", "attn_sparsity"):
            if getattr(args, flag, None) is not None:
                name = "--" + flag.replace("_", "-")
                raise JaxLlamaError(f"{name}: {lm.config.name} has no layer with keys and values")
    if sparsity is not None:
        lm = dataclasses.replace(lm, config=lm.config.replace(attn_sparsity=sparsity))
    return lm


def _adapters(args: argparse.Namespace) -> dict[str, Any]:
    """--adapter and --merge, as ``load`` takes them."""
    given = getattr(args, "adapter", [])
    if not given:
        if getattr(args, "merge", False):
            raise JaxLlamaError("--merge needs --adapter: what is put into the weights")
        return {}
    names = [name for name, _ in given]
    if len(set(names)) < len(names):
        raise JaxLlamaError(f"--adapter: a name is given twice: {', '.join(names)}")
    if len(given) > 1 and (args.merge or args.run is not _serve):
        raise JaxLlamaError(f"--adapter: one here, and {len(given)} are given: {', '.join(names)}")
    return {"adapters": dict(given), "merge": args.merge}


def _policy(args: argparse.Namespace) -> Policy | None:
    """--policy, with what other options say of it."""
    policy = getattr(args, "policy", None)
    if policy is None:
        return None
    if getattr(args, "mesh", None) is not None:
        raise JaxLlamaError("--policy and --mesh exclude each other: one device offloads")
    from jaxllama.offload.model import kv_dtype_of

    policy = _also(policy, args)
    kv_dtype_of(policy, _kv_dtype(args), None)
    return policy


def _also(policy: Policy, args: argparse.Namespace) -> Policy:
    if not hasattr(args, "chunk"):  # a command without a cache
        return policy
    return policy.also(attn_sparsity=args.attn_sparsity, prefill_batch_size=args.chunk)


def _mesh(args: argparse.Namespace) -> Mesh | None:
    """The devices of --mesh, all of which are there."""
    if args.mesh is None:
        return None
    from jaxllama.parallel.mesh import make_mesh

    try:
        return make_mesh(args.mesh)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"--{error}") from None


def _join(args: argparse.Namespace) -> None:
    """Meet the processes of the other hosts; only the first one prints."""
    if getattr(args, "hosts", None) is None:
        return
    if args.mesh is None:
        raise JaxLlamaError("--hosts needs --mesh: how the devices of all hosts share the work")
    from jaxllama.parallel import hosts as parallel_hosts

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
    from jaxllama.cli import chat

    prompts = _prompts(args)
    if args.stream and args.json:
        raise JaxLlamaError("--stream and --json exclude each other")
    if args.stream and len(prompts) > 1:
        raise JaxLlamaError(f"--stream shows one prompt, and there are {len(prompts)}")
    sampling = _sampling(args)
    lm = _load(args)
    rows = [chat.ids_of(lm, [chat.user(prompt)]) for prompt in prompts] if args.chat else prompts
    with working("generating") as sign:
        outs = lm.generate(
            rows, args.max_new_tokens, sampling, stop=args.stop, kv_dtype=_kv_dtype(args),
            on_text=chat.shown(sign) if args.stream else None, adapter=_only(lm), **_chunk(args),
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


def _only(lm: LanguageModel) -> str | None:
    """The adapter beside the weights, if there is one."""
    return next(iter(lm.adapters), None)


def _chunk(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.chunk is None else {"chunk": args.chunk}


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
    from jaxllama.cli import chat

    sampling = _sampling(args)
    lm = _load(args)
    options = {"kv_dtype": _kv_dtype(args), "adapter": _only(lm), **_chunk(args)}
    chat.converse(lm, sampling, args.max_new_tokens, args.system, options)


def _serve(args: argparse.Namespace) -> None:
    if args.policy is not None:
        raise JaxLlamaError("--policy: the serving engine runs no offloaded models")
    from jaxllama.cli.serve import ServeOptions, serve

    engine = {"max_slots": args.slots, "max_len": args.max_len, "max_queue": args.max_queue,
              "kv_dtype": _kv_dtype(args), "prefill_chunk": args.chunk}  # fmt: skip
    options = ServeOptions(
        args.model, args.host, args.port, tuple(args.api_key), args.max_body, args.drain_timeout,
        args.state, engine,
    )  # fmt: skip
    serve(options, lambda: _load(args, random=args.random))


def _bench_serve(args: argparse.Namespace) -> None:
    from jaxllama.bench import load_generator

    load = load_generator.from_args(args)
    with working("measuring"):
        report = load_generator.run(load)
    _print_json(report) if args.json else print(load_generator.table(report))


def _bench(args: argparse.Namespace) -> None:
    from jaxllama.bench import decode as bench

    if args.what == "serve":
        return _bench_serve(args)
    lm = _load(args, random=args.random)
    with working("measuring") as sign:
        report = bench.run(
            lm, batch=args.batch, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens,
            runs=args.runs, kv_dtype=_kv_dtype(args), chunk=args.chunk, context=args.context,
            trace=args.trace, sign=sign,
        )  # fmt: skip
    report["model"] = args.model  # as the user calls it, not as the checkpoint does
    _print_json(report) if args.json else print(bench.table(report))


def _eval(args: argparse.Namespace) -> None:
    from jaxllama.bench.evaluate import perplexity

    if None not in (args.window, args.stride) and args.stride >= args.window:
        raise JaxLlamaError(f"--stride = {args.stride}: must be below --window, {args.window}")
    text = _read_text(args.text)
    lm, reference = _load(args), None
    if args.reference is not None:
        from jaxllama.loading import load

        reference = load(args.reference, args.dtype, mesh=_mesh(args), progress=True)
    report = perplexity(
        lm, text, args.window, args.stride, reference=reference, kv_dtype=_kv_dtype(args),
        progress=True,
    )  # fmt: skip
    if args.json:
        _print_json({"model": args.model, **report})
    else:
        print(f"perplexity {report['perplexity']:.4f} over {report['tokens']} tokens")
        if reference is not None:
            print(f"against {args.reference}: KL {report['kl']:.4f} nats, "
                  f"top-1 {100 * report['top1']:.1f}%")  # fmt: skip


def _quantize(args: argparse.Namespace) -> None:
    from jaxllama.loading import default_dtype, load, read_config
    from jaxllama.quantization import checkpoint

    text = None if args.calibration is None else _read_text(args.calibration)
    request = checkpoint.Request(
        args.out, args.scheme, args.method, args.format, text, args.samples, args.window,
        tuple(args.report),
    )  # fmt: skip
    checkpoint.check(read_config(args.model), request, args.dtype or default_dtype())
    lm = load(args.model, args.dtype, progress=True)
    report = checkpoint.quantize_checkpoint(lm, request, progress=True)
    _print_json({"model": args.model, **report}) if args.json else print(checkpoint.table(report))


def _experiment(args: argparse.Namespace) -> None:
    from jaxllama.cli.experiment import command

    text, value = command(args.file, args.out, args.dry_run, args.compare)
    _print_json(value) if args.json else print(text, end="")


def _tokenize(args: argparse.Namespace) -> None:
    from jaxllama.cli import train as command

    report = command.tokenize_files(args.texts, args.out, args.tokenizer)
    _print_json(report) if args.json else print(command.table(report))


def _train(args: argparse.Namespace) -> None:
    from jaxllama.cli import train as command

    report = command.run_file(args.file, args.out, _mesh(args))
    _print_json(report) if args.json else print(command.table(report))


def _plan(args: argparse.Namespace) -> None:
    from jaxllama.bench import plan
    from jaxllama.offload.policy import Policy

    for tier in ("device", "host", "disk"):
        if args.policy is not None and getattr(args, f"{tier}_gb") is not None:
            raise JaxLlamaError(f"--{tier}-gb bounds what is solved for, and --policy is given")
    policy = _policy(args)
    base = _also(Policy(), args) if policy is None else policy
    with working("planning"):
        report = plan.command(args, policy, base, _kv_dtype(args))
    _print_json(report) if args.json else print(plan.table(report))


def _doctor(args: argparse.Namespace) -> None:
    from jaxllama.cli import doctor

    with working("examining"):
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
