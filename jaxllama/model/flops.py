"""How much arithmetic a token of training is, and the share of a device's peak that it reaches.

    forward = 2 * (weights of matmuls, the head's included)  +  mixers, a token
      attention   2 * T * N * H        scores and values: each 2 * N * H a key, T / 2 keys a query
      GLA         4 * H * Dk * Dv      the recursion's own products: k v^T and q S
      delta rule  6 * H * Dk * Dv      k S as well
    training = 3 * forward             (the backward pass is two products for each)
    adapters = 2 * weights' part + 3 * mixers' part      (frozen weights have one: dX)

as in PaLM (arXiv 2204.02311, appendix B), with the causal half of the square.  It counts the
model's work, not the machine's. Recomputation (``remat``), the products inside GLA's chunks, a
teacher's pass and element-wise arithmetic are left out. So they lower MFU, as they should.
"""

from __future__ import annotations

import jax

from jaxllama.config import ModelConfig
from jaxllama.model.mixers import MIXERS
from jaxllama.model.params import param_table

# Dense bfloat16 peaks of the vendors' data sheets, TFLOP/s, by a word of jax's device_kind.
_PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}


def flops_per_token(cfg: ModelConfig, sequence_length: int, is_frozen: bool = False) -> float:
    """Training FLOPs a token; see the module docstring.  is_frozen: only adapters learn, whose own
    arithmetic is not counted."""
    total = 3.0 * forward_flops_per_token(cfg, sequence_length)
    return total - 2.0 * matmul_weights(cfg) if is_frozen else total


def forward_flops_per_token(cfg: ModelConfig, sequence_length: int) -> float:
    total = 2.0 * matmul_weights(cfg)
    for layer in cfg.layers:
        total += MIXERS[layer.kind].parameters.flops(layer, sequence_length)
    return total


def parameters(cfg: ModelConfig) -> int:
    return sum(spec.size for spec in param_table(cfg).values())


def matmul_weights(cfg: ModelConfig) -> int:
    """Weights that a token is multiplied by: matrices, those of its own experts, a tied embedding
    once, as the head."""
    total = 0
    for path, spec in param_table(cfg.replace(mtp=None)).items():
        if len(spec.shape) == 2 and not path[-2].endswith("conv"):
            total += spec.size
        elif len(spec.shape) == 3 and (experts := cfg.experts) is not None:
            total += spec.size * experts.n_active // experts.n_experts
    return total if cfg.tie_embeddings else total - cfg.vocab_size * cfg.d_model


def peak_flops(stated_tflops: float | None = None) -> float | None:
    """FLOP/s of the default device: as stated, by its name, or None if neither is known."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    kind = jax.devices()[0].device_kind
    return next((peak * 1e12 for word, peak in _PEAKS.items() if word in kind), None)
