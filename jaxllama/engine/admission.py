"""Admission: checks that a request can run on an engine, before the request is queued."""

from __future__ import annotations

from jaxllama.decoding.sampling import BiasPairs, Sampling
from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.divided import AnyScheduler
from jaxllama.engine.grammar import Allowed, AtLeast, Forced, GrammarCompiler, Matcher
from jaxllama.engine.options import ResolvedOptions
from jaxllama.engine.request import Request
from jaxllama.engine.slots import MAX_BIAS
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.text.rows import fewer_tokens


class Admission:
    def __init__(
        self,
        lm: LanguageModel,
        options: ResolvedOptions,
        scheduler: AnyScheduler,
        adapters: AdapterSlots | None = None,
    ) -> None:
        cfg = lm.config
        self._cfg, self._tokenizer = cfg, lm.tokenizer
        self._adapter = lm.adapter_number if adapters is None else adapters.number
        self._max_len, self._scheduler = options.max_len, scheduler
        self._grammars = GrammarCompiler(lm.tokenizer, cfg.vocab_size, cfg.eos_token_ids)

    def check(self, request: Request) -> Matcher | None:
        """Return the matcher of the request's grammar or least length, or None if it has neither.

        Raises JaxLlamaError, which names the limit, for a request that can never run.
        """
        cfg, n_prompt = self._cfg, len(request.prompt)
        for token in (*request.prompt, *request.begun):
            if not 0 <= token < cfg.vocab_size:
                raise JaxLlamaError(
                    f"token id {token} is outside the vocabulary of {cfg.vocab_size}"
                )
        if n_prompt + request.max_new_tokens > self._max_len:
            raise JaxLlamaError(
                f"{n_prompt} prompt tokens and {request.max_new_tokens} new ones exceed the "
                f"engine's limit of {self._max_len} (max_len): "
                f"{fewer_tokens(n_prompt, self._max_len)}"
            )
        if request.stop and self._tokenizer is None:
            raise JaxLlamaError(f"stop strings need a tokenizer, and {cfg.name} has none")
        self._adapter(request.adapter)
        self._scheduler.check(request)
        _check_sampling(request.sampling, cfg.vocab_size)
        matcher = self._matcher(request)
        if not request.min_tokens:
            return matcher
        ends = {*cfg.eos_token_ids, *request.stop_token_ids}
        known = [token for token in ends if 0 <= token < cfg.vocab_size]
        return AtLeast(matcher, known, request.min_tokens, cfg.vocab_size)

    def _matcher(self, request: Request) -> Matcher | None:
        allowed, vocab_size = request.allowed_token_ids, self._cfg.vocab_size
        if request.forced is not None:
            if allowed is not None or request.grammar is not None or request.min_tokens:
                raise JaxLlamaError("forced tokens exclude a grammar, allowed tokens and a minimum")
            if not 0 <= min(request.forced) <= max(request.forced) < vocab_size:
                raise JaxLlamaError(f"forced: expected ids below the vocabulary of {vocab_size}")
            return Forced(request.forced, vocab_size)
        if request.grammar is not None:
            if allowed is not None:
                raise JaxLlamaError("allowed_token_ids and a grammar exclude each other")
            return self._grammars.matcher(request.grammar)
        if allowed is None:
            return None
        if not allowed or not 0 <= min(allowed) <= max(allowed) < vocab_size:
            raise JaxLlamaError(
                f"allowed_token_ids: expected one token id or more, below the vocabulary of "
                f"{vocab_size}"
            )
        return Allowed(allowed, request.max_new_tokens, vocab_size)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise JaxLlamaError if a row cannot have these parameters."""
    bias: BiasPairs = tuple(sampling.logit_bias or ())
    if len(bias) > MAX_BIAS:
        raise JaxLlamaError(
            f"logit_bias has {len(bias)} entries: the engine takes up to {MAX_BIAS}"
        )
    for token, _ in bias:
        if token >= vocab_size:
            raise JaxLlamaError(
                f"logit_bias: token id {token} is outside the vocabulary of {vocab_size}"
            )
