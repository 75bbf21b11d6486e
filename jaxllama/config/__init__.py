"""Model configuration: frozen dataclasses and the TOML loader that rejects unknown keys.

The forward pass depends on a ``ModelConfig``, the weights and the cache only. Presets are
``configs/models/<name>.toml``. A checkpoint's own config becomes the same dataclass
(``checkpoints.hf.load``, ``checkpoints.gguf.load``). Values that differ between models (theta, eps)
have no defaults here, so no preset can forget them.
"""

from jaxllama.config.attention import (
    AttentionConfig,
    FullAttentionConfig,
    IndexerConfig,
    LatentConfig,
    LayerInputsConfig,
    QKNorm,
    RopeConfig,
    RopeScaling,
    SharedBlocks,
)
from jaxllama.config.experts import ExpertsConfig
from jaxllama.config.flat import FlatConfig, of_last_version
from jaxllama.config.layer import (
    UNGATED,
    Activation,
    Beside,
    Eagle,
    FeedConfig,
    Form,
    Inputs,
    LayerConfig,
    MixerOptions,
    NormConfig,
    Parallel,
    Shared,
)
from jaxllama.config.linear import (
    DeltaConfig,
    FeatureMap,
    GLAConfig,
    Norm,
)
from jaxllama.config.model import ModelConfig, StepConfig, expand, model_of
from jaxllama.config.presets import configs_dir, load_config, preset_names, preset_sampling, shipped
from jaxllama.config.reader import from_dict, read_toml
from jaxllama.config.stored import UNMULTIPLIED, CheckpointForm, Multipliers

__all__ = [
    "Activation",
    "AttentionConfig",
    "Beside",
    "CheckpointForm",
    "DeltaConfig",
    "ExpertsConfig",
    "FeatureMap",
    "FeedConfig",
    "FlatConfig",
    "Form",
    "FullAttentionConfig",
    "GLAConfig",
    "Inputs",
    "IndexerConfig",
    "LatentConfig",
    "LayerConfig",
    "LayerInputsConfig",
    "MixerOptions",
    "ModelConfig",
    "Multipliers",
    "Norm",
    "NormConfig",
    "Parallel",
    "QKNorm",
    "RopeConfig",
    "RopeScaling",
    "Eagle",
    "Shared",
    "SharedBlocks",
    "StepConfig",
    "UNGATED",
    "UNMULTIPLIED",
    "configs_dir",
    "expand",
    "from_dict",
    "load_config",
    "model_of",
    "of_last_version",
    "preset_names",
    "preset_sampling",
    "read_toml",
    "shipped",
]
