"""PEFT's directories of LoRA adapters: adapter_config.json and adapter_model.safetensors.

    read(directory, cfg) -> {a checkpoint's tensor: (a[r, in], b[out, r])}
    save(directory, {module: (a, b)}, rank, alpha)

With DoRA (arXiv 2402.09353) a third array ``[out]`` has the magnitudes of the adapted rows.

The adapted weight is w + ``b @ a``. Both factors are float32. ``b`` includes the adapter's scale
(alpha / r, or alpha / sqrt(r) if it is rank-stabilised), and the family's multiplier and order of
rows (``model.param.TensorSource``). Adapters may belong to the products of the layers in the table
of parameters, with DoRA's magnitudes. Anything else raises an error that names the key or tensor:
biases, modules_to_save, embeddings, LoHa and similar methods. So do initializations that change the
base model, and PyTorch's .bin files.

Source: the files of ``peft``; scales and patterns as in its ``tuners/lora``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from jaxllama.checkpoints.folding import fold_rows
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.name_patterns import first_fitting
from jaxllama.checkpoints.safetensors import FLOATS, SafetensorsFile, write
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.files import ADAPTER, read_json, short, whole_folder
from jaxllama.model.param import TensorSource, piece_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Factors = dict[str, tuple[np.ndarray, ...]]

_MAX_RANK = 1 << 16
# products that take adapters
_PRODUCTS = ("qkv", "qkvz", "zxbcdt", "o", "gate_up", "up", "down", "q", "k", "v", "g")
# Prefix of the decoder's names inside a multimodal model, instead of "model".
_TEXT_PARTS = ("model.language_model.", "language_model.model.")
_TENSOR = r"base_model\.model\.(.+)\.(?:lora_([AB])\.weight|lora_magnitude_vector)"
_NONE: tuple[object, ...] = (None, False, [], {})
# Keys that change what an adapter computes, with the values that are supported.
_FIXED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, *_NONE, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(
        """
        modules_to_save layer_replication target_parameters trainable_token_indices
        alora_invocation_tokens arrow_config kasa_config velora_config monteclora_config use_bdlora
        """.split(),
        _NONE,
    ),
}
# Keys that are read here, or that have no effect: the tensors show which modules have adapters.
_KNOWN = frozenset(
    """
    r lora_alpha use_rslora use_dora rank_pattern alpha_pattern
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    target_modules exclude_modules lora_dropout layers_to_transform layers_pattern megatron_config
    megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size
    runtime_config ensure_weight_tying
    """.split()
)


def read(directory: str | Path, cfg: ModelConfig, max_bytes: int | None = None) -> Factors:
    """Return the factors of an adapter, by the base checkpoint's tensor; see the module docstring.

    Parameters
    ----------
    directory : str or Path
        The adapter's directory.
    cfg : ModelConfig
        Config of the base model.
    max_bytes : int or None
        Largest size of the weights' file.

    Returns
    -------
    dict of str to (float32[r, in], float32[out, r]) or (..., float32[out])

    Raises
    ------
    JaxLlamaError
        If a key or tensor is missing, unexpected, of the wrong shape or type, or not supported.
        The error names it and the file. Keys that PEFT would ignore give a WeightWarning instead.
    """
    directory = Path(directory)
    config = _read_config(directory)
    sources = products(cfg)
    with SafetensorsFile(directory / WEIGHTS) as file:
        if max_bytes is not None and file.size > max_bytes:
            raise file.error(f"more than {max_bytes} bytes")
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, info in file.tensors.items():
            match = re.fullmatch(_TENSOR, name)
            if match is None:
                raise file.error(f"tensor {short(name)}: only lora_A and lora_B are supported")
            module = match[1]
            for part in _TEXT_PARTS:
                module = "model." + module[len(part) :] if module.startswith(part) else module
            if ".experts." in module:
                raise file.error(f"tensor {short(name)}: experts take no adapters")
            if module not in sources:
                raise file.error(
                    f"tensor {short(name)}: {cfg.name} has no such product in its layers"
                )
            part = match[2] or "m"
            if info.dtype not in FLOATS or len(info.shape) != (1 if part == "m" else 2):
                raise file.error(
                    f"tensor {short(name)}: {info.dtype}{list(info.shape)} is no factor"
                )
            found.setdefault(module, {})[part] = file.read(name).astype(np.float32)
        if not found:
            raise file.error("there are no tensors in it")
        scales = _scales(config, list(found))
        return {
            sources[module].name: _factors(file, config, module, scales, sources[module], pair)
            for module, pair in found.items()
        }


def products(cfg: ModelConfig) -> dict[str, TensorSource]:
    """Return the weights that can have an adapter, by their modules' names.

    A weight that is rows of a tensor beside another's (Lara Mini's) takes none.
    """
    return {
        source.name.removesuffix(".weight"): source
        for (*_, product, leaf), param in tensor_table(cfg).items()
        if product in _PRODUCTS and leaf == "weight"
        for source in param.sources
        if piece_of(source.name) is None
    }


def _factors(
    file: SafetensorsFile,
    config: JsonReader,
    module: str,
    scales: dict[str, tuple[int, float]],
    source: TensorSource,
    pair: dict[str, np.ndarray],
) -> tuple[np.ndarray, ...]:
    for letter in "AB":
        if letter not in pair:
            raise file.error(f"{module}: lora_{letter} is missing")
    has_magnitudes = config.flag("use_dora", False)
    if has_magnitudes != ("m" in pair):
        what = "is missing" if has_magnitudes else "is there, but use_dora is not set"
        raise file.error(f"{module}: lora_magnitude_vector {what}")
    rank, scale = scales[module]
    (out, width), (a, b) = source.shape, (pair["A"], pair["B"])
    if a.shape != (rank, width) or b.shape != (out, rank):
        other = ""
        if a.shape[1:] != (width,) or b.shape[:1] != (out,):
            base = config.config.get("base_model_name_or_path")
            other = f"; the adapter is for another model{f': {base!s:.100}' if base else ''}"
        raise file.error(
            f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)}, but r = {rank} and the "
            f"model want {[rank, width]} and {[out, rank]}{other}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        b = fold_rows(source, b * np.float32(scale))
    more: tuple[np.ndarray, ...] = ()
    if has_magnitudes:
        if pair["m"].shape != (out,):
            raise file.error(
                f"{module}: lora_magnitude_vector {list(pair['m'].shape)}, not {[out]}"
            )
        more = (fold_rows(source, pair["m"]),)
    if not all(np.isfinite(part).all() for part in (a, b, *more)):
        raise file.error(f"{module}: numbers that are NaN or infinite")
    return a, b, *more


def _read_config(directory: Path) -> JsonReader:
    path = directory / CONFIG
    reader = JsonReader(read_json(path, ADAPTER), f"{path}: ")
    reader.get("peft_type")
    reader.check_keys(str(directory), "LoRA", _KNOWN, _FIXED, file=CONFIG)
    return reader


def _scales(config: JsonReader, modules: list[str]) -> dict[str, tuple[int, float]]:
    """Return (rank, multiplier of b) of each module."""
    ranks, alphas = (
        _values(config, "rank_pattern", modules),
        _values(config, "alpha_pattern", modules),
    )
    is_stabilised = config.flag("use_rslora", False)
    scales: dict[str, tuple[int, float]] = {}
    for module in modules:
        (owner, key), (alpha_owner, alpha_key) = ranks[module], alphas[module]
        rank = owner.size(key, 8, limit=_MAX_RANK)
        alpha = alpha_owner.number(alpha_key, 8.0)
        scales[module] = rank, alpha / (rank**0.5 if is_stabilised else rank)
    return scales


def _values(config: JsonReader, key: str, modules: list[str]) -> dict[str, tuple[JsonReader, str]]:
    """Return (object, key) of each module's own value, or of the default."""
    patterns = config.get(key, {})
    if not isinstance(patterns, dict):
        raise config.error(key, "expected an object of module to number")
    inner = JsonReader(patterns, f"{config.prefix}{key}.")
    default = config, "r" if key == "rank_pattern" else "lora_alpha"
    fitting = first_fitting(list(patterns), modules, inner.prefix)
    return {
        module: default if pattern is None else (inner, pattern)
        for module, pattern in zip(modules, fitting, strict=True)
    }


def save(
    directory: str | Path, modules: Factors, rank: int, alpha: float, source: str | None = None
) -> None:
    """Write an adapter that ``peft`` and ``read`` read.

    Parameters
    ----------
    directory : str or Path
        Must not exist; it appears complete or not at all.
    modules : dict of str to (float32[r, in], float32[out, r]) or (..., float32[out])
        Factors by the module's name in the base checkpoint, b without ``alpha / r``; with DoRA the
        magnitudes too.
    rank : int
        r of all modules.
    alpha : float
        Numerator of the scale alpha / r.
    source : str or None
        The base model's name.

    Raises
    ------
    JaxLlamaError
        If the directory exists or cannot be written.
    """
    directory = Path(directory)
    if directory.exists():
        raise JaxLlamaError(f"{directory}: exists already")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": any(len(parts) > 2 for parts in modules.values()),
        "inference_mode": True,
    }
    tensors = {
        f"base_model.model.{name}.lora_{part}": factor
        for name, parts in sorted(modules.items())
        for part, factor in zip(("A.weight", "B.weight", "magnitude_vector"), parts, strict=False)
    }
    try:
        with whole_folder(directory) as scratch:
            heads = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
            write(scratch / WEIGHTS, heads, iter(tensors.values()))
            (scratch / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise JaxLlamaError(f"{error.filename or directory}: {error.strerror or error}") from None
