"""``jaxllama doctor``: what this machine has and which implementation each op will use on it.

    examine(model) -> report (a dict)        table(report) -> text

An op's line says what it compiles to for one typical call of a bfloat16 model: on a Hopper GPU the
call is lowered and looked at, so the line cannot disagree with what will run; elsewhere the reason
is the one that keeps every kernel away (``pallas_kernels.dispatch.hopper_reason``).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllama.attention import has_cudnn
from jaxllama.checkpoints import hub
from jaxllama.config import preset_names
from jaxllama.loading import default_dtype, enable_compilation_cache, load
from jaxllama.weight_audit import buffers, decode_program
from pallas_kernels.dispatch import hopper_reason
from pallas_kernels.gla import gla, gla_step
from pallas_kernels.qtensor import QTensor
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import swiglu

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "safetensors", "tokenizers", "gguf")
_D = 4096  # the width of the typical calls


def examine(model: str | None = None) -> dict[str, Any]:
    """Versions, devices, caches, ops and, with ``model``, its dtypes and bytes (it is loaded).

    Raises JaxLlamaError for a model that does not load.
    """
    enable_compilation_cache()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": [_device(device) for device in jax.devices()],
        "default_dtype": default_dtype().name,
        "caches": {
            "all": _folder(hub.cache_dir()),
            "compiled": _folder(jax.config.jax_compilation_cache_dir),
        },
        "presets": preset_names(),
        "ops": [_op(*row) for row in _typical_calls()] + [_prefill_attention()],
    }
    if model is not None:
        report["model"] = _model(model)
    return report


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: jax.Device) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    return {
        "id": device.id,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_bytes": stats.get("bytes_limit"),
        "memory_in_use_bytes": stats.get("bytes_in_use"),
    }


def _folder(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {"path": None, "bytes": 0}
    files = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return {"path": str(path), "bytes": sum(file.lstat().st_size for file in files)}


# Ops

Call = Callable[..., Any]  # (*operands, implementation=)


def _typical_calls() -> list[tuple[str, str, Call, tuple[Any, ...]]]:
    """(op, the call in words, the op, operands) of a model of width 4096; shapes, not arrays."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    int4 = QTensor(array(_D, _D, dtype=jnp.int4), array(_D, _D // 128))
    int8 = QTensor(array(_D, _D, dtype=jnp.int8), array(_D, 1))
    token_int8 = QTensor(array(1, _D, dtype=jnp.int8), array(1, 1, dtype=jnp.float32))
    heads, head = array(1, 64, 4, 128), array(1, 4, 128)
    state = array(1, 4, 128, 128, dtype=jnp.float32)
    matmul, norm = quantized_matmul, functools.partial(rms_norm, eps=1e-5)
    return [
        ("quantized_matmul", "w4a16, 1 token", matmul, (array(1, _D), int4)),
        ("quantized_matmul", "w4a16, 512 tokens", matmul, (array(512, _D), int4)),
        ("quantized_matmul", "w8a16, 1 token", matmul, (array(1, _D), int8)),
        ("quantized_matmul", "w8a16, 512 tokens", matmul, (array(512, _D), int8)),
        ("quantized_matmul", "w8a8, 1 token", matmul, (token_int8, int8)),
        ("gla", "64 tokens", gla,
         (heads, heads, heads, array(1, 64, 4, 128, dtype=jnp.float32))),
        ("gla_step", "1 token", gla_step,
         (head, head, head, array(1, 4, 128, dtype=jnp.float32), state)),
        ("rms_norm", "1 token", norm, (array(1, _D), array(_D))),
        ("rms_norm", "1 token, to int8", functools.partial(norm, quantize=jnp.int8),
         (array(1, _D), array(_D))),
        ("swiglu", "1 token", swiglu, (array(1, 2 * _D),)),
        ("swiglu", "1 token, to int8", functools.partial(swiglu, quantize=jnp.int8),
         (array(1, 2 * _D),)),
    ]  # fmt: skip


def _op(op: str, call: str, function: Call, operands: tuple[Any, ...]) -> dict[str, str | None]:
    reason = hopper_reason()
    if reason is None:
        program = (
            jax.jit(lambda *xs: function(*xs)).trace(*operands).lower(lowering_platforms=("cuda",))
        )
        if "mosaic_gpu" not in program.as_text():
            reason = _refusal(function, operands)
    return {
        "op": op,
        "call": call,
        "implementation": "mosaic" if reason is None else "xla",
        "reason": reason,
    }


def _refusal(function: Call, operands: tuple[Any, ...]) -> str:
    """Why the op's own choice was XLA: what it says when it is asked for the kernel."""
    try:
        jax.eval_shape(functools.partial(function, implementation="mosaic"), *operands)
    except NotImplementedError as error:
        return str(error)
    return "XLA was measured to be faster"


def _prefill_attention() -> dict[str, str | None]:
    """Attention's own choice is between cuDNN and XLA."""
    q = jax.ShapeDtypeStruct((1, 512, 32, 128), default_dtype())
    reason = None if has_cudnn(q) else "cuDNN's kernel needs a GPU and 16-bit operands"
    return {
        "op": "attention",
        "call": f"prefill, {q.dtype}",
        "implementation": "xla" if reason else "cudnn",
        "reason": reason,
    }


def _model(name: str) -> dict[str, Any]:
    lm = load(name, progress=True)
    by_dtype: dict[str, int] = {}
    leaves = jax.tree.leaves(lm.params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    for leaf in leaves:
        key = str(leaf.dtype)
        by_dtype[key] = by_dtype.get(key, 0) + leaf.nbytes
    return {
        "name": lm.config.name,
        "layers": lm.config.n_layers,
        "context": lm.config.max_position,
        "parameters": sum(leaf.q.size if isinstance(leaf, QTensor) else leaf.size
                          for leaf in leaves),
        "activations": lm.dtype.name,
        "bytes_by_dtype": by_dtype,
        "buffers": buffers(lm.params),
        "decode_program": decode_program(lm.config, lm.params),
        "tokenizer": lm.tokenizer is not None,
        "chat_template": lm.tokenizer is not None and lm.tokenizer.chat_template is not None,
    }  # fmt: skip


# For people


def table(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v or 'missing'}" for k, v in report["packages"].items())
    lines = [
        f"python    {report['python']} on {report['system']}",
        f"packages  {versions}",
        f"backend   {report['backend']}, default dtype {report['default_dtype']}",
    ]
    for device in report["devices"]:
        limit = device["memory_bytes"]
        memory = "" if limit is None else f", {limit / 2**30:.1f} GiB for jax"
        lines.append(f"device    {device['id']}: {device['kind']}{memory}")
    for name, cache in report["caches"].items():
        size = f", {cache['bytes'] / 1e6:.1f} MB" if cache["path"] else ""
        lines.append(f"cache     {name}: {cache['path'] or 'off'}{size}")
    lines.append(f"presets   {', '.join(report['presets'])}")
    for op in report["ops"]:
        why = f" ({op['reason']})" if op["reason"] else ""
        lines.append(f"op        {op['op']}, {op['call']}: {op['implementation']}{why}")
    model = report.get("model")
    if model is not None:
        lines += [
            f"model     {model['name']}: {model['layers']} layers, context {model['context']}, "
            f"{model['parameters']:,} parameters, activations {model['activations']}",
            "weights   " + ", ".join(f"{dtype} {size / 1e6:.1f} MB"
                                     for dtype, size in model["bytes_by_dtype"].items()),
            *_buffer_lines(model["buffers"]),
            *_program_lines(model["decode_program"]),
            f"text      tokenizer {_yes(model['tokenizer'])}, "
            f"chat template {_yes(model['chat_template'])}",
        ]  # fmt: skip
    return "\n".join(lines)


def _buffer_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line for the buffers that are alike in every layer."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        name = re.sub(r"layer_\d+", "layer_*", row["path"])
        alike.setdefault((name, row["dtype"], tuple(row["shape"])), []).append(row["bytes"])
    return [
        f"buffer    {name}: {dtype}{list(shape)}, {len(sizes)} x {sizes[0]:,} bytes"
        for (name, dtype, shape), sizes in alike.items()
    ]


def _program_lines(program: dict[str, Any]) -> list[str]:
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
