"""Write a file of OLMoE-1B-7B's shape with random weights, for ``cpu_llama_cpp.py``.

    python benchmarks/peers/cpu_olmoe.py shards DIR [--layers 16]
    python benchmarks/peers/cpu_olmoe.py convert DIR BF16.gguf --llama-cpp DIR --like FILE.gguf
    PEER_PYTHON benchmarks/peers/cpu_olmoe.py quantize BF16.gguf Q4.gguf

``shards`` writes a Hugging Face directory in bfloat16, one layer (0.8 GB) at a time: 14 GB for all
16 layers.  ``convert`` runs llama.cpp's own converter from a copy of its sources, with the
vocabulary of another file, because the directory has no tokenizer.  ``quantize`` is llama.cpp's
own, to Q4_0 with its usual exceptions, in an environment with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA_FTYPE_Q4_0 = 2


def drawn(rng: np.random.Generator, *shape: int) -> Any:
    """A bfloat16 tensor of normal values: 65,536 quantiles of the distribution, drawn evenly."""
    import torch

    if not hasattr(drawn, "table"):
        normal = statistics.NormalDist(0.0, 0.02)
        values = [normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)]
        drawn.table = torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy()
    codes = rng.integers(0, 65536, shape, np.uint16)
    return torch.from_numpy(drawn.table[codes]).view(torch.bfloat16)


def shards(directory: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    rng, d, f = np.random.default_rng(0), CONFIG["hidden_size"], CONFIG["intermediate_size"]
    config = CONFIG | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    ones = torch.ones(d, dtype=torch.bfloat16)
    places: dict[str, str] = {}
    for index in range(layers + 1):
        if index == layers:
            tensors = {
                "model.embed_tokens.weight": drawn(rng, config["vocab_size"], d),
                "lm_head.weight": drawn(rng, config["vocab_size"], d),
                "model.norm.weight": ones,
            }
        else:
            layer = f"model.layers.{index}."
            tensors = {f"{layer}self_attn.{name}_proj.weight": drawn(rng, d, d) for name in "qkvo"}
            norms = ("input_layernorm", "post_attention_layernorm")
            for name in (*norms, "self_attn.q_norm", "self_attn.k_norm"):
                tensors[f"{layer}{name}.weight"] = ones.clone()
            tensors[f"{layer}mlp.gate.weight"] = drawn(rng, config["num_experts"], d)
            for expert in range(config["num_experts"]):
                room = f"{layer}mlp.experts.{expert}."
                tensors[f"{room}gate_proj.weight"] = drawn(rng, f, d)
                tensors[f"{room}up_proj.weight"] = drawn(rng, f, d)
                tensors[f"{room}down_proj.weight"] = drawn(rng, d, f)
        name = f"model-{index + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        print(f"{name}: {len(tensors)} tensors", flush=True)
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def convert(directory: Path, out: Path, llama_cpp: Path, like: Path) -> None:
    sys.path.insert(0, str(llama_cpp / "gguf-py"))
    sys.path.append(str(llama_cpp))
    import conversion
    import gguf

    source = gguf.GGUFReader(like)
    words = {
        key: list(source.fields[f"tokenizer.ggml.{key}"].contents())
        for key in ("tokens", "token_type", "merges")
    }

    def set_vocab(self: Any) -> None:
        more, write = self.hparams["vocab_size"] - len(words["tokens"]), self.gguf_writer
        write.add_tokenizer_model("gpt2")
        write.add_tokenizer_pre("smollm")
        write.add_token_list(words["tokens"] + [f"<|unused_{i}|>" for i in range(more)])
        write.add_token_types(words["token_type"] + [5] * more)
        write.add_token_merges(words["merges"])
        write.add_bos_token_id(1)
        write.add_eos_token_id(2)

    kind = conversion.get_model_class(CONFIG["architectures"][0])
    kind.set_vocab = set_vocab
    kind(directory, gguf.LlamaFileType.MOSTLY_BF16, out).write()


def quantize(source: Path, out: Path) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = LLAMA_FTYPE_Q4_0, 2
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(params)
    )
    if failed:
        sys.exit(f"llama.cpp's quantizer failed: {failed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("shards", "convert", "quantize"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--like", type=Path)
    args = parser.parse_args()
    if args.what == "shards":
        shards(*args.paths, args.layers)
    elif args.what == "convert":
        convert(*args.paths, args.llama_cpp, args.like)
    else:
        quantize(*args.paths)


if __name__ == "__main__":
    main()
