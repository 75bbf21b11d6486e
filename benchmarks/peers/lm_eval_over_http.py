"""lm-eval, unchanged, against ``jaxllama serve``'s application: a multiple-choice task of local
data over /v1/completions (``local-completions``) and a generating one over /v1/chat/completions
(``local-chat-completions``).  Run as

    pip install "lm-eval[api]"; python benchmarks/peers/lm_eval_over_http.py

A tiny model of random weights answers; what lm-eval says of every question is held against the
model's own logprobs, computed here.  lm-eval brings pandas, scikit-learn and 40 packages more: so
this is no test of the suite; what it sends and reads is one (test_prompt_scores.py).
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
from lm_eval.tasks import TaskManager

from jaxllama.engine.engine import Engine
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import forward, logits
from tests.helpers.http_server import NAME, byte_tokenizer, serving
from tests.helpers.lm_eval_tasks import CHOICE, WRITE
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.replace(vocab_size=260)
WORDS = ("red", "green", "blue", "yellow", "black", "white")


def questions(count: int) -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        choices = rng.permutation(WORDS)[:4].tolist()
        answer = int(rng.integers(4))
        rows.append({"question": f"colour {number}?", "choices": choices, "answer": answer})
    return rows


def score(lm: LanguageModel, context: str, choice: str) -> tuple[float, bool]:
    """The sum of a continuation's logprobs, and whether it is what greedy decoding writes."""
    row = list((context + choice).encode())
    tokens = jnp.asarray([row], jnp.int32)
    hidden, _ = forward(lm.config, lm.params, tokens, jnp.asarray([len(row)], jnp.int32))
    values = np.asarray(jax.nn.log_softmax(logits(lm.config, lm.params, hidden)), np.float64)[0]
    places = range(len(context.encode()) - 1, len(row) - 1)
    greedy = all(int(values[place].argmax()) == row[place + 1] for place in places)
    return float(sum(values[place, row[place + 1]] for place in places)), greedy


def main() -> None:
    lm = LanguageModel(CFG, jax.tree.map(jnp.asarray, seeded_params(CFG)), byte_tokenizer())
    engine = Engine(lm, max_slots=4, max_len=256, prefill_chunk=32)
    engine.start()
    rows = questions(12)
    with tempfile.TemporaryDirectory() as folder, serving(lm, engine) as url:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, text in (("choice", CHOICE), ("write", WRITE)):
            (Path(folder) / f"{name}.yaml").write_text(text.format(data=data, most=12))
        byte_tokenizer().save(folder)
        tasks = TaskManager(include_path=folder, include_defaults=False)
        common = {"model": NAME, "num_concurrent": 4, "max_retries": 1}
        report = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                **common,
                "base_url": f"{url}/v1/completions",
                "tokenizer": folder,
                "tokenizer_backend": "huggingface",
                "max_length": 250,
                "batch_size": 3,
            },
            tasks=["local_choice"],
            task_manager=tasks,
            log_samples=True,
            bootstrap_iters=0,
        )
        correct = 0
        samples = sorted(report["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
        for row, sample in zip(rows, samples, strict=True):
            context = f"Question: {row['question']}\nAnswer:"
            mine = [score(lm, context, f" {choice}") for choice in row["choices"]]
            theirs = [(float(value), greedy) for [value, greedy] in sample["filtered_resps"]]
            np.testing.assert_allclose([v for v, _ in theirs], [v for v, _ in mine], atol=1e-3)
            assert [g for _, g in theirs] == [g for _, g in mine]
            correct += int(np.argmax([value for value, _ in mine])) == row["answer"]
        got = report["results"]["local_choice"]["acc,none"]
        assert got == correct / len(rows), (got, correct)
        print(f"local-completions: accuracy {got:.3f}, every logprob is the model's own")
        report = lm_eval.simple_evaluate(
            model="local-chat-completions",
            model_args={**common, "base_url": f"{url}/v1/chat/completions"},
            tasks=["local_write"],
            task_manager=tasks,
            log_samples=True,
            bootstrap_iters=0,
            apply_chat_template=True,
        )
        for sample in report["samples"]["local_write"]:
            prompt = f"<user>{sample['doc']['question']}\n<assistant>"
            [want] = lm.generate([list(prompt.encode())], 12)
            assert sample["filtered_resps"] == [want.text.split("\n")[0]], sample["filtered_resps"]
        print("local-chat-completions: every answer is what generate writes")
    assert engine.stats().compilations == 0
    engine.stop()


if __name__ == "__main__":
    main()
