"""The layers as Flax (linen) modules, for a model of your own.

    from jaxllama.modules import GatedLinearAttention, RMSNorm, SwiGLU

``jaxllama.model.module`` says what each is.  ``stack_layers`` and ``unstack_layers`` convert
between the parameters of ``Decoder(cfg)`` and of ``Decoder(cfg, scan=True)``.
"""

from jaxllama.model.module import (
    Attention,
    Decoder,
    DecoderLayer,
    GatedDeltaNet,
    GatedLinearAttention,
    LayerNorm,
    MixtureOfExperts,
    RMSNorm,
    ShortConvolution,
    SwiGLU,
)
from jaxllama.model.stacked import stack_layers, unstack_layers

__all__ = [
    "Attention",
    "Decoder",
    "DecoderLayer",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LayerNorm",
    "MixtureOfExperts",
    "RMSNorm",
    "ShortConvolution",
    "SwiGLU",
    "stack_layers",
    "unstack_layers",
]
