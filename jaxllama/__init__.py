"""jaxllama: language models in JAX, with attention, Gated Linear Attention or the delta rule.

Public names, in the order data meets them.  They are imported on first use, so that
``import jaxllama`` is fast and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as" is what makes a name public to type checkers
    from jaxllama.config import DeltaConfig as DeltaConfig
    from jaxllama.config import ExpertsConfig as ExpertsConfig
    from jaxllama.config import FullAttentionConfig as FullAttentionConfig
    from jaxllama.config import GLAConfig as GLAConfig
    from jaxllama.config import IndexerConfig as IndexerConfig
    from jaxllama.config import LatentConfig as LatentConfig
    from jaxllama.config import LayerInputsConfig as LayerInputsConfig
    from jaxllama.config import ModelConfig as ModelConfig
    from jaxllama.config import RopeConfig as RopeConfig
    from jaxllama.config import load_config as load_config
    from jaxllama.decoding.sampling import Sampling as Sampling
    from jaxllama.engine.engine import Engine as Engine
    from jaxllama.engine.request import Request as Request
    from jaxllama.engine.rollout import Rollouts as Rollouts
    from jaxllama.engine.rollout import rescore as rescore
    from jaxllama.engine.rollout import rollout as rollout
    from jaxllama.errors import JaxLlamaError as JaxLlamaError
    from jaxllama.generation import commit as commit
    from jaxllama.generation import decode_step as decode_step
    from jaxllama.generation import generate as generate
    from jaxllama.generation import init_params as init_params
    from jaxllama.generation import logits as logits
    from jaxllama.generation import prefill as prefill
    from jaxllama.generation import reset_rows as reset_rows
    from jaxllama.generation import verify_step as verify_step
    from jaxllama.language_model import Generation as Generation
    from jaxllama.language_model import LanguageModel as LanguageModel
    from jaxllama.loading import load as load
    from jaxllama.loading import load_drafter as load_drafter
    from jaxllama.model.cache import Cache as Cache
    from jaxllama.model.cache import init_cache as init_cache
    from jaxllama.model.eagle3 import Drafter as Drafter
    from jaxllama.offload.policy import Policy as Policy
    from jaxllama.quantization.quantize import quantize_params as quantize_params
    from jaxllama.text.tokenizer import Tokenizer as Tokenizer

_HOME = {
    "load": "loading",
    "load_drafter": "loading",
    "LanguageModel": "language_model",
    "Generation": "language_model",
    "load_config": "config",
    "ModelConfig": "config",
    "RopeConfig": "config",
    "GLAConfig": "config",
    "DeltaConfig": "config",
    "IndexerConfig": "config",
    "LatentConfig": "config",
    "FullAttentionConfig": "config",
    "LayerInputsConfig": "config",
    "ExpertsConfig": "config",
    "Tokenizer": "text.tokenizer",
    "init_params": "generation",
    "quantize_params": "quantization.quantize",
    "init_cache": "model.cache",
    "Cache": "model.cache",
    "Drafter": "model.eagle3",
    "prefill": "generation",
    "decode_step": "generation",
    "verify_step": "generation",
    "commit": "generation",
    "reset_rows": "generation",
    "generate": "generation",
    "logits": "generation",
    "Sampling": "decoding.sampling",
    "Engine": "engine.engine",
    "Request": "engine.request",
    "rescore": "engine.rollout",
    "rollout": "engine.rollout",
    "Rollouts": "engine.rollout",
    "Policy": "offload.policy",
    "JaxLlamaError": "errors",
}
__all__ = list(_HOME)  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxllama' has no attribute {name!r}")
    home = importlib.import_module(f"jaxllama.{_HOME[name]}")
    globals().update({n: getattr(home, n) for n, module in _HOME.items() if module == _HOME[name]})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOME))
