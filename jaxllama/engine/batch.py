"""The device arrays of an engine's running requests, with one row for each slot."""

from __future__ import annotations

import dataclasses

import jax

from jaxllama.decoding.drafts import SlotDrafts
from jaxllama.decoding.sampling import History, SamplingParams
from jaxllama.model.cache import Cache, LayerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchState:
    """Device state of all slots.

    snapshots: for each layer with a recurrent state, S states that prompts may begin with, each
    leaf ``[S, ...]``; None for attention layers. All other fields have one row for each slot.

    token int32: the newest token, which is not in the cache yet. prompted: whether ``token`` is the
    prompt's last token. That token attends to everything, while generated tokens may attend
    sparsely. active: whether the row still generates. remaining int32: number of tokens that the
    row may still sample. ignore_eos: whether the row goes on past stop tokens. drafting: None in an
    engine without drafts.
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

    def with_layers(self, layers: tuple[LayerState, ...]) -> BatchState:
        """Return the slots with these states of the cache's layers."""
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, layers=layers))
