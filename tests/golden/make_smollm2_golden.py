"""Write smollm2.npz and smollm2_llamacpp.npz: what transformers and llama.cpp say of SmolLM2.

    python make_smollm2_golden.py transformers FILE.gguf      (transformers 5.23.0, accelerate)
    python make_smollm2_golden.py llama.cpp FILE.gguf         (llama-cpp-python 0.3.36, gguf)

transformers reads the GGUF itself, dequantizes it and continues 20 prompts greedily in float32, so
nothing of ours is in that file.  llama.cpp gives its most likely next token after every position of
english.txt: with the file as it is (its products then round activations to 8 bits) and with the
same weights written out in float32.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
NEW = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "To make a cup of tea, first",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "La capitale de l'Italie est",
    "import numpy as np\n\nx = np.",
    "The mitochondria",
    "Q: What is 7 times 8?\nA:",
    "Shakespeare wrote",
    "In 1969, astronauts",
    "| Country | Capital |\n|---|---|\n| Japan |",
    "Café, naïve and 東京 are",
    "A",
]


def from_transformers(gguf: Path) -> None:
    import torch
    import transformers

    load = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**load)
    prompts, greedy = [], []
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        prompts.append(ids[0].numpy().astype(np.uint16))
        greedy.append(out[len(ids[0]) :].numpy().astype(np.uint16))
        print(repr(tokenizer.decode(out)))
    np.savez_compressed(
        HERE / "smollm2.npz",
        prompts=np.concatenate(prompts),
        lengths=np.array([len(p) for p in prompts], np.uint16),
        greedy=np.stack(greedy),
    )


def from_llamacpp(gguf: Path) -> None:
    from llama_cpp import Llama

    def most_likely(path: Path) -> tuple[list[int], np.ndarray]:
        model = Llama(str(path), n_ctx=1024, logits_all=True, n_threads=2, verbose=False)
        tokens = model.tokenize(text.encode(), add_bos=False, special=False)
        model.eval(tokens)
        return tokens, np.array(model.scores[: len(tokens)]).argmax(-1).astype(np.uint16)

    text = (HERE / "english.txt").read_text(encoding="utf-8")
    tokens, as_shipped = most_likely(gguf)
    with tempfile.TemporaryDirectory() as folder:
        expanded = Path(folder) / "f32.gguf"
        write_float32(gguf, expanded)
        _, float32 = most_likely(expanded)
    print(len(tokens), "tokens; the two agree at", (as_shipped == float32).mean())
    np.savez_compressed(
        HERE / "smollm2_llamacpp.npz",
        tokens=np.array(tokens, np.uint16),
        as_shipped=as_shipped,
        float32=float32,
    )


def write_float32(source: Path, target: Path) -> None:
    """The same model with every tensor dequantized."""
    import gguf

    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape([int(n) for n in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    {"transformers": from_transformers, "llama.cpp": from_llamacpp}[sys.argv[1]](Path(sys.argv[2]))
