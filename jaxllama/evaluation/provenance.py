"""Provenance of a score: what must be equal for two runs to give the same number.

    provenance(lm) -> {"digest", "weights", "config", "bits", "dtype", "device", "versions"}

``digest`` sums up the other fields. Two runs with one digest had the same weights, bit by bit and
in the same layout. They also had the same configuration, versions and kind of device. Texts and
options of an evaluation are not part of it. Left out: the weights of an offloaded model, and of one
on several hosts. Their ``weights`` is None, so their digest is of the other fields alone.
"""

from __future__ import annotations

import hashlib
import json
import platform

import jax
import numpy as np

from jaxllama.evaluation.doctor import PACKAGES, bytes_by_dtype, package_version
from jaxllama.language_model import LanguageModel
from jaxllama.typing import JsonObject, Params

LENGTH = 16  # hexadecimal digits of a digest


def provenance(lm: LanguageModel) -> JsonObject:
    """Return the facts that a score of this model depends on, and a digest of them.

    Parameters
    ----------
    lm : LanguageModel
        The model.

    Returns
    -------
    dict
        JSON values. ``bits`` has the bytes of the weights by dtype, ``device`` the backend and the
        device's name, ``versions`` Python's, jaxllama's and the packages'.
    """
    facts: JsonObject = {
        "weights": weights_digest(lm.params) if lm.executor.on_device else None,
        "config": _short(repr(lm.config)),
        "bits": bytes_by_dtype(lm.params) if lm.executor.on_device else {},
        "dtype": lm.dtype.name,
        "deterministic": lm.deterministic,
        "device": f"{jax.default_backend()}: {jax.local_devices()[0].device_kind}",
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("jaxllama", *PACKAGES)},
        },
    }
    return {"digest": _short(json.dumps(facts, sort_keys=True)), **facts}


def weights_digest(params: Params) -> str | None:
    """Return a digest of all leaves with their paths, or None if no process has them whole."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        values = np.ascontiguousarray(np.asarray(leaf))
        total.update(f"{jax.tree_util.keystr(path)} {values.dtype} {values.shape}\0".encode())
        total.update(values.reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:LENGTH]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
