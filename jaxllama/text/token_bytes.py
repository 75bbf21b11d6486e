"""The bytes of each token, derived from the decoder of a ``tokenizers`` object.

There are three spellings: byte-level (a printable character for every byte), SentencePiece (a mark
for the space, ``<0x0A>`` for a byte), and plain words with a space between. Refused with an error
that names them: WordPiece, CTC and end-of-word-suffix decoders.
"""

from __future__ import annotations

import functools
import json

import tokenizers

from jaxllama.errors import JaxLlamaError


class ByteRule:
    """A function from a token to its bytes.

    drops_first_space: whether the tokenizer adds a text's first space itself.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        self._alphabet: dict[str, int] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._prefix = ""
        self.drops_first_space = False
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        decoder = json.loads(state)
        if decoder is None:  # tokens are words
            self._prefix, self.drops_first_space = " ", True
            return
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = [step["type"] for step in steps]
        fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
        for position, step in enumerate(steps):
            kind = step["type"]
            if kind == "ByteLevel" and self._alphabet is None:
                self._alphabet = {char: byte for byte, char in enumerate(byte_characters())}
            elif kind == "ByteFallback":
                self._byte_fallback = True
            elif kind == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                self.drops_first_space = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and step["content"] == " " and position > fused:
                self.drops_first_space = step["start"] > 0
            elif kind != "Fuse":
                raise JaxLlamaError(f"{source}: decoder step {kind!r} is not supported")

    def __call__(self, token: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[char] for char in token)
            except KeyError:  # an added token has its own spelling
                return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return (self._prefix + token).encode()


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return GPT-2's printable character for every byte: itself, or one from U+0100 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in itself else next(others)) for byte in range(256))
