"""The ops: quantized matmul, norms, activations, Gated Linear Attention, on arrays and QTensors.

Each has a readable reference, an XLA form that runs anywhere, and where it pays a Pallas Mosaic GPU
kernel for Hopper; ``dispatch`` says which is taken.  No flax and no configuration in here.
"""

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gla import gla, gla_step
from pallas_kernels.qtensor import QTensor, dequantize, quantize
from pallas_kernels.quantize_tokens import quantize_tokens
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rope_attention import rope_and_attend
from pallas_kernels.rope_cache import rope_and_write
from pallas_kernels.swiglu import swiglu

__all__ = [
    "QTensor",
    "decode_attention",
    "dequantize",
    "gla",
    "gla_step",
    "quantize",
    "quantize_tokens",
    "quantized_matmul",
    "rms_norm",
    "rope_and_attend",
    "rope_and_write",
    "swiglu",
]
