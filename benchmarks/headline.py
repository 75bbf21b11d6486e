"""Measure a headline row of the README and write ``benchmarks/results/NAME.json``.

    python -m benchmarks.headline NAME [--only LABEL] [-- further arguments of the commands]
    python -m benchmarks.headline --all        the figures of README.md's table, on one card
    python -m benchmarks.headline --list

Run it from the repository's root.  A row is one command a figure; ``ROWS`` has them all.  A figure
is a key of the JSON that a command prints, or a regular expression with one group, whose last match
counts.  A peer's figure is a published number, or an expression for the same output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the README's table.

    Parameters
    ----------
    what
        The row's words.
    commands
        Command line by label of the figure.  "{url}" becomes the server's address.
    figure
        A key of the printed JSON, or an expression with one group.
    unit
        Unit of the figures.
    peers
        A published figure, or an expression, by label.
    source
        Where the peers' figures come from.
    server
        Command line of a server that runs meanwhile.
    """

    what: str
    commands: Mapping[str, str]
    figure: str
    unit: str
    peers: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    source: str = ""
    server: str = ""


_BENCH = "jaxllama bench --model llama-3.1-8b --random --context 1024 --new-tokens 200 --json"
_EXPERTS = "jaxllama bench --random --context 512 --new-tokens 100 --json"
_BENCH27 = "jaxllama bench --random --json --model qwen3.6-27b --context 1024 --new-tokens 100"
_BENCH_EXPERTS = "jaxllama bench --random --json --context 1024 --new-tokens 100 --runs 2"
_BENCH30 = f"{_BENCH_EXPERTS} --model qwen3-30b-a3b"
_BENCH_OSS = f"{_BENCH_EXPERTS} --model gpt-oss-20b"
_ROWS64 = "--batch 64 --chunk 64 --kv-dtype int8"
_MATMUL = "python -m benchmarks.kernels.matmul quantized_matmul --shapes 'gate or up'"
_ENGINE = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.engine"
_PARALLEL = "python -m benchmarks.parallel --model llama-3.1-8b --dtype bfloat16 --batch 1"
_TENSORRT = "TensorRT-LLM 1.0, FP8, one H200, as published"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of README.md's table: one figure of a row's file beside one peer's figure.

    Parameters
    ----------
    what
        The line's words.
    row, label
        The row's key and the figure's label in its file.
    peer
        The peer's label in the file, or None.
    named
        The peer as the table names it.
    more_is_better
        Whether a larger figure is better.
    """

    what: str
    row: str
    label: str
    peer: str | None = None
    named: str = ""
    more_is_better: bool = True


README = (
    Figure(
        "Llama-3.1-8B, one row, bfloat16", "decode", "bfloat16", "gpt-fast bfloat16", "gpt-fast"
    ),
    Figure("Llama-3.1-8B, one row, 4 bits", "decode", "w4a16-sym", "gpt-fast w4a16", "gpt-fast"),
    Figure(
        "serving Llama-3.1-8B in FP8, 1,000 in and 1,000 out",
        "engine-fp8",
        "1000 / 1000",
        "TensorRT-LLM 1000 / 1000",
        "TensorRT-LLM",
    ),
    Figure(
        "serving gpt-oss-20b, 1,000 in and 1,000 out",
        "engine-gpt-oss",
        "1000 / 1000",
        "TensorRT-LLM 1000 / 1000",
        "TensorRT-LLM",
    ),
    Figure(
        "product of one row with 14336 x 4096 weights, 4 bits",
        "matmul-decode",
        "w4a16",
        "humming",
        "humming",
        more_is_better=False,
    ),
    Figure(
        "GLA, forward and backward, 8 x 4,096 tokens",
        "gla",
        "forward and backward",
        "fla",
        "fla",
        more_is_better=False,
    ),
    Figure(
        "gated delta rule, forward, 8 x 4,096 tokens",
        "gated-delta",
        "forward",
        "fla",
        "fla",
        more_is_better=False,
    ),
    Figure("training GLA-1.3B", "training", "bfloat16"),
    Figure(
        "SmolLM2-135M on two CPU cores, 4 bits", "cpu-decode", "decode", "llama.cpp", "llama.cpp"
    ),
)

ROWS = {
    "decode": Row(
        "Llama-3.1-8B, one row",
        {
            "bfloat16": _BENCH,
            "w8a16": f"{_BENCH} --quantize w8a16",
            "w4a16-sym": f"{_BENCH} --quantize w4a16-sym",
        },
        "decode_tokens_per_second",
        "tokens/s",
        {"gpt-fast bfloat16": 216, "gpt-fast w8a16": 233, "gpt-fast w4a16": 298},
        "gpt-fast on one H200 (docs/lab/model.md)",
    ),
    "decode-64": Row(
        "Llama-3.1-8B, 64 rows, W8A8, int8 cache",
        {"w8a8": f"{_BENCH} --batch 64 --quantize w8a8 --kv-dtype int8"},
        "decode_tokens_per_second",
        "tokens/s",
    ),
    "experts": Row(
        "OLMoE-1B-7B and Qwen3-30B-A3B's first 8 layers, one row",
        {
            f"{model} {scheme}": f"{_EXPERTS} --model {model}{option}"
            for model in ("olmoe-1b-7b", "qwen3-30b-a3b:layers=8")
            for scheme, option in (("bfloat16", ""), ("w4a16", " --quantize w4a16"))
        },
        "decode_tokens_per_second",
        "tokens/s",
    ),
    "qwen3-30b-a3b": Row(
        "Qwen3-30B-A3B, 1,024 tokens before",
        {
            "bfloat16, 1 row": _BENCH30,
            "w4a16, 1 row": f"{_BENCH30} --quantize w4a16",
            "mxfp4, 1 row": f"{_BENCH30} --quantize mxfp4",
            "w4a16, 64 rows": f"{_BENCH30} --quantize w4a16 {_ROWS64}",
        },
        "decode_tokens_per_second",
        "tokens/s",
    ),
    "gpt-oss": Row(
        "gpt-oss-20b, 1,024 tokens before",
        {
            "mxfp4, 1 row": f"{_BENCH_OSS} --quantize mxfp4",
            "w4a16, 1 row": f"{_BENCH_OSS} --quantize w4a16",
            "bfloat16, 1 row": _BENCH_OSS,
            "mxfp4, 64 rows": f"{_BENCH_OSS} --quantize mxfp4 {_ROWS64}",
        },
        "decode_tokens_per_second",
        "tokens/s",
    ),
    "qwen3.6-27b": Row(
        "Qwen3.6-27B's shape, one row behind 1,024 tokens",
        {
            scheme: f"{_BENCH27}{option}"
            for scheme, option in (
                ("bfloat16", ""),
                ("w4a16", " --quantize w4a16"),
                ("fp8-block", " --quantize fp8-block"),
                ("nvfp4", " --quantize nvfp4"),
            )
        },
        "decode_tokens_per_second",
        "tokens/s",
    ),
    "drafts": Row(
        "one row, 4 tokens drafted, 3 accepted, times plain decoding",
        {
            "llama-3.1-8b w4a16": "python -m benchmarks.verify --quantize w4a16",
            "gla-1.3b bfloat16": "python -m benchmarks.verify --model gla-1.3b",
        },
        "times_plain",
        "times",
    ),
    "matmul-decode": Row(
        "14336 x 4096, W4A16, 1 row",
        {"w4a16": f"{_MATMUL} --tokens 1 --schemes w4a16-g128-sym"},
        r"14336x4096\s+1\s+([\d.]+) ",
        "us",
        {"XLA": r"14336x4096\s+1\s+[\d.]+\s.*?%\s+([\d.]+) ", "humming": 15.5},
        "XLA in the same run; humming on one H200 (docs/lab/matmul.md)",
    ),
    "matmul-prefill": Row(
        "14336 x 4096, 8,192 rows",
        {
            "w8a8": f"{_MATMUL} --tokens 8192 --schemes w8a8",
            "w4a8": f"{_MATMUL} --tokens 8192 --schemes w4a8",
        },
        r"14336x4096\s+8192\s+[\d.]+\s+(\d+) TFLOP/s",
        "TOPS",
        {"XLA w8a8": 929},
        "XLA on an earlier H200",
    ),
    "gla": Row(
        "GLA forward and backward, 8 x 4096, 16 heads of 128",
        {"forward and backward": "python -m benchmarks.kernels.gla"},
        r"\(8, 4096, 16, 128, 128\) forward\+backward, saving states: ([\d.]+) ms",
        "ms",
        {"fla": 5.85, "XLA": 12.0},
        "flash-linear-attention 0.6.0 and XLA's form on one H200 (docs/lab/gla.md)",
    ),
    "gated-delta": Row(
        "gated delta rule forward, 8 x 4096, 4 and 16 heads of 128",
        {"forward": "python -m benchmarks.kernels.gated_delta"},
        r"\(8, 4096, 4, 16, 128, 128\) forward ([\d.]+) us",
        "us",
        {"XLA": r"\(8, 4096, 4, 16, 128, 128\) forward of the XLA form ([\d.]+) us", "fla": 810},
        "XLA in the same run; flash-linear-attention 0.6.0 on one H200",
    ),
    "kda": Row(
        "KDA forward, 8,192 tokens, 64 heads",
        {"forward": "python -m benchmarks.kernels.gated_delta"},
        r"\(1, 8192, 64, 64, 128, 128\) forward ([\d.]+) us",
        "us",
        {"fla": 1845},
        "flash-linear-attention 0.6.0 on one H200",
    ),
    "attention": Row(
        "decode attention, 64 rows of 8,192, int8 cache",
        {"int8": "python -m benchmarks.kernels.attention 64x8192"},
        r"decode_attention\s+64 x\s+8192 int8\s+mosaic\s+([\d.]+) us",
        "us",
        {"XLA": r"decode_attention\s+64 x\s+8192 int8\s+xla\s+([\d.]+) us"},
        "XLA's form in the same run",
    ),
    "engine": Row(
        "serving Llama-3.1-8B in the engine, W8A8, int8 cache, 512 in flight",
        {
            "128 / 128": f"{_ENGINE} --prompt 128 --new 128",
            "1000 / 1000": f"{_ENGINE} --prompt 1000 --new 1000",
        },
        "tokens_per_second",
        "tokens/s",
        {"TensorRT-LLM 128 / 128": 27_911, "TensorRT-LLM 1000 / 1000": 17_744},
        _TENSORRT,
    ),
    "engine-fp8": Row(
        "serving Llama-3.1-8B in the engine, FP8, fp8 cache, 512 in flight",
        {"1000 / 1000": f"{_ENGINE} --quantize fp8 --kv-dtype fp8 --prompt 1000 --new 1000"},
        "tokens_per_second",
        "tokens/s",
        {"TensorRT-LLM 1000 / 1000": 17_744},
        _TENSORRT,
    ),
    "engine-gpt-oss": Row(
        "serving gpt-oss-20b in the engine, MXFP4, int8 cache, 512 in flight",
        {
            "1000 / 1000": "python -m benchmarks.engine --model gpt-oss-20b --quantize mxfp4 "
            "--prompt 1000 --new 1000"
        },
        "tokens_per_second",
        "tokens/s",
        {"TensorRT-LLM 1000 / 1000": 13_858},
        "TensorRT-LLM, MXFP4, one H200, as published",
    ),
    "engine-long-prompts": Row(
        "serving Llama-3.1-8B in the engine, W8A8, int8 cache, 256 in flight",
        {"2048 / 128": f"{_ENGINE} --prompt 2048 --new 128 --in-flight 256"},
        "tokens_per_second",
        "tokens/s",
        {"TensorRT-LLM 2048 / 128": 3_538},
        _TENSORRT,
    ),
    "http": Row(
        "serving Llama-3.1-8B over HTTP, W8A8, int8 cache, 512 in flight",
        {
            "128 / 128": "jaxllama bench serve --url {url} --requests 5000 --concurrency 512 "
            "--prompt-tokens 128 --new-tokens 128 --json"
        },
        "output_tokens_per_s",
        "tokens/s",
        {"TensorRT-LLM 128 / 128": 27_911},
        _TENSORRT,
        server="jaxllama serve --model llama-3.1-8b --random --quantize w8a8 --kv-dtype int8 "
        "--max-slots 512 --max-len 256 --max-queue 1024 --port 0",
    ),
    "parallel": Row(
        "Llama-3.1-8B, bfloat16, one row, speed-up on a mesh",
        {
            "two": f"{_PARALLEL} --mesh model=1 model=2",
            "four": f"{_PARALLEL} --mesh model=1 model=4",
        },
        "speedup",
        "times",
    ),
    "offload": Row(
        "Llama-3.1-70B, 4 bits, weights in host memory, 16 GB of device",
        {
            "whole run": "XLA_PYTHON_CLIENT_MEM_FRACTION=0.106 "
            "python -m benchmarks.offload --only budget"
        },
        "tokens_per_second",
        "tokens/s",
        {"the same machine's 16 cores": 1.5},
        "python -m benchmarks.offload --only cpu",
    ),
    "quantization": Row(
        "SmolLM2-135M, rise of the perplexity by kind of unseen text, GPTQ",
        {
            scheme: f"jaxllama quantize --scheme {scheme} --method gptq --samples 64 {tune}"
            f"--out runs/headline-{scheme} && jaxllama eval --model runs/headline-{scheme} --exact "
            "--texts configs/texts/unseen --reference smollm2-135m --json"
            for scheme, tune in (("w8a16", ""), ("w8a8", ""), ("w4a16", "--tune 64 "))
        },
        "rise",
        "share",
    ),
    "training": Row(
        "GLA-1.3B, training, 32,768 tokens a step",
        {
            "bfloat16": "jaxllama tokenize configs/texts/*.txt --out data/bible-bytes "
            "--tokenizer bytes && jaxllama train configs/training/speed-gla-1.3b.toml"
        },
        r"([\d,]+) tokens/s",
        "tokens/s",
    ),
    "cpu-decode": Row(
        "SmolLM2-135M, a GGUF file, 2 CPU cores; arguments: FILE --peer PYTHON",
        {"decode": "python benchmarks/peers/cpu_llama_cpp.py"},
        r"decode, tokens/s: ours ([\d.]+)",
        "tokens/s",
        {"llama.cpp": r"decode, tokens/s: ours [\d.]+, llama.cpp ([\d.]+)"},
        "llama.cpp in the same run",
    ),
    "cpu-prefill": Row(
        "SmolLM2-135M, a GGUF file, prefill of 512 tokens; arguments: FILE --peer PYTHON",
        {"prefill": "python benchmarks/peers/cpu_llama_cpp.py"},
        r"prefill, tokens/s: .* ratio ([\d.]+)",
        "times llama.cpp",
        {"llama.cpp": 1.0},
        "llama.cpp in the same run",
    ),
}


def find(figure: str, lines: list[str]) -> Any:
    """Return the figure in printed lines; None if it is not there.

    An expression gives its last match.  A key gives its value in the last JSON that has it, as a
    list if it stands there more than once.
    """
    if "(" in figure:
        matches = [match[1] for line in lines for match in re.finditer(figure, line)]
        return float(matches[-1].replace(",", "")) if matches else None
    for text in (*reversed(lines), "\n".join(lines)):
        try:
            found = list(_values(figure, json.loads(text)))
        except ValueError:
            continue
        if found:
            return found[0] if len(found) == 1 else found
    return None


def _values(key: str, tree: Any) -> Any:
    """Yield every value of a key in nested JSON."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        for value in tree.values():
            yield from _values(key, value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(key, value)


def run(command: str) -> list[str]:
    """Run a command line from the repository's root, and return the lines of its stdout."""
    print(f"$ {command}", file=sys.stderr, flush=True)
    with subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        raise SystemExit(f"status {process.returncode}: {command}")
    return lines


def _environment() -> dict[str, str]:
    """This interpreter's programs first, and the repository's modules."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PATH": path, "PYTHONPATH": modules}


def measure(name: str, only: Sequence[str] = (), more: tuple[str, ...] = ()) -> Path:
    """Measure a row, and return the path of its file.

    Parameters
    ----------
    name
        A key of ``ROWS``.
    only
        Labels of the figures to measure; all by default.
    more
        Arguments that are added to every command.
    """
    row = ROWS[name]
    commands = {
        label: " ".join((command, *map(shlex.quote, more)))
        for label, command in row.commands.items()
        if not only or label in only
    }
    if not row.server:
        output = {label: run(command) for label, command in commands.items()}
    else:
        with subprocess.Popen(
            ["bash", "-c", f"exec {row.server}"],
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().split()[-1]
                output = {key: run(one.format(url=url)) for key, one in commands.items()}
            finally:
                server.send_signal(signal.SIGTERM)
    figures = {label: find(row.figure, lines) for label, lines in output.items()}
    lines = [line for some in output.values() for line in some]
    peers = {
        label: find(peer, lines) if isinstance(peer, str) else peer
        for label, peer in row.peers.items()
    }
    path = results.write(
        name,
        figures,
        unit=row.unit,
        peers=peers,
        source=row.source,
        commands=commands,
        output=output,
    )
    print(f"{row.what}: {figures} {row.unit}; {peers or 'no peer'}\n{path}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", choices=ROWS, metavar="NAME")
    parser.add_argument("--all", action="store_true", help="measure what README.md shows of a GPU")
    parser.add_argument("--list", action="store_true", help="print the rows and their commands")
    parser.add_argument("--only", metavar="LABEL", help="one figure of the row")
    parser.add_argument("more", nargs="*", help="behind --: arguments for every command")
    args = parser.parse_args()
    if args.all:
        return measure_all()
    if args.list or args.name is None:
        for name, row in ROWS.items():
            print(f"{name}: {row.what}, {row.unit}")
            for label, command in row.commands.items():
                print(f"    {label}: {command}")
        return
    measure(args.name, [args.only] if args.only else (), tuple(args.more))


def measure_all() -> None:
    """Measure the figures of README.md's table that need no file of weights, one by one."""
    found = [figure for figure in README if not figure.row.startswith("cpu-")]
    for row in dict.fromkeys(figure.row for figure in found):
        labels = [figure.label for figure in found if figure.row == row]
        measure(row, labels)


if __name__ == "__main__":
    main()
