"""jaxllama: Llama and Gated Linear Attention in JAX.

Public names, in the order data meets them.  They are imported on first use, so that
``import jaxllama`` is fast and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllama.cache import Cache, insert
    from jaxllama.cache import init_cache as init_cache
    from jaxllama.config import ModelConfig, load_config
    from jaxllama.errors import JaxLlamaError
    from jaxllama.generation import decode_step, generate, init_params, logits, prefill
    from jaxllama.language_model import Generation, LanguageModel
    from jaxllama.loading import load
    from jaxllama.offload.policy import Policy
    from jaxllama.quantization.scheme import quantize_params
    from jaxllama.sampling import Sampling
    from jaxllama.serving.engine import Engine
    from jaxllama.tokenizer import Tokenizer

_HOME = {
    "load": "loading",
    "LanguageModel": "language_model",
    "Generation": "language_model",
    "load_config": "config",
    "ModelConfig": "config",
    "Tokenizer": "tokenizer",
    "init_params": "generation",
    "quantize_params": "quantization.scheme",
    "init_cache": "cache",
    "Cache": "cache",
    "insert": "cache",
    "prefill": "generation",
    "decode_step": "generation",
    "generate": "generation",
    "logits": "generation",
    "Sampling": "sampling",
    "Engine": "serving.engine",
    "Policy": "offload.policy",
    "JaxLlamaError": "errors",
}
__all__ = list(_HOME)  # noqa: PLE0604
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxllama' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxllama.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOME))
