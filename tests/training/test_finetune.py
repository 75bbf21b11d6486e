"""Fine-tuning on conversations: adapters beside frozen weights, what a run leaves, resuming."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints import peft
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.cli.train import summary
from jaxllama.errors import JaxLlamaError
from jaxllama.model.linear import linear
from jaxllama.model.lora import TrainedLora, attach, for_rows
from jaxllama.training import train
from jaxllama.training.adapters import factors, first_adapters, joined, save, with_magnitudes
from jaxllama.training.loop import TrainResult
from jaxllama.training.packing import Conversations
from jaxllama.training.tuning import LoraConfig
from tests.helpers.chat_cases import chat_file, chat_model, chat_run, check_resumes
from tests.helpers.models import relative_error
from tests.helpers.parity_cases import CASES as PARITY
from tests.helpers.seeded import seeded_params

WEIGHTS = "adapter_model.safetensors"


def config_of(folder, **changes):
    table = {
        "steps": 6,
        "learning_rate": 0.02,
        "lora": {"rank": 4, "alpha": 8.0},
        "data": {"conversations": str(chat_file(folder)), "validation_conversations": 2},
    }
    return chat_run(folder, **table | changes)


def some_adapters(cfg, lora, seed=1, base=None):
    """Adapters whose b is not zero any more."""
    rng = np.random.default_rng(seed)
    draw = lambda leaf: leaf + rng.normal(size=leaf.shape).astype(np.float32) * 0.1  # noqa: E731
    return jax.tree.map(draw, begun(cfg, lora, base))


def begun(cfg, lora, base):
    """The adapters before the first step."""
    first = first_adapters(cfg, lora, 0)
    return with_magnitudes(cfg, lora, first, base) if lora.dora else first


@pytest.mark.parametrize(
    ("family", "dora"),
    [("granite", False), ("phi3", False), pytest.param("granite", True, marks=pytest.mark.slow)],
)
def test_what_is_trained_is_what_is_saved_and_served(family, dora, tmp_path):
    """Multipliers, orders of rows and fused tensors: the trained model, and PEFT's folder read
    again, give the same weights."""
    cfg = PARITY[family]
    lora = LoraConfig(rank=3, alpha=6.0, dora=dora)
    base = seeded_params(cfg)
    trained = some_adapters(cfg, lora, base=base)
    save(tmp_path / "adapter", cfg, lora, trained, "base")
    read = peft.read(tmp_path / "adapter", cfg)
    for name, (a, *others) in factors(cfg, lora, trained).items():
        np.testing.assert_array_equal(read[name][0], a)
        assert len(others) == 1 + dora
        for one, b in zip(read[name][1:], others, strict=True):
            np.testing.assert_allclose(one, b, rtol=1e-6)
    served = attach(tensor_table(cfg), base, [read])
    got = joined(cfg, lora, base, trained, 2, jnp.dtype("float32"))
    got, want = (
        {(*path,): node for path, node in _loras(tree)}
        for tree in (got, for_rows(served, np.ones(2, np.int32)))
    )
    assert got.keys() == want.keys()
    for path, lora_of in got.items():
        np.testing.assert_allclose(lora_of.a, want[path].a, rtol=1e-6)
        for ours, theirs in zip(lora_of.b, want[path].b, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert (lora_of.gain is not None) == dora
        if dora:
            np.testing.assert_allclose(lora_of.gain, want[path].gain, rtol=1e-5)


def test_a_bfloat16_step_makes_no_float32_copy_of_a_product_with_an_adapter():
    """Copies as wide as a layer's result took longer than the products of the adapters."""
    shapes = {"x": (2, 8, 64), "a": (1, 2, 3, 64), "b": (48, 3), "w": (96, 64), "dy": (2, 8, 96)}
    some = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def gradients(x, a, b, w, dy):
        def product(x, a, b):
            lora = TrainedLora(a, (b, b), jnp.ones(2, jnp.int32))
            return linear(x, {"weight": w, "lora": lora})

        y, pull = jax.vjp(product, x, a, b)
        return y, pull(dy)

    program = str(jax.make_jaxpr(gradients)(**some))
    assert "bf16[2,8,96]" in program and "bf16[96,6]" in program
    assert not re.findall(r"f32\[(?:\d+,)*96\]", program.replace("bf16", "half"))


def _loras(tree, path=()):
    for key, node in tree.items():
        if key == "lora":
            yield path, node
        elif isinstance(node, dict):
            yield from _loras(node, (*path, key))


def test_targets(tmp_path):
    cfg = PARITY["granite"]
    lora = LoraConfig(rank=2, targets=("q_proj", "down_proj"))
    tree = first_adapters(cfg, lora, 0)["layer_0"]
    assert tree["mixer"]["qkv"].keys() == {"q_proj"}
    assert tree["mlp"]["down"].keys() == {"down_proj"}
    with pytest.raises(JaxLlamaError, match=r"'w_q' is no product of .*q_proj, k_proj"):
        first_adapters(cfg, LoraConfig(rank=2, targets=("w_q",)), 0)


@pytest.mark.core
def test_a_run_of_adapters_learns_and_resumes_to_the_bit(folder):
    """Packed conversations over a 4-bit base, killed after step 3."""
    config = config_of(
        folder,
        validate_every=3,
        checkpoint_every=3,
        keep_checkpoints=2,
        keep_best=True,
        lora={"rank": 4, "alpha": 8.0, "base": "w4a16-g16"},
    )
    whole = train(config, folder / "whole")
    losses = [row["loss"] for row in whole.metrics]
    assert losses[-1] < losses[0] - 0.5
    assert [row["step"] for row in whole.validation] == [3, 6]
    again = check_resumes(config, whole, WEIGHTS, "checkpoints/6", "best")
    assert [row["loss"] for row in again.metrics] == losses
    assert again.model.name == "adapter"


def test_the_command_reports_the_loss_of_the_model_that_is_written():
    steps = [
        {"step": i, "tokens": i, "loss": 1.0, "tokens_per_second": 1.0, "mfu": None} for i in (1, 2)
    ]
    held = [{"step": 1, "validation_loss": 2.0}, {"step": 2, "validation_loss": 3.0}]
    result = TrainResult(Path("run"), steps, held, Path("run/adapter"))
    last, best = summary(result), summary(result, keep_best=True)
    assert last["validation_loss"] == 3.0 and "best_step" not in last
    assert (best["validation_loss"], best["best_step"]) == (2.0, 1)


@pytest.mark.slow
def test_samples_and_the_served_adapter(folder):
    """The adapter in the engine's form answers as the training model does; merged, too."""
    config = config_of(
        folder,
        steps=12,
        validate_every=6,
        samples={"prompts": ["say 1"], "max_new_tokens": 6},
        lora={"rank": 4, "alpha": 8.0, "merge": True},
    )
    run = train(config, folder / "samples")
    lines = [
        json.loads(line) for line in (folder / "samples/samples.jsonl").read_text().split("\n")[:-1]
    ]
    assert [line["step"] for line in lines] == [0, 6, 12]
    assert lines[0]["answer"] != lines[-1]["answer"]
    lm = jl.load(config.init_from, adapters={"x": run.model})
    prompt = lm.tokenizer.encode_chat([{"role": "user", "content": "say 1"}])
    (answer,) = lm.generate([prompt], 6, adapter="x")
    (merged,) = jl.load(folder / "samples/merged").generate([prompt], 6)
    assert answer.text == merged.text == lines[-1]["answer"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("dora", [False, True])
def test_fifty_steps_are_those_of_peft_in_torch(dora, tmp_path):
    """Same weights, tokens, schedule and clipping; packed here, a row each in torch."""
    folder = tmp_path
    torch = pytest.importorskip("torch")
    transformers, peft_library = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from tests.helpers.training_torch import rule_of, torch_step

    torch.set_num_threads(1)  # tiny products; threads wait for one another
    table = {"rank": 4, "alpha": 8.0, "dora": dora}
    config = config_of(folder, steps=50, learning_rate=5e-3, lora=table, scan=dora)
    model, cfg = chat_model(folder)
    base = jl.load(str(model), "float32", exact=True).params
    save(folder / "first", cfg, config.lora, begun(cfg, config.lora, base), None)
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net = peft_library.PeftModel.from_pretrained(net, folder / "first", is_trainable=True)
    rule = rule_of(net, config)
    rows, _ = Conversations.open(config).split(config.data.held_out)
    want = []
    for step in range(config.steps):
        batch = rows.batch(step, config.batch_size, config.sequence_length, config.seed)
        total, count = 0.0, 0
        for tokens, segments, weights in zip(*batch[:3], strict=True):
            for number in range(1, segments.max() + 1):
                own = segments == number
                ids = torch.tensor(tokens[own], dtype=torch.int64)[None]
                mask = torch.tensor(weights[own[1:]][-(int(own.sum()) - 1) :] > 0)
                logp = torch.log_softmax(net(ids).logits[0, :-1], -1)
                total = total - logp[torch.arange(len(mask)), ids[0, 1:]][mask].sum()
                count += int(mask.sum())
        want.append(torch_step(net, rule, config, step, total / count))
    result = train(config, folder / "torch")
    got = [row["loss"] for row in result.metrics]
    assert got[-1] < got[0] - 2
    np.testing.assert_allclose(got, want, rtol=1e-3)
    # Served, merged, and read by peft, the adapter is the one that was trained.
    ids = [list(range(40, 60))]
    with torch.no_grad():
        theirs = net(torch.tensor(ids)).logits[0].numpy()
    lengths = np.array([20], np.int32)
    lm = jl.load(str(model), "float32", exact=True, adapters={"x": result.model})
    merged = jl.load(str(model), "float32", exact=True, adapters={"x": result.model}, merge=True)
    params = for_rows(lm.params, np.ones(1, np.int32))
    served, whole = (
        jl.logits(cfg, tree, np.array(ids, np.int32), lengths)[0]
        for tree in (params, merged.params)
    )
    assert relative_error(served, whole) < 1e-5
    assert relative_error(served, theirs) < 2e-3
