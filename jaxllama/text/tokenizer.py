"""Tokenizer: text to token ids and back, and messages to a prompt.

The class wraps a ``tokenizers`` object, from ``tokenizer.json`` with the files beside it
(``from_file``), from a GGUF file (``from_gguf``), or for plain bytes (``byte_level``). The library
encodes. Decoding is jaxllama's own: every token is some bytes, and text is their concatenation read
as UTF-8. So ``decode`` and the incremental ``TextStream`` agree to the last character. The
library's byte-level and SentencePiece decoders give the same text, except for bytes that are not
UTF-8. There SentencePiece's decoder gives one U+FFFD a byte and drops whole characters beside them.
This class follows Unicode's rule everywhere.

``save`` writes files that transformers and ``from_file`` read. Left out: ``tokenizer.model``
(protobuf) without a ``tokenizer.json``.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models
from tokenizers import pre_tokenizers as pre

from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.errors import JaxLlamaError
from jaxllama.files import (
    SETTINGS,
    TEMPLATE,
    TOKENIZER,
    exists,
    one_line,
    read,
    read_json,
    read_text,
    text_digest,
)
from jaxllama.text.chat.prompt_text import ChatPrompt, Markers, PlainSpelling, Spellings
from jaxllama.text.growth import check_growth, check_markers
from jaxllama.text.stream import StopStrings, TextStream
from jaxllama.text.token_bytes import ByteRule, byte_characters
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from jaxllama.checkpoints.gguf.file import GGUFFile
    from jaxllama.text.chat.rendering import Conversation
    from jaxllama.text.chat.template import ChatTemplate

__all__ = ["StopStrings", "TextStream", "Tokenizer"]

PIECE = 8192  # characters that ``exceeds`` tokenizes at once: some 10 ms
CUT = 16  # number of additional tokens that cutting a piece may cause

_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text to token ids and back, and messages to a prompt.

    ``from_file``, ``from_gguf`` and ``byte_level`` make one. The arguments become the attributes
    below; ``vocab_size`` is by default that of ``backend``.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
        Encodes text.
    source : str
        Name of the tokenizer in errors.

    Attributes
    ----------
    eos_ids : tuple of int
        Tokens that end a generation.
    bos_id : int or None
        Token that begins a text.
    vocab_size : int
        Largest id + 1.
    special_tokens : dict of str to str
        Spellings by role.
    chat_template : str or None
        Jinja source. Without one ``encode_chat`` raises JaxLlamaError.
    parse_special : bool
        Whether a special token that a chat message spells becomes that token. False by default:
        ``encode_chat`` encodes messages as text.
    """

    parse_special: bool = False

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        source: str,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._backend = backend
        if vocab_size is not None:  # the property would list the whole vocabulary
            self.vocab_size = vocab_size
        self.source = source
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.special_tokens = dict(special_tokens or {})
        self._templates = (
            {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        )
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        special, spelt = self._markers
        check_markers([*special, *spelt], source)
        self._rule = ByteRule(backend, source)
        self._bytes: dict[int, bytes] = {}
        self._plain: PlainSpelling | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plain": None}  # made again when needed

    # Constructors

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Return the tokenizer of ``tokenizer.json`` (or its directory) and the files beside it.

        If they exist, these files are read too: tokenizer_config.json and special_tokens_map.json
        (special tokens, chat template), chat_template.jinja, the templates with other names in
        additional_chat_templates, generation_config.json or config.json
        (stop tokens).
        Raises JaxLlamaError naming the file.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        folder = path.parent
        if not exists(path):
            hint = ""
            if exists(folder / "tokenizer.model"):
                hint = "; tokenizer.model alone is not read: save the tokenizer with transformers"
            raise JaxLlamaError(f"{path}: no such file{hint}")
        raw = read(path, TOKENIZER)
        check_growth(raw, str(path))
        with _library_errors(f"{path}: not a tokenizer"):
            backend = tokenizers.Tokenizer.from_buffer(raw)
        backend.no_truncation()
        backend.no_padding()

        def of_folder(name: str) -> JsonObject:
            other = folder / name
            return read_json(other, SETTINGS) if exists(other) else {}

        config, special = of_folder("tokenizer_config.json"), of_folder("special_tokens_map.json")
        special.update((key, value) for key, value in config.items() if key in _SPECIAL and value)
        names = {key: text for key in _SPECIAL if (text := _content(special.get(key)))}

        def id_of(role: str) -> int | None:
            return backend.token_to_id(names[role]) if role in names else None

        ends: tuple[int, ...] = ()
        for name in ("generation_config.json", "config.json"):
            if not ends:
                place = f"{folder}: {name.removesuffix('.json')}: "
                ends = JsonReader(of_folder(name), place).token_ids("eos_token_id", None)
        eos = id_of("eos_token")
        template = config.get("chat_template")
        jinja = folder / "chat_template.jinja"
        if exists(jinja):
            template = read_text(jinja, TEMPLATE)
        elif isinstance(template, list):  # named templates
            template = {
                str(entry.get("name")): str(entry.get("template"))
                for entry in template
                if isinstance(entry, dict)
            }
        elif not isinstance(template, (str, type(None))):
            raise JaxLlamaError(f"{folder / 'tokenizer_config.json'}: chat_template is not text")
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        if others and template is not None:
            named = {"default": template} if isinstance(template, str) else template
            template = {**named, **{path.stem: read_text(path, TEMPLATE) for path in others}}
        return cls(
            backend,
            str(path),
            eos_ids=ends if eos is None else (*ends, eos),
            bos_id=id_of("bos_token"),
            special_tokens=names,
            chat_template=template,
        )

    @classmethod
    def from_gguf(cls, path: str | Path | GGUFFile) -> Tokenizer:
        """Return the tokenizer of a GGUF file, which may be open.

        Raises JaxLlamaError naming file and key.
        """
        from jaxllama.checkpoints.gguf import tokenizer as gguf_tokenizer
        from jaxllama.checkpoints.gguf.config import eos_ids
        from jaxllama.checkpoints.gguf.file import opened

        with opened(path) as file:
            backend = gguf_tokenizer.build(file)
            names, size = {}, file.length("tokenizer.ggml.tokens")
            for role in ("bos", "eos", "unknown", "padding"):
                index = gguf_tokenizer.token_id(file, size, role)
                token = None if index is None else backend.id_to_token(index)
                if token is not None:
                    names[{"unknown": "unk", "padding": "pad"}.get(role, role) + "_token"] = token
            return cls(
                backend,
                str(file.path),
                eos_ids=eos_ids(file),
                bos_id=gguf_tokenizer.token_id(file, size, "bos"),
                special_tokens=names,
                chat_template=file.string("tokenizer.chat_template", None),
                vocab_size=size,
            )

    @classmethod
    def byte_level(cls) -> Tokenizer:
        """Return a tokenizer of 256 tokens, id = byte of the UTF-8 text, for untrained models."""
        vocab = {char: byte for byte, char in enumerate(byte_characters())}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, "byte-level tokenizer")

    def save(self, directory: str | Path) -> list[Path]:
        """Write the tokenizer's files into an existing directory, and return their paths.

        The files are tokenizer.json, tokenizer_config.json and, if there is a template,
        chat_template.jinja. Several templates go into tokenizer_config.json.
        """
        directory = Path(directory)
        config: JsonObject = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        is_plain = not self._templates.keys() - {"default"}
        if not is_plain:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self._templates.items()
            ]
        contents = {
            "tokenizer.json": self._backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        }
        if is_plain and self.chat_template is not None:
            contents["chat_template.jinja"] = self.chat_template
        try:
            for name, content in contents.items():
                (directory / name).write_text(content, encoding="utf-8")
        except OSError as error:
            raise JaxLlamaError(f"{directory}: {error.strerror or error}") from None
        return [directory / name for name in contents]

    @property
    def name(self) -> str:
        """The file's name, for errors that clients of a server read."""
        return Path(self.source).name

    # Vocabulary

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def check_vocab(self, vocab_size: int) -> None:
        """Raise JaxLlamaError if the tokenizer has ids that a model of ``vocab_size`` lacks."""
        if self.vocab_size > vocab_size:
            raise JaxLlamaError(
                f"{self.source}: the tokenizer has ids up to {self.vocab_size - 1}, but the "
                f"model's vocab_size is {vocab_size}: they do not belong together"
            )

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Return whether both tokenizers give every token the same id."""
        return self is other or self._backend.get_vocab() == other._backend.get_vocab()

    @property
    def digest(self) -> str:
        """Of the tokens, of how texts become tokens, and of the chat templates."""
        return text_digest(self._backend.to_str() + json.dumps(self._templates, sort_keys=True))

    def token(self, token_id: int) -> str | None:
        """Return the token's spelling in the vocabulary."""
        return self._backend.id_to_token(token_id)

    def id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    # Text

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        A special token that the text spells becomes that token, as in plain prompts of ``generate``
        and /v1/completions. Messages go through ``encode_chat``.

        Parameters
        ----------
        text : str
            The text.
        add_special : bool
            Whether to add the begin (and end) tokens that the checkpoint's tokenizer adds, if any.

        Returns
        -------
        list of int

        Raises
        ------
        JaxLlamaError
            For text that is not Unicode.
        """
        self._check_unicode(text)
        with _library_errors(f"{self.name}: cannot encode"):
            return self._backend.encode(text, add_special_tokens=add_special).ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, joined as the checkpoint's tokenizer joins a pair.

        Raises
        ------
        JaxLlamaError
            For text that is not Unicode.
        """
        self._check_unicode(first)
        self._check_unicode(second)
        with _library_errors(f"{self.name}: cannot encode"):
            return self._backend.encode(first, second).ids

    @staticmethod
    def _check_unicode(text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise JaxLlamaError(
                f"the text is not Unicode: character {error.start} is {text[error.start]!r}, "
                "half of a pair or an undecodable byte"
            ) from None

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether ``text`` is certainly longer than ``limit`` tokens.

        It takes the time of tokenizing little more than that many. False is no answer for a text
        close to the limit. Only texts that could be too long are read, in pieces, since a token is
        some four bytes of UTF-8. A cut splits a word, a run of spaces or a special token and adds a
        few tokens, which do not count. Characters that normalizing drops do not count either.
        """
        size = len(text) * (1 if text.isascii() else 4)
        if size <= max(PIECE, 4 * limit):
            return False
        count = 0
        for start in range(0, len(text), PIECE):
            piece = self.encode(text[start : start + PIECE], add_special=False)
            count += max(len(piece) - CUT, 0)
            if count > limit:
                return True
        return False

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, *, continuing: bool = False
    ) -> str:
        """Return the text of ``ids``.

        Ids outside the vocabulary give nothing, and bytes that are not UTF-8 become U+FFFD.

        Parameters
        ----------
        ids : iterable of int
            Token ids.
        skip_special : bool
            Whether special tokens give no text.
        continuing : bool
            Whether the ids follow other text. A first space is then kept even if SentencePiece
            tokenizers would drop it.
        """
        pieces = (self.token_bytes(int(index), skip_special) for index in ids)
        data = b"".join(pieces)
        if self.drops_first_space and not continuing:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    @property
    def drops_first_space(self) -> bool:
        """Whether the tokenizer adds a text's first space itself."""
        return self._rule.drops_first_space

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """Return the bytes of a token."""
        if skip_special and token_id in self._special_ids:
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            data = b"" if token is None else self._rule(token)
            self._bytes[token_id] = data
        return data

    # Chat

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def template_for(self, tools: bool) -> str | None:
        """Return the chat template for conversations with or without tools, or None."""
        template = self._templates.get("tool_use") if tools else None
        return template or self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        *,
        continue_final_message: bool = False,
        **extra: object,
    ) -> str:
        """Return the prompt for messages, with special tokens as text.

        ``encode_chat`` returns its token ids.

        Parameters
        ----------
        messages : sequence of mappings
            Each {"role": ..., "content": ...}; ``chat.messages`` lists the forms.
        add_generation_prompt : bool
            Whether the prompt ends with the beginning of an answer.
        tools : sequence or None
            JSON schemas, for templates that use them.
        continue_final_message : bool
            Whether the prompt ends with the text of the last message. No answer begins then.
        **extra
            Further template variables.

        Raises
        ------
        JaxLlamaError
            Without a template, or when it refuses the messages.
        """
        return self.chat_prompt(
            messages,
            add_generation_prompt,
            tools,
            continue_final_message=continue_final_message,
            **extra,
        ).text

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[object] | None = None,
        *,
        continue_final_message: bool = False,
        **extra: object,
    ) -> ChatPrompt:
        """Return the prompt with the positions where a special token is only text."""
        begins = add_generation_prompt and not continue_final_message
        chat = self.conversation(messages, tools, add_generation_prompt=begins, **extra)
        if not continue_final_message:
            return chat.prompt()
        halves = chat.split(-1) if messages else None
        if halves is None:
            raise JaxLlamaError(
                "continue_final_message: the template does not show the last message's text"
            )
        return halves[0]

    def conversation(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None = None,
        **variables: object,
    ) -> Conversation:
        """Return a conversation for the chat template; see ``chat.rendering``."""
        from jaxllama.text.chat.rendering import Conversation

        template = self.compiled_template(bool(tools))
        markers = None if self.parse_special else self._spellings
        return Conversation.of(template, messages, tools, variables, markers)

    def compiled_template(self, tools: bool) -> ChatTemplate:
        """Return the template for conversations with or without tools.

        Raises JaxLlamaError for a tokenizer without one.
        """
        from jaxllama.text.chat.template import chat_template  # jinja2 takes 50 ms to import

        source = self.template_for(tools)
        if source is None:
            raise JaxLlamaError(
                f"{self.name}: no chat template: this is not a chat model; a directory may hold "
                "a template in chat_template.jinja"
            )
        return chat_template(source, self.name, tuple(self.special_tokens.items()))

    def encode_prompt(self, prompt: ChatPrompt) -> list[int]:
        """Return the token ids of a chat's prompt."""
        if not prompt.literal:
            return self.encode(prompt.text, add_special=False)
        self._check_unicode(prompt.text)
        with _library_errors(f"{self.name}: cannot encode"):
            if self._plain is None:
                special, spelt = self._markers
                self._plain = PlainSpelling(self._backend, [*special, *spelt])
            return self._plain.encode(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, object]], **options: Any) -> list[int]:
        """Return the token ids of the prompt for ``messages``; options as
        ``apply_chat_template``'s.

        Only special tokens that the template writes are special, unless ``parse_special``.
        """
        return self.encode_prompt(self.chat_prompt(messages, **options))

    @functools.cached_property
    def _markers(self) -> tuple[list[str], list[str]]:
        """Tokens that structure a conversation.

        They are the special tokens, and further added tokens that a template spells, such as
        ``<tool_call>``.
        """
        special, spelt, templates = [], [], "\0".join(self._templates.values())
        for token in self._backend.get_added_tokens_decoder().values():
            if token.special and token.content.strip():
                special.append(token.content)
            elif token.content.strip() and token.content.strip() in templates:
                spelt.append(token.content)
        return special, spelt

    @functools.cached_property
    def _spellings(self) -> Markers:
        special, spelt = self._markers
        return Markers(Spellings([*special, *spelt]), Spellings(special))


@contextlib.contextmanager
def _library_errors(what: str) -> Generator[None]:
    """Turn errors of the tokenizers library about a damaged file into JaxLlamaErrors.

    The library has no exception type of its own, and a panic in its Rust code is not even an
    Exception.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise JaxLlamaError(f"{what}: {one_line(error)}") from None
        raise


def _content(token: object) -> str | None:
    """Return a special token of tokenizer_config.json, which is a string or an object there."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
