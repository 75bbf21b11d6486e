"""Placement: stores each parameter in its tiers as it is read, so that no whole model is held.

    place = Placement(policy, dtype, scheme)
    place(path, leaf)                            the entry of the parameter tree
    place.model(cfg, params, tokenizer)          the LanguageModel

The device quantizes a matrix first, if there is a scheme, as ``load`` does without a policy. The
input table of a model with a
separate head is only looked up, one row per token. Such a table therefore stays in host memory or
on disk. It is on the device if all weights are.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.checkpoints import hub
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.offloaded.executor import SCHEME, Offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.model.layout import handles
from jaxllama.offload.expert_places import ExpertPlace, places, use_of
from jaxllama.offload.experts import ExpertBias, ExpertTensor, put_experts
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.store import RowTable, Store, wait
from jaxllama.offload.units import check_halves
from jaxllama.quantization.quantize import Rounder, in_order
from jaxllama.quantization.scheme import parse
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Leaf, Params, ParamsDict, Tree
from pallas_kernels.cpu import CpuWeight, prepare_tree, unavailable
from pallas_kernels.qtensor import QTensor

DIRECTORY = "JAXLLAMA_OFFLOAD_DIR"  # environment variable: folder of the disk's share


def disk_folder() -> Path:
    """Return the folder of the disk's share: the environment's, or one beside cached weights."""
    return Path(os.environ.get(DIRECTORY) or hub.cache_dir() / "offload").expanduser()


def scheme_of(policy: Policy, scheme: str | None) -> str | None:
    """Return the scheme of weights under a policy; ``scheme`` is the user's own.

    Raises JaxLlamaError if the policy compresses weights and the user names another scheme.
    """
    if not policy.compress_weight:
        return scheme
    if scheme not in (None, SCHEME):
        raise JaxLlamaError(f"policy: compress_weight is {SCHEME}, and quantize is {scheme!r}")
    return SCHEME


class Placement:
    """A function that stores parameters where a policy puts them. See the module docstring.

    directory: folder for the disk's share; by default ``disk_folder()``.
    deterministic, exact: as for ``LanguageModel``.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: DTypeLike,
        scheme: str | None = None,
        deterministic: bool = False,
        directory: str | Path | None = None,
        exact: bool = False,
    ) -> None:
        if deterministic and policy.cpu_attention and 0 < policy.cache_device < 100:
            raise JaxLlamaError(
                "policy: deterministic and cpu_attention need the cache all on the device or all "
                "in host memory: a row's place in its batch must not decide who attends"
            )
        self.deterministic = deterministic
        self.policy, self.dtype = policy, jnp.dtype(dtype)
        self.scheme = scheme_of(policy, scheme)
        self.recipe = parse(self.scheme or "none")
        self.rounder = Rounder(self.recipe, self._put)
        self.store = Store(disk_folder() if directory is None else directory)
        self.lays_out = not exact and handles(self.dtype)
        self.use = use_of(policy)
        # A GPU's machine too computes experts on its CPU, in the handlers' layout.
        computes = policy.cpu_expert > 0 and not exact and unavailable() is None
        self.lays_out_experts = self.lays_out or computes

    def fit(self, cfg: ModelConfig) -> None:
        """Fit the grids of the parameters to come to their inputs, as ``Rounder`` does.

        Raises JaxLlamaError if the policy does not fit the model.
        """
        self._checked(cfg)
        self.rounder = Rounder(self.recipe, self._put, cfg)

    def _checked(self, cfg: ModelConfig) -> ModelConfig:
        """Return the config with the policy's sparsity, after checking that the policy fits it."""
        if self.policy.attn_sparsity < 1:
            cfg = cfg.replace(attn_sparsity=self.policy.attn_sparsity)
        check_halves(cfg, self.policy)
        return cfg

    def __call__(self, path: tuple[str, ...], leaf: Leaf) -> Tree:
        """Return the leaf at ``path``, an array or a quantized weight, stored where the policy puts
        it; None for one that ``model`` puts into the tree.
        """
        return self.rounder(path, leaf)

    def _put(self, path: tuple[str, ...], leaf: Leaf) -> Tree:
        if path == ("embed", "weight") and not isinstance(leaf, QTensor | CpuWeight):
            return np.asarray(leaf)  # ``model`` places it, when it knows the head
        return self._store(path, leaf)

    def _store(self, path: tuple[str, ...], leaf: Leaf) -> Tree:
        if self.policy.experts and path[0].startswith("layer_") and path[1:2] == ("mlp",):
            if path[2] in ("experts_gate_up", "experts_down"):
                return self._put_experts(int(path[0].removeprefix("layer_")), path[-1], leaf)
        if self.lays_out:  # as the resident model's weights are
            leaf = prepare_tree(leaf)
        return wait(self.store.put(leaf, self.policy.weights))

    def _put_experts(self, layer: int, name: str, leaf: Leaf) -> ExpertTensor | ExpertBias:
        """Return a layer's experts, or their biases, stored one by one."""
        if name == "bias":
            device = wait(self.store.put(leaf, Shares(100, 0))).device
            return ExpertBias(device.reshape(leaf.shape), np.asarray(leaf))
        return put_experts(
            self.store,
            prepare_tree(leaf) if self.lays_out_experts else leaf,
            self._place(layer, leaf.shape[0]),
            self.policy.cpu_expert > 0,
            # A GPU may round a pair otherwise where its expert has a slot.
            learns=not self.deterministic,
        )

    def _place(self, layer: int, n_experts: int) -> ExpertPlace:
        if self.use is None:
            return places(self.policy, {layer: n_experts}, None)[layer]
        self.use.of(layer, n_experts)
        return self._places[layer]

    @functools.cached_property
    def _places(self) -> dict[int, ExpertPlace]:
        """Where the experts of all layers of the table of use lie."""
        assert self.use is not None
        counts = {index: len(shares) for index, shares in self.use.layers.items()}
        return places(self.policy, counts, self.use)

    def tree(self, params: ParamsDict) -> ParamsDict:
        """Return a whole tree, stored leaf by leaf. Each leaf is removed from ``params`` on the
        way.
        """

        def walk(node: ParamsDict, path: tuple[str, ...]) -> ParamsDict:
            return {
                name: walk(node.pop(name), (*path, name))
                if isinstance(node[name], dict)
                else self((*path, name), node.pop(name))
                for name in (list(node) if path else in_order(node))
            }

        return walk(params, ())

    def model(self, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None) -> LanguageModel:
        """Return the LanguageModel of placed parameters."""
        params = self.rounder.finish(params)
        path, table = ("embed", "weight"), params["embed"]["weight"]
        if isinstance(table, np.ndarray):
            if "head" in params and self.policy.weights.device < 100:
                table = RowTable(self.store, table, self.policy.weights)
            else:
                table = self._store(path, table)
            params["embed"] = {**params["embed"], "weight": table}
        cfg = self._checked(cfg)
        executor = Offloaded(self.policy, self.store)
        return LanguageModel(cfg, params, tokenizer, self.deterministic, executor=executor)
