"""Provenance of a score: what must be equal for two runs to give the same number.

    provenance(lm, kv_dtype, **options) -> {"digest", "weights", "config", "bits", "dtype", ...}

``digest`` sums up the other fields. Two runs with one digest had the same weights, bit by bit, in
the same layout and place. They also had the same cache, configuration, tokenizer, options,
versions and kind of device. Left out: the weights of a model on several hosts, whose ``weights`` is
None.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxllama.evaluation.doctor import PACKAGES, bytes_by_dtype, package_version
from jaxllama.files import DIGEST, text_digest
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import cache_dtype_name
from jaxllama.typing import ArrayOrNumpy, JsonObject


def provenance(
    lm: LanguageModel, kv_dtype: DTypeLike | None = None, **options: object
) -> JsonObject:
    """Return the facts that a score of this model depends on, and a digest of them.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    kv_dtype : data-type, optional
        Dtype of the cache; a policy may set it.
    options : object
        Options and texts of the evaluation, as JSON values.

    Returns
    -------
    dict
        JSON values. ``bits`` has the bytes of the weights by dtype, ``place`` a policy or a mesh,
        ``device`` the backend and the device's name, ``versions`` Python's, jaxllama's and the
        packages'.
    """
    cache, _ = lm.executor.cache_options(lm.config, kv_dtype, None, None)
    facts: JsonObject = {
        "weights": weights_digest(lm.executor.leaves(lm.params)),
        "config": text_digest(repr(lm.config)),
        "tokenizer": None if lm.tokenizer is None else lm.tokenizer.digest,
        "bits": bytes_by_dtype(lm.params) if lm.executor.on_device else {},
        "dtype": lm.dtype.name,
        "kv_dtype": None if cache is None else cache_dtype_name(cache),
        "place": lm.executor.arrangement,
        "deterministic": lm.deterministic,
        "options": options,
        "device": f"{jax.default_backend()}: {jax.local_devices()[0].device_kind}",
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("jaxllama", *PACKAGES)},
        },
    }
    return {"digest": text_digest(json.dumps(facts, sort_keys=True)), **facts}


def weights_digest(leaves: Iterable[tuple[str, ArrayOrNumpy]]) -> str | None:
    """Return a digest of (path, array) pairs, or None if no process has an array whole."""
    total = hashlib.sha256()
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        values = np.ascontiguousarray(np.asarray(leaf))
        total.update(f"{path} {values.dtype} {values.shape}\0".encode())
        total.update(values.reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:DIGEST]
