"""Constrained output: which tokens may come next, by llguidance (extra ``grammar``).

Each constrained request has a matcher on the host. The matcher reports the tokens that the grammar
forces, in order, and a bit mask over the vocabulary for the token after them. The sampler applies
both, so a forced run needs no round trip to the host. The tokens are the same as with one mask for
each token.

Contract: the tokens of a finished request (reason "stop") match the grammar. The tokens of a
request that ends for its length are a prefix of a match.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxllama import extras
from jaxllama.engine.request import Grammar
from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# Largest number of forced tokens that are looked up before any of them is written.
_AHEAD = 64


class NextTokens(NamedTuple):
    """The constraints on a request's next tokens.

    The next tokens must equal ``forced``. The tokens after those are restricted by ``mask``, uint32
    ``[ceil(V / 32)]``, where bit i of the whole allows token i. The information holds for ``known``
    tokens in all.
    """

    forced: Sequence[int]
    mask: np.ndarray
    known: int


class GrammarCompiler:
    """Makes matchers for one tokenizer. eos_ids: the model's stop tokens, at least one."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_ids)

    @functools.cached_property
    def _library(self) -> ModuleType:
        try:
            import llguidance
        except ImportError:
            raise extras.missing("llguidance", "constrained output") from None
        return llguidance

    @functools.cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None or not self._eos:
            raise JaxLlamaError("constrained output needs a tokenizer and a stop token")
        return self._library.LLTokenizer(
            self._library.TokenizerWrapper(
                _Vocabulary(self._tokenizer, self._vocab_size, self._eos)
            ),
            n_vocab=self._vocab_size,
            eos_token=self._eos,
        )

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher. An invalid grammar raises JaxLlamaError with the library's message."""
        library = self._library.LLMatcher
        try:
            if grammar.kind == "regex":
                source = library.grammar_from_regex(grammar.source)
            elif grammar.kind == "lark":
                source = _lark(grammar.source)
            else:
                # Only one spelling of white space is allowed: a weak model would go on writing
                # blanks.
                source = library.grammar_from_json_schema(
                    grammar.source, defaults={"whitespace_flexible": False}
                )
        except ValueError as error:
            raise JaxLlamaError(f"{grammar.kind}: {_one_line(error)}") from None
        matcher = library(self._vocabulary, source, log_level=0)
        if matcher.is_error():
            raise JaxLlamaError(f"{grammar.kind}: {_one_line(matcher.get_error())}")
        return Matcher(matcher, self._vocab_size)


class Matcher:
    """Follows one request's tokens.

    ``ahead`` and ``read`` raise JaxLlamaError if the grammar turns out too complex, because the
    library builds its automaton as tokens come.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._all = matcher, _everything(vocab_size)
        self._forced: list[int] = []  # the library's matcher has consumed these already
        self._mask: np.ndarray | None = None  # of the token after the forced ones

    def ahead(self) -> NextTokens:
        while self._mask is None and len(self._forced) < _AHEAD:
            if self._forced and self._matcher.is_stopped():
                break
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._all)]
            self._check()
            token = _only(bits)
            if token is None:
                self._mask = bits
            else:
                self._consume(token)
                self._forced.append(token)
        if self._mask is None:
            return NextTokens(self._forced, self._all, len(self._forced))
        return NextTokens(self._forced, self._mask, len(self._forced) + 1)

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._forced:
                if token != self._forced.pop(0):
                    raise JaxLlamaError(f"grammar: token {token} was drawn where one is forced")
            else:
                self._mask = None
                self._consume(token)

    @property
    def is_complete(self) -> bool:
        """Whether only a stop token can follow the tokens that were read."""
        return not self._forced and self._matcher.is_stopped()

    def _consume(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise JaxLlamaError(f"grammar: {_one_line(self._matcher.get_error())}")


class AtLeast(Matcher):
    """Keeps a request from its stop tokens until it has ``least`` tokens.

    A grammar that allows nothing but a stop token ends the request earlier.
    """

    def __init__(
        self, inner: Matcher | None, stop_ids: Sequence[int], least: int, vocab_size: int
    ) -> None:
        self._inner, self._left = inner, least
        self._unstopped = _everything(vocab_size)
        for token in stop_ids:
            self._unstopped[token // 32] &= ~np.uint32(1 << token % 32)

    def ahead(self) -> NextTokens:
        if self._inner is None:
            return NextTokens((), self._unstopped, self._left)
        known = self._inner.ahead()
        unstopped = known.mask & self._unstopped
        is_early = len(known.forced) < self._left
        return known._replace(mask=unstopped) if is_early and unstopped.any() else known

    def read(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)
        if self._inner is not None:
            self._inner.read(tokens)

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete


class Allowed(Matcher):
    """Allows any of the given tokens, as often as the model likes.

    A stop token ends the request only if it is one of them.
    """

    def __init__(self, token_ids: Sequence[int], most: int, vocab_size: int) -> None:
        self._left = most
        self._allowed = np.zeros_like(_everything(vocab_size))
        for token in token_ids:
            self._allowed[token // 32] |= np.uint32(1 << token % 32)

    def ahead(self) -> NextTokens:
        return NextTokens((), self._allowed, self._left)

    def read(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)

    @property
    def is_complete(self) -> bool:
        return False


class Forced(Matcher):
    """Allows one given sequence of tokens."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._left, self._all = list(tokens), _everything(vocab_size)

    def ahead(self) -> NextTokens:
        return NextTokens(self._left, self._all, len(self._left))

    def read(self, tokens: Sequence[int]) -> None:
        self._left = self._left[len(tokens) :]

    @property
    def is_complete(self) -> bool:
        return False


def _everything(vocab_size: int) -> np.ndarray:
    return np.full(-(-vocab_size // 32), 2**32 - 1, np.uint32)


def _only(mask: np.ndarray) -> int | None:
    """Return the token that a mask allows if there is exactly one, else None."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None


class _Vocabulary:
    """The tokenizer interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: list[int]) -> None:
        self.eos_token_id, self.bos_token_id = eos[0], tokenizer.bos_id
        spelt = [tokenizer.token_bytes(index, skip_special=True) for index in range(vocab_size)]
        # A token without bytes (special, unused) is marked so that no text can reach it.
        self.tokens = [
            data or b"\xff<%d>" % index if index not in eos else b"\xff<eos-%d>" % index
            for index, data in enumerate(spelt)
        ]
        self.special_token_ids = [
            index for index, data in enumerate(spelt) if not data or index in eos
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False)


def _lark(source: str) -> str:
    """Return the grammar in the library's format. GBNF is accepted too."""
    from llguidance.gbnf_to_lark import any_to_lark

    several = {"grammars": [{"lark_grammar": source}]}
    if source.startswith('{"grammars"'):
        several = json.loads(source)
    for grammar in several["grammars"]:
        if "lark_grammar" in grammar:
            try:
                grammar["lark_grammar"] = any_to_lark(grammar["lark_grammar"])
            except Exception as error:  # the library has no type for it that is public
                raise ValueError(error) from None
    return json.dumps(several)


def _one_line(error: object) -> str:
    """Return an error without the dump of the library's state, which holds the written text."""
    return " ".join(str(error).partition("<state>")[0].split())[:300]
