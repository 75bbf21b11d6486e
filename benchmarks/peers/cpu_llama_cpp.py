"""One GGUF file on this CPU: jaxllama beside llama.cpp, in alternating rounds.

    python benchmarks/peers/cpu_llama_cpp.py FILE.gguf --peer PYTHON [--threads N] [--rounds N]
    python benchmarks/peers/cpu_llama_cpp.py --make OUT.gguf --like FILE.gguf

PYTHON is that of an environment with llama-cpp-python, built from source for this machine.  The
file's own codes on both sides, flash attention on.  --what chooses among three.  Decode: 64 greedy
tokens (--new) behind 5; stream: the same as text, piece by piece; prefill: 512 tokens; with
--engine also 16 requests at once through our engine beside one.  The file's types, the CPU and
llama.cpp's build are printed first: llama.cpp repacks Q4_0 for AVX-512, and not Q4_1, so name the
file with any figure.  A round in which other processes took more than 5% of the cores does not
count, unless --busy: both are then judged by their own CPU time alone, which on one thread
(--threads 1) means something still; llama.cpp's threads wait for each other by spinning, and more
of them on a busy machine measure that.  Each round stands on stderr.

--make writes a file of Llama-3.2-1B's shape with random Q4_0 weights and another file's tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROMPT, NEW, LONG = 5, 64, 512
FOREIGN = 0.05  # of the cores' time

PEER = """
import json, random, sys, time
from llama_cpp import Llama
threads, more = int(sys.argv[2]), int(sys.argv[3]) - 1
import llama_cpp
model = Llama(sys.argv[1], n_ctx=1024, n_threads=threads, n_threads_batch=threads, flash_attn=True,
              verbose=False)
print(llama_cpp.__version__, llama_cpp.llama_print_system_info().decode(), flush=True)
random.seed(0)
vocabulary = min(model.n_vocab(), 49000)
prompt = [random.randint(100, vocabulary - 1) for _ in range(512)]
for line in sys.stdin:
    model.reset()
    if line.strip() in ("decode", "stream"):
        tokens = model.generate(prompt[:5], temp=0.0)
        text = [model.detokenize([next(tokens)])]
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(more):
            token = next(tokens)
            if line.strip() == "stream":
                text.append(model.detokenize([token]))
        work = more
    else:
        wall, cpu = time.perf_counter(), time.process_time()
        model.eval(prompt)
        work = 512
    times = work / (time.perf_counter() - wall), work / (time.process_time() - cpu)
    print(json.dumps(times), flush=True)
"""


class Peer:
    """llama.cpp in a process of its own, which waits while we measure."""

    def __init__(self, python: str, file: str, threads: int, new: int) -> None:
        self.process = subprocess.Popen(
            [python, "-c", PEER, file, str(threads), str(new)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.build: str | None = None

    def __call__(self, what: str) -> tuple[float, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.build is None:
            self.build = self.process.stdout.readline().strip()
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))


class Ours:
    def __init__(self, file: str, new: int) -> None:
        from jaxllama.evaluation.speed.harness import Decoding
        from jaxllama.loading import load

        self.lm, self.new = load(file), new
        self.endless = dataclasses.replace(self.lm, config=self.lm.config.replace(eos_token_ids=()))
        self.decoding = Decoding(self.lm, 1)

    def __call__(self, what: str) -> tuple[float, float]:
        if what == "decode":
            state, _ = self.decoding.prefilled(PROMPT, self.new)
            cpu = time.process_time()
            seconds, work = self.decoding.run(state, self.new), self.new - 1
        elif what == "stream":
            # Other tokens than llama.cpp's: a rate depends on their number alone.
            pieces = self.endless.stream(list(range(1000, 1000 + PROMPT)), self.new)
            next(pieces)
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in pieces:
                pass
            seconds, work = time.perf_counter() - begun, self.new - 1
        else:
            cpu = time.process_time()
            seconds, work = self.decoding.prefilled(LONG, 1)[1], LONG
        return work / seconds, work / (time.process_time() - cpu)


def engine_rates(lm: Any, requests: int) -> float:
    """Tokens a second of so many requests of 64 tokens behind 16 each, at once."""
    import numpy as np

    import jaxllama as jl

    lm = dataclasses.replace(lm, config=lm.config.replace(eos_token_ids=()))
    if not hasattr(engine_rates, "engine"):
        engine_rates.engine = jl.Engine(
            lm, max_slots=16, max_len=96, steps_per_call=8, prefix_cache=False
        )
        engine_rates.engine.warm_up()
    engine, rng = engine_rates.engine, np.random.default_rng(0)
    begun = time.perf_counter()
    for i in range(requests):
        prompt = tuple(int(t) for t in rng.integers(100, 40000, 16))
        engine.submit(
            jl.Request(id=f"{begun}/{i}", prompt=prompt, max_new_tokens=NEW), lambda event: None
        )
    while engine.step():
        pass
    return requests * NEW / (time.perf_counter() - begun)


def busy_ticks() -> int:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, fields[:3])) + sum(map(int, fields[5:8]))


def ticks_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def memory_of(pid: int) -> tuple[int, int]:
    """Resident MB of a process, with the pages of a mapped file, now and at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) // 1024 for name in ("VmRSS", "VmHWM"))


def measured(sides: dict[str, Any], pids: list[int], what: str, rounds: int, busy: bool) -> Any:
    """Each side's (rate, rate of CPU time) of every round that counts; at most 4 times as many are
    tried."""
    kept: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    cores = os.cpu_count() or 1
    for side in sides.values():  # compiles, and warms up
        side(what)
    for _ in range(4 * rounds):
        before, own, begun = busy_ticks(), sum(map(ticks_of, pids)), time.monotonic()
        found = {name: side(what) for name, side in sides.items()}
        ticks = (busy_ticks() - before) - (sum(map(ticks_of, pids)) - own)
        share = ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begun) / cores
        print(f"  {what}, others {share:.0%}: {found}", file=sys.stderr, flush=True)
        if busy or share <= FOREIGN:
            for name, rates in found.items():
                kept[name].append(rates)
        if len(kept["ours"]) == rounds:
            break
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--new", type=int, default=NEW, help="tokens of a decode round")
    parser.add_argument("--what", nargs="+", default=["decode", "stream", "prefill"])
    parser.add_argument("--make", metavar="OUT")
    parser.add_argument("--like", metavar="FILE")
    args = parser.parse_args()
    if args.make:
        return make(args.make, args.like)
    os.sched_setaffinity(0, range(args.threads))  # before jax counts its threads
    ours = Ours(args.file, args.new)
    peer = Peer(args.peer, args.file, args.threads, args.new)
    pids = [os.getpid(), peer.process.pid]
    describe(args.file, args.threads)
    for what in args.what:
        kept = measured({"ours": ours, "llama.cpp": peer}, pids, what, args.rounds, args.busy)
        for index, unit in enumerate(("tokens/s", "tokens a CPU second")):
            rates = {name: [pair[index] for pair in pairs] for name, pairs in kept.items()}
            if not rates["ours"]:
                print(f"{what}: no quiet round")
                break
            middle = {name: statistics.median(values) for name, values in rates.items()}
            ratio = statistics.median(
                a / b for a, b in zip(rates["ours"], rates["llama.cpp"], strict=True)
            )
            print(
                f"{what}, {unit}: "
                + ", ".join(f"{k} {v:.1f}" for k, v in middle.items())
                + f", ratio {ratio:.2f} ({len(rates['ours'])} rounds)",
                flush=True,
            )
    print(f"llama.cpp: flash attention on, {peer.build}")
    for name, pid in zip(("ours", "llama.cpp"), pids, strict=True):
        now, most = memory_of(pid)
        print(f"resident memory of {name}: {now} MB, at most {most} MB")
    peer.process.stdin.close()
    if args.engine:
        engine_rates(ours.lm, 1)
        ratios = [engine_rates(ours.lm, 16) / engine_rates(ours.lm, 1) for _ in range(args.rounds)]
        print(f"16 requests at once over one: {statistics.median(ratios):.2f}x")
    read_beside(ours)


def describe(file: str, threads: int) -> None:
    """Print what a figure means nothing without."""
    import gguf

    types = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")
    print(f"{Path(file).name}: {dict(types)}; {cpu}, {threads} threads", flush=True)


def read_beside(ours: Ours) -> None:
    """The step's rate beside that of reading the same codes and nothing else, in turns."""
    import jax

    from benchmarks.kernels.cpu import reading
    from jaxllama.evaluation.speed.harness import bytes_per_step, timed
    from pallas_kernels.cpu import CpuWeight

    leaves = jax.tree.leaves(ours.lm.params, is_leaf=lambda leaf: isinstance(leaf, CpuWeight))
    codes = [w.q.reshape(-1, w.q.shape[-1]) for w in leaves if isinstance(w, CpuWeight)]
    read, n_bytes = reading(codes)
    read()
    rates, size = [], bytes_per_step(ours.lm)
    for _ in range(7):
        both = size * ours("decode")[0], n_bytes / timed(read)[1]
        rates.append((*both, both[0] / both[1]))
    step, memory, share = map(statistics.median, zip(*rates, strict=True))
    print(
        f"a step's {size / 1e6:.1f} MB at {step / 1e9:.1f} GB/s, reading alone "
        f"{memory / 1e9:.1f} GB/s: {share:.0%}"
    )


def add_words(writer: Any, like: str, vocab: int) -> None:
    """Give a file the vocabulary of another, filled up to ``vocab`` tokens."""
    import gguf

    source = gguf.GGUFReader(like)
    words = {
        key: list(source.fields[f"tokenizer.ggml.{key}"].contents())
        for key in ("tokens", "token_type", "merges")
    }
    more = vocab - len(words["tokens"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words["tokens"] + [f"<|unused_{i}|>" for i in range(more)])
    writer.add_token_types(words["token_type"] + [5] * more)
    writer.add_token_merges(words["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def make(path: str, like: str) -> None:
    import gguf
    import numpy as np

    kind, d, f, n, k, h, layers, vocab = (
        gguf.GGMLQuantizationType.Q4_0,
        2048,
        8192,
        32,
        8,
        64,
        16,
        128256,
    )
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        ("block_count", layers),
        ("context_length", 8192),
        ("embedding_length", d),
        ("feed_forward_length", f),
        ("attention.head_count", n),
        ("attention.head_count_kv", k),
        ("rope.dimension_count", h),
        ("attention.key_length", h),
        ("attention.value_length", h),
        ("vocab_size", vocab),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    add_words(writer, like, vocab)
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 32, 18), np.uint8)
        scale = np.float16(0.0043) * (1 + 0.2 * rng.random((rows, columns // 32))).astype("<f2")
        blocks[..., :2] = scale.astype("<f2")[..., None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(d, np.float32))

    matrix("token_embd.weight", vocab, d)
    ones("output_norm.weight")
    for layer in range(layers):
        ones(f"blk.{layer}.attn_norm.weight")
        ones(f"blk.{layer}.ffn_norm.weight")
        for name, rows, columns in (
            ("attn_q", n * h, d),
            ("attn_k", k * h, d),
            ("attn_v", k * h, d),
            ("attn_output", d, n * h),
            ("ffn_gate", f, d),
            ("ffn_up", f, d),
            ("ffn_down", d, f),
        ):
            matrix(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
