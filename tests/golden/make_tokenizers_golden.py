"""Writes tokenizers.json: what transformers makes of the texts and templates of test_tokenizer.

python -m tests.golden.make_tokenizers_golden
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import transformers

from jaxllama.checkpoints import hub
from tests.text import test_tokenizer as cases


def golden() -> dict[str, Any]:
    file = hub.resolve("smollm2-135m")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smollm2 = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    folder = cases.llama_like(Path(tempfile.mkdtemp()))
    llama = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return {
        "smollm2": {text: smollm2(text).input_ids for text in cases.TEXTS},
        "templates": [
            smollm2.apply_chat_template(
                cases.MESSAGES,
                chat_template=template,
                tools=[cases.TOOL],
                flavour="é",
                tokenize=False,
                add_generation_prompt=True,
            )
            for template in cases.TEMPLATES
        ],
        "llama": {
            text: [
                llama(text).input_ids,
                llama(text, add_special_tokens=False).input_ids,
                llama.decode(llama(text).input_ids, skip_special_tokens=True),
            ]
            for text in cases.LLAMA_TEXTS
        },
    }


def main() -> None:
    parts = []
    for name, values in golden().items():
        if isinstance(values, dict):
            rows = [f"{json.dumps(text)}: {json.dumps(want)}" for text, want in values.items()]
            parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
        else:
            rows = [json.dumps(value) for value in values]
            parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(rows) + "\n]")
    Path(__file__).with_name("tokenizers.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
