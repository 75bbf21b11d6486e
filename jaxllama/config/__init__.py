"""Model configuration: frozen dataclasses and the TOML loader that rejects unknown keys.

The forward pass depends on a ``ModelConfig``, the weights and the cache only. Presets are
``configs/models/<name>.toml``. A checkpoint's own config becomes the same dataclass
(``checkpoints.hf.load``, ``checkpoints.gguf.load``). Values that differ between models (theta, eps)
have no defaults here, so no preset can forget them.
"""

from jaxllama.config.attention import (
    FullAttentionConfig,
    LatentConfig,
    RopeConfig,
    RopeScaling,
    SharedBlocks,
)
from jaxllama.config.experts import ExpertsConfig
from jaxllama.config.linear import DeltaConfig, FeatureMap, GLAConfig, Norm
from jaxllama.config.model import (
    KINDS,
    UNGATED,
    Activation,
    LayerInputsConfig,
    ModelConfig,
    Options,
    QKNorm,
)
from jaxllama.config.presets import configs_dir, load_config, preset_names, preset_sampling, shipped
from jaxllama.config.reader import from_dict, read_toml
from jaxllama.config.stored import UNMULTIPLIED, CheckpointForm, Multipliers

__all__ = [
    "Activation",
    "CheckpointForm",
    "DeltaConfig",
    "ExpertsConfig",
    "FeatureMap",
    "FullAttentionConfig",
    "GLAConfig",
    "KINDS",
    "LatentConfig",
    "LayerInputsConfig",
    "ModelConfig",
    "Multipliers",
    "Norm",
    "Options",
    "QKNorm",
    "RopeConfig",
    "RopeScaling",
    "SharedBlocks",
    "UNGATED",
    "UNMULTIPLIED",
    "configs_dir",
    "from_dict",
    "load_config",
    "preset_names",
    "preset_sampling",
    "read_toml",
    "shipped",
]
