"""``jaxllama bench --draft``: measure a draft's gain on 60 prompts of three kinds.

    run(lm, draft, draft_tokens, ...) -> report (a dict)        table(report) -> text

The prompts (configs/texts/drafts.jsonl) ask to edit a text, to copy a sentence from one, and to
continue code. Each is decoded greedily, in one row, until it ends or has ``new_tokens``, without
and with the draft in turns. The prefill does not count. ``accepted_per_pass`` is the number of
drafted tokens that each pass over the model accepted, in addition to its own token.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import configs_dir
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed.harness import timed
from jaxllama.executors.executor import Call
from jaxllama.language_model import LanguageModel
from jaxllama.model.eagle3 import Drafter
from jaxllama.progress import Working
from jaxllama.text.rows import check_rows, pad_rows, shapes_of
from jaxllama.typing import JsonObject


def run(
    lm: LanguageModel,
    draft: str | LanguageModel | Drafter,
    draft_tokens: int = 0,
    *,
    new_tokens: int = 64,
    runs: int = 1,
    kv_dtype: str | None = None,
    chunk: int | None = None,
    prompts: int | None = None,
    sign: Working | None = None,
) -> JsonObject:
    """Measure a draft. runs: number of runs of each prompt, whose median counts. prompts: number
    of prompts of a kind, by default all 20.

    Raises JaxLlamaError for a model without a tokenizer, or an unsuitable draft.
    """
    if lm.tokenizer is None:
        raise JaxLlamaError(f"{lm.config.name} has no tokenizer, and the prompts are text")
    drafting, sign = lm.drafting(draft, draft_tokens), sign or Working()
    assert drafting is not None
    path = configs_dir() / "texts" / "drafts.jsonl"
    given = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [lm.tokenizer.encode(prompt["prompt"]) for prompt in given]
    check_rows(lm.config, lm.tokenizer, rows, new_tokens, ())
    width, capacity, room = shapes_of(rows, new_tokens)
    sampling = SamplingParams.stack([Sampling()], lm.config.vocab_size)
    stop_ids = jnp.asarray(lm.config.eos_token_ids, jnp.int32)
    dtype, width_of_chunk = lm.executor.cache_options(lm.config, kv_dtype, chunk, lm.dtype)

    def decoded(row: list[int], drafts: bool) -> np.ndarray:
        """Return (tokens after the first, seconds, drafted, accepted)."""
        tokens, lengths = pad_rows([row], width)
        call = Call(
            tokens,
            lengths,
            sampling,
            stop_ids,
            capacity,
            room,
            limit=new_tokens,
            kv_dtype=dtype,
            chunk=width_of_chunk,
            drafting=drafting if drafts else None,
        )
        rows = lm.executor.begin(lm.config, lm.params, call)
        jax.block_until_ready(rows.report)
        report, seconds = timed(rows.advance, new_tokens)
        report = jax.device_get(report)
        return np.array([int(report.counts[0]) - 1, seconds, *report.drafts[:, 0]])

    sign.note("compiling the decode loops")
    for drafts in (False, True):
        decoded(rows[0], drafts)
    kinds: JsonObject = {}
    for kind in dict.fromkeys(prompt["kind"] for prompt in given):
        sums = np.zeros((2, 4))
        kind_rows = [row for row, prompt in zip(rows, given, strict=True) if prompt["kind"] == kind]
        for row in kind_rows[:prompts]:
            rounds = [[decoded(row, drafts) for drafts in (False, True)] for _ in range(runs)]
            sums += np.median(rounds, axis=0)
        (plain_tokens, plain, _, _), (tokens, seconds, drafted, accepted) = sums
        kinds[kind] = {
            "plain_tokens_per_second": plain_tokens / plain,
            "tokens_per_second": tokens / seconds,
            "speedup": (tokens / seconds) / (plain_tokens / plain),
            "accepted_per_pass": accepted / max(tokens - accepted, 1),
            "accepted_share": accepted / max(drafted, 1),
            "tokens": int(tokens),
        }
        sign.say(f"{kind:12} {kinds[kind]['tokens_per_second']:.1f} tokens/s")
    return {
        "draft": draft if isinstance(draft, str) else draft.config.name,
        "draft_layers": None if isinstance(draft, str) else draft.config.n_layers,
        "draft_tokens": draft_tokens,
        "dtype": lm.dtype.name,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "new_tokens": new_tokens,
        "runs": runs,
        "kinds": kinds,
    }


def table(report: JsonObject) -> str:
    """Return the report as text."""
    layers = report["draft_layers"]
    draft = report["draft"] + ("" if layers is None else f" ({layers} layers)")
    count = report["draft_tokens"] or "as many tokens as pay"
    lines = [
        f"{report['model']} ({report['dtype']}) on {report['device']}, draft {draft}, {count}",
        f"{'':12} {'plain':>10} {'draft':>10} {'speedup':>8}  accepted a pass, of drafted",
    ]
    for kind, of in report["kinds"].items():
        lines.append(
            f"{kind:12} {of['plain_tokens_per_second']:>10.1f} {of['tokens_per_second']:>10.1f} "
            f"{of['speedup']:>8.2f}  {of['accepted_per_pass']:.2f}, {of['accepted_share']:.0%}"
        )
    return "\n".join(lines)
