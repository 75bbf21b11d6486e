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
import threading
import time
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxllama import extras
from jaxllama.engine import grammar_process
from jaxllama.engine.grammar_process import one_line
from jaxllama.engine.request import Grammar, QueueFull
from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# Largest number of forced tokens that are looked up before any of them is written.
_AHEAD = 64
MEMORY = 2**30  # bytes of all matchers that exist
# CPU seconds that a request's grammar may take: so many at once, and so many for each token.
SECONDS, SECONDS_A_TOKEN = 2.0, 0.01


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
    """Makes matchers for one tokenizer. eos_ids: the model's stop tokens, at least one.

    The matchers that exist at a time take at most ``MEMORY`` bytes in all, as ``grammar_process``
    measures them.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_ids)
        self._sizes: list[int] = []  # of the matchers that exist
        self._lock = threading.Lock()

    @functools.cached_property
    def _library(self) -> ModuleType:
        try:
            import llguidance
        except ImportError:
            raise extras.missing("llguidance", "constrained output") from None
        return llguidance

    @functools.cached_property
    def _vocabulary(self) -> grammar_process.Vocabulary:
        if self._tokenizer is None or not self._eos:
            raise JaxLlamaError("constrained output needs a tokenizer and a stop token")
        spelt = [self._tokenizer.token_bytes(i, skip_special=True) for i in range(self._vocab_size)]
        # A token without bytes (special, unused) is marked so that no text can reach it.
        return grammar_process.Vocabulary(
            [
                data or b"\xff<%d>" % index if index not in self._eos else b"\xff<eos-%d>" % index
                for index, data in enumerate(spelt)
            ],
            [index for index, data in enumerate(spelt) if not data or index in self._eos],
            self._eos,
            self._tokenizer.bos_id,
        )

    @functools.cached_property
    def _library_tokenizer(self) -> llguidance.LLTokenizer:
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return grammar_process.library_tokenizer(
            self._vocabulary, lambda text: tokenizer.encode(text, add_special=False)
        )

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher.

        Raises JaxLlamaError with the library's message for a grammar that is wrong, and with the
        limit for one that is too large. Raises QueueFull if the matchers take too much memory.
        """
        library = self._library.LLMatcher
        compiled = grammar_process.compiled(grammar.kind, grammar.source, self._vocabulary)
        with self._lock:
            if sum(self._sizes) + compiled.size > MEMORY and self._sizes:
                raise QueueFull("other requests have large grammars: no memory for one more", 1.0)
            self._sizes.append(compiled.size)
        matcher = Matcher(
            library(self._library_tokenizer, compiled.source, log_level=0), self._vocab_size
        )
        weakref.finalize(matcher, self._sizes.remove, compiled.size)
        return matcher


class Matcher:
    """Follows one request's tokens.

    ``ahead`` and ``read`` raise JaxLlamaError if the grammar turns out too complex, because the
    library builds its automaton as tokens come. The engine's thread computes the masks, so a
    request's masks may take no more than ``SECONDS`` of it, and ``SECONDS_A_TOKEN`` for each token.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._all = matcher, _everything(vocab_size)
        self._forced: list[int] = []  # the library's matcher has consumed these already
        self._mask: np.ndarray | None = None  # of the token after the forced ones
        self._seconds = SECONDS  # that masks may still take

    def ahead(self) -> NextTokens:
        while self._mask is None and len(self._forced) < _AHEAD:
            if self._forced and self._matcher.is_stopped():
                break
            began = time.thread_time()
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._all)]
            self._seconds += SECONDS_A_TOKEN - (time.thread_time() - began)
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
            raise JaxLlamaError(f"grammar: {one_line(self._matcher.get_error())}")
        if self._seconds < 0:
            raise JaxLlamaError("grammar: its masks take too much time: send a simpler one")


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
        if self._left <= len(known.forced) or not unstopped.any():
            return known
        return known._replace(mask=unstopped, known=min(known.known, self._left))

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
