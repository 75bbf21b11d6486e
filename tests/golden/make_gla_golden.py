"""Make gla_golden.npz: what flash-linear-attention computes, for test_gla and test_gla_model.

    PYTHONPATH=.:tests python tests/golden/make_gla_golden.py OUT.npz

Needs a GPU, torch, triton, and flash-linear-attention 0.6.0 with fla-core 0.6.0.  Weights and
inputs come from seeded numpy generators, which the tests run again, so the file holds only results:
logits of ``GLAForCausalLM`` for each of CONFIGS, and o, the state and the gradients of its naive
recurrence for ``op_inputs``.  float32 throughout; Triton is told not to use TF32.  The layers run
as the recurrent kernel ("chunk" for the configuration that asks for it).  FlashAttention, which has
no float32, is replaced by torch's own attention with the same causal window.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import numpy as np

from tests.helpers.seeded import uniform

_COMMON: dict[str, Any] = {
    "model_type": "gla",
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_heads": 2,
    "expand_k": 0.5,
    "expand_v": 1.0,
    "norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "attn_mode": "fused_recurrent",
    "fuse_cross_entropy": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ATTN = {
    "layers": [1],
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_bias": True,
    "window_size": 24,
    "rope_theta": 1000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": _COMMON,
    "chunk": {**_COMMON, "attn_mode": "chunk"},
    "kv_groups": {**_COMMON, "num_heads": 4, "num_kv_heads": 2},
    "short_conv": {**_COMMON, "use_short_conv": True, "num_heads": 4, "num_kv_heads": 2},
    "no_output_gate": {**_COMMON, "use_output_gate": False},
    "unfused_norm": {**_COMMON, "fuse_norm": False, "clamp_min": -0.05},
    "hybrid": {**_COMMON, "num_hidden_layers": 3, "attn": _ATTN},
}
N_TOKENS = 80  # above the 64 up to which the layer always takes its recurrent kernel
OP_SHAPE = (2, 70, 2, 32, 48)  # B, T, H, Dk, Dv


def tokens() -> np.ndarray:
    unit = (uniform(7, N_TOKENS) + 1) / 2
    return (unit * _COMMON["vocab_size"]).astype(np.int64)[None]


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Seeded weights for tensors of these names and shapes, of a size that keeps logits near 1."""
    out = {}
    for index, name in enumerate(sorted(shapes)):
        x = uniform(100 + index, math.prod(shapes[name])).reshape(shapes[name])
        if "norm" in name:
            x = 1 + np.float32(0.3) * x
        elif x.ndim > 1 and "embeddings" not in name:
            x = x * np.float32((3 / math.prod(x.shape[1:])) ** 0.5)
        out[name] = x
    return out


def op_inputs() -> dict[str, np.ndarray]:
    """q, k, v, log_decay g, initial_state s, and the loss's weights d_o and d_s."""
    b, t, h, d_k, d_v = OP_SHAPE
    shapes = {
        "q": (b, t, h, d_k),
        "k": (b, t, h, d_k),
        "v": (b, t, h, d_v),
        "g": (b, t, h, d_k),
        "s": (b, h, d_k, d_v),
        "d_o": (b, t, h, d_v),
        "d_s": (b, h, d_k, d_v),
    }
    out = {
        name: np.float32(1.5) * uniform(index, math.prod(shape)).reshape(shape)
        for index, (name, shape) in enumerate(shapes.items())
    }
    out["g"] = np.float32(0.1) * (out["g"] - np.float32(1.5))  # in [-0.3, 0)
    return out


def main(path: str) -> None:
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    import torch
    from triton.runtime.autotuner import Autotuner

    # One configuration a kernel: which is fastest is no matter here, and trying takes minutes.
    init = Autotuner.__init__
    Autotuner.__init__ = lambda self, fn, names, configs, *args, **options: init(
        self, fn, names, configs[:1], *args, **options
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    results: dict[str, np.ndarray] = {}

    from fla.ops.gla import chunk_gla
    from fla.ops.gla.naive import naive_recurrent_gla

    data = {name: torch.tensor(x, device="cuda") for name, x in op_inputs().items()}
    inputs = [data[name].requires_grad_() for name in ("q", "k", "v", "g", "s")]
    o, s = naive_recurrent_gla(*inputs, output_final_state=True)
    ((o * data["d_o"]).sum() + (s * data["d_s"]).sum()).backward()
    results |= {"op/o": _numpy(o), "op/s": _numpy(s)}
    results |= {f"op/d_{name}": _numpy(data[name].grad) for name in ("q", "k", "v", "g", "s")}
    with torch.no_grad():
        o, s = chunk_gla(*inputs[:4], initial_state=inputs[4], output_final_state=True)
    print(f"chunk_gla against the recurrence: {_error(_numpy(o), results['op/o']):.1e}", flush=True)

    import fla.layers.attn as attn

    attn.flash_attn_func = _attention
    from fla.models.gla import GLAConfig, GLAForCausalLM

    ids = torch.tensor(tokens(), device="cuda")
    for name, config in CONFIGS.items():
        model = GLAForCausalLM(GLAConfig(**config)).float().cuda().eval()
        state = model.state_dict()
        values = weights({key: tuple(x.shape) for key, x in state.items()})
        model.load_state_dict({key: torch.tensor(x) for key, x in values.items()})
        with torch.no_grad():
            results[name] = _numpy(model(ids, use_cache=False).logits)
        print(f"{name}: rms {np.sqrt(np.mean(results[name] ** 2)):.3f}", *state, flush=True)
        np.savez_compressed(path, **results)


def _attention(q, k, v, causal: bool, window_size: tuple[int, int]):
    """``flash_attn_func`` for ``[B, T, heads, H]`` in float32: causal, window counted backwards."""
    import torch

    assert causal
    length = q.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    mask = distance >= 0
    if window_size[0] >= 0:
        mask &= distance <= window_size[0]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device))
    return out.transpose(1, 2)


def _numpy(x) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def _error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


if __name__ == "__main__":
    main(sys.argv[1])
