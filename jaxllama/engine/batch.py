"""The arrays of an engine's running requests: a row for each slot."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from jaxllama.decoding.drafts import Pace
from jaxllama.decoding.sampling import History, SamplingParams
from jaxllama.model.cache import Cache, LayerState


class SlotDrafts(NamedTuple):
    """text int32 ``[B, L]``: prompt and answer, up to the newest token.  pace: how much each row
    asks for.  read int32 ``[B]``: how much of the text a model that drafts has in its cache; its
    layers, in a decode call."""

    text: jax.Array
    pace: Pace
    read: jax.Array
    layers: tuple[LayerState, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchState:
    """snapshots: of each layer with a state some states to begin with, each leaf ``[S, ...]``, None
    for attention.  All else has a row for each slot.

    token int32: the newest, not yet in the cache.  prompted: it is the prompt's last, which attends
    to everything, where generated tokens may attend sparsely.  active: it has not ended.  remaining
    int32: tokens that may still be drawn.  ignore_eos: goes on past stop tokens.  drafting: None
    where no drafts are made.
    """

    cache: Cache
    snapshots: tuple[LayerState | None, ...]
    token: jax.Array
    prompted: jax.Array
    active: jax.Array
    remaining: jax.Array
    ignore_eos: jax.Array
    sampling: SamplingParams
    history: History
    drafting: SlotDrafts | None

    @property
    def size(self) -> int:
        return self.token.shape[0]
