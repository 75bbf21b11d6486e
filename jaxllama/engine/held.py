"""The model that an engine runs: replaced between two steps, or put to sleep with its cache.

The engine calls these under the lock that its steps take. Cached prefixes of the weights before are
not found again, unless the tiers have them and the same weights return.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import jax
import numpy as np

from jaxllama.engine.blocks import BlockRunner
from jaxllama.engine.divided import AnyScheduler
from jaxllama.engine.records import weights_hash
from jaxllama.engine.runner import Runner
from jaxllama.engine.tiers import Identity
from jaxllama.engine.weights import with_params, without_weights
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.typing import Params


class HeldModel:
    """An engine's model; ``asleep``: whether its cache, and perhaps its weights, are freed."""

    def __init__(
        self, lm: LanguageModel, scheduler: AnyScheduler, runner: Runner | BlockRunner
    ) -> None:
        self.lm = lm
        self.asleep = False
        self._scheduler, self._runner = scheduler, runner
        self._at_rest: Params | None = None  # the weights on the host
        self._nonce = os.urandom(16)
        self._identify()

    def resident_runner(self, what: str) -> Runner:
        """Return the runner, whose weights may change. Raises JaxLlamaError for others.

        what: the beginning of the error.
        """
        if not isinstance(self._runner, Runner):
            raise JaxLlamaError(f"{what}: an offloaded model keeps its weights on the host")
        if self._runner.adapters is not None and self._runner.adapters.n_free:
            raise JaxLlamaError(f"{what}: an engine with lora_slots keeps its weights")
        return self._runner

    def hold(self, lm: LanguageModel) -> None:
        """Run ``lm`` from now on."""
        self._at_rest = None
        self._hold(lm)

    def _hold(self, lm: LanguageModel) -> None:
        assert isinstance(self._runner, Runner)
        self.lm = lm
        self._runner.params = lm.params
        if self._runner.adapters is not None:
            self._runner.adapters.params = lm.params
        self._scheduler.weights += 1
        self._identify()

    def _identify(self) -> None:
        """Tell the tiers which weights their records depend on from now on."""
        tiers = self._scheduler.pools[0].tiers
        if tiers is None:
            return
        assert isinstance(self._runner, Runner)
        runner, lm = self._runner, self.lm
        tiers.identity = None
        trees = lm.params, runner.draft_params
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trees)):
            return
        cache = runner.slots.cache.layers, runner.slots.snapshots
        kinds = [(leaf.shape[1:], leaf.dtype.name) for leaf in jax.tree.leaves(cache)]
        options = runner.options
        sums = options.deterministic, options.unit
        facts = lm.config, options.draft, options.page_size, sums, str(kinds)
        hashed = weights_hash(trees, facts)
        tiers.identity = Identity(hashed, self._scheduler.weights, lm.adapters, self._nonce)

    def _renumber(self) -> None:
        """Keep the weights' identity under a new number."""
        tiers = self._scheduler.pools[0].tiers
        if tiers is not None and tiers.identity is not None:
            number = self._scheduler.weights
            tiers.identity = dataclasses.replace(tiers.identity, number=number)

    def sleep(self, weights: Literal["keep", "host", "drop"]) -> None:
        """Free the cache, and the weights as ``Engine.sleep`` says."""
        runner = self.resident_runner("sleep")
        self.asleep = True
        for pool in self._scheduler.pools:
            pool.forget_unsaved()
        runner.sleep()
        if weights == "host":
            self._at_rest = jax.device_get(self.lm.params)
        if weights == "keep":
            self._scheduler.weights += 1  # the prefixes on the device are gone
            self._renumber()
        else:
            self._hold(without_weights(self.lm))

    def wake(self) -> None:
        """Take the weights back, and an empty cache."""
        if not self.asleep:
            raise JaxLlamaError("the engine does not sleep")
        runner = self.resident_runner("wake")
        if self._at_rest is not None:
            params = jax.tree.map(_back, self._at_rest, self.lm.params)
            self.hold(with_params(self.lm, params))
        elif any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self.lm.params)):
            raise JaxLlamaError("wake: the weights were dropped; update_params gives new ones")
        runner.wake()
        self.asleep = False


def _back(leaf: np.ndarray, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(leaf, shape.sharding)
