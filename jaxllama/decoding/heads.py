"""HeadDraft: a head that reads the model's states proposes the next tokens (``model.heads``).

The head reads each token with the hidden state of the token before it.  The prefill and each pass
over the model therefore hand out their hidden states, and the head reads them at once, also while
no row drafts: its cache is always as long as the model's.  Between passes a row keeps one hidden
state, from which its next draft begins.

Reading costs one layer a pass.  A proposal of k tokens costs k heads and k - 1 layers.  A chain of
tokens is compiled for few lengths, each without a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.decoding.drafts import (
    FEW,
    DraftContext,
    Drafted,
    PromptPart,
    SlotDrafts,
    chain,
)
from jaxllama.decoding.loop import in_width
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.turn import Inputs, Pass
from jaxllama.model import decoder
from jaxllama.model.cache import Cache, init_cache
from jaxllama.model.heads import Head
from jaxllama.model.records import Hidden
from jaxllama.parallel.mesh import mesh_of
from jaxllama.typing import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadState:
    """The head's state of B rows.

    cache: of one layer.  last: the head's hidden state ``[B, D]`` for each row's newest token.
    is_known: bool ``[B]``: whether ``last`` is.  Rows for which it is not propose nothing.
    """

    cache: Cache
    last: Hidden
    is_known: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadDraft:
    """Proposes the tokens that the head samples with the same keys.

    Its parameters are those that ``weights`` returns.
    """

    head: Head
    reads_hidden: ClassVar[bool] = True
    counts_read: ClassVar[bool] = False

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    def begin(self, params: Params, batch: int, capacity: int) -> HeadState:
        """The state of ``batch`` rows before their prompts."""
        dtype, mesh = decoder.activation_dtype(params), mesh_of(params)
        cfg = self.head.layer_config
        cache = init_cache(cfg, batch, capacity, dtype, mesh=mesh)
        last = Hidden(jnp.zeros((batch, cfg.d_model), dtype))
        return HeadState(cache, last, jnp.zeros((batch,), bool))

    def read_prompt(
        self,
        params: Params,
        state: HeadState,
        following: jax.Array,
        hidden: Hidden,
        lengths: jax.Array,
        *,
        fresh: bool = False,
    ) -> HeadState:
        """Read a part of a prompt.

        hidden ``[B, T, D]``: the model's for its tokens, of which ``lengths[B]`` count.
        following: int32 ``[B, T]``: the token after each of them.
        """
        cache = self._filled(params, state.cache, following, hidden, lengths, fresh=fresh)
        return dataclasses.replace(state, cache=cache)

    def weights(self, model: Params, draft: Params | None) -> Params:
        """Return those that the head reads."""
        return self.head.weights(model, draft)

    def fill(self, params: Params, cache: Cache, part: PromptPart) -> Cache:
        """Return the head's cache with the part of the prompts."""
        columns = jnp.arange(part.tokens.shape[1], dtype=jnp.int32)
        last = part.following[:, None]
        after = jnp.concatenate([part.tokens[:, 1:], last], axis=1)
        after = jnp.where(columns == part.lengths[:, None] - 1, last, after)
        return self._filled(params, cache, after, part.hidden, part.lengths, fresh=part.fresh)

    def state_of(self, slots: SlotDrafts, cache: Cache, drafts_here: bool) -> HeadState:
        """Return the state, which the head keeps also while no row drafts."""
        del drafts_here
        assert slots.last is not None
        head = Cache(slots.layers, cache.lengths, cache.table)
        return HeadState(head, Hidden(slots.last), slots.read >= 0)

    def to_slots(self, slots: SlotDrafts, kept: HeadState, length: jax.Array) -> SlotDrafts:
        """Return the slots with the state."""
        read = jnp.where(kept.is_known, length, -1)
        return slots._replace(layers=kept.cache.layers, read=read, last=kept.last.x)

    def _filled(
        self,
        params: Params,
        cache: Cache,
        following: jax.Array,
        hidden: Hidden,
        lengths: jax.Array,
        *,
        fresh: bool,
    ) -> Cache:
        """Return the head's cache with a part of a prompt, as ``read_prompt`` takes it."""
        return self.head.forward(
            params,
            following,
            _apart(hidden),
            lengths,
            cache,
            is_prompt=True,
            fresh=fresh,
        )[1]

    def read(
        self,
        params: Params,
        state: HeadState,
        following: jax.Array,
        hidden: Hidden,
        new: jax.Array,
    ) -> HeadState:
        """Read the tokens of a pass, whose cache has kept ``new[B]``; as ``read_prompt``."""
        read, cache = self.head.forward(params, following, _apart(hidden), new, state.cache)
        return HeadState(cache, read.last(new, state.last), state.is_known | (new > 0))

    def begin_answer(
        self, params: Params, rows: Rows, state: HeadState, last: Hidden, lengths: jax.Array
    ) -> Rows:
        """Return the rows after the head has read their first tokens.

        last: ``[B, D]``: the model's hidden state for the last token of each prompt, of which a row
        without one has length 0.
        """
        live, newest = (lengths > 0).astype(jnp.int32), rows.fields.newest[:, None]
        state = self.read(params, state, newest, last.reshaped(-1, 1), live)
        return dataclasses.replace(rows, kept=state)

    def observe(self, params: Params, rows: Rows, inputs: Inputs, passed: Pass) -> Rows:
        """Read what a turn has added to ``rows``, whose ``text`` has the new tokens already."""
        assert rows.text is not None and passed.hidden is not None
        before = inputs.fields.length
        place = jnp.arange(inputs.tokens.shape[1], dtype=jnp.int32)[None, :]
        index = jnp.minimum(before[:, None] + 1 + place, rows.text.shape[1] - 1)
        following = jnp.take_along_axis(rows.text, index, axis=1)
        new = rows.fields.length - before
        return dataclasses.replace(
            rows, kept=self.read(params, rows.kept, following, passed.hidden, new)
        )

    def propose(self, params: Params, kept: HeadState, ask: DraftContext) -> Drafted:
        """Draft ``ask.wanted`` tokens for each row; if no row wants any, the head does not run."""
        ask = ask._replace(wanted=jnp.where(kept.is_known, ask.wanted, 0))
        scores = functools.partial(self.head.scores, params)
        forward = functools.partial(self.head.forward, params, is_own=True)
        tokens, cache = in_width(
            tuple(sorted({min(FEW, ask.most), ask.most})),
            jnp.max(ask.wanted),
            lambda length, carry: chain(length, ask, kept.last, carry[1], scores, forward),
            (ask.none, kept.cache),
        )
        # Entries past the length are never read.
        cache = Cache(cache.layers, kept.cache.lengths, kept.cache.table)
        return Drafted(tokens, ask.wanted, dataclasses.replace(kept, cache=cache))


def _apart(hidden: Hidden) -> Hidden:
    """Return the states behind a border for the compiler.

    Otherwise it shares their norm between the model and the head, and the model's logits would be
    rounded otherwise than without the head.
    """
    return lax.optimization_barrier(hidden)
