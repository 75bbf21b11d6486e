"""Translate bodies of OpenAI's API to engine requests, one for each choice.

    Prompts(lm, name, max_len)     completion(body, id), chat(body, id) -> AcceptedCall;
                                   row, chat_prompt

Contract. Sampling parameters that a body omits are the model's own (its generation_config.json).
Other defaults are OpenAI's: temperature 1, 16 tokens for completions, the rest of the context for
chat. A body without a seed gets a random one. ``AcceptedCall.seed`` holds it, so that the answer
can be reproduced; choice i has seed + i. Raises ApiError, or JaxLlamaError if the tokenizer or the
template refuses the body.

The template shows tools to the model; a template that ignores them is refused.
``AcceptedCall.reading`` says how calls and reasoning are found in the answer.

Refused with an error that says so: images and audio, web search, moderation, tools that are not
functions, ``suffix``, ``best_of``.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxllama.checkpoints.pooling import Pooling
from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.request import Request
from jaxllama.engine.scoring import Scores
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving.api.bodies import Chat, Completion, GenerationBody, Tokenize
from jaxllama.serving.api.constraints import constraint, form
from jaxllama.serving.api.infill import infill
from jaxllama.serving.api.reading import PLAIN, Reading, reading
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.api.tools import offered
from jaxllama.text.chat.messages import content_text
from jaxllama.text.chat.prompt_text import ChatPrompt
from jaxllama.text.rows import fewer_tokens
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import JsonObject

COMPLETION_TOKENS = 16  # OpenAI's default for completions
SMALLEST_TOP_P = 1e-30  # stands for a body's 0: only the likeliest token
_ABSENT = {
    "audio": "only text is written",
    "functions": "send tools instead",
    "moderation": "nothing here moderates",
    "web_search_options": "there is no web search",
}


@dataclasses.dataclass(frozen=True)
class AcceptedCall:
    """One accepted body.

    requests: its choices in order, ``choices`` of them for each prompt. echoes: the text that
    ``echo`` puts before each choice. seed: the body's seed, or the random one. reading: how to read
    an answer's text, None for plain text. is_written: false if the body only scores its prompts.
    to_score: number of alternatives for each prompt token, None if prompts are not scored. scores:
    the scores of each prompt, once they are known. echoes_scores, lists_scores: whether the answer
    reports scores in its logprobs, or in prompt_logprobs. shows_ids: whether it reports token ids.
    notes: parts of a schema that are not enforced.
    """

    id: str
    created: int
    model: str
    requests: tuple[Request, ...]
    choices: int
    echoes: tuple[str, ...]
    seed: int
    tokenizer: Tokenizer | None
    eos: frozenset[int]
    reading: Reading | None = None
    is_written: bool = True
    to_score: int | None = None
    echoes_scores: bool = False
    lists_scores: bool = False
    shows_ids: bool = False
    scores: tuple[Scores, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def prompts(self) -> tuple[Request, ...]:
        """The first request of each prompt."""
        return self.requests[:: self.choices]


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The part of a LanguageModel that a front end needs."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    sampling: Sampling | None
    adapters: tuple[str, ...]
    pooling: Pooling | None = None
    n_classes: int = 0

    @classmethod
    def of(cls, lm: LanguageModel) -> ModelFacts:
        adapters = tuple(lm.adapters)
        return cls(lm.config, lm.tokenizer, lm.sampling, adapters, lm.pooling, lm.n_classes)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Translates bodies to calls, with the tokenizer, the chat template and their limits.

    name: of the model. aliases: its other names. max_choices: limit of prompts times n of one body;
    it is the queue's size, beyond which no retry helps. A prompt beyond max_len is refused without
    tokenizing the rest of it. loaded: returns the ids of adapters loaded at run time, by name.
    """

    lm: ModelFacts
    name: str
    max_len: int
    max_choices: int
    aliases: tuple[str, ...] = ()
    loaded: Callable[[], Mapping[str, str]] = dict

    @property
    def models(self) -> dict[str, str | None]:
        """The names that a body may give the model, and the adapter of each: "name:adapter".

        An adapter that was loaded at run time is a model of its own name, as in vLLM.
        """
        return dict(self.loaded()) | {
            f"{model}:{adapter}" if adapter else model: adapter
            for model in (self.name, *self.aliases)
            for adapter in (None, *self.lm.adapters)
        }

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter of a model's name; None for the model itself and for a body without a
        name.
        """
        model = self.name if model is None else model
        models = self.models
        if model not in models:
            there = ", ".join(map(repr, models))
            raise ApiError(
                404,
                f"the model {model!r} does not exist here: this server has {there}",
                param="model",
                code="model_not_found",
            )
        return models[model]

    def completion(self, body: Completion, call_id: str, owner: str = "") -> AcceptedCall:
        """Return the call of a completion body.

        owner: key whose cached prompts it may share, together with ``cache_salt``.
        """
        self.adapter_of(body.model)
        if body.best_of not in (None, body.n or 1):
            raise ApiError.unsupported("best_of", "only best_of equal to n is supported")
        _check_prompt_logprobs(body)
        echoes_scores = bool(body.echo) and body.logprobs is not None
        if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
            raise ApiError.at("max_tokens", "0 needs echo or prompt_logprobs")
        n = body.n or 1
        prompts = as_list(body.prompt)
        self._check_choices(len(prompts), n)
        asked = _only_limit(body, "max_tokens", "n_predict")
        max_tokens = COMPLETION_TOKENS if asked is None else _limit(asked)
        keep = self._kept(body.truncate_prompt_tokens, max_tokens)
        if body.suffix:
            rows = [self._filling(body, prompt) for prompt in prompts]
        else:
            rows = [self.row(prompt, "prompt", keep) for prompt in prompts]
        echoes = []
        if body.echo:
            for text, row in zip(prompts, rows, strict=True):
                is_whole = isinstance(text, str) and keep is None
                echoes.append(text if is_whole else self.tokenizer().decode(row))
        call = self._call(body, call_id, owner, rows, max_tokens, body.logprobs)
        asked = [body.prompt_logprobs, body.logprobs if echoes_scores else None]
        return dataclasses.replace(
            call,
            echoes=tuple(echo for echo in echoes for _ in range(n)),
            to_score=max((count for count in asked if count is not None), default=None),
            echoes_scores=echoes_scores,
        )

    def _filling(self, body: Completion, prompt: str | list[int]) -> list[int]:
        """Return the prompt for a text between ``prompt`` and the body's suffix."""
        for name in ("echo", "truncate_prompt_tokens", "prompt_logprobs"):
            if getattr(body, name) not in (None, False):
                raise ApiError.unsupported("suffix", f"excludes {name}")
        tokenizer, suffix = self.tokenizer(), body.suffix or ""
        before = self.encode(prompt, "prompt", False) if isinstance(prompt, str) else prompt
        row = infill(tokenizer, before, self.encode(suffix, "suffix", False))
        if row is None:
            raise ApiError.unsupported("suffix", f"{self.name} has no tokens to fill in the middle")
        return self.row(row, "suffix")

    def chat(self, body: Chat, call_id: str, owner: str = "") -> AcceptedCall:
        """Return the call of a chat body. owner: as for ``completion``."""
        self.adapter_of(body.model)
        _check_features(body)
        self._check_choices(1, body.n or 1)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        _check_prompt_logprobs(body)
        template = self.tokenizer().template_for(bool(body.tools)) or ""
        tools = offered(body, template)
        prompt = self.chat_prompt(body, list(tools.shown) if tools else None)
        max_tokens = _limit(_only_limit(body, "max_completion_tokens", "max_tokens", "n_predict"))
        row = self.encode_chat(prompt, self._kept(body.truncate_prompt_tokens, max_tokens))
        how = reading(template, prompt.text, tools)
        if tools is not None and (body.bad_words or body.allowed_token_ids):
            name = "bad_words" if body.bad_words else "allowed_token_ids"
            raise ApiError.unsupported(
                name, "a call of a tool cannot be held to it: leave out tools"
            )
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        call = self._call(body, call_id, owner, [row], max_tokens, logprobs, how)
        return dataclasses.replace(
            call, reading=None if how.is_plain else how, to_score=body.prompt_logprobs
        )

    def _kept(self, truncation: int | None, max_tokens: int | None) -> int | None:
        """Return the number of a prompt's last tokens that are kept; None for all."""
        if truncation != -1:
            return truncation
        return max(self.max_len - max(max_tokens or 1, 1), 1)

    def row(self, prompt: str | list[int], key: str, keep: int | None = None) -> list[int]:
        """Return a prompt's 1 to max_len token ids.

        key: the body's field. keep: number of last tokens to keep, None for all.
        """
        row = self.encode(prompt, key, keep=keep) if isinstance(prompt, str) else prompt
        row = row if keep is None else row[-keep:]
        if not row:
            raise ApiError(400, f"{key}: must not be empty", param=key, code="empty_prompt")
        if len(row) > self.max_len:
            raise self._too_long(key)
        if max(row) >= self.lm.config.vocab_size:
            raise ApiError(
                400,
                f"{key}: token id {max(row)} is outside the vocabulary of "
                f"{self.lm.config.vocab_size}",
                param=key,
                code="invalid_value",
            )
        return row

    def chat_prompt(self, body: Chat | Tokenize, tools: list[JsonObject] | None) -> ChatPrompt:
        """Return the conversation after the checkpoint's template."""
        tokenizer = self.tokenizer()
        messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
        # A template copies its messages several times.
        is_cut = isinstance(body, Chat) and body.truncate_prompt_tokens is not None
        texts = [] if is_cut else [content_text(m.get("content")) for m in messages]
        if any(tokenizer.exceeds(text, self.max_len) for text in texts):
            raise self._too_long("messages")
        template = tokenizer.template_for(bool(tools))
        if template is None:  # the tokenizer's own error names the file
            raise ApiError(
                400,
                "messages: the model has no chat template: send a prompt to /v1/completions, or "
                "add a chat_template.jinja to the model's directory",
                param="messages",
                code="no_chat_template",
            )
        if tools and not tokenizer.compiled_template(tools=True).shows_tools:
            raise ApiError.unsupported("tools", "the model's chat template does not show tools")
        more = _template_variables(body, template)
        return tokenizer.chat_prompt(messages, tools=tools, **more)

    def encode(
        self, text: str, key: str, add_special: bool = True, keep: int | None = None
    ) -> list[int]:
        """Return at most max_len token ids, in time proportional to max_len.

        keep: number of last tokens to keep of a text of any length; None refuses a longer text.
        """
        return self._bounded(text, key, keep, lambda: self.tokenizer().encode(text, add_special))

    def encode_chat(self, prompt: ChatPrompt, keep: int | None = None) -> list[int]:
        """Return the token ids of a conversation, as ``encode`` does."""
        return self._bounded(
            prompt.text, "messages", keep, lambda: self.tokenizer().encode_prompt(prompt)
        )

    def _bounded(
        self, text: str, key: str, keep: int | None, encode: Callable[[], list[int]]
    ) -> list[int]:
        if keep is not None:
            return encode()[-keep:]
        row = None if self.tokenizer().exceeds(text, self.max_len) else encode()
        if row is None or len(row) > self.max_len:
            raise self._too_long(key)
        return row

    def _too_long(self, key: str) -> ApiError:
        message = f"{key}: more than {self.max_len} tokens, which is the context: send less text"
        return ApiError(400, message, param=key, code="context_length_exceeded")

    def tokenizer(self) -> Tokenizer:
        if self.lm.tokenizer is None:
            raise JaxLlamaError(f"{self.name} has no tokenizer: send token ids to /v1/completions")
        return self.lm.tokenizer

    def _check_choices(self, n_prompts: int, n: int) -> None:
        if n_prompts * n > self.max_choices:
            message = f"n: {n_prompts} prompts x {n} choices are more than {self.max_choices}"
            raise ApiError(400, message, param="n", code="too_many_choices")

    def _sampling(self, body: GenerationBody, seed: int) -> Sampling:
        named = {name: value for name in _NAMED if (value := getattr(body, name)) is not None}
        if "top_k" in named:
            named["top_k"] = max(named["top_k"], 0)  # vLLM writes -1 for off
        if named.get("top_p") == 0:
            named["top_p"] = SMALLEST_TOP_P
        bias = {int(key): value for key, value in (body.logit_bias or {}).items()}
        defaults = self.lm.sampling or Sampling(temperature=1.0)
        return dataclasses.replace(defaults, **named, logit_bias=bias, seed=seed)

    def _call(
        self,
        body: GenerationBody,
        call_id: str,
        owner: str,
        rows: list[list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        how: Reading = PLAIN,
    ) -> AcceptedCall:
        """Return a call. max_tokens: None for the rest of the context."""
        n, tokenizer = body.n or 1, self.lm.tokenizer
        most = [
            max(self.max_len - len(row), 1) if max_tokens is None else max_tokens for row in rows
        ]
        for row, count in zip(rows, most, strict=True):
            if len(row) + count > self.max_len:
                raise ApiError(
                    400,
                    f"the context is {self.max_len} tokens; this asks for {len(row)} in the prompt "
                    f"and {count} new ones: {fewer_tokens(len(row), self.max_len)}",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
        # 62 bits, so that seed + choice stays within 64.
        seed = secrets.randbits(62) if body.seed is None else body.seed
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        wanted = form(body)
        if wanted is not None and body.allowed_token_ids is not None:
            raise ApiError.unsupported(
                "allowed_token_ids", "the answer has a form already: leave one out"
            )
        grammar = constraint(wanted, how, tokenizer)
        ends = tuple(body.stop_token_ids or ())
        allowed = None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
        skip_special = body.skip_special_tokens is not False
        if tokenizer is not None and how.needs_special(tokenizer):
            skip_special = False
        requests = []
        for index, row in enumerate(row for row in rows for _ in range(n)):
            requests.append(
                Request(
                    id=f"{call_id}/{index}",
                    prompt=tuple(row),
                    max_new_tokens=max(most[index // n], 1),
                    sampling=self._sampling(body, seed + index % n),
                    stop=stop,
                    logprobs=logprobs,
                    priority=body.priority or 0,
                    deadline=body.deadline,
                    grammar=grammar,
                    ignore_eos=bool(body.ignore_eos),
                    adapter=self.adapter_of(body.model),
                    stop_token_ids=ends,
                    min_tokens=(body.min_tokens or 0) if max_tokens != 0 else 0,
                    skip_special_tokens=skip_special,
                    allowed_token_ids=allowed,
                    include_stop=bool(body.include_stop_str_in_output),
                    cache_salt=f"{owner}/{body.cache_salt or ''}",
                )
            )
        return AcceptedCall(
            id=call_id,
            created=int(time.time()),
            model=body.model,
            requests=tuple(requests),
            choices=n,
            echoes=(),
            seed=seed,
            tokenizer=tokenizer,
            eos=frozenset((*self.lm.config.eos_token_ids, *ends)),
            is_written=max_tokens != 0,
            lists_scores=body.prompt_logprobs is not None,
            shows_ids=bool(body.return_token_ids),
            notes=(
                *body.notes,
                *(() if wanted is None else wanted.notes),
                *(() if how.tools is None else how.tools.notes),
            ),
        )


_NAMED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def _limit(max_tokens: int | None) -> int | None:
    """Return None if a body sets no limit: without the field, or with -1."""
    return None if max_tokens == -1 else max_tokens


def as_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """Return one prompt or several as a list of prompts."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _check_features(body: Chat) -> None:
    """Raise ApiError for features of OpenAI's service that a language model alone lacks."""
    for key, reason in _ABSENT.items():
        if getattr(body, key) not in (None, []):  # {} requests a web search
            raise ApiError.unsupported(key, reason)
    if body.modalities and "audio" in body.modalities:
        raise ApiError.unsupported("modalities", "only text is written")
    if body.function_call not in (None, "none", "auto"):
        raise ApiError.unsupported("function_call", "send tool_choice instead")


def _check_prompt_logprobs(body: GenerationBody) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError.unsupported("prompt_logprobs", "they are not streamed")


def _only_limit(body: GenerationBody, *names: str) -> int | None:
    """Return the limit of an answer's tokens, which has several names; None without a limit."""
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    for name, value in given.items():
        first = next(iter(given))
        if value != given[first]:
            message = f"{name}: {value}, but {first} is {given[first]}: send one of them"
            raise ApiError(400, message, param=name, code="invalid_value")
    return next(iter(given.values()), None)


def _template_variables(body: Chat | Tokenize, template: str) -> JsonObject:
    """Return the template's variables other than messages and tools."""
    more = dict(body.chat_template_kwargs or {})
    thinks = body.enable_thinking
    if thinks is not None:
        if more.setdefault("enable_thinking", thinks) != thinks:
            message = f"enable_thinking: {thinks}, but chat_template_kwargs has the opposite"
            raise ApiError(400, message, param="enable_thinking", code="invalid_value")
        if "enable_thinking" not in template and (thinks or reading(template, "", None).tags):
            raise ApiError.unsupported(
                "enable_thinking", "the model's chat template does not know it"
            )
    if isinstance(body, Chat) and body.reasoning_effort and "reasoning_effort" in template:
        more.setdefault("reasoning_effort", body.reasoning_effort)
    for key in ("messages", "tools", "add_generation_prompt", "continue_final_message", "self"):
        if key in more:
            raise ApiError.at("chat_template_kwargs", f"{key} cannot be given here")
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError.at("continue_final_message", "excludes add_generation_prompt")
    asked = body.add_generation_prompt
    more["add_generation_prompt"] = asked is not False
    more["continue_final_message"] = bool(body.continue_final_message)
    return more
