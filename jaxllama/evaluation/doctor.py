"""``jaxllama doctor``: describe this machine and the implementation that each op uses on it.

    examine(model) -> report (a dict)        table(report) -> text

An op's line comes from ``pallas_kernels.explain``, for a typical call of a bfloat16 model. With a
model, there is a line for each call of its decode steps and its prefill. These programs are traced,
so the line agrees with what runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.checkpoints import hub
from jaxllama.config import preset_names
from jaxllama.evaluation.weight_audit import buffers, decode_program
from jaxllama.generation import decode_step, prefill
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype, enable_compilation_cache, load
from jaxllama.model.cache import init_cache
from jaxllama.model.mixers import keeps_tokens
from jaxllama.model.mixers.attention.chunk import has_cudnn
from jaxllama.typing import JsonObject, LocalDevice, Params, Tree
from pallas_kernels.cards.architecture import TARGET, asked_target, nearest_card
from pallas_kernels.cpu import CpuWeight, jit, unavailable
from pallas_kernels.dispatch import Choice, choices
from pallas_kernels.gla.op import gla, gla_step
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import QTensor
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "gguf")
_D = 4096  # the width of the typical calls
_ROWS, _PROMPT, _CONTEXT = 16, 512, 1024  # sizes of a model's own calls


def examine(model: str | None = None, **source: Any) -> JsonObject:
    """Return versions, devices, caches and ops; with ``model`` also its dtypes and bytes.

    source: further arguments of ``load``. Raises JaxLlamaError for a model that does not load.
    """
    enable_compilation_cache()
    report: JsonObject = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "packages": {name: package_version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "target": None if (target := asked_target()) is None else target.name,
        "devices": [_device(device) for device in jax.devices()],
        "default_dtype": default_dtype().name,
        "caches": {
            "all": _folder(hub.cache_dir()),
            "compiled": _folder(jax.config.values["jax_compilation_cache_dir"]),
        },
        "cpu_handlers": _cpu_handlers(),
        "presets": preset_names(),
        "ops": [_op(*row) for row in _typical_calls()]
        + [_prefill_attention(512, 32, 128, default_dtype())],
    }
    if model is not None:
        report["model"] = _model(model, source)
    return report


def _cpu_handlers() -> str:
    """Return the instruction set of the CPU handlers, or why they do not run."""
    reason = unavailable()
    return jit.host().name if reason is None else f"none: {reason.text}"


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: LocalDevice) -> JsonObject:
    stats = device.memory_stats() or {}
    return {
        "id": device.id,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "planned_as": nearest_card(device) if device.platform == "gpu" else None,
        "memory_bytes": stats.get("bytes_limit"),
        "memory_in_use_bytes": stats.get("bytes_in_use"),
    }


def _folder(path: str | Path | None) -> JsonObject:
    if path is None:
        return {"path": None, "bytes": 0}
    files = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return {"path": str(path), "bytes": sum(file.lstat().st_size for file in files)}


# Ops

Call = Callable[..., Tree]


def _typical_calls() -> list[tuple[str, Call, tuple[Tree, ...]]]:
    """Return (description, op, operands) of calls of a model of width 4096; shapes, not arrays."""

    def array(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Tree:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    groups = array(_D, _D // 128)
    int4 = QTensor(array(_D, _D, dtype=jnp.int4), groups, array(*groups.shape, dtype=jnp.int8))
    int8 = QTensor(array(_D, _D, dtype=jnp.int8), array(_D, 1))
    token_int8 = QTensor(array(1, _D, dtype=jnp.int8), array(1, 1, dtype=jnp.float32))
    heads, head = array(1, 64, 4, 128), array(1, 4, 128)
    state = array(1, 4, 128, 128, dtype=jnp.float32)
    matmul, norm = quantized_matmul, functools.partial(rms_norm, eps=1e-5)
    return [
        ("w4a16, 1 token", matmul, (array(1, _D), int4)),
        ("w4a16, 512 tokens", matmul, (array(512, _D), int4)),
        ("w8a16, 1 token", matmul, (array(1, _D), int8)),
        ("w8a16, 512 tokens", matmul, (array(512, _D), int8)),
        ("w8a8, 1 token", matmul, (token_int8, int8)),
        ("64 tokens", gla, (heads, heads, heads, array(1, 64, 4, 128, dtype=jnp.float32))),
        ("1 token", gla_step, (head, head, head, array(1, 4, 128, dtype=jnp.float32), state)),
        ("1 token", norm, (array(1, _D), array(_D))),
        ("1 token, to int8", functools.partial(norm, quantize=jnp.int8), (array(1, _D), array(_D))),
        ("1 token", swiglu, (array(1, 2 * _D),)),
        ("1 token, to int8", functools.partial(swiglu, quantize=jnp.int8), (array(1, 2 * _D),)),
    ]


def _op(call: str, function: Call, operands: tuple[Tree, ...]) -> JsonObject:
    (choice,) = choices(function, *operands)
    return {"call": call} | dataclasses.asdict(choice)


def _model_calls(lm: LanguageModel) -> list[JsonObject]:
    """Return the calls of decode steps of one row and of several, and of a prefill.

    Equal calls are counted. The programs themselves are traced.
    """
    cfg, params = lm.config, lm.params
    capacity = min(cfg.max_position, _CONTEXT)
    width = min(capacity, _PROMPT)

    def ints(*shape: int) -> Tree:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    found = []
    for rows in (1, _ROWS):
        cache = jax.eval_shape(functools.partial(init_cache, cfg, rows, capacity, lm.dtype))
        step = functools.partial(inspect.unwrap(decode_step), cfg)
        found += _counted(
            f"decode, {rows} rows" if rows > 1 else "decode, 1 row",
            choices(step, params, ints(rows), cache),
        )
    whole = functools.partial(inspect.unwrap(prefill), cfg)
    cache = jax.eval_shape(functools.partial(init_cache, cfg, 1, capacity, lm.dtype))
    choices_made = choices(whole, params, ints(1, width), ints(1), cache)
    found += _counted(f"prefill, {width} tokens", choices_made)
    if cfg.head_dim and any(map(keeps_tokens, cfg.layer_types)):
        found.append(_prefill_attention(width, cfg.n_heads, cfg.head_dim, lm.dtype))
    return found


def _counted(call: str, found: list[Choice]) -> list[JsonObject]:
    counts = Counter(tuple(dataclasses.asdict(choice).items()) for choice in found)
    return [{"call": call, "count": n} | dict(items) for items, n in counts.items()]


def _prefill_attention(tokens: int, heads: int, head_dim: int, dtype: DTypeLike) -> JsonObject:
    """Return attention's choice between cuDNN and XLA."""
    q = jax.ShapeDtypeStruct((1, tokens, heads, head_dim), dtype)
    reason = None if has_cudnn(q) else "cuDNN's kernel needs a GPU and 16-bit operands"
    operands = f"{q.dtype}[{','.join(map(str, q.shape))}]"
    choice = dataclasses.asdict(Choice("attention", operands, "xla", reason))
    choice["implementation"] = "xla" if reason else "cudnn"
    return {"call": f"prefill, {tokens} tokens"} | choice


def _model(name: str, source: JsonObject) -> JsonObject:
    lm = load(name, progress=True, **source)
    leaves = _weights(lm.params)
    return {
        "name": str(name),
        "layers": lm.config.n_layers,
        "context": lm.config.max_position,
        "parameters": sum(math.prod(leaf.shape) for leaf in leaves),
        "activations": lm.dtype.name,
        "bytes_by_dtype": bytes_by_dtype(lm.params),
        "buffers": buffers(lm.params),
        "calls": _model_calls(lm),
        "decode_program": decode_program(lm.config, lm.params),
        "tokenizer": lm.tokenizer is not None,
        "chat_template": lm.tokenizer is not None and lm.tokenizer.chat_template is not None,
    }


def bytes_by_dtype(params: Params) -> dict[str, int]:
    """Return the bytes of the weights by dtype; a quantized weight counts under its own."""
    by_dtype: dict[str, int] = {}
    for leaf in _weights(params):
        key = str(leaf.dtype)
        by_dtype[key] = by_dtype.get(key, 0) + leaf.nbytes
    return by_dtype


def _weights(params: Params) -> list[Any]:
    kinds = QTensor | CpuWeight
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, kinds))


# Text for people


def table(report: JsonObject) -> str:
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in report["packages"].items())
    lines = [
        f"python    {report['python']} on {report['system']}",
        f"packages  {versions}",
        f"backend   {report['backend']}, default dtype {report['default_dtype']}",
    ]
    lines.append(f"handlers  {report['cpu_handlers']}")
    for device in report["devices"]:
        limit = device["memory_bytes"]
        memory = "" if limit is None else f", {limit / 2**30:.1f} GiB for jax"
        lines.append(f"device    {device['id']}: {device['kind']}{memory}")
        if device["planned_as"]:
            lines.append(f"          not in the table of cards; planned as {device['planned_as']}")
    if report["target"]:
        lines.append(f"target    kernels use only what {report['target']} has ({TARGET})")
    for name, cache in report["caches"].items():
        size = f", {cache['bytes'] / 1e6:.1f} MB" if cache["path"] else ""
        lines.append(f"cache     {name}: {cache['path'] or 'off'}{size}")
    lines.append(f"presets   {', '.join(report['presets'])}")
    model = report.get("model")
    lines += [_op_line(op) for op in (report["ops"] if model is None else model["calls"])]
    if model is not None:
        lines += [
            f"model     {model['name']}: {model['layers']} layers, context {model['context']}, "
            f"{model['parameters']:,} parameters, activations {model['activations']}",
            "weights   "
            + ", ".join(
                f"{dtype} {size / 1e6:.1f} MB" for dtype, size in model["bytes_by_dtype"].items()
            ),
            *_buffer_lines(model["buffers"]),
            *_program_lines(model["decode_program"]),
            f"text      tokenizer {_yes(model['tokenizer'])}, "
            f"chat template {_yes(model['chat_template'])}",
        ]
    return "\n".join(lines)


def _op_line(op: JsonObject) -> str:
    count = f"{op['count']} x " if op.get("count", 1) > 1 else ""
    choice = Choice(**{f.name: op[f.name] for f in dataclasses.fields(Choice)})
    return f"op        {op['call']}: {count}{choice}"


def _buffer_lines(rows: list[JsonObject]) -> list[str]:
    """Return one line for the buffers that are equal in every layer."""
    alike: dict[tuple[Tree, ...], list[int]] = {}
    for row in rows:
        name = re.sub(r"layer_\d+", "layer_*", row["path"])
        alike.setdefault((name, row["dtype"], tuple(row["shape"])), []).append(row["bytes"])
    return [
        f"buffer    {name}: {dtype}{list(shape)}, {len(sizes)} x {sizes[0]:,} bytes"
        for (name, dtype, shape), sizes in alike.items()
    ]


def _program_lines(program: JsonObject) -> list[str]:
    largest = program["largest_temporary"]
    if not program["quantized_weights"] or largest is None:
        return []
    copies = program["copies"]
    found = (
        "no quantized weight is copied into floats"
        if not copies
        else f"{len(copies)} quantized weights are copied into floats, {copies[0]['type']}"
        f"{copies[0]['shape']} the first"
    )
    temporary = program["temporary_bytes"]
    size = "" if temporary is None else f", {temporary / 1e6:.2f} MB of temporaries in all"
    return [
        f"decode    compiled for {program['backend']}: {found}",
        f"decode    largest float temporary {largest['bytes'] / 1e6:.2f} MB "
        f"({largest['type']}{largest['shape']}){size}; the largest quantized weight as floats "
        f"would be {program['largest_weight_as_floats'] / 1e6:.2f} MB",
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
