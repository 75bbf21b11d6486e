"""Answers of the model during training, one line of samples.jsonl a question."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from jaxllama.language_model import LanguageModel
from jaxllama.model import lora
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import adapters
from jaxllama.training.run_directory import SAMPLES
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import Params


def model_of(
    setup: TrainingSetup, params: Params, fixed: Params | None, tokenizer: Tokenizer
) -> LanguageModel:
    """Return the model as it stands, with its adapters under the name "run".

    params, fixed: per layer.
    """
    config = setup.config
    if config.lora is None:
        floats = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
        return LanguageModel(setup.model, floats, tokenizer, exact=True)
    assert fixed is not None
    factors = adapters.factors(setup.model, config.lora, params)
    whole = lora.attach(setup.model, fixed, [factors])
    return LanguageModel(setup.model, whole, tokenizer, adapters=("run",), exact=True)


def write(directory: Path, setup: TrainingSetup, lm: LanguageModel, step: int) -> list[str]:
    """Append the answers after ``step`` steps to the run's file, and return them."""
    samples = setup.config.samples
    assert samples is not None and lm.tokenizer is not None
    rows = [
        lm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        if lm.tokenizer.chat_template is not None
        else lm.tokenizer.encode(prompt)
        for prompt in samples.prompts
    ]
    adapter = "run" if lm.adapters else None
    found = lm.generate(rows, samples.max_new_tokens, adapter=adapter)
    with open(directory / SAMPLES, "a", encoding="utf-8") as file:
        for prompt, answer in zip(samples.prompts, found, strict=True):
            line = {"step": step, "prompt": prompt, "answer": answer.text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return [answer.text for answer in found]
