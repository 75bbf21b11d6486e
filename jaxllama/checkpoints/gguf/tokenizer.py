"""The tokenizer inside a GGUF file, built as a ``tokenizers`` object.

There are two models. "gpt2" is byte-level BPE with stored merges; the pre-tokenizer that
``tokenizer.ggml.pre`` names splits the text first. "llama" is SentencePiece BPE, which scores every
piece and always merges the neighbours whose joined piece scores best. It becomes a BPE whose merges
are all splits of all pieces, ranked by the piece's score. A character without a piece falls back to
its bytes.

Source: llama.cpp's names and patterns (as facts), the ``tokenizers`` documentation. Left out:
Unigram and WordPiece vocabularies. Among pieces with equal scores, SentencePiece merges the
leftmost first; here the one with the lowest id is first.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from jaxllama.checkpoints.gguf.file import GGUFFile

# Token types of the specification.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Trained pieces are much shorter; the splits of a longer one would take too long.
_MAX_PIECE = 1000
_MAX_LETTERS = 1 << 24  # of all pieces, each of which is split before every letter

_GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_CUT = _WORDS_CUT.replace("DIGITS", "{1,3}")
_QWEN2_CUT = _WORDS_CUT.replace("DIGITS", "")
_QWEN35_CUT = _QWEN2_CUT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_SEED_CUT = _QWEN2_CUT.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
_CASED_CUT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING|"
    r"\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_CUT = _CASED_CUT.replace("DIGITS", "").replace("ENDING", "")
_GPT4O_CUT = _CASED_CUT.replace("DIGITS", "{1,3}").replace(
    "ENDING", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI_CUT = r"\p{Han}+|" + _GPT4O_CUT.replace(r"\p{M}]", rf"\p{{M}}{_NO_HAN}]").replace(
    r"[\r\n/]*", r"[\r\n]*"
)
_DEEPSEEK_CUTS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_OLD_HAN = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM_CUTS = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _OLD_HAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER_CUTS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_HAN, r"\p{N}")
_BLOOM_CUT = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEFAULT_CUTS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_CUT, r"\p{N}+", r"[0-9][0-9][0-9]")

# Names in tokenizer.ggml.pre whose whole words that are tokens skip the merges.
IGNORE_MERGES = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken", "glm4"),
    *("midm-2.0", "lfm2", "minicpm5"),
)
_NO_BOS = ("glm4", "minicpm5")  # of these, the ones that add no token before a text by default
# Regular expressions that are applied one after the other -> their names in tokenizer.ggml.pre.
_NAMES: dict[tuple[str, ...], str] = {
    (_GPT2_CUT,): "gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 mellum gigachat "
    "a.x-4.0",
    (r"\p{N}", _GPT2_CUT): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (_LLAMA3_CUT,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral dbrx smaug-bpe glm4 "
    "chatglm-bpe midm-2.0 lfm2",
    (_QWEN2_CUT,): "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan kormo f2llmv2 grok-2 "
    "solar-open",
    (_QWEN35_CUT,): "qwen35",
    (_TEKKEN_CUT,): "tekken",
    (_GPT4O_CUT,): "gpt-4o llama4 kanana2 minimax-m2",
    (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O_CUT): "tiny_aya cohere2moe",
    (_KIMI_CUT,): "kimi-k2",
    (_SEED_CUT,): "seed-coder",
    (r"\p{N}{1,3}", _WORDS_CUT.replace("DIGITS", "+")): "minicpm5",
    _DEEPSEEK_CUTS: "deepseek-v3 hunyuan-dense joyai-llm",
    _DEEPSEEK_LLM_CUTS: "deepseek-llm",
    _DEEPSEEK_CODER_CUTS: "deepseek-coder",
    (_BLOOM_CUT,): "bloom poro-chat gpt3-finnish",
    (_BLOOM_CUT, r"\p{N}"): "viking",
}
PRE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("default", ""), _DEFAULT_CUTS),
    **{name: cuts for cuts, names in _NAMES.items() for name in names.split()},
}


# Tokens that end a generation by their spelling, as in llama.cpp: files often name only one.
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "</s>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
# Tokens between the parts of a file or a project, by kind: the first of each kind ends, too.
_BETWEEN_FILES = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
_ENDS_OF_CHANNELS = frozenset(("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"))


def build(file: GGUFFile) -> Tokenizer:
    """Return the tokenizer; ``add_special_tokens`` adds the begin and end that the file asks for.

    Raises JaxLlamaError naming the file and the key.
    """
    model = file.string("tokenizer.ggml.model")
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise file.error("tokenizer.ggml.tokens", "is empty")
    types = token_types(file, len(tokens))
    for index in ends_by_spelling(tokens, types):
        types[index] = CONTROL  # whatever the file says, as in llama.cpp
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(file, tokens, types), True
    else:
        raise file.error("tokenizer.ggml.model", f"{model!r} is not 'gpt2' or 'llama'")
    special = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER) and token
    ]
    tokenizer.add_tokens(special)
    begin = _edge(file, tokens, "bos", adds_bos)
    end = _edge(file, tokens, "eos", False)
    if begin or end:
        ids = [(token, tokens.index(token)) for token in dict.fromkeys(begin + end)]
        try:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*begin, "$A", *end], special_tokens=ids
            )
        except Exception as error:  # the binding has no exception type of its own
            raise file.error("tokenizer.ggml.bos_token_id", f"{ids}: {error}") from None
    return tokenizer


def token_types(file: GGUFFile, count: int) -> list[int]:
    """Return the type of each of ``count`` tokens."""
    if "tokenizer.ggml.token_type" not in file:
        return [NORMAL] * count
    types = file.array("tokenizer.ggml.token_type").tolist()
    if len(types) != count:
        raise file.error("tokenizer.ggml.token_type", f"{len(types)} types for {count} tokens")
    return types


def ends_by_spelling(tokens: list[str], types: list[int]) -> list[int]:
    """Return the ids of tokens that end a generation by their spelling."""
    found = {token: index for index, token in enumerate(tokens) if token in _ENDS}
    if "</s>" in found and types[found["</s>"]] != CONTROL:
        del found["</s>"]  # an HTML tag in Gemma's vocabulary
    if len(found.keys() & _ENDS_OF_CHANNELS) > 1:
        found.pop("<|end|>", None)  # it ends one of an answer's several messages
    index_of = {token: index for index, token in enumerate(tokens)}
    between = (next((t for t in kind if t in index_of), None) for kind in _BETWEEN_FILES)
    return [*found.values(), *(index_of[token] for token in between if token is not None)]


def token_id(file: GGUFFile, tokens: list[str] | int, key: str) -> int | None:
    """Return ``tokenizer.ggml.<key>_token_id``, checked against the vocabulary or its size."""
    field = f"tokenizer.ggml.{key}_token_id"
    index = file.integer(field, None)
    size = tokens if isinstance(tokens, int) else len(tokens)
    if index is not None and not 0 <= index < size:
        raise file.error(field, f"{index} is not in the vocabulary of {size}")
    return index


def _edge(file: GGUFFile, tokens: list[str], key: str, default: bool) -> list[str]:
    """Return the token for one end of a text in a list, or an empty list."""
    index = token_id(file, tokens, key)
    wanted = file.boolean(f"tokenizer.ggml.add_{key}_token", default)
    return [tokens[index]] if wanted and index is not None else []


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.string("tokenizer.ggml.pre", "default")
    if name not in PRE:
        known = ", ".join(repr(key) for key in PRE if key)
        raise file.error("tokenizer.ggml.pre", f"{name!r} is not one of {known}")
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)  # the left part may begin with a blank
        merges.append((merge[:cut], merge[cut + 1 :]) if cut > 0 else (merge, ""))
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=name in IGNORE_MERGES)
    except Exception as error:  # the binding has no exception type of its own
        raise file.error("tokenizer.ggml.merges", str(error)) from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in IGNORE_MERGES and name not in _NO_BOS


def pre_tokenizer(name: str) -> pre.Sequence:
    """Return the pre-tokenizer of a name in ``tokenizer.ggml.pre``."""
    cuts = [pre.Split(Regex(cut), behavior="isolated") for cut in PRE[name]]
    return pre.Sequence([*cuts, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = file.array("tokenizer.ggml.scores").tolist()
    if len(scores) != len(tokens):
        raise file.error("tokenizer.ggml.scores", f"{len(scores)} scores for {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    # Only these pieces take part in merges: "<0x41>" as text is not the byte.
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER)}
    longest = max(map(len, pieces), default=0)
    if longest > _MAX_PIECE:
        raise file.error("tokenizer.ggml.tokens", f"a piece has {longest} characters")
    if sum(map(len, pieces)) > _MAX_LETTERS:
        raise file.error("tokenizer.ggml.tokens", f"more than {_MAX_LETTERS} characters")
    ranked = []
    for piece in pieces:
        index = vocab[piece]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], index, cut, left, right))
    ranked.sort()
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefix = file.boolean("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
