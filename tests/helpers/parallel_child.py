"""Run by test_parallel in a process of its own, with 8 devices where the tests have one.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python -m tests.helpers.parallel_child NAME ...

One JSON line per result.
A model and the same model on a mesh, both through ``start`` and the compiled loop; what is compared
is printed, and judged by the test.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import compiler_options, generation
from jaxllama.config import DeltaConfig, ExpertsConfig, GLAConfig, LatentConfig, ModelConfig
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.perplexity import perplexity
from jaxllama.evaluation.speed.hlo import computations
from jaxllama.executors import prompts, resident
from jaxllama.loading import load
from jaxllama.model.cache import init_cache
from jaxllama.model.shardings import fetch, gather_params, shard_params
from jaxllama.parallel import mesh as parallel
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import random_params
from jaxllama.training import fsdp, loop, train
from jaxllama.training.config import TrainConfig
from jaxllama.training.loop import TrainResult
from jaxllama.training.passes import placed, sharding
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import init_state, update
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.helpers.models import GEMMA4, LLAMA, params_of, tokens_of
from tests.helpers.training_cases import (
    TEXT,
    byte_model,
    first_params,
    rows_of,
    run_config,
    token_file,
)

jax.config.update("jax_numpy_dtype_promotion", "strict")

# 8 heads, so that 8 shards have one each; a vocabulary (97) that no mesh divides.
WIDE = LLAMA.replace(
    d_model=64, n_layers=1, n_heads=8, n_kv_heads=2, d_ff=128, layer_types=("attention",)
)
GLA = GLAConfig(n_heads=8, n_kv_heads=2, expand_k=0.5, expand_v=1.0, use_short_conv=True)
FAMILIES = {
    "gqa": WIDE,
    "mha-tied-bias": WIDE.replace(n_kv_heads=8, tie_embeddings=True, qkv_bias=True, o_bias=True),
    "mqa-window": WIDE.replace(n_kv_heads=1, sliding_window=7, mlp_bias=True),
    "llama3-rope-even": WIDE.replace(
        vocab_size=128,
        rope=dataclasses.replace(WIDE.rope, scaling="llama3", factor=8.0, original_max_position=16),
    ),
    "gla": WIDE.replace(layer_types=("gla",), gla=GLA),
    "gla-variant": WIDE.replace(
        layer_types=("gla",),
        gla=dataclasses.replace(
            GLA,
            decay="head",
            feature_map="elu",
            normalizer=True,
            output_norm="layer",
            norm_weight=False,
            gate_bias=True,
        ),
    ),
    "delta": WIDE.replace(
        n_layers=2,
        layer_types=("delta", "attention"),
        attn_gate=True,
        qk_norm="head",
        delta=DeltaConfig(n_heads=16, n_k_heads=8, d_k=8, d_v=8, norm_eps=1e-5),
    ),
    "kda": WIDE.replace(
        layer_types=("delta",),
        delta=DeltaConfig(
            8,
            8,
            8,
            8,
            1e-5,
            decay="channel",
            gate="low_rank",
            gate_bias=True,
            gate_activation="sigmoid",
        ),
    ),
    "qwen3.5": WIDE.replace(
        n_layers=4,
        layer_types=("delta", "delta", "delta", "attention"),
        rope=dataclasses.replace(WIDE.rope, rotary_dim=4),
        attn_gate=True,
        qk_norm="head",
        delta=DeltaConfig(n_heads=16, n_k_heads=8, d_k=8, d_v=8, norm_eps=1e-5),
    ),
    "latent": WIDE.replace(
        layer_types=("latent",) * WIDE.n_layers,
        n_kv_heads=8,
        latent=LatentConfig(kv_rank=12, d_nope=6, d_rope=2, d_v=6, q_rank=16),
        rope=dataclasses.replace(WIDE.rope, rotary_dim=2),
    ),
    "gemma4": GEMMA4.replace(d_model=64, n_heads=8, d_ff=128, shared_kv_d_ff=256),
    "short-conv": WIDE.replace(
        n_layers=2, layer_types=("short_conv", "attention"), mixers={"short_conv": {"width": 64}}
    ),
    "experts": WIDE.replace(
        experts=ExpertsConfig(8, 2, 32, shared=64, shared_gate=True, bias=True)
    ),
    "experts-ungated": WIDE.replace(
        n_layers=2,
        activation="relu2",
        gated_mlp=False,
        experts=ExpertsConfig(8, 2, 32, scores="sigmoid", choice_bias=True, shared=64),
    ),
    "side-by-side": WIDE.replace(
        n_layers=2,
        layer_types=("attention", "ssm"),
        bare_layers=(0,),
        beside_layers=(1,),
        mixers={"ssm": {"n_heads": 16, "head_dim": 4, "state": 8, "n_groups": 8}},
    ),
    "hybrid": WIDE.replace(n_layers=2, layer_types=("gla", "attention"), gla=GLA),
}
MESHES = ("1x2", "2x2", "1x4", "1x8", "2x4")
MIXED = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.8, top_k=20, min_p=0.01, seed=1),
    Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.2, logit_bias={5: 2.0}, seed=5),
]
NEW = 8


def mesh_of_name(name: str):
    data, model = name.split("x")
    return parallel.make_mesh(f"data={data},model={model}")


def decode(cfg, params, mesh, dtype, sampling, kv_dtype=None):
    """(tokens, logprobs, text of the compiled loop)."""
    tokens, lengths = tokens_of(cfg, 4, 9), jnp.asarray([9, 4, 7, 1], jnp.int32)
    cache = init_cache(cfg, 4, 9 + NEW, kv_dtype or dtype, mesh=mesh)
    stacked = SamplingParams.stack(sampling, cfg.vocab_size, 0)
    stop_ids = jnp.zeros((0,), jnp.int32)
    state = prompts.start(
        cfg,
        params,
        prompts.PromptBatch(tokens, lengths, stacked, stop_ids),
        cache.layers,
        cache.lengths,
        max_new_tokens=NEW,
    )
    arguments = (params, state, stacked, stop_ids, np.int32(NEW))
    if any(leaf.dtype == jnp.int4 for leaf in jax.tree.leaves((params, state))):
        # jax's compiled functions do not take int4 arrays on several CPU devices; jit does.
        (state, _), text = resident.advance(cfg, *arguments), None
    else:
        loop = resident.advance.lower(cfg, *arguments).compile()
        (state, _), text = loop(*arguments), loop.as_text()
    return *fetch((state.tokens, state.logprobs)), text


def collectives(text: str) -> dict[str, list[str]]:
    """The shapes of every collective of a compiled program, by kind."""
    found = collections.defaultdict(list)
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    for step in itertools.chain.from_iterable(computations(text)[0].values()):
        if (kind := step.opcode.removesuffix("-start")) in kinds:
            found[kind].append(re.sub(r"\{[\d,]*\}", "", step.type))
    return dict(found)


def share(params) -> tuple[float, list[str]]:
    """The fullest device's part of the bytes that are split, and whose others every device has."""
    held, total, whole = collections.Counter(), 0, set()
    for path, leaf in jax.tree.leaves_with_path(params):
        if leaf.is_fully_replicated:
            whole.add([key.key for key in path if hasattr(key, "key")][-2])
            continue
        total += leaf.nbytes
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return max(held.values()) / total, sorted(whole)


def compare(family: str, scheme: str, meshes, sampled: bool, kv_dtype=None) -> None:
    cfg = FAMILIES[family]
    dtype = "bfloat16" if scheme == "bfloat16" else "float32"
    params = params_of(cfg, dtype=dtype)
    if scheme not in ("bfloat16", "float32"):
        params = quantize_params(params, scheme)
    sampling = MIXED if sampled else [Sampling()] * 4
    want = decode(cfg, params, None, dtype, sampling, kv_dtype)
    held = jax.device_get(params)  # numpy reorders rows without a program for each shape
    for name in meshes:
        mesh = mesh_of_name(name)
        config, on_mesh = shard_params(cfg, held, mesh)
        got = decode(config, on_mesh, mesh, dtype, sampling, kv_dtype)
        report(
            case=f"{family}-{scheme}-{name}",
            same=bool(np.array_equal(want[0], got[0])),
            distinct=len(np.unique(got[0])),
            logprob=float(np.max(np.abs(want[1] - got[1]))),
            layers=cfg.n_layers - len(cfg.beside_layers),  # XLA joins the sums of a pair
            collectives=None if got[2] is None else collectives(got[2]),
            share=share(on_mesh),
        )


def packed() -> None:
    """Logits with weights as packed checkpoints have them: column orders, zero points, blocks."""
    cfg = FAMILIES["gqa"]
    params = quantize_params(params_of(cfg), "w4a16-g32-zero")
    rng = np.random.default_rng(0)
    layer = params["layer_0"]
    for mixer, leaf in (("mixer", "o"), ("mlp", "down"), ("mlp", "gate_up")):
        weight = layer[mixer][leaf]["weight"]
        columns = jnp.asarray(rng.permutation(weight.shape[1]), jnp.int32)
        layer[mixer][leaf]["weight"] = dataclasses.replace(weight, columns=columns)
    weight = layer["mixer"]["qkv"]["weight"]
    q, k, v = (weight.rows(slice(*rows)) for rows in ((0, 64), (64, 80), (80, 96)))
    blocks = RowBlocks((q, jnp.asarray(rng.normal(size=k.shape), jnp.float32), v))
    layer["mixer"]["qkv"]["weight"] = blocks
    tokens, lengths = tokens_of(cfg, 2, 9), jnp.asarray([9, 4], jnp.int32)
    want = np.asarray(generation.logits(cfg, params, tokens, lengths))
    config, on_mesh = shard_params(cfg, params, mesh_of_name("2x4"))
    got = np.asarray(generation.logits(config, on_mesh, tokens, lengths))
    back = gather_params(cfg, on_mesh, 4)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), _floats(params), _floats(back))
    report(
        case="packed",
        error=float(np.max(np.abs(want - got)) / np.max(np.abs(want))),
        same=all(jax.tree.leaves(same)),
    )


def one_row() -> None:
    """The collectives of the loop of one row, whose vocabulary has even shares."""
    cfg, mesh = FAMILIES["llama3-rope-even"], mesh_of_name("1x8")
    config, params = shard_params(cfg, params_of(cfg), mesh)
    stacked, stop_ids = SamplingParams.stack([Sampling()], cfg.vocab_size), jnp.zeros(0, jnp.int32)
    cache = init_cache(config, 1, 9 + NEW, "float32", mesh=mesh)
    state = prompts.start(
        config,
        params,
        prompts.PromptBatch(tokens_of(cfg, 1, 9), jnp.asarray([9], jnp.int32), stacked, stop_ids),
        cache.layers,
        cache.lengths,
        max_new_tokens=NEW,
    )
    loop = resident.advance.lower(config, params, state, stacked, stop_ids, np.int32(NEW))
    options = [{}, {"xla_gpu_no_such_option": True}]
    report(
        case="one-row",
        collectives=collectives(loop.compile().as_text()),
        is_default=resident.loop_for(config, params) is resident.advance,
        adds_up=[compiler_options._adds_up(mesh, option) for option in options],
    )


def random() -> None:
    """Weights drawn on a mesh, each device its part, beside one device's, cut."""
    cfg, key, mesh = FAMILIES["gqa"], jax.random.key(0), mesh_of_name("2x2")
    got = random_params(cfg, key, jnp.float32, "w4a16", mesh=mesh)
    _, want = shard_params(cfg, jax.device_get(random_params(cfg, key, jnp.float32, "w4a16")), mesh)
    worst = 0.0
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        worst = max(worst, float(np.max(np.abs(a - b))))
    report(case="random", worst=worst)


def _floats(params):
    from pallas_kernels.qtensor import dequantize

    def one(leaf):
        return dequantize(jax.tree.map(jnp.asarray, leaf)) if isinstance(leaf, QTensor) else leaf

    return jax.tree.map(one, params, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def gradients() -> None:
    """d loss / d params through a mesh, and of rows that training splits over one."""
    cfg = FAMILIES["gqa"].replace(n_kv_heads=8)
    params = params_of(cfg)
    tokens, lengths = tokens_of(cfg, 4, 9), jnp.full((4,), 9, jnp.int32)

    def loss(params, tokens):
        scores = generation.logits(cfg, params, tokens, lengths[: tokens.shape[0]])
        logs = jax.nn.log_softmax(scores[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=2))

    gradient = jax.value_and_grad(loss)
    want = jax.device_get(jax.jit(gradient)(params, tokens))
    setup = SimpleNamespace(model=cfg, config=SimpleNamespace(fsdp=False))
    on_rows = fsdp.mean_on_rows(setup, lambda params, fixed, rows: gradient(params, rows))

    def split(params, tokens):
        return on_rows(params, None, tokens)

    for name, function in (("2x4", gradient), ("4x1", split)):
        mesh = mesh_of_name(name)
        _, on_mesh = shard_params(cfg, params, mesh)
        value, grads = jax.jit(function)(on_mesh, tokens)
        grads = gather_params(cfg, grads, mesh.shape["model"])
        off = jax.tree.map(
            lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(a))), want[1], grads
        )
        report(
            case=f"gradients-{name}",
            loss=abs(float(want[0]) - float(value)),
            worst=max(jax.tree.leaves(off)),
        )


def divided() -> None:
    """Steps on one device and on four that share the weights, and the share of a device."""
    for name, family, more in (
        ("whole layers", "gqa", {"scan": True}),
        ("inputs", "hybrid", {"scan": True, "remat": True}),
        ("fp8", "gla", {"products": "fp8"}),
    ):
        model = byte_model(family, **({"d_model": 128, "d_ff": 128} if name == "fp8" else {}))
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(
                Path(folder), model, batch_size=16, microbatches=2, fsdp=True, **more
            )
        setup = TrainingSetup(config, model)
        tokens = rows_of(model, 16, 25).reshape(2, 8, 25)
        curves, shares = [], []
        for grid in (None, parallel.make_mesh("data=4")):
            state = init_state(setup, first_params(model))
            state = jax.device_put(state, placed(setup, state, grid))
            batch = jax.device_put(tokens, sharding(grid, 1))
            curve = []
            for _ in range(4):
                state, metrics = update(setup, state, None, batch)
                curve.append([float(metrics["loss"]), float(metrics["grad_norm"])])
            curves.append(curve)
            shares.append(sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)))
        off = np.max(np.abs(np.divide(*curves) - 1), axis=0).tolist()
        report(case=name, off=off, share=shares[1] / shares[0])


def training(
    model: ModelConfig,
    runs: dict[str, list[str | None]],
    is_scored: bool = False,
    fsdp: bool = False,
) -> None:
    """The curves of one run by its name, on the meshes that it has one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        tokens = str(token_file(room))
        config = run_config(
            room,
            model,
            batch_size=16,
            microbatches=2,
            checkpoint_every=4,
            fsdp=fsdp,
            data={"tokens": tokens, "validation_tokens": 25 * 10},
        )
        results = {name: resumed(config, room / name, meshes) for name, meshes in runs.items()}
        *_, result = results.values()
        scores = [
            perplexity(load(result.model, mesh=mesh), TEXT[:300], window=64)["nll"]
            for mesh in ((None, "data=2,model=2") if is_scored else ())
        ]
        refused(
            config,
            room,
            {
                "data=3": "does not divide the 8 rows of a microbatch",
                "data=2,model=2": "takes data=N and stage=N only",
                "data=16": "needs 16 devices",
            },
        )
    curves = {name: curves_of(result) for name, result in results.items()}
    off = distances(curves)
    fell = curves["one"][0][-1] / curves["one"][0][0]
    same = curves.get("again") == curves.get("data=4")
    report(case="training", off=off, fell=fell, same=same, scores=scores)


def resumed(config: TrainConfig, path: Path, meshes: list[str | None]) -> TrainResult:
    """A run that is interrupted on each mesh but the last."""
    for mesh in meshes[:-1]:
        with contextlib.suppress(InterruptedError), interrupted_at(7):
            train(config, path, mesh=mesh)
        assert not (path / "model").exists()
    return train(config, path, mesh=meshes[-1])


def curves_of(result: TrainResult) -> list[list[float]]:
    """Loss, norm of the gradient and held-out loss of a run."""
    curves = [[row[key] for row in result.metrics] for key in ("loss", "grad_norm")]
    return [*curves, [row["validation_loss"] for row in result.validation]]


def distances(curves: dict[str, list[list[float]]]) -> dict[str, float]:
    """The largest relative difference of each run's curves from those of the run "one"."""
    return {
        name: max(
            float(np.max(np.abs(np.divide(a, b) - 1)))
            for a, b in zip(curve, curves["one"], strict=True)
        )
        for name, curve in curves.items()
    }


def refused(config: TrainConfig, room: Path, meshes: dict[str, str]) -> None:
    """Training on each mesh is refused with its words."""
    for mesh, words in meshes.items():
        try:
            train(config, room / "refused", mesh=mesh)
        except JaxLlamaError as error:
            assert words in str(error), error
        else:
            raise AssertionError(mesh)


@contextlib.contextmanager
def interrupted_at(step: int):
    """A run that ends before the metrics of ``step`` are written."""
    append = loop.RunDirectory.append

    def deadly(self, rows):
        rows = list(rows)
        if rows[0]["step"] == step:
            raise InterruptedError
        append(self, rows)

    loop.RunDirectory.append = deadly
    try:
        yield
    finally:
        loop.RunDirectory.append = append


def report(**result) -> None:
    print(json.dumps(result), flush=True)


def main(names: list[str]) -> None:
    warnings.simplefilter("error")  # a cache that is not updated in place is a warning
    for name in names:
        if name == "packed":
            packed()
        elif name == "gradients":
            gradients()
        elif name == "one-row":
            one_row()
        elif name == "random":
            random()
        elif name == "sequence":
            from tests.helpers import sequence_child

            sequence_child.compare("gqa:4x1:prompt")
        elif name == "sizes":
            from tests.helpers import exchange_child

            exchange_child.sizes_of_exchanges()
        elif name == "training":
            model = byte_model("gqa", n_layers=1, layer_types=("attention",))
            training(model, {"one": [None], "moved": ["data=4", None]})
        elif name == "parts":
            model = byte_model("gqa", n_layers=1, layer_types=("attention",))
            runs = {"one": [None], "moved": ["data=4", None], "wider": ["data=2", "data=4"]}
            training(model, runs, fsdp=True)
        elif name == "divided":
            divided()
        elif name == "resumed":
            runs = {"one": [None], "data=4": ["data=4"], "again": ["data=4"] * 2}
            training(byte_model("hybrid"), runs, is_scored=True)
        else:  # family:scheme:meshes:sampled|greedy[:kv dtype]
            family, scheme, meshes, how, *kv = name.split(":")
            names = MESHES if meshes == "all" else meshes.split("+")
            compare(family, scheme, names, how == "sampled", *kv)


if __name__ == "__main__":
    main(sys.argv[1:])
