"""The workloads: functions from one point's settings to a dict of numbers.

    WORKLOADS[name](experiment, settings, seed, room) -> {result: number | [numbers] | text}
    OF_SEEDS[name](experiment, settings, seeds) -> [one such result a seed]

Contract: a result depends only on the arguments and the machine. ``room`` is the point's own
directory, which may not exist yet; a killed workload continues from it. Lists are curves: all lists
of one picture have the same length. This module only connects experiments with the functions that
do the work, in ``evaluation``, ``training`` and ``offload``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxllama.checkpoints import hub
from jaxllama.config import ModelConfig, load_config, preset_names
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.perplexity import perplexity
from jaxllama.evaluation.speed.decode import run as run_bench
from jaxllama.evaluation.speed.drafts import run as run_drafts
from jaxllama.evaluation.speed.harness import timed
from jaxllama.experiments import serving
from jaxllama.experiments.config import Experiment, digest
from jaxllama.experiments.settings import (
    BIBLE,
    FACTS,
    FILES,
    NO_FILES,
    LearnSettings,
    ModelSettings,
    OffloadSettings,
    QualitySettings,
    ServeSettings,
    Settings,
    SpeedSettings,
    TrainSettings,
)
from jaxllama.experiments.table import check_columns
from jaxllama.language_model import LanguageModel
from jaxllama.loading import (
    default_dtype,
    enable_compilation_cache,
    is_random_preset,
    load,
)
from jaxllama.model.cache import check_has_keys
from jaxllama.quantization import calibration
from jaxllama.quantization.pipeline import calibrate
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import random_params
from jaxllama.quantization.scheme import parse
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import JsonObject, Options
from pallas_kernels.qtensor import tree_bytes

if TYPE_CHECKING:
    from jaxllama.offload.policy import Policy
    from jaxllama.planner.accounting import Footprint
    from jaxllama.training import TrainConfig

Results = JsonObject
# Results of the whole process or its caches, which mean nothing if it measures many points.
_PROCESS = (
    "peak_rss_bytes",
    "peak_device_bytes",
    "first_token_seconds",
    "compile_seconds",
    "compiled_from_cache",
    "ceiling_gigabytes_per_second",
)
# Results of a draft.
DRAFTED = ("plain_tokens_per_second", "tokens_per_second", "speedup", "accepted_per_pass")
PROMPT_BYTES = 512  # at least those of the longest prompt in configs/texts/drafts.jsonl
_DRAFTS, _LAYERS = ("ngram", "mtp"), "layers="  # drafts that are no model's name
_LAST = 0.05  # share of the last steps whose mean is the final loss


def quality(experiment: Experiment, settings: QualitySettings, seed: int, room: Path) -> Results:
    """Measure perplexity, KL and top-1 agreement, bytes of weights, and speed if requested."""
    text = read_text(experiment, settings.text)
    lm, reference = quality_models(experiment, settings, seed, settings.calibrated)
    cache = kv_dtype(settings.kv_dtype)
    report = perplexity(
        lm,
        text,
        min(settings.window, lm.config.max_position),
        reference=reference,
        kv_dtype=cache,
        max_tokens=settings.max_tokens,
    )
    nbytes = sum(tree_bytes(leaf) for _, leaf in lm.executor.leaves(lm.params))
    results = {**report, "weight_megabytes": nbytes / 1e6}
    if settings.decode_tokens:
        fast = dataclasses.replace(lm, exact=False)  # as ``load`` returns it
        speed = run_bench(fast, prompt_tokens=16, new_tokens=settings.decode_tokens, kv_dtype=cache)
        results["decode_tokens_per_second"] = speed["decode_tokens_per_second"]
    return results


def quality_models(
    experiment: Experiment, settings: QualitySettings, seed: int, calibrated: bool = False
) -> tuple[LanguageModel, LanguageModel]:
    """Return the quantized model and its reference.

    calibrated: find the codes by the point's method, not by rounding to nearest.
    """
    floats = dataclasses.replace(
        settings, scheme="none", method="rtn", kv_dtype=None, attn_sparsity=1.0
    )
    plain = _model(experiment, floats, seed)
    lm = plain
    if settings.policy is not None:
        lm = _placed(plain, settings.policy, settings.scheme)
    elif calibrated:
        source = settings.calibration
        sample = (
            calibration.DEFAULT_TEXT.read_text(encoding="utf-8")
            if source is None
            else read_text(experiment, source)
        )
        tokens = calibration.windows(
            plain.tokenizer, sample, settings.calibration_window, settings.calibration_samples
        )
        params, _ = calibrate(
            plain.config, plain.params, tokens, parse(settings.scheme), settings.method
        )
        lm = dataclasses.replace(plain, params=params)
    elif settings.scheme != "none":
        params = quantize_params(plain.params, settings.scheme, cfg=plain.config)
        lm = dataclasses.replace(plain, params=params)
    lm = _sparse(lm, settings)
    if settings.reference is None:
        return lm, plain
    return lm, _model(experiment, dataclasses.replace(floats, model=settings.reference), seed)


def _placed(plain: LanguageModel, policy: str, scheme: str) -> LanguageModel:
    """Return a resident model under a policy, with the weights that ``load`` would give it."""
    from jaxllama.offload.policy import Policy
    from jaxllama.placement import Placement

    place = Placement(
        Policy.parse(policy), plain.dtype, None if scheme == "none" else scheme, exact=plain.exact
    )
    place.fit(plain.config)
    params = place.tree(jax.tree.map(np.asarray, plain.params))
    return place.model(plain.config, params, plain.tokenizer)


def _sparse(lm: LanguageModel, settings: ModelSettings) -> LanguageModel:
    """Return the model with the settings' sparsity."""
    if settings.attn_sparsity == 1:
        return lm
    check_has_keys(lm.config, attn_sparsity=settings.attn_sparsity)
    config = lm.config.replace(attn_sparsity=settings.attn_sparsity)
    return dataclasses.replace(lm, config=config)


def draft_of(
    experiment: Experiment,
    settings: SpeedSettings | OffloadSettings | ServeSettings,
    lm: LanguageModel,
    seed: int,
) -> str | LanguageModel | None:
    """Return the draft of a point, as ``generate`` takes it."""
    name = settings.draft
    if name is None or name in _DRAFTS:
        return name
    if name.startswith(_LAYERS):
        return lm.first_layers(int(name.removeprefix(_LAYERS)))
    other = dataclasses.replace(settings, model=name, scheme="none", attn_sparsity=1.0)
    return _model(experiment, other, seed)


def speed(experiment: Experiment, settings: SpeedSettings, seed: int, room: Path) -> Results:
    """Return the report of ``bench.run``, and the weights' bytes."""
    lm = speed_model(experiment, settings, seed)
    if settings.draft is not None:
        return drafted(experiment, settings, lm, seed)
    report = run_bench(
        lm,
        batch=settings.batch,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        runs=settings.runs,
        context=settings.context,
        kv_dtype=kv_dtype(settings.kv_dtype),
        chunk=settings.chunk,
    )
    asked = set(dataclasses.asdict(settings)) | set(_PROCESS)
    kept = {key: entry for key, entry in report.items() if key not in asked}
    return {
        **kept,
        "weight_megabytes": tree_bytes(lm.params) / 1e6,
        "cache_megabytes": report["cache_bytes"] / 1e6,
        "program_megabytes": (report["program_bytes"] or 0) / 1e6,
    }


def drafted(
    experiment: Experiment,
    settings: SpeedSettings,
    lm: LanguageModel,
    seed: int,
    prompts: int | None = None,
) -> Results:
    """Return the mean over the kinds of prompts of ``drafts.run``.

    prompts: number of prompts of a kind; all by default.
    """
    report = run_drafts(
        lm,
        draft_of(experiment, settings, lm, seed) or "ngram",
        settings.draft_tokens,
        new_tokens=settings.new_tokens,
        runs=settings.runs,
        kv_dtype=kv_dtype(settings.kv_dtype),
        chunk=settings.chunk,
        prompts=prompts,
    )
    kinds = report["kinds"].values()
    return {name: statistics.mean(kind[name] for kind in kinds) for name in DRAFTED}


def speed_model(experiment: Experiment, settings: SpeedSettings, seed: int) -> LanguageModel:
    """Return the point's model.

    Random weights have no trained context, so their limit is raised to the positions that the
    measurement needs.
    """
    lm = _model(experiment, settings, seed)
    if is_random(experiment, settings):
        need = max(settings.prompt_tokens + 1, settings.context + settings.new_tokens)
        if settings.draft is not None:
            need = PROMPT_BYTES + settings.new_tokens  # their tokenizer has a token a byte
        longest = max(need, lm.config.max_position)
        lm = dataclasses.replace(lm, config=lm.config.replace(max_position=longest))
    return lm


def train(experiment: Experiment, settings: TrainSettings, seed: int, room: Path) -> Results:
    """Train; return curves of loss by tokens and their ends. ``room`` resumes a killed run."""
    from jaxllama import training
    from jaxllama.model.flops import parameters

    config = tokenized(experiment, settings, room.parent)
    config = dataclasses.replace(config, seed=seed)
    result = training.train(config, room)
    steps, validation = result.metrics, result.validation
    losses = [step["loss"] for step in steps]
    last = losses[-max(1, round(len(losses) * _LAST)) :]
    results: Results = {
        "tokens": [step["tokens"] for step in steps],
        "loss": losses,
        "final_loss": statistics.mean(last),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps),
        "parameters": None if config.model is None else parameters(config.model),
    }
    if validation:
        results |= {
            "validation_tokens": [step["tokens"] for step in validation],
            "validation_loss": [step["validation_loss"] for step in validation],
            "final_validation_loss": validation[-1]["validation_loss"],
        }
    return results


def tokenized(experiment: Experiment, settings: TrainSettings, folder: Path) -> TrainConfig:
    """Return the configuration with a token file of ``settings.text`` in ``folder``."""
    from jaxllama.training.corpus import bible
    from jaxllama.training.data import tokenize

    config = settings.config
    if settings.text is None:
        return config
    names = settings.text, settings.tokenizer
    tokens = folder / f"tokens-{'-'.join(Path(name).stem for name in names)}-{digest(names)}"
    if not tokens.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = experiment.find(settings.text)
        if settings.text == BIBLE:
            text = folder / "bible.txt"
            text.write_text(bible(), encoding="utf-8")
        tokenize([text], tokens, _tokenizer(settings.tokenizer))
    data = dataclasses.replace(config.data, tokens=str(tokens))
    return dataclasses.replace(config, data=data)


def offload_need(experiment: Experiment, settings: OffloadSettings) -> Footprint:
    """Return the bytes in each place that a point's policy needs; the model is not loaded."""
    cfg = model_config(experiment, settings)
    assert cfg is not None
    return _offload_bytes(cfg, settings, settings.dtype or default_dtype())


def _offload_bytes(cfg: ModelConfig, settings: OffloadSettings, dtype: DTypeLike) -> Footprint:
    from jaxllama.offload.policy import Policy
    from jaxllama.placement import scheme_of
    from jaxllama.planner.accounting import footprint

    policy = Policy.parse(settings.policy)
    return footprint(
        cfg,
        policy,
        rows=min(settings.batch, policy.block_size),
        width=settings.prompt_tokens,
        capacity=settings.prompt_tokens + settings.new_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype(settings.kv_dtype) or dtype,
        scheme=scheme_of(policy, None if settings.scheme == "none" else settings.scheme),
        compile_programs=False,
    )


def offload(experiment: Experiment, settings: OffloadSettings, seed: int, room: Path) -> Results:
    """Measure generation of random prompts under a policy, and the bytes in each place.

    Prefill is included, as in FlexGen's figures. No row stops before ``new_tokens``.
    """
    lm, prompts = offload_task(experiment, settings, seed)
    how: Options = {
        "kv_dtype": kv_dtype(settings.kv_dtype),
        **drafting(experiment, settings, lm, seed),
    }

    def seconds(new_tokens: int) -> float:
        return timed(lambda: lm.generate(prompts, new_tokens, **how))[1]

    seconds(settings.new_tokens)  # compiles
    prefill, whole = seconds(1), seconds(settings.new_tokens)
    bytes_in = _offload_bytes(lm.config, settings, lm.dtype)
    return {
        "tokens_per_second": settings.batch * settings.new_tokens / whole,
        "prefill_seconds": prefill,
        "device_megabytes": bytes_in.device / 1e6,
        "host_megabytes": bytes_in.host / 1e6,
        "disk_megabytes": bytes_in.disk / 1e6,
    }


def drafting(
    experiment: Experiment, settings: OffloadSettings | ServeSettings, lm: LanguageModel, seed: int
) -> Options:
    """Return the arguments of ``generate`` for the point's draft."""
    draft = draft_of(experiment, settings, lm, seed)
    return {} if draft is None else {"draft": draft, "draft_tokens": settings.draft_tokens}


def serve(experiment: Experiment, settings: ServeSettings, seed: int, room: Path) -> Results:
    """Measure a queue of random prompts whose answers have different lengths."""
    lm, prompts, lengths = serve_task(experiment, settings, seed)
    return serving.serve(
        lm,
        prompts,
        lengths,
        slots=settings.slots,
        batching=settings.batching,
        kv_dtype=kv_dtype(settings.kv_dtype),
        **drafting(experiment, settings, lm, seed),
    )


def serve_task(
    experiment: Experiment, settings: ServeSettings, seed: int
) -> tuple[LanguageModel, list[list[int]], list[int]]:
    """Return the model without stop tokens, random prompts, and the lengths of their answers."""
    lm = _model(experiment, settings, seed)
    lm = dataclasses.replace(lm, config=lm.config.replace(eos_token_ids=()))
    rng = np.random.default_rng(seed)
    shape = (settings.requests, settings.prompt_tokens)
    lengths = rng.integers(1, settings.new_tokens + 1, settings.requests).tolist()
    return lm, rng.integers(0, lm.config.vocab_size, shape).tolist(), lengths


def offload_task(
    experiment: Experiment, settings: OffloadSettings, seed: int
) -> tuple[LanguageModel, list[list[int]]]:
    """Return the model under its policy, without stop tokens, and random prompts."""
    from jaxllama.offload.policy import Policy

    policy = Policy.parse(settings.policy)
    if settings.attn_sparsity < 1:
        policy = policy.also(attn_sparsity=settings.attn_sparsity)
    lm = _model(experiment, settings, seed, policy)
    lm = dataclasses.replace(lm, config=lm.config.replace(eos_token_ids=()))
    rng = np.random.default_rng(seed)
    shape = (settings.batch, settings.prompt_tokens)
    return lm, rng.integers(0, lm.config.vocab_size, shape).tolist()


def learn(experiment: Experiment, settings: LearnSettings, seeds: Sequence[int]) -> list[Results]:
    """Return the results of ``learning.learn`` for a model under ``[models]``."""
    from jaxllama.experiments import learning

    enable_compilation_cache()
    text = learned_text(experiment, settings)
    cfg = model_config(experiment, settings)
    assert cfg is not None  # ``check`` has made sure of it
    return learning.learn(cfg, text, settings, seeds)


def learned_text(experiment: Experiment, settings: LearnSettings) -> bytes | None:
    """Return the bytes that a point learns; None for rows of facts."""
    from jaxllama.training.corpus import bible

    if settings.text == FACTS:
        return None
    is_bible = settings.text == BIBLE
    return bible().encode() if is_bible else experiment.find(settings.text).read_bytes()


Function = Callable[..., Results]  # (experiment, settings, seed, folder)
WORKLOADS: dict[str, Function] = {
    "quality": quality,
    "speed": speed,
    "train": train,
    "offload": offload,
    "serve": serve,
}
OF_SEEDS = {"learn": learn}  # workloads that measure several seeds at once
# The results that each workload can have. Some depend on the settings: a reference, a draft, data
# to validate on.
_OF_PREDICTIONS = ("perplexity", "nll", "rise", "kl", "top1")
_OF_TRAINING = ("parameters", "tokens", "tokens_per_second", "loss")
RESULTS: dict[str, tuple[str, ...]] = {
    "quality": (
        *(name + error for name in _OF_PREDICTIONS for error in ("", "_se")),
        "tokens",
        "stride",
        "weight_megabytes",
        "decode_tokens_per_second",
    ),
    "speed": (
        "device",
        "jax",
        "decode_tokens_per_second",
        "generate_tokens_per_second",
        "prefill_seconds",
        "prefill_tokens_per_second",
        "kernels_per_step",
        "weight_bytes_per_step",
        "weight_gigabytes_per_second",
        "cache_bytes",
        "bytes_per_step",
        "gigabytes_per_second",
        "share_of_ceiling",
        "program_bytes",
        "weight_megabytes",
        "cache_megabytes",
        "program_megabytes",
        *DRAFTED,
    ),
    "train": (
        *_OF_TRAINING,
        "final_loss",
        "validation_tokens",
        "validation_loss",
        "final_validation_loss",
    ),
    "offload": (
        "tokens_per_second",
        "prefill_seconds",
        "device_megabytes",
        "host_megabytes",
        "disk_megabytes",
    ),
    "serve": ("tokens_per_second", "request_seconds", "seconds"),
    "learn": (
        *_OF_TRAINING,
        "state_kilobytes",
        "learning_rate",
        "held_loss",
        "held_losses",
        "recall_of_facts",
        "recall",
        "mean_recall",
    ),
}


# Shared functions


def check(experiment: Experiment) -> None:
    """Raise JaxLlamaError for a missing model, file or command, or an unknown column.

    It is called before any point is measured. Nothing is fetched.
    """
    check_columns(experiment, RESULTS[experiment.workload])
    for point in experiment.points:
        try:
            for name in _models(experiment, point.settings):
                if not is_random_preset(name):  # ``load`` warns of these
                    hub.find(name)
            _check_files(experiment, point.settings)
        except JaxLlamaError as error:
            raise JaxLlamaError(f"{experiment.path}: {point.name}: {error}") from None


def _models(experiment: Experiment, settings: Settings) -> list[str]:
    """Return the names to load, with paths relative to the file."""
    if isinstance(settings, TrainSettings):
        config = settings.config
        teacher = None if config.distill is None else config.distill.teacher
        tokenizer = None if settings.text is None else settings.tokenizer
        names = [config.init_from, teacher, None if tokenizer == "bytes" else tokenizer]
        return [name for name in names if name is not None]
    if isinstance(settings, LearnSettings):
        if settings.model not in experiment.models:
            known = ", ".join(experiment.models)
            raise JaxLlamaError(f"model = {settings.model!r}: not under [models]; there: {known}")
        return []
    if is_random(experiment, settings) and model_config(experiment, settings) is None:
        raise JaxLlamaError(_no_preset(experiment, settings.model))
    reference: str | None = getattr(settings, "reference", None)
    draft: str | None = getattr(settings, "draft", None)
    if draft is not None and (draft in _DRAFTS or draft.startswith(_LAYERS)):
        draft = None
    names = {
        name
        for name in (settings.model, reference, draft)
        if name is not None and name not in experiment.models
    }
    if settings.random:
        return []
    return [str(path) if (path := experiment.find(name)).exists() else name for name in names]


def _check_files(experiment: Experiment, settings: Settings) -> None:
    if getattr(settings, "text", None) == BIBLE:
        from jaxllama.training.corpus import find_bible

        find_bible()
    if isinstance(settings, TrainSettings) and settings.text is None:
        from jaxllama.training.start import open_data

        open_data(settings.config)
    for key in FILES:
        name = getattr(settings, key, None)
        if name is not None and name not in NO_FILES:
            path = experiment.find(name)
            try:
                path.stat()
            except OSError as error:
                raise JaxLlamaError(f"{key}: {path}: {error.strerror}") from None


def _no_preset(experiment: Experiment, model: str) -> str:
    known = ", ".join((*experiment.models, *preset_names()))
    return f"random = true: model = {model!r} is not a preset; allowed: {known}"


def is_random(experiment: Experiment, settings: ModelSettings) -> bool:
    return settings.random or settings.model in experiment.models


def model_config(experiment: Experiment, settings: Settings | ModelSettings) -> ModelConfig | None:
    """Return a model's configuration if it is known without its checkpoint."""
    if isinstance(settings, TrainSettings):
        return settings.config.model
    if isinstance(settings, LearnSettings) and settings.n_layers is not None:
        cfg = experiment.models[settings.model]
        return cfg.replace(
            n_layers=settings.n_layers, layer_types=cfg.layer_types[-settings.n_layers :]
        )
    if settings.model in experiment.models:
        return experiment.models[settings.model]
    return load_config(settings.model) if settings.model in preset_names() else None


def kv_dtype(name: str | None) -> str | None:
    return "float8_e4m3fn" if name == "fp8" else name


def _model(
    experiment: Experiment, settings: ModelSettings, seed: int, policy: Policy | None = None
) -> LanguageModel:
    """The model of a point; random weights are of the seed.

    Quality depends on the scheme alone, so its products are exact on a CPU, too.
    """
    scheme = None if settings.scheme == "none" else settings.scheme
    exact = isinstance(settings, QualitySettings)
    if not is_random(experiment, settings):
        path = experiment.find(settings.model)
        source = path if path.exists() else settings.model
        lm = load(source, settings.dtype, scheme, policy=policy, exact=exact)
        return lm if isinstance(settings, QualitySettings) else _sparse(lm, settings)
    enable_compilation_cache()
    cfg = model_config(experiment, settings)
    if cfg is None:
        raise JaxLlamaError(_no_preset(experiment, settings.model))
    dtype = default_dtype() if settings.dtype is None else settings.dtype
    tokenizer, key = Tokenizer.byte_level(), jax.random.key(seed)
    if policy is None:
        params = random_params(cfg, key, dtype, scheme)
        lm = LanguageModel(cfg, params, tokenizer, exact=exact)
        return lm if isinstance(settings, QualitySettings) else _sparse(lm, settings)
    from jaxllama.placement import Placement

    place = Placement(policy, dtype, scheme)
    return place.model(cfg, random_params(cfg, key, dtype, scheme, place), tokenizer)


def _tokenizer(name: str) -> Tokenizer:
    return Tokenizer.byte_level() if name == "bytes" else _loaded_tokenizer(name)


def _loaded_tokenizer(name: str) -> Tokenizer:
    tokenizer = load(name).tokenizer
    if tokenizer is None:
        raise JaxLlamaError(f"tokenizer = {name!r}: this model has none")
    return tokenizer


def read_text(experiment: Experiment, name: str) -> str:
    path = experiment.find(name)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise JaxLlamaError(f"{path}: not UTF-8 text: byte {error.start}") from None
