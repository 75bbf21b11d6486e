"""Planted faults: does the suite find what it is there for?

    python tests/faults.py                 run the draw of 40 faults, one line a fault
    python tests/faults.py 3 17            run these
    python tests/faults.py --first         run only the test that should find each of them
    python tests/faults.py --json OUT      write the results to a file as well

Each fault replaces one piece of source text in a copy of the tree. ``pytest -x`` then runs the
test that should find it and, if that one passes, the tests of the fault's room and, for faults in
the model, the model identities. A fault is found when a test fails. Faults in Mosaic kernels need
jax >= 0.11.2 (the emulator): run them with that environment. ``CANDIDATES`` was written before the
suite was shortened; ``SEED`` draws 40 of it. FAULTS.md holds the results.

The program exits with 1 where a fault's text no longer stands in its file exactly once: adapt the
fault to the new code then, without changing what it breaks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEED, DRAWN = 39, 40
ROOT = Path(__file__).resolve().parent.parent
IDENTITIES = "tests/model/test_model.py tests/model/test_decode_step.py"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One planted fault.

    what: the fault in words. file: relative path. old, new: source text before and after; old
    stands exactly once in the file. tests: what pytest runs, separated by spaces. first: the test
    or file that should find the fault, which runs before the others.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str
    first: str


M, K = "jaxllama/model/", "pallas_kernels/"
ONE = "tests/model/test_model.py"
MODEL = f"{IDENTITIES} tests/model"
ENGINE, HTTP = "tests/engine", "tests/serving/http"
DECODE = "tests/kernels/attention/test_decode_attention.py"
CALIBRATION = "tests/quantization/test_calibration.py"
TRAINING = "tests/training/test_training.py"
CANDIDATES = [
    # The model
    Fault(
        "attention sees one key beyond the window",
        K + "attention/plain.py",
        "visible & (k_pos > q_pos - window)",
        "visible & (k_pos >= q_pos - window)",
        f"tests/kernels/attention {MODEL}",
        first=f"{ONE}::test_attention_equals_a_float64_softmax",
    ),
    Fault(
        "RoPE turns the second half the wrong way",
        K + "attention/plain.py",
        "second * c + first * s",
        "second * c - first * s",
        f"tests/kernels/attention {MODEL}",
        first="tests/model/test_parity.py::test_golden",
    ),
    Fault(
        "a query sees its successor",
        K + "attention/plain.py",
        "visible = k_pos <= q_pos\n",
        "visible = k_pos <= q_pos + 1\n",
        f"tests/kernels/attention {MODEL}",
        first=f"{ONE}::test_attention_equals_a_float64_softmax",
    ),
    Fault(
        "the last block's repeated keys count twice",
        K + "attention/blockwise.py",
        "is_visible(positions, k_positions[None, :], window) & fresh",
        "is_visible(positions, k_positions[None, :], window)",
        f"tests/kernels/attention {MODEL}",
        first=f"{ONE}::test_long_prompts_cross_query_and_key_blocks",
    ),
    Fault(
        "padding is written into the cache",
        M + "mixers/attention/mix.py",
        "slots = jnp.where(is_new, positions, capacity_of(cache.k, table))",
        "slots = positions",
        MODEL,
        first=f"{ONE}::test_chunked_prefill_is_whole_prefill",
    ),
    Fault(
        "a stopped row's token is written",
        M + "mixers/attention/mix.py",
        "slots = jnp.where(at.lengths > 0, position, capacity_of(cache.k, table))",
        "slots = position",
        f"{MODEL} {ENGINE}",
        first="tests/engine/test_engine.py::test_tokens_are_those_of_the_request_alone",
    ),
    Fault(
        "softcap is left out of a decode step",
        M + "mixers/attention/mix.py",
        "softcap=cfg.attn_softcap,",
        "softcap=None,",
        MODEL,
        first="tests/model/test_verify_step.py",
    ),
    Fault(
        "llama3 scaling blends the wrong way",
        M + "rope.py",
        "(keep * inv_freq + (1 - keep) * inv_freq / cfg.factor)",
        "((1 - keep) * inv_freq + keep * inv_freq / cfg.factor)",
        f"{MODEL} tests/checkpoints",
        first="tests/model/test_parity.py::test_golden[rope-llama3]",
    ),
    Fault(
        "yarn's ramp is one dimension off",
        M + "rope.py",
        "ramp = (np.arange(head_dim // 2) - low)",
        "ramp = (np.arange(head_dim // 2) + 1 - low)",
        f"{MODEL} tests/checkpoints",
        first="tests/model/test_parity.py::test_golden[rope-yarn-options]",
    ),
    Fault(
        "the short convolution forgets a row's oldest input",
        M + "mixers/recurrent.py",
        "last = lengths[:, None] + jnp.arange(past.shape[1]",
        "last = jnp.maximum(lengths[:, None] - 1, 0) + jnp.arange(past.shape[1]",
        MODEL,
        first=f"{ONE}::test_prefill_then_decode_is_the_full_forward_at_every_split",
    ),
    Fault(
        "a GLA row that stands still decays",
        M + "mixers/gla/mix.py",
        "q, k, v, log_decay = moving(moves, q, k, v, log_decay)",
        "q, k, v, log_decay = q, k, v, log_decay",
        f"{MODEL} tests/decoding/test_drafts.py {ENGINE}",
        first="tests/engine/test_engine_state.py",
    ),
    Fault(
        "the embedding's scale is dropped",
        M + "decoder.py",
        "return x * jnp.asarray(cfg.d_model**0.5, x.dtype) if cfg.embedding_scale else x",
        "return x",
        MODEL,
        first="tests/model/test_parity.py::test_golden[gemma3_text]",
    ),
    Fault(
        "a parallel block's MLP reads the stream behind the mixer",
        M + "forms/parallel.py",
        'inner(layer, p["mlp"], before, p.get(',
        'inner(layer, p["mlp"], stream, p.get(',
        MODEL,
        first="tests/model/test_parity.py::test_golden",
    ),
    Fault(
        "a commit keeps one token too many",
        M + "verification.py",
        "cache, count = proposal.cache, jnp.clip(count, 0, proposal.new)",
        "cache, count = proposal.cache, jnp.clip(count + 1, 0, proposal.new)",
        f"{MODEL} tests/decoding/test_drafts.py",
        first="tests/model/test_verify_step.py",
    ),
    Fault(
        "every row gets the first adapter",
        M + "lora.py",
        "return jnp.broadcast_to(self.rows[:, None], x.shape[:2])",
        "return jnp.broadcast_to(jnp.minimum(self.rows, 1)[:, None], x.shape[:2])",
        MODEL,
        first="tests/model/test_lora.py",
    ),
    # Generation and sampling
    Fault(
        "a chunked prefill keeps the hidden state of an empty chunk",
        "jaxllama/decoding/forward.py",
        "return (cache, hidden.last(n_new, last), kept), None",
        "return (cache, hidden.last(n_new), kept), None",
        f"{MODEL} tests/test_language_model.py",
        first=f"{ONE}::test_chunked_prefill_is_whole_prefill",
    ),
    Fault(
        "a full row gives finite logits",
        "jaxllama/decoding/forward.py",
        "fits = cache.lengths + lengths <= cache.capacity",
        "fits = cache.lengths + lengths <= cache.capacity + 1",
        MODEL,
        first=f"{ONE}::test_a_full_row_stays_as_it_is_and_gets_nan",
    ),
    Fault(
        "a done row's count grows",
        "jaxllama/decoding/turn.py",
        "count=fields.count + live,",
        "count=fields.count + 1,",
        f"{MODEL} tests/test_language_model.py",
        first=f"{ONE}::test_rows_stop_separately_and_the_loop_stops_early",
    ),
    Fault(
        "only the first stop token counts",
        "jaxllama/decoding/turn.py",
        "found = jnp.any(tokens[..., None] == stop_ids, axis=-1)",
        "found = jnp.any(tokens[..., None] == stop_ids[:1], axis=-1)",
        f"{MODEL} tests/test_language_model.py tests/decoding/test_sampling.py",
        first=f"{ONE}::test_rows_stop_separately_and_the_loop_stops_early",
    ),
    Fault(
        "the sampling key ignores the position",
        "jaxllama/decoding/sampling.py",
        "key = jax.random.fold_in(key, position)",
        "key = jax.random.fold_in(key, 0)",
        "tests/decoding/test_sampling.py tests/test_language_model.py",
        first="tests/decoding/test_sampling.py::test_seeds_and_positions_decide_the_draw",
    ),
    Fault(
        "top-p reads the mass before top-k",
        "jaxllama/decoding/sampling.py",
        "mass = jnp.where(keep, jnp.exp(-below), 0.0)",
        "mass = jnp.exp(-below)",
        "tests/decoding/test_sampling.py",
        first="tests/decoding/test_sampling.py::test_kept_tokens_are_those_of_a_sort",
    ),
    Fault(
        "the presence penalty counts the prompt",
        "jaxllama/decoding/sampling.py",
        "jnp.where(generated, params.presence_penalty[:, None], 0.0)",
        "jnp.where(repeated, params.presence_penalty[:, None], 0.0)",
        "tests/decoding/test_sampling.py",
        first="tests/decoding/test_sampling.py::test_penalties_by_hand",
    ),
    Fault(
        "a draft's pause never grows",
        "jaxllama/decoding/drafts.py",
        "jnp.minimum(2 * self.pause, _LONGEST_PAUSE)",
        "self.pause",
        "tests/decoding/test_drafts.py",
        first="tests/decoding/test_drafts.py::test_a_wrong_draft_is_asked_ever_more_seldom",
    ),
    # The engine
    Fault(
        "a prefix is known one page too far",
        "jaxllama/engine/pages.py",
        "for first in range(0, len(tokens) - self.size + 1, self.size):",
        "for first in range(0, len(tokens), self.size):",
        ENGINE,
        first="tests/engine/test_scheduler.py",
    ),
    Fault(
        "prefixes are shared between adapters",
        "jaxllama/engine/pages.py",
        "parent = self._roots.setdefault(key, Node(key, -1, None))",
        "parent = self._roots.setdefault(None, Node(None, -1, None))",
        ENGINE,
        first="tests/engine/test_scheduler.py",
    ),
    Fault(
        "an evicted page keeps its snapshot",
        "jaxllama/engine/pages.py",
        "        del self._leaves[node]\n        self._drop_state(node)\n",
        "        del self._leaves[node]\n",
        ENGINE,
        first="tests/engine/test_scheduler.py",
    ),
    Fault(
        "a growing row lacks its last page",
        "jaxllama/engine/scheduler.py",
        "return max(self.pages.need(after) - len(sequence.held.pages), 0)",
        "return max(self.pages.need(after - 1) - len(sequence.held.pages), 0)",
        ENGINE,
        first="tests/engine/test_scheduler.py",
    ),
    Fault(
        "a preempted sequence loses its place",
        "jaxllama/engine/scheduler.py",
        "return (self.order - AGE * self.request.priority, self.order)",
        "return (self.order + AGE * self.request.priority, self.order)",
        ENGINE,
        first="tests/engine/test_scheduler.py",
    ),
    Fault(
        "ignore_eos is ignored",
        "jaxllama/engine/passes.py",
        "        ignores_stops=slots.ignore_eos,\n",
        "",
        ENGINE,
        first="tests/engine/test_engine.py::test_ignore_eos_goes_on",
    ),
    Fault(
        "a newcomer's seed is the slot's old one",
        "jaxllama/engine/slots.py",
        "slot[row], sampling[row], length[row] = new.slot, new.sampling, new.length",
        "slot[row], length[row] = new.slot, new.length",
        ENGINE,
        first="tests/engine/test_engine.py::test_tokens_are_those_of_the_request_alone",
    ),
    Fault(
        "top log-probabilities are one token short",
        "jaxllama/engine/output.py",
        "ids, values = (array[begin:kept, :n_top].tolist() for array in written.top)",
        "ids, values = (array[begin:kept, : n_top - 1].tolist() for array in written.top)",
        f"{ENGINE} {HTTP}",
        first="tests/engine/test_engine.py::test_likeliest_tokens_are_reported",
    ),
    # Text
    Fault(
        "a stop string's overlap with itself is forgotten",
        "jaxllama/text/stream.py",
        "state = failure[state - 1]\n                if stop[state] == char:",
        "state = 0\n                if stop[state] == char:",
        "tests/text tests/test_language_model.py",
        first="tests/text/test_tokenizer.py::test_stop_strings_equal_a_search_of_the_whole_text",
    ),
    Fault(
        "a split UTF-8 character is not held back",
        "jaxllama/text/stream.py",
        'rest = self._utf8.decode(b"", final=True)',
        'rest = ""',
        "tests/text tests/test_language_model.py",
        first="tests/text/test_tokenizer.py::test_stream_flushes_a_broken_character",
    ),
    # Quantization and checkpoints
    Fault(
        "zero points are added",
        K + "qtensor.py",
        "x = (x - self.zero.astype(jnp.float32)[..., None]) * scale",
        "x = (x + self.zero.astype(jnp.float32)[..., None]) * scale",
        "tests/kernels/test_qtensor.py tests/kernels/matmul tests/quantization",
        first="tests/kernels/test_qtensor.py",
    ),
    Fault(
        "AWQ's fields are read in file order",
        "jaxllama/checkpoints/packed/awq.py",
        ".reshape(len(packed), -1, _FIELDS)[..., _PLACE]",
        ".reshape(len(packed), -1, _FIELDS)[..., _ORDER]",
        "tests/checkpoints",
        first="tests/checkpoints/test_packed.py::test_import_is_bit_exact",
    ),
    Fault(
        "GPTQ spreads the error with the wrong sign",
        "jaxllama/quantization/gptq.py",
        "rows = rows - weights[:, None] * error[None, :]",
        "rows = rows + weights[:, None] * error[None, :]",
        "tests/quantization",
        first=f"{CALIBRATION}::test_gptq_is_its_equations_whole_and_in_parts",
    ),
    Fault(
        "GPTQ forgets the blocks ahead",
        "jaxllama/quantization/gptq.py",
        "later = jnp.arange(k)[None, :] >= begin + block",
        "later = jnp.arange(k)[None, :] >= begin + 2 * block",
        "tests/quantization",
        first=f"{CALIBRATION}::test_gptq_is_its_equations_whole_and_in_parts",
    ),
    # Offloading, several devices, training
    Fault(
        "a filled-up batch shifts the rows' lengths",
        "jaxllama/executors/offloaded/run.py",
        "lengths = jnp.pad(lengths, (0, empty))",
        "lengths = jnp.pad(lengths, (empty, 0))",
        "tests/offload",
        first="tests/offload/test_offload.py",
    ),
    Fault(
        "a shard looks up its neighbour's rows",
        "jaxllama/parallel/collectives.py",
        "mine = (local >= 0) & (local < rows)",
        "mine = (local >= 0) & (local <= rows)",
        "tests/parallel",
        first="tests/parallel/test_parallel.py",
    ),
    Fault(
        "the gradient is a sum over microbatches",
        "jaxllama/training/step.py",
        "return jax.tree.map(lambda g: g / parts, grads), jax.tree.map(jnp.mean, metrics)",
        "return grads, jax.tree.map(jnp.mean, metrics)",
        "tests/training",
        first=f"{TRAINING}::test_gradients_of_the_whole_model_are_torch_s_in_float64",
    ),
    Fault(
        "weight decay reaches the norms",
        "jaxllama/training/optimizer.py",
        'return leaf.ndim - lead >= 2 and getattr(keys[-1], "name", "w") == "w"',
        'return getattr(keys[-1], "name", "w") == "w"',
        "tests/training",
        first=f"{TRAINING}::test_the_curve_is_torch_s",
    ),
    # Linear attention and kernels
    Fault(
        "a chunk's state decays once too often",
        K + "gla/chunked.py",
        'writes = dot("...cd,...ce->...de", k * jnp.exp(suffix), v, dtype)',
        'writes = dot("...cd,...ce->...de", k * jnp.exp(prefix), v, dtype)',
        "tests/kernels/gla tests/model/test_gla_model.py",
        first="tests/kernels/gla/test_gla.py",
    ),
    Fault(
        "the gradient of k misses the diagonal",
        K + "gla/chunked.py",
        "    d_k += on_diagonal * q\n",
        "",
        "tests/kernels/gla",
        first="tests/kernels/gla/test_gla.py",
    ),
    Fault(
        "int8 rows of the CPU lose a row's tail",
        K + "cpu/matmul.py",
        "return e.b.udiv(e.b.sub(e.b.add(body.tiles, body.run), e.i64(1)), body.run)",
        "return e.b.udiv(body.tiles, body.run)",
        "tests/kernels/cpu",
        first="tests/kernels/cpu/test_cpu_matmul.py",
    ),
    Fault(
        "an empty split's maximum counts",
        K + "attention/merge.py",
        "loaded.append((arith.select(inside, peak, p.cf(NEG_INF)), whole, values))",
        "loaded.append((peak, whole, values))",
        "tests/kernels/attention",
        first=f"{DECODE}::test_the_kernel_emulated_is_a_float64_softmax",
    ),
    Fault(
        "the decode kernel's old sums do not fade",
        K + "attention/tile.py",
        "fade.append(p.exp2(arith.subf(top[c], best)))",
        "fade.append(p.cf(1.0))",
        "tests/kernels/attention",
        first=f"{DECODE}::test_the_kernel_emulated_is_a_float64_softmax",
    ),
    Fault(
        "the last group's scale serves all groups",
        K + "matmul/few_rows/tile_loop.py",
        "            g %= at_once\n",
        "            g = at_once - 1\n",
        "tests/kernels/matmul",
        first="tests/kernels/matmul/test_quantized_matmul.py::test_decode_kernel_emulated",
    ),
    Fault(
        "SwiGLU's gate has no minus",
        K + "rows/one_row.py",
        "arith.mulf(gate, p.cf(-LOG2E))",
        "arith.mulf(gate, p.cf(LOG2E))",
        "tests/kernels/rows",
        first="tests/kernels/rows/test_low_rank.py::test_the_kernel_on_the_emulator",
    ),
]


def drawn() -> list[Fault]:
    """The 40 faults that ``SEED`` draws, in the order of ``CANDIDATES``."""
    picked = random.Random(SEED).sample(range(len(CANDIDATES)), DRAWN)
    return [CANDIDATES[index] for index in sorted(picked)]


def needs_emulator(fault: Fault) -> bool:
    """Whether only the emulator of Mosaic kernels can find the fault."""
    return fault.file.endswith(("merge.py", "tile.py", "tile_loop.py", "one_row.py"))


def plant(fault: Fault, tree: Path) -> None:
    """Replace the fault's text in ``tree``. Raises SystemExit unless it stands there once."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.what}: its text stands {text.count(fault.old)} times in {path}")
    path.write_text(text.replace(fault.old, fault.new))


def failure(tree: Path, tests: list[str]) -> str | None:
    """Run the tests in ``tree`` until one fails. Return its name, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-q", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode == 0:
        return None
    if done.returncode in (1, 2) and failed:  # 2: a module that cannot be imported
        return failed.group(1)
    raise SystemExit(f"pytest {tests} ended with {done.returncode}:\n{done.stdout[-2000:]}")


def run(fault: Fault, only_first: bool) -> dict[str, object]:
    """Plant the fault in a copy of the tree and run its tests until one fails."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        skipped = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".dev-*", ".whl*")
        shutil.copytree(ROOT, tree, ignore=skipped)
        plant(fault, tree)
        started = time.monotonic()
        by = failure(tree, [fault.first])
        if by is None and not only_first:
            by = failure(tree, fault.tests.split())
        seconds = time.monotonic() - started
    return {"fault": fault.what, "file": fault.file, "found_by": by, "seconds": round(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="which of the draw, from 0")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--lane", choices=["all", "emulator", "rest"], default="all")
    parser.add_argument("--first", action="store_true", help="only the test that should find it")
    parser.add_argument("--check", action="store_true", help="only see that every text is there")
    options = parser.parse_args()
    faults = drawn()
    for fault in CANDIDATES:
        text = (ROOT / fault.file).read_text()
        if text.count(fault.old) != 1:
            sys.exit(f"{fault.what}: its text stands {text.count(fault.old)} times in {fault.file}")
    if options.check:
        return
    results = []
    for index in options.numbers or range(len(faults)):
        if options.lane != "all" and needs_emulator(faults[index]) != (options.lane == "emulator"):
            continue
        results.append(run(faults[index], options.first))
        print(f"{index:2d} {results[-1]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    found = sum(result["found_by"] is not None for result in results)
    print(f"{found} of {len(results)} faults found")


if __name__ == "__main__":
    main()
