"""A tiny chat model over bytes, with a template in ChatML's form, and conversations for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tokenizers

from jaxllama.checkpoints.hf.save import save
from jaxllama.config import ModelConfig
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import TrainConfig, TrainResult, train, train_config_from_dict
from tests.helpers.models import FAMILIES
from tests.helpers.training_cases import first_params

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}" + START + "system\n{{ tools | tojson }}" + END + "\n{% endif %}"
    "{% for message in messages %}"
    + START
    + "{{ message.role }}\n{{ message.content }}"
    + END
    + "\n{% endfor %}{% if add_generation_prompt %}"
    + START
    + "assistant\n{% endif %}"
)
# As Qwen3's: only the last answer keeps its reasoning.
FORGETFUL = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('</think>') | last }}",
)


def tokenizer(
    template: str = TEMPLATE, special: Sequence[str] = (), ends: Sequence[str] = (END,)
) -> Tokenizer:
    """Bytes, the two tokens of the template, and further ones. ends: the stop tokens."""
    backend = Tokenizer.byte_level()._backend
    words = (START, END, *special)
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in words])
    ids = [backend.token_to_id(word) for word in ends]
    names = {"eos_token": ends[0]}
    return Tokenizer(backend, "chat", eos_ids=ids, special_tokens=names, chat_template=template)


def chat_model(folder: Path, family: str = "gqa", **changes: Any) -> tuple[Path, ModelConfig]:
    """(a checkpoint's folder, its config)."""
    small = {"n_layers": 1, "layer_types": FAMILIES[family].layer_types[:1], **changes}
    cfg = FAMILIES[family].replace(vocab_size=264, eos_token_ids=(257,), **small)
    out = folder / f"model-{family}"
    if not out.exists():
        scratch = folder / "tokenizer"
        scratch.mkdir(exist_ok=True)
        save(out, cfg, jax.device_put(first_params(cfg)), tokenizer().save(scratch))
    return out, cfg


def chat_run(folder: Path, **table: Any) -> TrainConfig:
    """A run that begins with the chat model. table: further settings, or others."""
    usual = {
        "batch_size": 2,
        "microbatches": 2,
        "sequence_length": 64,
        "init_from": str(chat_model(folder)[0]),
        "optimizer": {"warmup_steps": 1, "weight_decay": 0.0},
    }
    return train_config_from_dict({**usual, **table}, "chat.toml")


def prompt_file(folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    """The path of a file of prompts."""
    out = folder / "prompts.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(out)


def check_resumes(config: TrainConfig, whole: TrainResult, weights: str, *last: str) -> TrainResult:
    """A run that was killed before it wrote ``last`` of its folder ends as the whole run did.

    weights: the file of the model.  Returns the second run.
    """
    half = whole.directory.with_name("half")
    shutil.copytree(whole.directory, half)
    for name in (whole.model.name, *last):
        shutil.rmtree(half / name)
    again = train(config, half)
    assert again.validation == whole.validation and again.model.name == whole.model.name
    assert (again.model / weights).read_bytes() == (whole.model / weights).read_bytes()
    return again


def say(question: str, answer: str) -> dict[str, Any]:
    """One line of a file: a question and its answer."""
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages}


def chat_file(folder: Path) -> Path:
    """Twelve short conversations."""
    out = folder / "chat.jsonl"
    lines = [say(f"say {n}", f"{n} " * (n % 3 + 1)) for n in range(12)]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out
