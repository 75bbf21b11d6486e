"""The ops: quantized matmul, norms, activations, Gated Linear Attention and the gated delta rule,
on arrays and QTensors.

Each op has a readable reference and an XLA form that runs anywhere.  Where it pays, an op has a
Pallas Mosaic GPU kernel for Hopper.  ``dispatch`` chooses the implementation, and ``explain``
reports the choice for a call.  This package does not use flax or a configuration.
"""

from pallas_kernels.attention.op import decode_attention
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.attention.rope_cache import rope_and_write
from pallas_kernels.dispatch import explain
from pallas_kernels.experts.gate import ClampedGate
from pallas_kernels.experts.op import grouped_matmul
from pallas_kernels.gated_delta.op import gated_delta, gated_delta_step
from pallas_kernels.gla.op import gla, gla_step
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import QTensor, dequantize, quantize
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu

__all__ = [
    "ClampedGate",
    "QTensor",
    "decode_attention",
    "dequantize",
    "explain",
    "gated_delta",
    "gated_delta_step",
    "gla",
    "gla_step",
    "grouped_matmul",
    "quantize",
    "quantize_tokens",
    "quantized_matmul",
    "rms_norm",
    "rope_and_attend",
    "rope_and_write",
    "swiglu",
]
