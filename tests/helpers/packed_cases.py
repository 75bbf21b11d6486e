"""Packed checkpoints to test with: config.json, how a Linear is made, and what comes of it."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxllama.checkpoints.hf.tables import tensor_table as param_table
from pallas_kernels.qtensor import QTensor
from tests.helpers import packed_oracle as oracle
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

# down_proj has 48 inputs: with groups of 32 the last is short.
CFG = LLAMA.replace(n_layers=1, layer_types=("attention",), tie_embeddings=True, eos_token_ids=())
# 44 inputs are 5 1/2 int32 of 4 bits; 22 kv features are no multiple of 8.
ODD = CFG.replace(d_ff=44, head_dim=6, n_heads=6, n_kv_heads=3)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "desc_act": False,
    "sym": False,
    "checkpoint_format": "gptq",
}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {**TOKEN, "strategy": "tensor", "dynamic": False}


def compressed(kind: str, weights: dict[str, Any], inputs: Any = None, **more: Any) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"g": group},
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        **more,
    }


def floating(args: dict[str, Any]) -> dict[str, Any]:
    return {**args, "type": "float", "num_bits": 8}


GROUP, CHANNEL, TENSOR = (
    {"strategy": "group", "group_size": 16},
    {"strategy": "channel"},
    {"strategy": "tensor"},
)
BLOCK = {"strategy": "block", "block_structure": [16, 16]}
BLOCK_INPUTS = floating({**TOKEN, "strategy": "group", "group_size": 16})
INT8 = {"num_bits": 8}
FLOAT4 = {"num_bits": 4, "type": "float"}
WIDE = CFG.replace(d_ff=160)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def awq(group=16):
    return lambda rng, name, out, width: oracle.awq(rng, out, width, group)


def gptq(group=16, order=None, **kwargs):
    def make(rng, name, out, width):
        g_idx = None
        if order == "desc_act":
            # One order for every Linear that reads the same input, as the method makes it.
            g_idx = oracle.act_order(np.random.default_rng(width), width, group)
        elif order == "own":
            g_idx = oracle.act_order(rng, width, group)
        elif order == "uneven":
            g_idx = rng.integers(0, -(-width // group), width).astype(np.int32)
        elif order == "consecutive":
            g_idx = (np.arange(width) // group).astype(np.int32)
        return oracle.gptq(rng, out, width, group, g_idx=g_idx, **kwargs)

    return make


def packed(group=16, order=None, **kwargs):
    def make(rng, name, out, width):
        g_idx = None
        if order == "act":
            g_idx = oracle.act_order(np.random.default_rng(width), width, group)
        elif order == "none":
            g_idx = np.full(width, -1, np.int32)
        return oracle.packed(rng, out, width, group, g_idx=g_idx, **kwargs)

    return make


def float4(name):
    return lambda rng, linear, out, width: oracle.float4(rng, out, width, name)


def plain(**kwargs):
    return lambda rng, name, out, width: oracle.plain(rng, out, width, **kwargs)


# id: (config, quantization_config, tensors of a Linear, [words, groups of qkv, of down, zeros?,
# columns?, activations, static?])
IMPORTS = {
    "awq": (CFG, AWQ, awq(), ["int4", 2, 3, True, False, None, False]),
    "awq-rows": (CFG, {**AWQ, "group_size": -1}, awq(-1), ["int4", 1, 1, True, False, None, False]),
    "awq-short-group": (
        CFG,
        {
            "quant_method": "awq",
            "w_bit": 4,
            "q_group_size": 32,
            "zero_point": True,
            "version": "GEMM",
        },
        awq(32),
        ["int4", 1, 3, True, False, None, False],
    ),
    "gptq": (CFG, GPTQ, gptq(), ["int4", 2, 3, True, False, None, False]),
    "gptq-symmetric": (
        CFG,
        {**GPTQ, "sym": True},
        gptq(symmetric=True),
        ["int4", 2, 3, False, False, None, False],
    ),
    "gptq-g_idx": (CFG, GPTQ, gptq(order="consecutive"), ["int4", 2, 3, True, False, None, False]),
    "gptq-act-order": (
        CFG,
        {**GPTQ, "desc_act": True},
        gptq(order="desc_act"),
        ["int4", 2, 3, True, True, None, False],
    ),
    "gptq-act-order-short-group": (
        CFG,
        {**GPTQ, "desc_act": True, "group_size": 32},
        gptq(32, "desc_act"),
        ["int4", 1, 3, True, True, None, False],
    ),
    "gptq-v2-uneven-groups": (
        CFG,
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        gptq(order="uneven", v2=True),
        ["int4", None, None, True, True, None, False],
    ),
    "gptq-8bit": (CFG, {**GPTQ, "bits": 8}, gptq(bits=8), ["int8", 2, 3, True, False, None, False]),
    "gptq-8bit-v2-rows": (
        CFG,
        {**GPTQ, "bits": 8, "group_size": -1, "format": "gptq_v2", "checkpoint_format": None},
        gptq(-1, bits=8, v2=True),
        ["int8", 1, 1, True, False, None, False],
    ),
    "gptq-8bit-symmetric-act-order": (
        CFG,
        {**GPTQ, "bits": 8, "desc_act": True},
        gptq(order="desc_act", bits=8, symmetric=True),
        ["int8", 2, 3, False, True, None, False],
    ),
    "gptq-padded": (ODD, GPTQ, gptq(order="desc_act"), ["int4", 2, 11, True, True, None, False]),
    "packed": (
        CFG,
        compressed("pack-quantized", GROUP),
        packed(),
        ["int4", 2, 3, False, False, None, False],
    ),
    "packed-zeros": (
        CFG,
        compressed("pack-quantized", {**GROUP, "symmetric": False}),
        packed(zeros="packed"),
        ["int4", 2, 3, True, False, None, False],
    ),
    "packed-old-zeros": (
        CFG,
        compressed("pack-quantized", {**GROUP, "symmetric": False}),
        packed(zeros="int8"),
        ["int4", 2, 3, True, False, None, False],
    ),
    "packed-act-order": (
        CFG,
        compressed("pack-quantized", {**GROUP, "actorder": "group"}),
        packed(order="act"),
        ["int4", 2, 3, False, True, None, False],
    ),
    "packed-no-order": (
        CFG,
        compressed("pack-quantized", GROUP),
        packed(order="none"),
        ["int4", 2, 3, False, False, None, False],
    ),
    "packed-padded": (
        ODD,
        compressed("pack-quantized", {**GROUP, "symmetric": False}),
        packed(zeros="packed"),
        ["int4", 2, 11, True, False, None, False],
    ),
    "packed-rows": (
        ODD,
        compressed("pack-quantized", CHANNEL),
        packed(None),
        ["int4", 1, 1, False, False, None, False],
    ),
    "packed-tensor": (
        CFG,
        compressed("pack-quantized", TENSOR),
        packed(None, per_tensor=True),
        ["int4", 1, 1, False, False, None, False],
    ),
    "packed-8bit-zeros": (
        ODD,
        compressed("pack-quantized", {**CHANNEL, **INT8, "symmetric": False}),
        packed(None, bits=8, zeros="packed"),
        ["int8", 1, 1, True, False, None, False],
    ),
    "packed-int8-tokens": (
        CFG,
        compressed("pack-quantized", GROUP, TOKEN),
        packed(),
        ["int4", 2, 3, False, False, "int8", False],
    ),
    "packed-fp8-tokens": (
        CFG,
        compressed("pack-quantized", GROUP, floating(TOKEN)),
        packed(),
        ["int4", 2, 3, False, False, "float8_e4m3fn", False],
    ),
    "int8-tokens-of-4-bits": (
        CFG,
        compressed("int-quantized", GROUP, TOKEN),
        plain(floating=False, bits=4, group=16),
        ["int4", 2, 3, False, False, "int8", False],
    ),
    "int8-tokens": (
        CFG,
        compressed("int-quantized", {**CHANNEL, **INT8}, TOKEN),
        plain(floating=False),
        ["int8", 1, 1, False, False, "int8", False],
    ),
    "int8-static": (
        CFG,
        compressed("int-quantized", {**CHANNEL, **INT8}, STATIC),
        plain(floating=False, static="input_scale"),
        ["int8", 1, 1, False, False, "int8", True],
    ),
    "fp8-channel-tokens": (
        CFG,
        compressed("float-quantized", floating(CHANNEL), floating(TOKEN)),
        plain(floating=True, dtype=ml_dtypes.bfloat16),
        ["float8_e4m3fn", 1, 1, False, False, "float8_e4m3fn", False],
    ),
    "fp8-tensor-static": (
        CFG,
        compressed("float-quantized", floating(TENSOR), floating(STATIC)),
        plain(floating=True, scale="tensor", static="input_scale"),
        ["float8_e4m3fn", 1, 1, False, False, "float8_e4m3fn", True],
    ),
    "fp8-weights-only": (
        CFG,
        compressed("naive-quantized", floating(CHANNEL)),
        plain(floating=True),
        ["float8_e4m3fn", 1, 1, False, False, None, False],
    ),
    "fp8-compressed-blocks": (
        CFG,
        compressed("float-quantized", floating(BLOCK), BLOCK_INPUTS),
        plain(floating=True, scale="block"),
        ["float8_e4m3fn", 2, 3, False, False, None, False],
    ),
    "fp8-blocks": (
        CFG,
        {**FP8, "weight_block_size": [16, 16], "fmt": "e4m3"},
        plain(floating=True, scale="block", name="weight_scale_inv"),
        ["float8_e4m3fn", 2, 3, False, False, None, False],
    ),
    "fp8-blocks-at-the-edge": (
        ODD,
        {**FP8, "weight_block_size": [32, 32]},
        plain(floating=True, scale="block", block=(32, 32), name="weight_scale_inv"),
        ["float8_e4m3fn", 1, 11, False, False, None, False],
    ),
    "fp8-blocks-of-128": (
        WIDE,
        {**FP8, "weight_block_size": [128, 128], "fmt": "e4m3"},
        plain(floating=True, scale="block", block=(128, 128), name="weight_scale_inv"),
        ["float8_e4m3fn", 1, 5, False, False, None, False],
    ),
    "mxfp4": (
        WIDE,
        compressed("mxfp4-pack-quantized", {**FLOAT4, "strategy": "group", "group_size": 32}),
        float4("mxfp4"),
        ["float4_e2m1fn", 1, 5, False, False, None, False],
    ),
    "nvfp4": (
        WIDE,
        compressed(
            "nvfp4-pack-quantized",
            {**FLOAT4, "strategy": "tensor_group", "group_size": 16},
            {**FLOAT4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        ),
        float4("nvfp4"),
        ["float4_e2m1fn", 2, 10, False, False, None, False],
    ),
    "modelopt": (
        WIDE,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        float4("modelopt"),
        ["float4_e2m1fn", 2, 10, False, False, None, False],
    ),
    "fp8-scalar": (
        CFG,
        FP8,
        plain(floating=True, scale="scalar", name="weight_scale_inv"),
        ["float8_e4m3fn", 1, 1, False, False, "float8_e4m3fn", False],
    ),
    "fp8-column": (
        CFG,
        FP8,
        plain(floating=True, scale="column"),
        ["float8_e4m3fn", 1, 1, False, False, "float8_e4m3fn", False],
    ),
    "fp8-static": (
        CFG,
        {**FP8, "activation_scheme": "static"},
        plain(floating=True, scale="scalar", static="input_scale"),
        ["float8_e4m3fn", 1, 1, False, False, "float8_e4m3fn", True],
    ),
}


def write(folder: Path, cfg, options, make) -> tuple[Path, dict[str, np.ndarray]]:
    """A directory, and its weights as floats; see ``packed_oracle.checkpoint``."""
    rng = np.random.default_rng(0)
    made = oracle.checkpoint(cfg, options, lambda *linear: make(rng, *linear))
    oracle.save(folder, *made[:2])
    return folder, made[2]


@functools.cache
def _made(case: str):
    cfg, options, make, _ = IMPORTS[case]
    rng = np.random.default_rng(0)
    return oracle.checkpoint(cfg, options, lambda *linear: make(rng, *linear))


def tensors_of(case: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(tensors, config.json) of a case, to be changed."""
    return copy.deepcopy(_made(case)[:2])


def write_case(folder: Path, case: str) -> tuple[Path, dict[str, np.ndarray]]:
    """The directory of a case, and its weights as floats."""
    tensors, config, weights = _made(case)
    oracle.save(folder, tensors, config)
    return folder, weights


def words_of(shape, words="int4", group=None, *, zeros=False, scale=np.float16, seed=0) -> QTensor:
    """Random words and scales."""
    rng = np.random.default_rng(seed)
    groups = (shape[0], 1 if group is None else shape[1] // group)
    low, high = (-128, 128) if words == "int8" else (-8, 8)
    q = rng.integers(low, high, shape).astype(jnp.dtype(words))
    zero = rng.integers(low, high, groups).astype(np.int8) if zeros else None
    return QTensor(q, rng.uniform(0.01, 0.02, groups).astype(scale), zero)


def quantized(cfg, pick) -> dict[str, Any]:
    """seeded_params with ``pick(path, weight)`` in place of every matmul's weight."""
    params = seeded_params(cfg)
    for path, spec in param_table(cfg).items():
        *rooms, leaf = path
        room = params
        for key in rooms:
            room = room[key]
        if path[0] != "embed" and len(spec.shape) == 2 and leaf == "weight":
            room[leaf] = pick(path, room[leaf])
    return params
