"""Where each expert of a mixture lies at first, by measured use: the hottest on the device.

    use = ExpertUse.load("use.json")                     share of tokens that pass each expert
    places(policy, {layer: n_experts}, use) -> {layer: ExpertPlace}

The file is JSON: ``{"layers": {"0": [0.01, 0.2, ...], ...}}``, one share of the tokens for each
expert. The shares of a layer sum to the number of experts that a token passes.

``places`` sorts the experts of all layers by their shares and cuts the list at the policy's
percentages. Experts go to the device in groups of a sixteenth of a layer, because each number of
experts on the device is a program of its own. Without a table all experts count alike.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.files import write_text
from jaxllama.offload.policy import Policy

GROUPS = 16  # of a layer's experts that go to the device together


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertUse:
    """Share of the tokens that pass each expert, ``[E]`` by layer."""

    layers: dict[int, np.ndarray]

    @classmethod
    def of_counts(cls, counts: Mapping[int, np.ndarray], n_active: int) -> ExpertUse:
        """Return the shares of counted pairs of a token and an expert, ``[E]`` by layer."""
        shares = {}
        for layer, count in counts.items():
            total = max(float(np.sum(count)), 1.0)
            shares[layer] = np.asarray(count, np.float64) * n_active / total
        return cls(shares)

    @classmethod
    def load(cls, path: str | Path) -> ExpertUse:
        """Read a file. Raises JaxLlamaError naming what is wrong with it."""
        try:
            written = Path(path).stat().st_mtime_ns
        except OSError as error:
            raise JaxLlamaError(f"{path}: {error.strerror or error}") from None
        return _load(str(path), written)

    def save(self, path: str | Path) -> None:
        rows = {
            str(layer): [round(float(x), 6) for x in shares]
            for layer, shares in self.layers.items()
        }
        write_text(Path(path), json.dumps({"layers": rows}))

    def of(self, layer: int, n_experts: int) -> np.ndarray:
        """Return a layer's shares.

        Raises JaxLlamaError if the table has not ``n_experts`` of this layer.
        """
        shares = self.layers.get(layer)
        if shares is None or len(shares) != n_experts:
            found = "no row" if shares is None else f"{len(shares)} experts"
            raise JaxLlamaError(f"expert use: layer {layer}: {found}, expected {n_experts} experts")
        return shares


@functools.lru_cache(maxsize=16)
def _load(path: str, written: int) -> ExpertUse:
    """Read a file that was last written at ``written``."""
    del written
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["layers"]
        layers = {int(layer): np.asarray(shares, np.float64) for layer, shares in rows.items()}
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JaxLlamaError(f'{path}: expected {{"layers": {{"0": [share, ...], ...}}}}') from None
    if any(shares.ndim != 1 or not (shares >= 0).all() for shares in layers.values()):
        raise JaxLlamaError(f"{path}: expected a list of shares, none below 0, for each layer")
    return ExpertUse(layers)


def use_of(policy: Policy) -> ExpertUse | None:
    """Return the policy's table. Raises JaxLlamaError for a file that is none."""
    return ExpertUse.load(policy.expert_use) if policy.expert_use else None


@dataclasses.dataclass(frozen=True)
class ExpertPlace:
    """Indices of a layer's experts by tier, each from the most used to the least used.

    device: those that are on the device at first.  host, disk: those that are not.
    shares: of the tokens that pass each expert, if they are known.
    """

    device: tuple[int, ...]
    host: tuple[int, ...]
    disk: tuple[int, ...]
    shares: tuple[float, ...] = ()

    @property
    def pinned(self) -> tuple[int, ...]:
        """Return the experts in host memory, which has copies of the device's for others to take
        their slots."""
        return (*self.device, *self.host) if self.host else ()

    @property
    def written(self) -> tuple[int, ...]:
        """Return the experts on disk, which has the copies if host memory has none."""
        return self.disk if self.host or not self.disk else (*self.device, *self.disk)


def places(
    policy: Policy, counts: Mapping[int, int], use: ExpertUse | None
) -> dict[int, ExpertPlace]:
    """Return where the experts of all layers lie.

    counts: number of experts by layer. Without a table of use nothing ranks the layers, and each is
        placed by itself, as a load sees one at a time.

    Raises JaxLlamaError if the table of use has other layers or experts.
    """
    if use is None and len(counts) > 1:
        return {layer: places(policy, {layer: n}, None)[layer] for layer, n in counts.items()}
    percentages = policy.expert_shares
    assert percentages is not None
    ranked: dict[int, list[tuple[float, int]]] = {}
    for layer, n in counts.items():
        often = np.full(n, 1.0) if use is None else use.of(layer, n)
        ranked[layer] = [(float(often[i]), int(i)) for i in np.argsort(-often, kind="stable")]
    total = sum(counts.values())
    on_device, on_host, _ = percentages.rows(total)
    groups = []
    for layer, experts in ranked.items():
        size = max(1, len(experts) // GROUPS)
        for first in range(0, len(experts), size):
            group = experts[first : first + size]
            mean = sum(share for share, _ in group) / len(group)
            groups.append((-mean, first, layer, len(group)))
    device = dict.fromkeys(counts, 0)
    for _, _, layer, size in sorted(groups):
        if size <= on_device:
            device[layer] += size
            on_device -= size
    # What a group's size left over of the device's share lies on the host.
    rest = sorted(
        (-share, rank, layer)
        for layer, experts in ranked.items()
        for rank, (share, _) in enumerate(experts)
        if rank >= device[layer]
    )
    on_host += on_device
    host = dict.fromkeys(counts, 0)
    for _, _, layer in rest[:on_host]:
        host[layer] += 1
    found = {}
    for layer, experts in ranked.items():
        order = [index for _, index in experts]
        cut, end = device[layer], device[layer] + host[layer]
        shares = () if use is None else tuple(use.of(layer, len(experts)).tolist())
        found[layer] = ExpertPlace(
            tuple(order[:cut]), tuple(order[cut:end]), tuple(order[end:]), shares
        )
    return found
