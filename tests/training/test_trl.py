"""Fifty steps of SFT with LoRA, of DPO and of GRPO have the losses of TRL and PEFT in torch.

TRL's trainers compute the losses, of the same weights and tokens; AdamW's options, the schedule and
clipping are ours. ``pip install trl`` first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.save import save as save_model
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.training import train, train_config_from_dict
from jaxllama.training.adapters import first_adapters, save
from jaxllama.training.batch import Batch
from jaxllama.training.packing import Conversations
from jaxllama.training.policy import Answers, advantages, coefficients
from jaxllama.training.prompts import PromptFile
from jaxllama.training.scores import scores
from jaxllama.training.start import begin
from jaxllama.training.step import init_state, update
from tests.helpers.chat_cases import chat_model
from tests.training import test_finetune, test_rewards
from tests.training.test_finetune import config_of as chat_config
from tests.training.test_preference import pairs_file
from tests.training.test_rewards import config_of as rewards_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # torch's and TRL's own
]
STEPS = 50
PAD = 257


@pytest.fixture(scope="module")
def torch():
    found = pytest.importorskip("torch")
    pytest.importorskip("trl")
    found.set_num_threads(1)
    return found


@dataclasses.dataclass(frozen=True)
class Base:
    """A model, how fast it learns, and by how much its losses fall at least."""

    folder: Path
    cfg: ModelConfig
    length: int  # tokens of a row
    rates: dict[str, float]
    falls: dict[str, float]


@pytest.fixture(params=["tiny", "smollm2"])
def base(request, tmp_path, monkeypatch):
    """The tiny chat model, or SmolLM2-135M from its GGUF file as a directory of float32."""
    if request.param == "tiny":
        folder, cfg = chat_model(tmp_path)
        rates = {"sft": 5e-3, "dpo": 1e-3, "grpo": 2e-4}
        return Base(folder, cfg, 64, rates, {"sft": 2, "dpo": 0.3, "grpo": 0.1})
    try:
        lm = jl.load("smollm2-135m", "float32", exact=True)
    except (OSError, JaxLlamaError) as error:
        pytest.skip(f"no SmolLM2-135M: {error}")
    folder, words = tmp_path / "smollm2", tmp_path / "words"
    words.mkdir()
    save_model(folder, lm.config, lm.params, lm.tokenizer.save(words))
    found = folder, lm.config
    for module in (test_finetune, test_rewards):
        monkeypatch.setattr(module, "chat_model", lambda *_: found)
    rates = {"sft": 1e-3, "dpo": 1e-5, "grpo": 2e-7}
    return Base(*found, 128, rates, {"sft": 1, "dpo": 0.3, "grpo": 0.005})


def options(folder, **more):
    """A trainer's arguments on a CPU; everything but the loss is ours."""
    return {
        "output_dir": str(folder / "trl"),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        **more,
    }


def parts_of(base):
    """(torch's model, its tokenizer)."""
    import transformers

    net = transformers.AutoModelForCausalLM.from_pretrained(base.folder, dtype="float32")
    words = transformers.AutoTokenizer.from_pretrained(base.folder)
    words.pad_token = words.convert_ids_to_tokens(PAD)
    return net, words


def dataset(rows):
    import datasets

    return datasets.Dataset.from_list(rows)


def batches(config):
    rows, _ = Conversations.open(config).split(config.data.held_out)
    for step in range(config.steps):
        yield rows.batch(step, config.batch_size, config.sequence_length, config.seed)


def sequences(batch):
    """(tokens, whether each is an answer's) of every sequence of a Batch."""
    for row in range(len(batch.tokens)):
        for number in range(1, batch.segments[row].max() + 1):
            own = batch.segments[row] == number
            answers = np.concatenate([[0], batch.weights[row]])[own] > 0
            yield batch.tokens[row][own].tolist(), answers.tolist()


def compared(got, want, least):
    assert got[-1] < got[0] - least
    worst = np.max(np.abs(np.array(got) / np.array(want) - 1))
    print(f"largest relative difference of {len(got)} losses: {worst:.1e}")
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_sft_with_lora(torch, base, tmp_path):
    from peft import PeftModel
    from trl import SFTConfig, SFTTrainer

    from tests.helpers.training_torch import rule_of, torch_step

    config = chat_config(tmp_path, steps=STEPS, learning_rate=base.rates["sft"])
    cfg = base.cfg
    save(tmp_path / "first", cfg, config.lora, first_adapters(cfg, config.lora, 0), None)
    net, words = parts_of(base)
    net = PeftModel.from_pretrained(net, tmp_path / "first", is_trainable=True)
    trainer = SFTTrainer(
        net,
        SFTConfig(**options(tmp_path)),
        train_dataset=dataset([{"text": "a"}]),
        processing_class=words,
    )
    rule, want = rule_of(trainer.model, config), []
    for step, batch in enumerate(batches(config)):
        parts = list(sequences(batch))
        longest = max(len(ids) for ids, _ in parts)
        ids = torch.full((len(parts), longest), PAD)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for row, (tokens, answers) in enumerate(parts):
            n = len(tokens)
            ids[row, :n], mask[row, :n] = torch.tensor(tokens), 1
            kept = [token if own else -100 for token, own in zip(tokens, answers, strict=True)]
            labels[row, :n] = torch.tensor(kept)
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        value = trainer.compute_loss(trainer.model, inputs)
        want.append(torch_step(trainer.model, rule, config, step, value))
    got = [row["loss"] for row in train(config, tmp_path / "run").metrics]
    compared(got, want, base.falls["sft"])


def test_dpo(torch, base, tmp_path):
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from tests.helpers.training_torch import rule_of, torch_step

    config = train_config_from_dict(
        {
            "steps": STEPS,
            "batch_size": 2,
            "sequence_length": base.length,
            "learning_rate": base.rates["dpo"],
            "init_from": str(base.folder),
            "optimizer": {"warmup_steps": 5, "weight_decay": 0.01},
            "objective": {"kind": "dpo", "beta": 0.1},
            "data": {"conversations": str(pairs_file(tmp_path, "dpo")), "packing": False},
        },
        "dpo.toml",
    )
    net, words = parts_of(base)
    reference, _ = parts_of(base)
    trainer = DPOTrainer(
        net,
        reference,
        DPOConfig(**options(tmp_path), beta=0.1),
        train_dataset=dataset([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=words,
    )
    rule, want, collate = rule_of(trainer.model, config), [], DataCollatorForPreference(PAD)
    for step, batch in enumerate(batches(config)):
        parts, examples = list(sequences(batch)), []
        for (chosen, own), (rejected, _) in zip(parts[::2], parts[1::2], strict=True):
            n = own.index(True)
            pair = {"chosen_ids": chosen[n:], "rejected_ids": rejected[n:]}
            examples.append({"prompt_ids": chosen[:n], **pair})
        value = trainer._compute_loss(trainer.model, collate(examples), False)
        want.append(torch_step(trainer.model, rule, config, step, value))
    got = [row["loss"] for row in train(config, tmp_path / "run").metrics]
    compared(got, want, base.falls["dpo"])


def given_rollouts(rng, rows=8):
    """Prompts of different lengths with answers of different lengths, rewards, and noise of the
    old log-probabilities, as of an earlier policy."""
    prompts = [rng.integers(0, 256, rng.integers(2, 6)).tolist() for _ in range(rows // 4)]
    answers = [rng.integers(0, 256, rng.integers(2, 9)).tolist() for _ in range(rows)]
    pairs = [(prompts[row // 4], answer) for row, answer in enumerate(answers)]
    return pairs, rng.normal(size=rows).astype(np.float32), rng.normal(0, 0.1, (rows, 64))


def test_grpo_on_given_rollouts(torch, base, tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    from tests.helpers.training_torch import rule_of, torch_step

    goal = {"kind": "grpo", "beta": 0.04, "clip": 0.2}
    # Clipping is a step in the gradient; AdamW makes steps of rounding where gradients vanish.
    slow = {"learning_rate": base.rates["grpo"], "optimizer": {"eps": 1e-6, "weight_decay": 0.0}}
    config = rewards_config(tmp_path, steps=STEPS, objective=goal, **slow)
    setup, params, _ = begin(config, PromptFile.open(config))
    first = jax.tree.map(jnp.copy, params)
    state = init_state(setup, params)
    net, words = parts_of(base)
    arguments = options(tmp_path, per_device_train_batch_size=8, max_completion_length=8)
    trainer = GRPOTrainer(
        net,
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(**arguments, num_generations=4, beta=0.04, epsilon=0.2, loss_type="grpo"),
        train_dataset=dataset([{"prompt": "a"}]),
        processing_class=words,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    rule, got, want = rule_of(trainer.model, config), [], []
    for step in range(STEPS):
        pairs, rewards, noise = given_rollouts(np.random.default_rng(step % 4))
        tokens = np.zeros((8, 65), np.int32)
        own = np.zeros((8, 64), np.float32)
        for row, (prompt, answer) in enumerate(pairs):
            n = len(prompt) + len(answer)
            tokens[row, :n] = prompt + answer
            own[row, len(prompt) - 1 : n - 1] = 1
        reference = scores(setup, first, None, tokens)[0]
        new = scores(setup, state["params"], None, tokens)[0]
        old = (reference + noise).astype(np.float32)
        answers = Answers(*map(jnp.asarray, (own, old, reference, old, rewards)))
        gain = np.asarray(advantages(config.goal, 4, answers))[:, 0]

        ids = torch.full((8, 8), PAD)
        mask, before = torch.zeros_like(ids), torch.full((8, 5), PAD)
        before_mask, theirs = torch.zeros_like(before), torch.zeros(2, 8, 8)
        for row, (prompt, answer) in enumerate(pairs):
            n, m = len(answer), len(prompt)
            ids[row, :n], mask[row, :n] = torch.tensor(answer), 1
            before[row, -m:], before_mask[row, -m:] = torch.tensor(prompt), 1
            for part, values in enumerate((old, reference)):
                theirs[part, row, :n] = torch.tensor(values[row][own[row] > 0])
        inputs = {
            "prompt_ids": before,
            "prompt_mask": before_mask,
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": torch.tensor(gain),
            "old_per_token_logps": theirs[0],
            "ref_per_token_logps": theirs[1],
        }
        value = trainer._compute_loss(trainer.model, inputs)
        want.append(torch_step(trainer.model, rule, config, step, value))

        change, parts = coefficients(config.goal, 4, 0.0, jnp.asarray(new), answers)
        got.append(float(parts["loss"]))
        weights = np.asarray(change) * np.float32(-change.size)
        batch = Batch(tokens.reshape(2, 4, 65), None, weights.reshape(2, 4, 64))
        state, _ = update(setup, state, None, batch)
    compared(got, want, base.falls["grpo"])
