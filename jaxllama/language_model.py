"""LanguageModel: config, params and tokenizer together, turning prompts into text.

A LanguageModel tokenizes the prompts and pads them to a few shape buckets, so that a steady state
compiles nothing. Its executor runs them. The executor decodes in slices where a caller reads the
text as it comes, or where stop strings may end it. Readers turn the tokens into text. The model
holds no state between calls.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllama.checkpoints.pooling import Pooling
from jaxllama.config import ModelConfig
from jaxllama.decoding.gain import Gain
from jaxllama.decoding.sampling import Sampling, whole
from jaxllama.errors import JaxLlamaError
from jaxllama.executors import resident
from jaxllama.executors.batches import GenerateCall, OnPrompt, Steps, generations
from jaxllama.executors.drafting import draft_source
from jaxllama.executors.executor import DraftSource, Executor, KeptCalls
from jaxllama.generation import check_chunk, check_prompts
from jaxllama.kept import KeptPrograms, signature
from jaxllama.model.eagle3 import Drafter
from jaxllama.model.layout import as_stored
from jaxllama.model.lora import for_rows
from jaxllama.model.summary import summary
from jaxllama.text.chat.messages import check_messages
from jaxllama.text.rows import (
    Generation,
    check_rows,
    encoded,
    sampling_of,
    short,
    stops_of,
    token_batch,
)
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Params

# a message has one of these beside its role
_HOLDS = {"content", "tool_calls", "tool_responses", "reasoning_content", "reasoning", "thinking"}

OnText = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model with its tokenizer, ready to generate text. ``load`` makes one.

    Parameters
    ----------
    config : ModelConfig
        The model's configuration.
    params : dict
        Its tree of parameters.
    tokenizer : Tokenizer or None
        None if the checkpoint has no tokenizer. Prompts are then token ids, and ``chat`` raises
        JaxLlamaError.
    deterministic : bool
        Each row's logits then have the same bits in any batch and at any place in it, and in an
        engine of any number of slots: sums have one order (``pallas_kernels.fixed_sums``). Prompts
        are prefilled one by one in pieces of fixed widths, whatever ``chunk`` says. Programs of
        exactly 32 rows decode them, each with rows that need the same room. An offloaded model's
        programs, also for prompts, have its policy's ``gpu_batch_size`` rows.
    sampling : Sampling, optional
        The checkpoint's own settings, from generation_config.json. ``chat`` and the server use them
        if the caller names none.
    adapters : tuple of str
        Names of the LoRA adapters in ``params`` (``model.lora``), in their order.
    exact : bool
        On a CPU, quantized weights keep exact float32 products. Otherwise they are laid out for the
        CPU's handlers (``model.layout``), which round activations to 8 bits.
    programs : KeptPrograms, optional
        Programs that earlier processes compiled for this model. None uses jax's own cache alone.
    pooling : Pooling, optional
        How hidden states become a text's vector, from sentence-transformers' files. None if the
        model has no such files.
    classifier : jax.Array, optional
        The head of a model for classification, float32 ``[classes, d_model]``. It scores the
        documents of ``/v1/rerank``.
    executor : Executor
        The place where the model runs; by default the devices that hold the parameters.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    deterministic: bool = False
    sampling: Sampling | None = None
    adapters: tuple[str, ...] = ()
    exact: bool = False
    programs: KeptPrograms | None = dataclasses.field(default=None, repr=False, compare=False)
    pooling: Pooling | None = None
    classifier: jax.Array | None = dataclasses.field(default=None, repr=False, compare=False)
    executor: Executor = dataclasses.field(default=resident.Resident(), repr=False, compare=False)
    # What the drafts of earlier calls gained.
    gains: dict[Hashable, Mapping[tuple[int, int], Gain]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "executor", self.executor.with_params(self.params))
        if not self.exact:
            object.__setattr__(self, "params", self.executor.laid_out(self.params))
        # Saving, byte counts and offloading then see an untied model.
        config = self.config.with_head_of(self.params)
        if config.fixed_sums != self.deterministic:
            config = config.replace(fixed_sums=self.deterministic)
        object.__setattr__(self, "config", config)

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the activations."""
        return self.params["norm"]["weight"].dtype

    @property
    def n_classes(self) -> int:
        """Return the number of classes of ``classifier``, 0 without one."""
        return 0 if self.classifier is None else self.classifier.shape[0]

    @property
    def mesh(self) -> Mesh | None:
        """Return the mesh that holds the parameters, or None for one device."""
        return self.executor.mesh

    def __repr__(self) -> str:
        return summary(
            type(self).__name__,
            self.config,
            self.params,
            "no tokenizer" if self.tokenizer is None else None,
            None if self.sampling is None else f"sampling: {self.sampling}",
        )

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
        draft: str | LanguageModel | Drafter | None = None,
        draft_tokens: int = 0,
    ) -> list[Generation]:
        """Continue every prompt by up to ``max_new_tokens`` tokens.

        Parameters
        ----------
        prompts : str or sequence
            One text, or a sequence of texts and sequences of token ids.
        max_new_tokens : int
            Most new tokens of a row.
        sampling : Sampling or sequence of Sampling, optional
            One for all rows, or one per row. The default is greedy decoding.
        seed : int or sequence of int
            Seed of rows whose sampling has none. One int gives equal prompts equal text; a sequence
            gives each row its own seed.
        stop : str or sequence of str
            Strings that end a row when they appear, also across token borders.
        kv_dtype : data-type, optional
            Type of the cache, for example "int8" or "fp8"; by default the activations' type.
        chunk : int, optional
            Tokens of a prompt that pass through the model at once.
            ``decoding.forward.prefill_chunk`` chooses the default. ``docs/rooms/model.md`` lists
            where the answer is equal to the bit; elsewhere it is equal up to rounding.
        on_text : callable, optional
            Called as (row, new text) during decoding, with complete characters only.
        on_prompt : callable, optional
            Called as (tokens read, tokens of the longest prompt) after each chunk, if prompts have
            several. Deterministic and offloaded models do not call it.
        adapter : str or sequence, optional
            One of ``adapters``, or one per row. None selects the model itself.
        draft : str, LanguageModel or Drafter, optional
            The source of drafts, which the model verifies several tokens at a time. "ngram"
            proposes the tokens that followed the newest tokens earlier in the text. "mtp" is the
            head of a checkpoint that has one (Qwen3.5, Qwen3-Next). A smaller model needs the same
            tokenizer; ``first_layers`` makes one. ``jl.load_drafter`` reads a head that was trained
            beside this model. Drafts do not change the tokens.
        draft_tokens : int
            Tokens of one draft, up to 15. With 0 each row adapts the number, and drafting ends
            where it costs time.

        Returns
        -------
        list of Generation
            One result per prompt, in order.

        Raises
        ------
        JaxLlamaError
            If a prompt is empty, if it and ``max_new_tokens`` exceed the context, or if an id is
            outside the vocabulary. Also for text without a tokenizer, and for an argument of
            another type or number of rows.
        """
        rows = self.encode(prompts)
        steps = self._steps(
            rows,
            max_new_tokens,
            sampling_of(sampling, seed, len(rows)),
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
        messages: Sequence[Mapping[str, object]],
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        *,
        kv_dtype: DTypeLike | None = None,
        chunk: int | None = None,
        on_text: OnText | None = None,
        adapter: str | None = None,
        draft: str | LanguageModel | Drafter | None = None,
        draft_tokens: int = 0,
    ) -> Generation:
        """Return the model's answer to a conversation, formatted by its chat template.

        Parameters
        ----------
        messages : sequence of mapping
            The conversation: {"role": ..., "content": ...} each.
        max_new_tokens : int
            Most new tokens. The context's end may lower it.
        sampling : Sampling, optional
            By default the model's own (``self.sampling``), or greedy if it has none.
        seed, stop, kv_dtype, chunk, on_text, adapter, draft, draft_tokens
            As for ``generate``.

        Returns
        -------
        Generation
            The answer.

        Raises
        ------
        JaxLlamaError
            If the model has no tokenizer or no template, or if the conversation fills the context.
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
        draft: str | LanguageModel | Drafter | None = None,
        draft_tokens: int = 0,
    ) -> Iterator[str]:
        """Yield the text of ``generate`` for one prompt while it is decoded.

        Each piece has complete characters. The device works at most one piece ahead. A closed or
        abandoned iterator therefore leaves at most ``PIECE_SECONDS`` of work.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or token ids.
        max_new_tokens, sampling, seed, stop, kv_dtype, chunk, adapter, draft, draft_tokens
            As for ``generate``, for one row.

        Returns
        -------
        iterator of str
            Pieces of the new text.

        Raises
        ------
        JaxLlamaError
            At the call, not during the iteration: if the model has no tokenizer, and as for
            ``generate``.
        """
        if self.tokenizer is None:
            raise JaxLlamaError(f"{self.config.name} has no tokenizer: there is no text to stream")
        steps = self._steps(
            self.encode([prompt]),
            max_new_tokens,
            sampling_of(sampling, seed, 1),
            stop,
            kv_dtype,
            chunk,
            True,
            adapter,
            self.drafting(draft, draft_tokens),
        )
        return (text for _, text in steps)

    def save(
        self,
        directory: str | Path,
        *,
        format: str | None = None,
        type: str | None = None,
        progress: bool = False,
    ) -> Path:
        """Write the model into a new directory or GGUF file, which ``load`` reads.

        The directory gets config.json, generation_config.json (with ``sampling``), safetensors and
        the tokenizer's files. It appears complete or, on any failure, not at all.

        Parameters
        ----------
        directory : str or Path
            The target, which must be empty or not exist.
        format : str, optional
            "floats", "awq", "gptq" or "compressed-tensors" write a Hugging Face directory, which
            transformers loads too. "floats" dequantizes quantized weights. "native" keeps any
            quantized weight bit for bit; other programs refuse it. The default is "native" for
            quantized weights. It is "floats" for others, which keep their dtype. "gguf" writes one
            file, which llama.cpp reads too; ``directory`` is its path and ends with .gguf. It is
            the default for such a path.
        type : str, optional
            GGUF type to which all matrices are rounded, such as "q4_k". Without it quantized
            weights keep their codes, and floats their dtype.
        progress : bool
            Show a progress bar on stderr.

        Returns
        -------
        Path
            The directory, or the file.

        Raises
        ------
        JaxLlamaError
            If the path cannot be written, the format cannot hold a weight, or transformers has no
            class for an option of the config. The message names it.
        """
        from jaxllama.checkpoints import saving  # few programs write a model

        format = saving.format_of(directory, format)
        saving.check_format(format, type)
        if self.adapters:
            raise JaxLlamaError("adapters lie beside the weights: load(..., merge=True) joins them")
        params = as_stored(self.executor.whole(self.config, self.params))
        with tempfile.TemporaryDirectory() as scratch:
            files = [] if self.tokenizer is None else self.tokenizer.save(scratch)
            return saving.save(
                directory,
                self.config,
                params,
                files,
                format=format,
                dtype=self.dtype,
                sampling=self.sampling,
                progress=progress,
                type=type,
            )

    def _steps(
        self,
        rows: list[list[int]],
        max_new_tokens: Any,
        per_row: list[Sampling],
        stop: Any,
        kv_dtype: DTypeLike | None,
        chunk: Any,
        watched: bool,
        adapter: str | Sequence[str | None] | None,
        drafting: DraftSource | None,
        on_prompt: OnPrompt | None = None,
    ) -> Steps:
        """Check the arguments of ``generate`` now, and return an iterator that does its work."""
        max_new_tokens = whole("max_new_tokens", max_new_tokens)
        chunk = None if chunk is None else whole("chunk", chunk)
        check_chunk(chunk)
        stops = stops_of(stop)
        check_rows(self.config, self.tokenizer, rows, max_new_tokens, stops)
        numbers = self._numbers(adapter, len(rows))
        cache_dtype, chunk = self.executor.cache_options(self.config, kv_dtype, chunk, self.dtype)
        call = GenerateCall(
            rows,
            per_row,
            numbers,
            max_new_tokens,
            stops,
            cache_dtype,
            chunk,
            watched,
            self.deterministic,
            drafting,
            on_prompt,
        )
        return generations(
            self.executor, self.config, self.tokenizer, call, self._params_for, self._kept
        )

    def _numbers(self, adapter: str | Sequence[str | None] | None, batch: int) -> list[int]:
        """Return each row's adapter number, as ``model.lora`` counts them."""
        per_row = [adapter] * batch if adapter is None or isinstance(adapter, str) else adapter
        if not isinstance(per_row, Sequence):
            raise JaxLlamaError(f"adapter = {short(adapter)}: expected a name, or one a row")
        if len(per_row) != batch:
            raise JaxLlamaError(f"adapter: {len(per_row)} entries for {batch} prompts")
        return [self.adapter_number(name) for name in per_row]

    def adapter_number(self, name: str | None) -> int:
        """Return an adapter's number, from 1; None has number 0.

        Parameters
        ----------
        name : str or None
            One of ``adapters``.

        Returns
        -------
        int
            The number that ``model.lora`` uses.

        Raises
        ------
        JaxLlamaError
            If the model has no adapter of this name.
        """
        if name is None:
            return 0
        if name not in self.adapters:
            raise unknown_adapter(name, self.adapters, self.config)
        return self.adapters.index(name) + 1

    def _params_for(self, numbers: list[int]) -> Params:
        """Return the parameters of a batch whose rows have these adapters.

        If no row has an adapter, the base model's program runs. A deterministic model is the
        exception: a row's bits must not depend on its neighbours.
        """
        if not self.adapters or not (self.deterministic or any(numbers)):
            return self.params
        return for_rows(self.params, jnp.asarray(numbers, jnp.int32))

    @property
    def _kept(self) -> KeptCalls | None:
        """Return the kept programs for the base model's rows on the first device."""
        if self.programs is None or self.adapters or self.mesh is not None:
            return None
        leaf = next(iter(jax.tree.leaves(self.params)))
        if isinstance(leaf, jax.Array) and leaf.devices() != {jax.local_devices()[0]}:
            return None
        return KeptCalls(self.programs, self._signature)

    @functools.cached_property
    def _signature(self) -> str:
        return signature(self.params)

    def drafting(
        self, draft: str | LanguageModel | Drafter | None, draft_tokens: Any
    ) -> DraftSource | None:
        """Check ``generate``'s arguments ``draft`` and ``draft_tokens``, and return the source of
        drafts.

        Parameters
        ----------
        draft : str, LanguageModel or Drafter, optional
            "ngram", "mtp", a model with the same tokenizer, or a head trained beside this model.
        draft_tokens : int
            Tokens of one draft, up to 15. With 0 each row adapts the number, and drafting ends
            where it costs time.

        Returns
        -------
        DraftSource or None
            None without a draft.

        Raises
        ------
        JaxLlamaError
            If this model cannot use the draft.
        """
        if draft is not None:
            return draft_source(self, draft, draft_tokens)
        if draft_tokens:
            raise JaxLlamaError(f"draft_tokens = {draft_tokens!r} needs a draft")
        return None

    def first_layers(self, count: int) -> LanguageModel:
        """Return the model of the first layers, with this model's norm and head.

        It serves as a draft that needs no weights of its own.

        Parameters
        ----------
        count : int
            Number of layers, at least 1.

        Returns
        -------
        LanguageModel
            The smaller model, which shares this model's arrays.

        Raises
        ------
        JaxLlamaError
            If ``count`` is below 1 or exceeds the number of layers.
        """
        cfg, count = self.config, whole("layers", count)
        if not 1 <= count <= cfg.n_layers:
            raise JaxLlamaError(f"layers = {count}: {cfg.name} has {cfg.n_layers}")
        gone = {"mtp", *(f"layer_{index}" for index in range(count, cfg.n_layers))}
        params = {name: part for name, part in self.params.items() if name not in gone}
        return dataclasses.replace(self, config=cfg.first_layers(count), params=params)

    def logits(
        self, tokens: Any, lengths: Any, *, adapter: str | Sequence[str | None] | None = None
    ) -> jax.Array:
        """Return teacher-forced logits of every position.

        Parameters
        ----------
        tokens : array
            Integer ``[B, T]``: token ids, right-padded.
        lengths : array
            Integer ``[B]``: valid tokens of each row.
        adapter : str or sequence, optional
            As for ``generate``.

        Returns
        -------
        jax.Array
            float32 ``[B, T, V]``.

        Raises
        ------
        JaxLlamaError
            If shapes differ, a number is not whole, a valid id is outside of the vocabulary, or the
            model has no such adapter.
        """
        tokens, lengths = token_batch(tokens, lengths, self.config.vocab_size)
        numbers = self._numbers(adapter, tokens.shape[0])
        rows = 1 if self.deterministic else tokens.shape[0]  # at once
        check_prompts(self.config, tokens, lengths)
        parts = [
            self.executor.logits(
                self.config,
                self._params_for(numbers[i : i + rows]),
                tokens[i : i + rows],
                lengths[i : i + rows],
            )
            for i in range(0, tokens.shape[0], rows)
        ]
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def encode(self, prompts: str | Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Return the token ids of each prompt.

        Parameters
        ----------
        prompts : str or sequence
            One text, or a sequence of texts and sequences of token ids. Ids pass through.

        Returns
        -------
        list of list of int
            Token ids, one list per prompt.

        Raises
        ------
        JaxLlamaError
            If a prompt is empty text, or is text and the model has no tokenizer.
        """
        return encoded(self.tokenizer, self.config.name, prompts)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the token ids of the prompt for a conversation.

        The chat template writes the special tokens. Special tokens that a message spells are plain
        text, unless ``tokenizer.parse_special`` is set.

        Parameters
        ----------
        messages : sequence of mapping
            The conversation: {"role": ..., "content": ...} each.

        Returns
        -------
        list of int
            Token ids.

        Raises
        ------
        JaxLlamaError
            If the model has no tokenizer or no template, or if the template refuses the messages.
        """
        if self.tokenizer is None:
            raise JaxLlamaError(f"{self.config.name} has no tokenizer, so it cannot chat")
        check_messages(messages)
        for index, message in enumerate(messages):
            if not _HOLDS & message.keys():
                raise JaxLlamaError(f'messages[{index}] = {short(message)}: "content" is missing')
        return self.tokenizer.encode_chat(messages)


def unknown_adapter(name: str, known: Iterable[str], cfg: ModelConfig) -> JaxLlamaError:
    """Return the error of an adapter that a model does not have."""
    there = ", ".join(map(repr, known)) or "none: give adapters= at load, or --adapter"
    return JaxLlamaError(f"adapter = {short(name)}: {cfg.name} has {there}")
