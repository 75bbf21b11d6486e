"""GGUF checkpoints: a file's ModelConfig and its parameters.

``read_config(path)`` reads metadata only.  ``load_params(path, cfg, dtype)`` reads one tensor at a
time from the mapped file, a few hundred rows at once, straight into the fused arrays of our tree,
so the peak is the tree plus a few MB.  ``keep_quantized`` leaves matrices as QTensors in groups of
32 or 16 (``codes``): the same words and scales, and ``dequantize`` gives the float32 bits that
``gguf`` does.

Files of architecture "llama" (Llama, Mistral, SmolLM2, TinyLlama) hold q and k with the two halves
of each head interleaved row by row; they are put back into "rotate half" order while reading.
"qwen2" files are not permuted.

Source: the GGUF specification and llama.cpp's conversion rules; dequantization is
``gguf.quants``'s.  Left out, with an error that names the tensor: IQ, TQ and MXFP types.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf.quants
import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from jaxllama.checkpoints.gguf import codes as gguf_words
from jaxllama.checkpoints.gguf.codes import KEPT
from jaxllama.checkpoints.gguf.config import read_config
from jaxllama.checkpoints.gguf.file import GGUFFile, TensorInfo
from jaxllama.checkpoints.packed.module import fuse
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.progress import working

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor, RowBlocks

__all__ = ["load_params", "read_config"]

_PLAIN = {Type.F32: np.dtype("<f4"), Type.F16: np.dtype("<f2"),
          Type.BF16: np.dtype(ml_dtypes.bfloat16)}  # fmt: skip
_CHUNK = 1 << 17  # features dequantized at once: 512 KB of float32 stays in the L2 cache


class _Part(NamedTuple):
    """One stored tensor of a (possibly fused) leaf."""

    tensor: str
    shape: tuple[int, ...]
    heads: int = 0  # rows belong to this many heads and are permuted; 0: they are not


def load_params(
    path: str | Path,
    cfg: ModelConfig,
    dtype: Any,
    *,
    keep_quantized: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """The parameter tree as numpy arrays of ``dtype`` (QTensor scales and zeros are float32).

    keep_quantized: quantized matrices become QTensors; a fused matrix whose parts are stored in
        different types becomes RowBlocks.
    progress: a bar on stderr.
    Warns WeightWarning for NaN or infinite weights.  Raises JaxLlamaError naming the file and the
    tensor that is missing, unexpected, of the wrong shape or of an unsupported type.
    """
    dtype = np.dtype(dtype)
    with GGUFFile(path) as file:
        leaves = _leaves(file, cfg)
        _check(file, leaves)
        total = sum(file.tensors[part.tensor].nbytes for parts in leaves.values() for part in parts)
        params: dict[str, Any] = {}
        with working(f"reading {file.path.name}", total, progress) as advance:
            for leaf, parts in leaves.items():
                *rooms, name = leaf.split("/")
                room = params
                for key in rooms:
                    room = room.setdefault(key, {})
                infos = [file.tensors[part.tensor] for part in parts]
                if keep_quantized and any(info.type in KEPT for info in infos):
                    room[name] = _read_quantized(file, parts, infos, dtype)
                else:
                    room[name] = _read_dense(file, parts, infos, dtype)
                for info in infos:
                    file.release(info)
                    advance(info.nbytes)
        return params


def _leaves(file: GGUFFile, cfg: ModelConfig) -> dict[str, list[_Part]]:
    """Every leaf of the tree, "layer_0/mixer/qkv/weight", and the stored tensors it is made of."""
    if "gla" in cfg.layer_types:
        raise JaxLlamaError(f"{file.path}: GGUF has no GLA layers, but {cfg.name!r} does")
    arch = file.string("general.architecture")
    d, f, q, k = (cfg.d_model, cfg.d_ff, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim)
    permuted = arch == "llama"
    q_heads, k_heads = (cfg.n_heads, cfg.n_kv_heads) if permuted else (0, 0)
    leaves = {"embed/weight": [_Part("token_embd.weight", (cfg.vocab_size, d))]}
    for i in range(cfg.n_layers):
        layer, block = f"layer_{i}", f"blk.{i}"
        leaves[f"{layer}/mixer_norm/weight"] = [_Part(f"{block}.attn_norm.weight", (d,))]
        leaves[f"{layer}/mlp_norm/weight"] = [_Part(f"{block}.ffn_norm.weight", (d,))]
        # leaf, columns, bias?, the stored parts with their rows
        for leaf, columns, bias, rows in (
            ("mixer/qkv", d, cfg.qkv_bias,
             (("attn_q", q, q_heads), ("attn_k", k, k_heads), ("attn_v", k, 0))),
            ("mixer/o", q, cfg.o_bias, (("attn_output", d, 0),)),
            ("mlp/gate_up", d, cfg.mlp_bias, (("ffn_gate", f, 0), ("ffn_up", f, 0))),
            ("mlp/down", f, cfg.mlp_bias, (("ffn_down", d, 0),)),
        ):  # fmt: skip
            leaves[f"{layer}/{leaf}/weight"] = [
                _Part(f"{block}.{name}.weight", (n, columns), heads) for name, n, heads in rows
            ]
            if bias:
                leaves[f"{layer}/{leaf}/bias"] = [
                    _Part(f"{block}.{name}.bias", (n,), heads) for name, n, heads in rows
                ]
    leaves["norm/weight"] = [_Part("output_norm.weight", (d,))]
    if not cfg.tie_embeddings:
        leaves["head/weight"] = [_Part("output.weight", (cfg.vocab_size, d))]
    return leaves


def _check(file: GGUFFile, leaves: dict[str, list[_Part]]) -> None:
    """Names, shapes and types, before anything is allocated."""
    parts = [part for leaf in leaves.values() for part in leaf]
    missing = [part.tensor for part in parts if part.tensor not in file.tensors]
    if missing:
        raise file.error("tensors", f"missing: {_some(missing)}")
    wanted = {part.tensor for part in parts} | {"rope_freqs.weight"}  # that one is in the config
    unexpected = [name for name in file.tensors if name not in wanted]
    if unexpected:
        raise file.error("tensors", f"unexpected: {_some(unexpected)}")
    for part in parts:
        info = file.tensors[part.tensor]
        if info.shape != part.shape:
            raise file.error(
                f"tensor {part.tensor!r}",
                f"shape {list(info.shape)}, but the config wants {list(part.shape)}",
            )
        kinds = (*_PLAIN, *KEPT) if len(part.shape) == 2 else tuple(_PLAIN)
        if info.type not in kinds:
            known = ", ".join(kind.name for kind in kinds)
            raise file.error(
                f"tensor {part.tensor!r}", f"type {info.type.name} is not one of {known}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _stored_rows(
    file: GGUFFile, part: _Part, info: TensorInfo
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield ``(start, stop, bytes[stop - start, row_bytes])`` in the tree's row order."""
    raw = file.rows(info)
    if len(part.shape) == 1 and part.heads:
        raw = raw.reshape(part.shape[0], -1)  # a bias: its "rows" are its elements
    order = None
    if part.heads:
        # Stored row (head, pair i, half h) is row (head, half h, pair i) of "rotate half".
        order = np.arange(len(raw)).reshape(part.heads, -1, 2).swapaxes(1, 2).reshape(-1)
    step = max(1, _CHUNK // part.shape[-1])
    for start in range(0, len(raw), step):
        stop = min(start + step, len(raw))
        yield start, stop, raw[start:stop] if order is None else raw[order[start:stop]]


@np.errstate(all="ignore")  # NaN and infinity are reported by name, not as numpy's warnings
def _read_dense(
    file: GGUFFile, parts: list[_Part], infos: list[TensorInfo], dtype: np.dtype
) -> np.ndarray:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    out = np.empty(shape, dtype)
    first = 0
    for part, info in zip(parts, infos, strict=True):
        target = out[first : first + part.shape[0]]
        first += part.shape[0]
        by_row = len(part.shape) == 1 and not part.heads  # a vector is stored as one row
        if by_row:
            target = target[None]
        finite = True
        for start, stop, raw in _stored_rows(file, part, info):
            values = _to_floats(raw, info.type).reshape(target[start:stop].shape)
            target[start:stop] = values
            finite = finite and bool(np.isfinite(target[start:stop]).all())
        if not finite:
            _warn(file, info)
    return out


def _to_floats(raw: np.ndarray, kind: Type) -> np.ndarray:
    raw = np.ascontiguousarray(raw)
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    # The rows' method and not gguf.quants.dequantize, which works on 16 rows at a time: 10x slower.
    return getattr(gguf.quants, kind.name).dequantize_rows(raw)


def _warn(file: GGUFFile, info: TensorInfo) -> None:
    warnings.warn(
        f"{file.path}: tensor {info.name!r} holds NaN or infinite weights",
        WeightWarning,
        stacklevel=5,
    )


@np.errstate(all="ignore")
def _read_quantized(
    file: GGUFFile, parts: list[_Part], infos: list[TensorInfo], dtype: np.dtype
) -> QTensor | RowBlocks:
    """Words and scales as they are stored; parts in floats stay floats."""
    blocks = []
    for part, info in zip(parts, infos, strict=True):
        if info.type not in KEPT:
            blocks.append(_read_dense(file, [part], [info], dtype))
            continue
        words = gguf_words.empty(info.type, *part.shape)
        for start, stop, raw in _stored_rows(file, part, info):
            words.fill(slice(start, stop), raw)
        if not words.finite():
            _warn(file, info)
        blocks.append(words.to_qtensor())
    return fuse(blocks)
