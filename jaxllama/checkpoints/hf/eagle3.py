"""Read and write EAGLE-3 heads in the published layout: config.json and safetensors.

    config.json   architectures LlamaForCausalLMEagle3; Llama's keys of the one layer; vocab_size
                  and target_hidden_size of the model beside it; draft_vocab_size
    fc, midlayer.*, norm, lm_head    the weights; embed_tokens only if it differs from the model's
    d2t           int64: a token's id in the model's vocabulary less its own
    t2d           bool: which of the model's tokens the head has

``eagle_config.eagle_aux_hidden_state_layer_ids`` counts the layers whose outputs the head reads
(SGLang, SpecForge); the same key outside of ``eagle_config`` counts those whose inputs it reads
(vLLM).  Sources: SafeAILab/EAGLE, SpecForge, and the readers of vLLM and SGLang.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from jaxllama.checkpoints.hf.config import config_from_hf, config_to_hf
from jaxllama.checkpoints.hf.load import Tensors, check_tensors, open_tensors, read_param
from jaxllama.checkpoints.hf.refused import HEADS
from jaxllama.checkpoints.hf.save import (
    SaveUnit,
    check_paths,
    flatten,
    floats_unit,
    write_directory,
)
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.checkpoints.safetensors import DTYPES
from jaxllama.config import Eagle, Form
from jaxllama.errors import JaxLlamaError
from jaxllama.files import SETTINGS, exists, read_json
from jaxllama.model.eagle3 import TARGETS, Drafter, Eagle3Head, table
from jaxllama.model.param import Param, tensor
from jaxllama.model.param import Path as ParamPath
from jaxllama.model.params import nested
from jaxllama.typing import JsonMapping, JsonObject

_IDS = "eagle_aux_hidden_state_layer_ids"
_VOCAB, _WIDTH, _NORM = "draft_vocab_size", "target_hidden_size", "norm_before_residual"
_SETS = "eagle_config"
_OWN = (_IDS, _VOCAB, _WIDTH, _NORM, _SETS, "norm_output", "fc_norm", "qkv_bias")
_EMBED, _D2T, _T2D = "embed_tokens.weight", "d2t", "t2d"


def is_drafter(directory: str | Path) -> bool:
    """Return whether the folder's config.json is of an EAGLE-3 head."""
    path = Path(directory) / "config.json"
    if not exists(path):
        return False
    names = read_json(path, SETTINGS).get("architectures")
    return isinstance(names, list) and any(name in HEADS for name in names)


def load(directory: str | Path, dtype: DTypeLike = np.float32) -> Drafter:
    """Return the head of a folder, with numpy arrays in ``dtype``.

    Raises JaxLlamaError naming the file and the key or tensor that is missing, unexpected, or of
    the wrong shape or value.
    """
    directory, dtype = Path(directory), np.dtype(dtype)
    if not is_drafter(directory):
        raise JaxLlamaError(f"{directory}: no EAGLE-3 head: config.json has none of {HEADS}")
    config = read_json(directory / "config.json", SETTINGS)
    try:
        head = _head(config, directory.resolve().name)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{directory / 'config.json'}: {error}") from None
    with contextlib.ExitStack() as stack:
        files = _plain_names(open_tensors(directory, stack))
        rows = _table(head, has_embedding=_EMBED in files)
        check_tensors(directory, files, rows, (_D2T, _T2D))
        values = {
            path: read_param(files, spec, dtype, {}, lambda _: None) for path, spec in rows.items()
        }
        targets = _targets(directory, head, files)
    return Drafter(head, {**nested(values), TARGETS: targets})


def save(directory: str | Path, drafter: Drafter) -> Path:
    """Write the head to a folder that does not exist yet, all of it or nothing.

    Raises JaxLlamaError naming the path or the parameter.
    """
    head, params = drafter.head, drafter.params
    rows = _table(head, has_embedding="embed" in params)
    flat = flatten({name: part for name, part in params.items() if name != TARGETS})
    check_paths(flat, rows)
    units = [floats_unit(spec, flat[path]) for path, spec in rows.items()]
    targets = np.asarray(params[TARGETS], np.int64)
    known = np.zeros(head.target_vocab, bool)
    known[targets] = True
    for name, value in ((_D2T, targets - np.arange(len(targets))), (_T2D, known)):
        units.append(SaveUnit(((name, value.shape, value.dtype),), lambda value=value: [value]))
    dtype = flat["fc", "weight"].dtype.name
    documents = {"config.json": _config(head, dtype)}
    return write_directory(directory, documents, units, None, 5 * 10**9, progress=False)


def _head(config: JsonMapping, name: str) -> Eagle3Head:
    read = JsonReader(config)
    layers = read.size("num_hidden_layers", 1)
    if layers != 1:
        raise read.error(
            "num_hidden_layers", "must be 1: heads of several layers are not supported"
        )
    for key in ("fc_norm", "qkv_bias"):
        if config.get(key):
            raise read.error(key, "is not supported")
    if config.get("norm_output") is False:
        raise read.error("norm_output", "is not supported")
    vocab = read.size("vocab_size")
    own = {key: value for key, value in config.items() if key not in _OWN}
    own |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    own |= {"vocab_size": read.size(_VOCAB, vocab), "tie_word_embeddings": False}
    model = config_from_hf(own, name)
    form = Eagle(norm_residual=bool(config.get(_NORM)))
    model = model.of_layers([model.layers[0].replace(form=form)])
    width = read.size(_WIDTH, model.d_model)
    return Eagle3Head(model, _taps(config, read), width, vocab)


def _taps(config: JsonMapping, read: JsonReader) -> tuple[int, ...]:
    """Return the layers before which the head reads the states; () for the published ones."""
    sets = config.get(_SETS) or {}
    if not isinstance(sets, dict):
        raise read.error(_SETS, "must be an object")
    if not sets.get("use_aux_hidden_state", True):
        raise read.error(_SETS, "use_aux_hidden_state must be true")
    for ids, ahead in ((config.get(_IDS), 0), (sets.get(_IDS), 1)):
        if ids is None:
            continue
        if not isinstance(ids, list) or len(ids) != 3 or not all(type(i) is int for i in ids):
            raise JaxLlamaError(f"{_IDS} = {str(ids)[:80]}: must be three layers")
        return tuple(index + ahead for index in ids)
    return ()


def _config(head: Eagle3Head, dtype: str) -> JsonObject:
    """Return config.json, the inverse of ``_head``."""
    layer = head.model.layers[0]
    form = layer.form
    plain = head.model.of_layers([layer.replace(form=Form())])
    config = config_to_hf(plain, dtype)
    config |= {"architectures": [HEADS[0]], "vocab_size": head.target_vocab}
    config |= {_VOCAB: head.model.vocab_size, _WIDTH: head.target_width}
    if head.taps:
        config |= {_IDS: list(head.taps), _SETS: {_IDS: [index - 1 for index in head.taps]}}
    if isinstance(form, Eagle) and form.norm_residual:
        config[_NORM] = True
    return config


def _table(head: Eagle3Head, *, has_embedding: bool) -> dict[ParamPath, Param]:
    rows = table(head)
    if has_embedding:
        rows["embed", "weight"] = tensor(_EMBED, head.target_vocab, head.model.d_model)
    return rows


def _plain_names(files: Tensors) -> Tensors:
    """Return the tensors under the names of the published layout, which other tools write anew."""
    plain = {name.removeprefix("model."): at for name, at in files.items()}
    begins = "layers.0."
    return {
        f"midlayer.{name.removeprefix(begins)}" if name.startswith(begins) else name: at
        for name, at in plain.items()
    }


def _targets(directory: Path, head: Eagle3Head, files: Tensors) -> np.ndarray:
    """Return the id in the model's vocabulary of each of the head's tokens, int32."""
    count = head.model.vocab_size
    if _D2T not in files:
        if count != head.target_vocab:
            raise JaxLlamaError(f"{directory}: missing tensors: '{_D2T}'")
        return np.arange(count, dtype=np.int32)
    file, info = files[_D2T]
    if info.shape != (count,) or info.dtype not in ("I64", "I32"):
        raise file.error(
            f"tensor {_D2T!r}: {info.dtype} {list(info.shape)}, "
            f"but the config wants {count} whole numbers"
        )
    offsets = np.empty(count, DTYPES[info.dtype])
    file.read_into(info, offsets)
    targets = offsets.astype(np.int64) + np.arange(count)
    is_known = (targets >= 0) & (targets < head.target_vocab)
    if not is_known.all() or len(np.unique(targets)) < count:
        raise file.error(
            f"tensor {_D2T!r}: its ids are not different tokens below {head.target_vocab}"
        )
    return targets.astype(np.int32)
