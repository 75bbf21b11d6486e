"""The layers as Flax (linen) modules, for a model of your own.

    from jaxllama.modules import GatedLinearAttention, RMSNorm, SwiGLU

``jaxllama.model.module`` says what each is.  ``stack_layers`` and ``unstack_layers`` convert
between the parameters of ``Decoder(cfg)`` and of ``Decoder(cfg, scan=True)``.
"""

from jaxllama.model.mixers.attention.module import Attention
from jaxllama.model.mixers.delta.module import GatedDeltaNet
from jaxllama.model.mixers.gla.module import GatedLinearAttention
from jaxllama.model.mixers.latent.module import LatentAttention
from jaxllama.model.mixers.short_conv.module import ShortConvolution
from jaxllama.model.mixers.ssm.module import Mamba2
from jaxllama.model.module import (
    Decoder,
    DecoderLayer,
    LayerNorm,
    MixtureOfExperts,
    RMSNorm,
    SwiGLU,
)
from jaxllama.model.stacked import stack_layers, unstack_layers

__all__ = [
    "Attention",
    "Decoder",
    "DecoderLayer",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LatentAttention",
    "LayerNorm",
    "Mamba2",
    "MixtureOfExperts",
    "RMSNorm",
    "ShortConvolution",
    "SwiGLU",
    "stack_layers",
    "unstack_layers",
]
