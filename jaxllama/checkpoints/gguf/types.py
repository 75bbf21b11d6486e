"""The tensor types of GGUF files, by their numbers, and their blocks.

The ``gguf`` package has the same tables. Importing it takes 70 ms of every start, and most files
need nothing else of it. So the tables are repeated here, and ``test_gguf_types`` compares them.
``codes`` imports the package for the types that only it can dequantize.
"""

from __future__ import annotations

import enum


class TensorType(enum.IntEnum):
    """A type's number in a file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


Type = TensorType
# Columns of a block, and bytes of a block.
BLOCKS: dict[TensorType, tuple[int, int]] = {
    Type.F32: (1, 4),
    Type.F16: (1, 2),
    Type.Q4_0: (32, 18),
    Type.Q4_1: (32, 20),
    Type.Q5_0: (32, 22),
    Type.Q5_1: (32, 24),
    Type.Q8_0: (32, 34),
    Type.Q8_1: (32, 40),
    Type.Q2_K: (256, 84),
    Type.Q3_K: (256, 110),
    Type.Q4_K: (256, 144),
    Type.Q5_K: (256, 176),
    Type.Q6_K: (256, 210),
    Type.Q8_K: (256, 292),
    Type.IQ2_XXS: (256, 66),
    Type.IQ2_XS: (256, 74),
    Type.IQ3_XXS: (256, 98),
    Type.IQ1_S: (256, 50),
    Type.IQ4_NL: (32, 18),
    Type.IQ3_S: (256, 110),
    Type.IQ2_S: (256, 82),
    Type.IQ4_XS: (256, 136),
    Type.I8: (1, 1),
    Type.I16: (1, 2),
    Type.I32: (1, 4),
    Type.I64: (1, 8),
    Type.F64: (1, 8),
    Type.IQ1_M: (256, 56),
    Type.BF16: (1, 2),
    Type.TQ1_0: (256, 54),
    Type.TQ2_0: (256, 66),
    Type.MXFP4: (32, 17),
    Type.NVFP4: (64, 36),
    Type.Q1_0: (128, 18),
}
FLOATS = (Type.F32, Type.F16, Type.BF16)
# Types whose quantized matrices are read: all that the ``gguf`` package can dequantize.
KEPT = tuple(
    kind for kind in Type if BLOCKS[kind][0] > 1 and kind not in (Type.Q8_1, Type.Q8_K, Type.Q1_0)
)
READABLE = (*FLOATS, *KEPT)
