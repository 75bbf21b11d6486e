"""LanguageModel: config, params and tokenizer together, turning prompts into text.

It tokenizes the prompts and pads them to a few shape buckets, so that a steady state compiles
nothing.  Its executor runs them: in slices where a caller reads the text as it comes, or stop
strings may end it.  Readers turn the tokens to text.  It holds no state between calls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import load as packed
from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts
from jaxllama.decoding.forward import Params
from jaxllama.decoding.rows import Report
from jaxllama.decoding.sampling import Sampling, SamplingParams, whole
from jaxllama.errors import JaxLlamaError
from jaxllama.executors import resident
from jaxllama.executors.executor import Alone, Call, DraftSource, Executor, Kept
from jaxllama.generation import check_prompts
from jaxllama.kept import KeptPrograms, signature
from jaxllama.model.lora import for_rows
from jaxllama.model.shardings import fetch
from jaxllama.text.reader import Reader
from jaxllama.text.rows import (
    Generation,
    ids_of,
    pad_rows,
    pieces_of,
    sampling_of,
    shapes_of,
    short,
    stops_of,
)
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.brief import brief, size_text
from pallas_kernels.cpu import CpuWeight, restore_tree
from pallas_kernels.qtensor import QTensor, RowBlocks

# Seconds of decoding between two looks at the text, where somebody reads it as it comes or stop
# strings may end it: 12 pieces a second read as one flow.
PIECE_SECONDS = 0.08
# Rows of the one program that decodes every batch of a deterministic model.
DETERMINISTIC_ROWS = 32
_QUANTIZED = QTensor | RowBlocks | CpuWeight
SAVE_FORMATS = ("floats", *packed.FORMATS)
_SCREEN = 20  # lines of parameters that ``repr`` shows

OnText = Callable[[int, str], None]
OnPrompt = Callable[[int, int], None]
# (row, new text) as it comes, and the results at the end.
Steps = Generator[tuple[int, str], None, list["Generation"]]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model with its tokenizer, ready to generate text; ``load`` makes one.

    config, params: the pure functions' ``cfg`` and ``params``.  tokenizer: None if the checkpoint
    has none; prompts are then token ids, and ``chat`` raises JaxLlamaError.

    sampling: the model's own, of its generation_config.json, which ``chat`` and the server take
    where nobody names another; None where the checkpoint says nothing.
    deterministic: a row's logits are the same bits whatever the batch and its place in it.  Sums
    are taken in an order that the compiler chooses by shape, so shapes are what this fixes: prompts
    are prefilled one by one in pieces of fixed widths, whatever ``chunk`` says, and decoded in
    programs of exactly 32 rows, each with rows that need the same room.  An engine does the same.
        An offloaded model's programs have its policy's ``gpu_batch_size`` rows, prompts too.
    adapters: names of the LoRA adapters that lie in params (``model.lora``), in their order.
    exact: on a CPU, quantized weights keep exact float32 products.  Otherwise they are laid out for
        the CPU's handlers (``model.cpu_layout``), which round activations to 8 bits.
    programs: what earlier processes have compiled for this model; None for jax's own cache alone.
    executor: where the model runs; by default on the devices that the parameters are on.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    deterministic: bool = False
    sampling: Sampling | None = None
    adapters: tuple[str, ...] = ()
    exact: bool = False
    programs: KeptPrograms | None = dataclasses.field(default=None, repr=False, compare=False)

    executor: Executor = dataclasses.field(default=resident.Resident(), repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "executor", self.executor.with_params(self.params))
        if not self.exact:
            object.__setattr__(self, "params", self.executor.laid_out(self.params))
        # What else asks about the head (saving, byte counts, offloading) sees an untied model.
        object.__setattr__(self, "config", self.config.with_head_of(self.params))

    @property
    def dtype(self) -> jnp.dtype:
        """The activations' dtype."""
        return self.params["norm"]["weight"].dtype

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the parameters are on, None for one device."""
        return self.executor.mesh

    def __repr__(self) -> str:
        return _described(self)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        max_new_tokens: int = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        *,
        kv_dtype: DTypeLike | None = None,
        chunk: int | None = None,
        on_text: OnText | None = None,
        on_prompt: OnPrompt | None = None,
        adapter: str | Sequence[str | None] | None = None,
        draft: str | LanguageModel | None = None,
        draft_tokens: int = 0,
    ) -> list[Generation]:
        """Continue every prompt (text, or token ids) by up to ``max_new_tokens``.

        sampling: for all rows, or one per row; greedy by default.
        seed: rows without a seed of their own use it; one int gives equal prompts equal text, a
            list gives each row its own.
        stop: strings that end a row when they appear, across token borders too.
        kv_dtype: of the cache; the activations' dtype by default.
        chunk: tokens of a prompt that go through the model at once; by default as many as
            ``decoding.forward.prefill_chunk`` says.  The answer is the same to the bit where
            ``model/README.md`` says so, else up to rounding.
        on_text: called as (row, new text) while decoding, on complete characters only.
        on_prompt: called as (tokens read, tokens of the longest prompt) after each chunk of prompts
            that have several; a deterministic model and an offloaded one do not call it.
        adapter: one of ``adapters``, or one a row; None is the model itself.
        draft: who proposes tokens that the model then verifies, several in one pass: "ngram" (what
            followed the last tokens before), or a smaller model with the same tokenizer, such as
            ``first_layers``.  The tokens are the same without it.
        draft_tokens: that it proposes at once, up to 15; 0 lets each row find what pays.
        Raises JaxLlamaError for an empty prompt, ids outside the vocabulary, text without a
        tokenizer, or a prompt that does not fit the context.
        """
        steps = self._steps(
            prompts,
            max_new_tokens,
            sampling,
            seed,
            stop,
            kv_dtype,
            chunk,
            on_text is not None,
            adapter,
            self.drafting(draft, draft_tokens),
            on_prompt,
        )
        while True:
            try:
                row, text = next(steps)
            except StopIteration as end:
                return end.value
            if on_text is not None:
                on_text(row, text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        *,
        kv_dtype: DTypeLike | None = None,
        chunk: int | None = None,
        on_text: OnText | None = None,
        adapter: str | None = None,
        draft: str | LanguageModel | None = None,
        draft_tokens: int = 0,
    ) -> Generation:
        """The model's answer to ``messages`` ({"role": ..., "content": ...}), by its chat template.

        max_new_tokens: fewer where the context ends before.
        sampling: the model's own by default (``self.sampling``), or greedy where it has none.
        The rest as for ``generate``.  Raises JaxLlamaError without a tokenizer or a template, or
        for a conversation that fills the context.
        """
        ids = self.encode_chat(messages)
        room = self.config.max_position - len(ids)
        if room < 1:
            raise JaxLlamaError(
                f"the conversation has {len(ids)} tokens and the context {self.config.max_position}"
            )
        new = min(whole("max_new_tokens", max_new_tokens), room)
        [out] = self.generate(
            [ids],
            new,
            sampling or self.sampling,
            seed,
            stop,
            kv_dtype=kv_dtype,
            chunk=chunk,
            on_text=on_text,
            adapter=adapter,
            draft=draft,
            draft_tokens=draft_tokens,
        )
        return out

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        *,
        kv_dtype: DTypeLike | None = None,
        chunk: int | None = None,
        adapter: str | None = None,
        draft: str | LanguageModel | None = None,
        draft_tokens: int = 0,
    ) -> Iterator[str]:
        """The text of ``generate`` for one prompt (text, or token ids), in pieces of complete
        characters, as it is decoded.

        The device is at most one piece ahead, so an iterator that is left, or closed, leaves at
        most ``PIECE_SECONDS`` of work behind.  Raises JaxLlamaError at the call.
        """
        if self.tokenizer is None:
            raise JaxLlamaError(f"{self.config.name} has no tokenizer: there is no text to stream")
        steps = self._steps(
            [prompt],
            max_new_tokens,
            sampling,
            seed,
            stop,
            kv_dtype,
            chunk,
            True,
            adapter,
            self.drafting(draft, draft_tokens),
        )
        return (text for _, text in steps)

    def save(
        self, directory: str | Path, *, format: str | None = None, progress: bool = False
    ) -> Path:
        """Write config.json, generation_config.json (with ``sampling``), safetensors, and the
        tokenizer's files into a new directory, which ``load`` reads.

        format: "floats", "awq", "gptq" or "compressed-tensors" for a Hugging Face directory, which
            transformers loads too; "floats" dequantizes quantized weights.  "native" keeps any
            quantized weight bit for bit, and other programs refuse it.  The default is "native" for
            quantized weights and "floats" for others, which keep their dtype.
        progress: a bar on stderr.

        The directory must not exist or be empty; it appears complete or, on any failure, not at
        all.  Raises JaxLlamaError naming the path, the weight that the format cannot hold, or an
        option of the config that no class of transformers has.
        """
        if format not in (None, *SAVE_FORMATS):
            raise JaxLlamaError(f"format = {format!r}: is not one of {', '.join(SAVE_FORMATS)}")
        if self.adapters:
            raise JaxLlamaError("adapters lie beside the weights: load(..., merge=True) joins them")
        params = restore_tree(self.executor.whole(self.config, self.params))
        is_packed = any(isinstance(leaf, _QUANTIZED) for leaf in _weights(params))
        format = format or ("native" if is_packed else "floats")
        cfg, sampling = self.config, self.sampling
        with tempfile.TemporaryDirectory() as scratch:
            files = [] if self.tokenizer is None else self.tokenizer.save(scratch)
            if format != "floats":
                return packed.save(
                    directory,
                    cfg,
                    params,
                    files,
                    format=format,
                    sampling=sampling,
                    progress=progress,
                )
            params = packed.in_floats(params, self.dtype) if is_packed else params
            cfg = cfg.with_head_of(params)
            return hf.save(directory, cfg, params, files, sampling=sampling, progress=progress)

    def _steps(
        self,
        prompts: Any,
        max_new_tokens: Any,
        sampling: Any,
        seed: Any,
        stop: Any,
        kv_dtype: DTypeLike | None,
        chunk: Any,
        watched: bool,
        adapter: str | Sequence[str | None] | None,
        drafting: DraftSource | None,
        on_prompt: OnPrompt | None = None,
    ) -> Steps:
        """``generate`` as an iterator: arguments are checked now, the work is done as it goes."""
        rows = self.encode(prompts)
        max_new_tokens = whole("max_new_tokens", max_new_tokens)
        chunk = None if chunk is None else whole("chunk", chunk)
        if chunk is not None and chunk < 1:
            raise JaxLlamaError(f"chunk = {chunk}: must be at least 1")
        stops = stops_of(stop)
        self._check(rows, max_new_tokens, stops)
        numbers = self._numbers(adapter, len(rows))
        per_row = sampling_of(sampling, seed, len(rows))
        cache_dtype, chunk = self.executor.cache_options(kv_dtype, chunk, self.dtype)
        width = drafting.plan.widths[0] if drafting else 1
        options = _Options(
            max_new_tokens,
            stops,
            cache_dtype,
            chunk,
            watched,
            drafting,
            on_prompt,
            deterministic_rows=self.executor.block_size or DETERMINISTIC_ROWS // width,
        )
        return self._batches(rows, per_row, numbers, options)

    def _batches(
        self,
        rows: list[list[int]],
        sampling: list[Sampling],
        adapters: list[int],
        options: _Options,
    ) -> Steps:
        """Batch by batch."""
        results: list[Generation] = [None] * len(rows)  # type: ignore[list-item]
        for members in self._groups(rows, options):
            numbers = [adapters[index] for index in members]
            if self.deterministic:
                numbers += [0] * (options.deterministic_rows - len(members))
            model = self._for_rows(numbers)
            outs = yield from model._run(members, rows, sampling, options)
            for index, out in zip(members, outs, strict=True):
                results[index] = out
        return results

    def _numbers(self, adapter: str | Sequence[str | None] | None, batch: int) -> list[int]:
        """Each row's adapter as ``model.lora`` counts them."""
        per_row = [adapter] * batch if adapter is None or isinstance(adapter, str) else adapter
        if not isinstance(per_row, Sequence):
            raise JaxLlamaError(f"adapter = {short(adapter)}: expected a name, or one a row")
        if len(per_row) != batch:
            raise JaxLlamaError(f"adapter: {len(per_row)} entries for {batch} prompts")
        return [self.adapter_number(name) for name in per_row]

    def adapter_number(self, name: str | None) -> int:
        """Of an adapter from 1 on, 0 for None.  JaxLlamaError for one that is not here."""
        if name is None:
            return 0
        if name not in self.adapters:
            there = ", ".join(map(repr, self.adapters)) or "none"
            raise JaxLlamaError(f"adapter = {short(name)}: {self.config.name} has {there}")
        return self.adapters.index(name) + 1

    def _for_rows(self, numbers: list[int]) -> LanguageModel:
        """The model of a batch whose rows have these adapters; where none has one that is the base
        model's program, unless a row's bits must not depend on its neighbours."""
        if not self.adapters or not (self.deterministic or any(numbers)):
            return self
        params = for_rows(self.params, jnp.asarray(numbers, jnp.int32))
        return dataclasses.replace(self, params=params)

    def _groups(self, rows: list[list[int]], options: _Options) -> list[list[int]]:
        """Indices of the rows that run together: as many as the executor takes, or those whose
        programs have the same shapes wherever else they run."""
        if not self.deterministic:
            count = len(rows)
            size = self.executor.block_size or count
            return [list(range(at, min(at + size, count))) for at in range(0, count, size)]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(rows):
            shapes = shapes_of([row], options.max_new_tokens)
            alike.setdefault((*shapes[:2], _pieces(len(row))), []).append(index)
        size = options.deterministic_rows
        return [
            members[first : first + size]
            for members in alike.values()
            for first in range(0, len(members), size)
        ]

    def _run(
        self,
        members: list[int],
        rows: list[list[int]],
        sampling: list[Sampling],
        options: _Options,
    ) -> Steps:
        """One batch, the rows ``members``, through prefill and the decode loop."""
        rows, sampling = [rows[i] for i in members], [sampling[i] for i in members]
        max_new_tokens, stops = options.max_new_tokens, options.stops
        eos = self.config.eos_token_ids
        answers = [_Answer(Reader(self.tokenizer, eos, stops)) for _ in rows]
        if self.deterministic:
            empty = options.deterministic_rows - len(rows)
            rows, sampling = rows + [[]] * empty, sampling + [Sampling()] * empty
        params = SamplingParams.stack(sampling, self.config.vocab_size, 0)
        width, capacity, room = shapes_of(rows, max_new_tokens)
        tokens, lengths = pad_rows(rows, width)
        stop_ids = jax.device_put(np.asarray(self.config.eos_token_ids, np.int32))
        call = Call(
            tokens,
            lengths,
            params,
            stop_ids,
            capacity=capacity,
            room=room,
            limit=max_new_tokens,
            kv_dtype=options.kv_dtype,
            chunk=options.chunk,
            alone=self._alone(lengths),
            drafting=options.drafting,
            on_prompt=None if self.deterministic else options.on_prompt,
            kept=self._kept,
        )
        decoding = self.executor.begin(self.config, self.params, call)
        pace = _Pieces(max_new_tokens, is_read=options.watched or bool(stops))
        counts, report = np.ones(len(rows), int), decoding.report
        while True:
            ahead = None
            # The next call is handed to the device before this one is read, but for the first
            # piece: it does not wait for the loop to be compiled.
            if self.executor.runs_ahead and pace.until > 1 and pace.until < max_new_tokens:
                ahead = decoding.advance(pace.next(counts))
            found: Report = fetch(report)
            counts = found.counts
            pace.arrived()
            for row, answer in enumerate(answers):
                text = answer.read(found.tokens[row, : counts[row]])
                if text and options.watched:
                    yield members[row], text
            ended = np.ones(len(rows), bool)
            ended[: len(answers)] = [answer.reader.stopped for answer in answers]
            if not (~ended & ~found.done & (counts < max_new_tokens)).any():
                break
            if stops:
                decoding.end(ended)
            if ahead is None:
                ahead = decoding.advance(pace.next(counts[~ended]))
            report = ahead
        results = []
        for row, answer in enumerate(answers):
            tail = answer.close()
            if tail and options.watched:
                yield members[row], tail
            drafted, accepted = map(int, found.drafts[:, row])
            results.append(answer.result(found.logprobs[row], drafted, accepted))
        return results

    def _alone(self, lengths: jax.Array) -> Alone | None:
        """The shapes in which a deterministic model reads prompts of ``lengths[B]``."""
        if not self.deterministic:
            return None
        return Alone(DETERMINISTIC_ROWS, _pieces(int(jax.device_get(lengths).max())))

    @property
    def _kept(self) -> Kept | None:
        """Programs for the base model's rows on one device."""
        if self.programs is None or self.adapters or self.mesh is not None:
            return None
        return Kept(self.programs, self._signature)

    @functools.cached_property
    def _signature(self) -> str:
        return signature(self.params)

    def drafting(self, draft: str | LanguageModel | None, draft_tokens: Any) -> DraftSource | None:
        """``generate``'s two arguments, checked."""
        if draft is None:
            if draft_tokens:
                raise JaxLlamaError(f"draft_tokens = {draft_tokens!r} needs a draft")
            return None
        vocab_size, params = self.config.vocab_size, None
        if isinstance(draft, LanguageModel):
            self._check_draft(draft)
            own, params = drafts.ModelDraft(draft.config, vocab_size), draft.params
        elif draft == "ngram":
            own = drafts.NGram(unsure=not draft_tokens)
        else:
            raise JaxLlamaError(f'draft = {short(draft)}: expected "ngram" or a LanguageModel')
        plan = drafts.DraftPlan.of(own, draft_tokens, self.deterministic)
        self.executor.check_drafts(self.deterministic)
        return DraftSource(plan, params)

    def _check_draft(self, draft: LanguageModel) -> None:
        name = draft.config.name
        if not draft.executor.on_device:
            raise JaxLlamaError(f"draft: {name} is offloaded, and a draft lies on the device")
        if draft.mesh != self.mesh:
            raise JaxLlamaError(f"draft: {name} is not on the mesh of {self.config.name}")
        own, other = self.tokenizer, draft.tokenizer
        if own is None or other is None:
            is_same = draft.config.vocab_size == self.config.vocab_size
        else:
            is_same = own.has_ids_of(other)
        if not is_same:
            raise JaxLlamaError(f"draft: {name} has another tokenizer than {self.config.name}")

    def first_layers(self, count: int) -> LanguageModel:
        """The model of the first ``count`` layers, with this one's norm and head: a draft that
        needs no weights of its own.  Raises JaxLlamaError for none, or more than there are."""
        cfg, count = self.config, whole("layers", count)
        if not 1 <= count <= cfg.n_layers:
            raise JaxLlamaError(f"layers = {count}: {cfg.name} has {cfg.n_layers}")
        gone = {f"layer_{index}" for index in range(count, cfg.n_layers)}
        params = {name: part for name, part in self.params.items() if name not in gone}
        return dataclasses.replace(self, config=cfg.first_layers(count), params=params)

    def logits(
        self, tokens: Any, lengths: Any, *, adapter: str | Sequence[str | None] | None = None
    ) -> jax.Array:
        """Teacher-forced float32 logits ``[B, T, V]`` of ``tokens[B, T]``, ``lengths[B]`` valid.

        adapter: as for ``generate``.
        Raises JaxLlamaError for other shapes, numbers that are not whole, valid ids outside of the
        vocabulary, and an adapter that is not here.
        """
        tokens, lengths = self._batch(tokens, lengths)
        numbers = self._numbers(adapter, tokens.shape[0])
        rows = 1 if self.deterministic else tokens.shape[0]  # at once
        check_prompts(self.config, tokens, lengths)
        parts = [
            self.executor.logits(
                self.config,
                self._for_rows(numbers[i : i + rows]).params,
                tokens[i : i + rows],
                lengths[i : i + rows],
            )
            for i in range(0, tokens.shape[0], rows)
        ]
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def _batch(self, tokens: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
        """``logits``'s arguments as int32 arrays; of traced ones only the shapes are looked at."""
        given = [x if isinstance(x, Tracer) else np.asarray(x) for x in (tokens, lengths)]
        tokens, lengths = given
        for name, x in (("tokens", tokens), ("lengths", lengths)):
            if not np.issubdtype(x.dtype, np.integer):
                raise JaxLlamaError(f"{name}: {x.dtype.name}: expected whole numbers")
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
            raise JaxLlamaError(
                f"tokens{list(tokens.shape)}, lengths{list(lengths.shape)}: expected [B, T] and [B]"
            )
        if not any(isinstance(x, Tracer) for x in given):
            if np.any((lengths < 0) | (lengths > tokens.shape[1])):
                raise JaxLlamaError(f"lengths: must be from 0 to {tokens.shape[1]}")
            valid = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
            bad = valid[(valid < 0) | (valid >= self.config.vocab_size)]
            if bad.size:
                raise JaxLlamaError(
                    f"token id {bad[0]} is outside the vocabulary of {self.config.vocab_size}"
                )
        return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)

    def encode(self, prompts: str | Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Token ids of each prompt; ids pass through."""
        try:
            given = [prompts] if isinstance(prompts, str) else list(prompts)
        except TypeError:
            raise JaxLlamaError(
                f"prompts = {short(prompts)}: expected text, or a list of texts or token ids"
            ) from None
        if not given:
            raise JaxLlamaError("no prompts: the list is empty")
        rows = []
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise JaxLlamaError(
                        f"prompt {index} is text, but {self.config.name} has no tokenizer: "
                        "pass token ids"
                    )
                if not prompt:
                    raise JaxLlamaError(f"prompt {index} is empty")
                rows.append(self.tokenizer.encode(prompt))
            else:
                rows.append(ids_of(index, prompt))
        return rows

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the prompt for ``messages``.

        The chat template writes the special tokens.  One that a message spells is text, unless
        ``tokenizer.parse_special``.  Raises JaxLlamaError without a tokenizer or a template, or
        when the template refuses the messages.
        """
        if self.tokenizer is None:
            raise JaxLlamaError(f"{self.config.name} has no tokenizer, so it cannot chat")
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not is_list or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise JaxLlamaError(
                f'messages = {short(messages)}: expected a list of {{"role": ..., "content": ...}}'
            )
        return self.tokenizer.encode_chat(messages)

    def _check(self, rows: list[list[int]], max_new_tokens: int, stops: tuple[str, ...]) -> None:
        if max_new_tokens < 1:
            raise JaxLlamaError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
        if stops and self.tokenizer is None:
            raise JaxLlamaError(f"stop strings need a tokenizer, and {self.config.name} has none")
        if "" in stops:
            raise JaxLlamaError("stop = '': a stop string must not be empty")
        limit, vocab = self.config.max_position, self.config.vocab_size
        for index, row in enumerate(rows):
            if not row:
                raise JaxLlamaError(f"prompt {index} is empty")
            bad = [token for token in row if not 0 <= token < vocab]
            if bad:
                raise JaxLlamaError(
                    f"prompt {index}: token id {bad[0]} is outside the vocabulary of {vocab}"
                )
            if len(row) + max_new_tokens > limit:
                raise JaxLlamaError(
                    f"prompt {index}: {len(row)} tokens and {max_new_tokens} new ones exceed the "
                    f"context of {limit}"
                )


@dataclasses.dataclass(frozen=True)
class _Options:
    """What ``generate`` was asked for, the same for every row."""

    max_new_tokens: int
    stops: tuple[str, ...]
    kv_dtype: DTypeLike
    chunk: int | None
    watched: bool  # somebody reads the text as it comes
    drafting: DraftSource | None
    on_prompt: OnPrompt | None
    # Of every batch of a deterministic model: an executor's block, or what makes a pass over the
    # model one of DETERMINISTIC_ROWS tokens.
    deterministic_rows: int


def _pieces(length: int) -> tuple[int, ...]:
    """Widths in which a deterministic model reads a prompt of ``length`` tokens but its last, which
    the first decode step takes."""
    return pieces_of(length - 1, jax.default_backend() == "cpu")


class _Pieces:
    """How many tokens the loop's next call writes.

    is_read: someone waits for the text.  A call then takes about ``PIECE_SECONDS``, by the fastest
    step so far, so that a slow model shows each token and a fast one is not held up by its host.
    Calls have 2 steps until one was measured, and grow by four times at most.  Otherwise one call
    writes all tokens.  until: tokens of each row after the calls so far.
    """

    def __init__(self, limit: int, is_read: bool) -> None:
        self._limit, self._is_read = limit, is_read
        self._steps = 2 if is_read else limit
        self._running: list[tuple[int, float]] = []  # steps, and when the device was asked
        self._arrived = 0.0
        self._step_seconds = math.inf
        self.until = 1

    def next(self, counts: np.ndarray) -> int:
        """Tokens that each row shall have after the next call, which begins now.  counts: of the
        open rows, as far as they are known."""
        if self._is_read and self._step_seconds < math.inf:
            affordable = max(int(PIECE_SECONDS / self._step_seconds), 1)
            self._steps = min(affordable, 4 * self._steps)
        # Of a draft that was right a row has more tokens than were asked for.
        self.until = min(max(self.until, int(counts.min())) + self._steps, self._limit)
        self._running.append((self._steps, time.perf_counter()))
        return self.until

    def arrived(self) -> None:
        """The tokens of the oldest call are here."""
        now = time.perf_counter()
        if self._running:
            steps, asked = self._running.pop(0)
            seconds = now - max(asked, self._arrived)
            self._step_seconds = min(self._step_seconds, seconds / steps)
        self._arrived = now


@dataclasses.dataclass
class _Answer:
    """One row's tokens and text so far, as its reader gives them."""

    reader: Reader
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""

    def read(self, written: np.ndarray) -> str:
        """Take the row's tokens, of which the first are known; returns the new text."""
        if self.reader.stopped:
            return ""
        new = written[len(self.tokens) :].tolist()
        count, text = self.reader.read(new)
        self.tokens += new[:count]
        self.text += text
        return text

    def close(self) -> str:
        """The text that the reader held back."""
        text = self.reader.close()
        self.text += text
        return text

    def result(self, logprobs: np.ndarray, drafted: int, accepted: int) -> Generation:
        """The answer, of a row with these log-probabilities."""
        reason = "stop" if self.reader.stopped else "length"
        known = logprobs[: len(self.tokens)].tolist()
        return Generation(self.text, self.tokens, known, reason, drafted, accepted)


def _weights(params: Params) -> list[Any]:
    """Every parameter, a quantized one being one."""
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, _QUANTIZED))


def _described(lm: LanguageModel) -> str:
    """What ``repr`` says: facts, then a line for every kind of parameter."""
    kinds: dict[tuple[str, str], int] = {}
    leaves = jax.tree_util.tree_leaves_with_path(
        lm.params, is_leaf=lambda leaf: isinstance(leaf, _QUANTIZED)
    )
    for path, leaf in leaves:
        name = ".".join(str(getattr(entry, "key", entry)) for entry in path)
        kind = re.sub(r"layer_\d+", "layer_*", name), brief(leaf)
        kinds[kind] = kinds.get(kind, 0) + 1
    facts = [
        lm.config.name,
        f"{lm.config.n_layers} layers",
        f"vocabulary {lm.config.vocab_size}",
        f"context {lm.config.max_position}",
        size_text(lm.params),
        "no tokenizer" if lm.tokenizer is None else None,
        None if lm.sampling is None else f"sampling: {lm.sampling}",
    ]
    lines = [
        f"  {count} x {name} {text}" if count > 1 else f"  {name} {text}"
        for (name, text), count in kinds.items()
    ]
    if len(lines) > _SCREEN:
        lines[_SCREEN:] = [f"  and {len(lines) - _SCREEN} more kinds of parameters"]
    return "\n".join([f"{type(lm).__name__}({', '.join(filter(None, facts))})", *lines])
