"""A tokenizer's files as a GGUF file's ``tokenizer.*`` keys: the way back of ``tokenizer``.

    keys(files, cfg) -> metadata        check_way_back(file, files)

Byte-level BPE becomes "gpt2". Its pre-tokenizer takes the name in ``tokenizer.ggml.pre`` that cuts
a sample like it. BPE with bytes for unknown characters becomes "llama": pieces score by the rank of
the merge that makes them. Without a tokenizer the model is "none". ``check_way_back`` encodes the
sample with the written file's tokenizer. Left out: Unigram, WordPiece and normalizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxllama.checkpoints.gguf import tokenizer
from jaxllama.checkpoints.gguf.file import NO_VOCABULARY, GGUFFile
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonMapping, JsonObject

_ROLES = {"unk": "unknown", "pad": "padding"}
_LOWEST = -1e9  # score of pieces that no merge makes
# Texts in which the known pre-tokenizers differ: digits, cases, scripts, signs, blanks.
_SAMPLE = (
    "\n \n\n \t\t \n   I've 'told HE'S 'RE 3 33 333 3333 33333 3.3 3..3 a1b2 camelCase XMLHttp "
    "caf\u00e9 \u043d\u0435\u0449\u043e \u6211\u60f3\u5728apple\u5de5\u4f5c \u3053\u3093 "
    "\U0001f680\u2705 ?!...... ======= ``'' a_b/c\\d <x>(y)[z]{w} \u1780\u17b6\u1793\u17cb "
    "$5.00 #tag @me 50% x^2+y~z|\r\n\r\n  e\u0301  end "
)


def keys(files: Iterable[str | Path], cfg: ModelConfig) -> JsonObject:
    """Return the metadata of a tokenizer, and of the tokens that begin and end ``cfg``'s texts.

    Ids of the model without a token become unused ones. Raises JaxLlamaError for a tokenizer that
    llama.cpp does not have.
    """
    paths = {Path(path).name: Path(path) for path in files}
    if "tokenizer.json" not in paths:
        return {
            "tokenizer.ggml.model": NO_VOCABULARY[0],
            **_ids({"bos": cfg.bos_token_id}, cfg, []),
        }
    document = _json(paths["tokenizer.json"])
    backend = Tokenizer.from_str(json.dumps(document))
    config = _json(paths["tokenizer_config.json"]) if "tokenizer_config.json" in paths else {}
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise _error(f"a model of type {model['type']!r} is not written, only BPE")
    merges = [
        tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]
    ]
    if not merges:
        raise _error("its vocabulary has no merges, which llama.cpp needs")
    tokens, types = _tokens(backend, model, cfg.vocab_size)
    found: JsonObject = {}
    if model.get("byte_fallback"):
        found |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(tokens, merges),
            "tokenizer.ggml.add_space_prefix": _adds_blank(backend),
        }
    else:
        found |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer(backend, model),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        }
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    template = paths.get("chat_template.jinja")
    text = config.get("chat_template") if template is None else template.read_text("utf-8")
    if isinstance(text, list):
        text = next((one["template"] for one in text if one.get("name") == "default"), None)
    if text:
        found["tokenizer.chat_template"] = text
    spelt = tokenizer.ends_by_spelling(tokens, types)
    roles, edges = _edges(backend, config)
    return found | edges | _ids({"bos": cfg.bos_token_id, **roles}, cfg, spelt)


def check_way_back(file: GGUFFile, files: Iterable[str | Path]) -> None:
    """Raise JaxLlamaError if the written file's tokenizer encodes a sample to other tokens."""
    source = next((path for path in map(Path, files) if path.name == "tokenizer.json"), None)
    if source is None:
        return
    backend = Tokenizer.from_file(str(source))
    want = backend.encode(_SAMPLE, add_special_tokens=False).ids
    got = tokenizer.build(file).encode(_SAMPLE, add_special_tokens=False).ids
    if got != want:
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), len(got))
        raise _error(f"a reader would encode a sample to other tokens (the first is number {at})")


def _error(why: str) -> JaxLlamaError:
    return JaxLlamaError(f"format 'gguf': tokenizer: {why}")


def _json(path: Path) -> JsonObject:
    return json.loads(path.read_text(encoding="utf-8"))


def _tokens(backend: Tokenizer, model: JsonMapping, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the spelling and the type of every id."""
    added = backend.get_added_tokens_decoder()
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [tokenizer.UNUSED] * vocab_size
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        tokens[index], types[index] = token, tokenizer.NORMAL
        if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[index] = tokenizer.BYTE
        elif token == model.get("unk_token"):
            types[index] = tokenizer.UNKNOWN
        elif index in added:
            types[index] = tokenizer.CONTROL if added[index].special else tokenizer.USER
    return tokens, types


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    rank: dict[str, int] = {}
    for index, (left, right) in enumerate(merges):
        rank.setdefault(left + right, index)
    return [-float(rank[token]) if token in rank else _LOWEST for token in tokens]


def _adds_blank(backend: Tokenizer) -> bool:
    """Return whether a text begins with a blank that it does not have."""
    tokens = backend.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith("\u2581")


def _pre_tokenizer(backend: Tokenizer, model: JsonMapping) -> str:
    """Return the name in ``tokenizer.ggml.pre`` that cuts the sample as the tokenizer does."""

    def ends(cutter: Any) -> list[int]:
        return [end for _, (_, end) in cutter.pre_tokenize_str(_SAMPLE)]

    names = [name for name in tokenizer.PRE if name not in ("default", "")] + ["default"]
    want = None if backend.pre_tokenizer is None else ends(backend.pre_tokenizer)
    for name in names:
        alike = bool(model.get("ignore_merges")) == (name in tokenizer.IGNORE_MERGES)
        if alike and ends(tokenizer.pre_tokenizer(name)) == want:
            return name
    raise _error("no pre-tokenizer of llama.cpp cuts words as it does")


def _edges(backend: Tokenizer, config: JsonMapping) -> tuple[JsonObject, JsonObject]:
    """Return the ids of tokens by role, and whether begin and end stand around every text."""
    found: JsonObject = {}
    for role in ("bos", "eos", "unk", "pad"):
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        index = backend.token_to_id(token) if isinstance(token, str) else None
        if index is not None:
            found[role] = index
    around = backend.encode("").ids
    begins, ends = around[:1] == [found.get("bos")], around[-1:] == [found.get("eos")]
    return found, {
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": ends and len(around) > begins,
    }


def _ids(roles: JsonObject, cfg: ModelConfig, spelt: list[int]) -> JsonObject:
    """Return the keys of tokens by role; a reader finds the ends in ``spelt`` without a key."""
    first, *more = cfg.eos_token_ids or (roles.get("eos"),)
    ends = zip(("eot", "eom"), (index for index in more if index not in spelt), strict=False)
    ids = {_ROLES.get(role, role): index for role, index in roles.items()}
    ids |= {"eos": first, **dict(ends)}
    return {f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None}
