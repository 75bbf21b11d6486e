"""Write a file of OLMoE-1B-7B's shape with random codes, for ``cpu_llama_cpp.py``.

    python benchmarks/peers/cpu_olmoe.py OUT.gguf --like FILE.gguf [--experts MXFP4] [--layers 16]

The experts have the type that is named, all other matrices Q8_0, and the router is float32. With
Q4_0 and all 16 layers the file has 4 GB. Its vocabulary is that of FILE.
"""

from __future__ import annotations

import argparse
from typing import Any

import gguf
import numpy as np
from cpu_llama_cpp import add_words

D, F, HEADS, EXPERTS, ACTIVE, VOCAB = 2048, 1024, 16, 64, 8, 50304
BYTES = {"Q4_0": 18, "MXFP4": 17, "Q8_0": 34}  # of a block of 32 columns


def blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random blocks of a matrix ``shape [..., columns]``, whose weights deviate by 0.02."""
    found = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, BYTES[kind]), np.uint8)
    if kind == "MXFP4":
        found[..., 0] = 121  # a scale of 2^-6; codes reach 6 and their doubles 12
    else:
        scale = np.float16(0.0043 if kind == "Q4_0" else 0.00027)
        found[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return found.reshape(*shape[:-1], -1)


def write(out: str, like: str, experts: str, layers: int) -> None:
    writer, rng = gguf.GGUFWriter(out, "olmoe", use_temp_file=True), np.random.default_rng(0)
    sizes = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": D,
        "feed_forward_length": F,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "expert_count": EXPERTS,
        "expert_used_count": ACTIVE,
        "vocab_size": VOCAB,
    }
    for name, value in sizes.items():
        writer.add_uint32(f"olmoe.{name}", value)
    writer.add_float32("olmoe.rope.freq_base", 1e4)
    writer.add_float32("olmoe.attention.layer_norm_rms_epsilon", 1e-5)
    add_words(writer, like, VOCAB)

    def matrix(name: str, kind: str, *shape: int) -> None:
        types: Any = gguf.GGMLQuantizationType
        writer.add_tensor(f"{name}.weight", blocks(rng, kind, shape), raw_dtype=types[kind])

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(D, np.float32))

    matrix("token_embd", "Q8_0", VOCAB, D)
    ones("output_norm")
    matrix("output", "Q8_0", VOCAB, D)
    for layer in range(layers):
        at = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
            ones(at + name)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(at + name, "Q8_0", D, D)
        router = rng.standard_normal((EXPERTS, D), np.float32) * np.float32(0.02)
        writer.add_tensor(f"{at}ffn_gate_inp.weight", router)
        matrix(f"{at}ffn_gate_exps", experts, EXPERTS, F, D)
        matrix(f"{at}ffn_up_exps", experts, EXPERTS, F, D)
        matrix(f"{at}ffn_down_exps", experts, EXPERTS, D, F)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--like", required=True)
    parser.add_argument("--experts", choices=BYTES, default="Q4_0")
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    write(args.out, args.like, args.experts, args.layers)


if __name__ == "__main__":
    main()
