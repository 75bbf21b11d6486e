"""The cost of experts that lie one by one: how many a step needs, and what they take.

    needed(shares, tokens) -> probability by expert          that one of the tokens passes it
    layer_seconds(costs, policy, shares, tokens) -> ExpertStep          of a layer's cold experts

A token passes expert e with the probability of its measured share p. At least one of n tokens does
so with 1 - (1 - p)^n. The number of needed experts that are not on the device then has a
distribution (Poisson-binomial). For each number, the run's own rule divides the experts between
link and CPU (``offloaded.experts.divided``), and

    loads alone   max(dispatch, load_visit + loads * load)
    else          cpu_visit + rows * row + longer + both + share * shorter     of  loads * load
                                                      and experts * expert + tokens * token

where ``tokens`` are those beyond the first of an expert, and ``dispatch`` is the host's time for a
layer whose experts are all on the device. Pairs beyond those of a step take what they take in a
prompt. A layer that only loads waits for nothing on the host, so the link hides the dispatch. A
layer of which the CPU may compute experts waits for its router, on a GPU without the host
(``offloaded.mailbox``), also if it needs none of them. Slots of other experts on the device add to
both visits, because such a layer computes twice. Link and CPU read the same memory: where it is the
narrower one, ``share`` is 1 or more. The mean over the distribution is the layer's time.

Left out: the dependence between a token's experts, which are distinct.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.executors.offloaded.experts import divided
from jaxllama.offload.expert_places import ExpertPlace, places, use_of
from jaxllama.offload.policy import ALL_ON_CPU, CPU_PAIRS, Policy


@dataclasses.dataclass(frozen=True)
class ExpertCosts:
    """Seconds of a layer whose experts lie one by one, as measured on one machine.

    layer: a decode step of a layer whose experts are all on the device: a layer, a row.
    load: a layer that loads its experts, one expert.
    cpu: a layer of which the CPU computes the experts, beside its rows, one expert, a further token
        of an expert; empty if this CPU computes none.
    prompt: one of many tokens of an expert that the CPU computes; empty likewise.
    slots: what slots for some experts on the device add to a layer that loads, and to one of the
        CPU.
    both: what a layer with both adds, and a second of the shorter of both.
    """

    layer: tuple[float, ...]
    load: tuple[float, ...]
    cpu: tuple[float, ...]
    prompt: tuple[float, ...]
    slots: tuple[float, ...]
    both: tuple[float, ...]

    @property
    def of_policy(self) -> dict[str, float]:
        """Return the policy's fields that divide experts between link and CPU."""
        if not self.cpu:
            return {}
        unit = max(self.load[1], 1e-9)
        return {
            "cpu_expert": float(f"{max(self.cpu[1] / unit, ALL_ON_CPU):.4g}"),
            "cpu_token": float(f"{max(self.cpu[2], *self.prompt) / unit:.4g}"),
        }

    def on_cpu(self, computed: float, extra: float) -> float:
        """Return the CPU's seconds for so many experts with ``extra`` further tokens."""
        _, expert, token = self.cpu
        pairs = computed + extra
        # Steps, of which ``expert`` and ``token`` are, have no more than ``CPU_PAIRS``.
        return max(computed * expert + extra * token, (pairs - CPU_PAIRS) * self.prompt[0])

    def seconds(
        self,
        loads: float,
        computed: float,
        extra: float,
        waits: bool = True,
        rows: float = 1.0,
        has_slots: bool = False,
    ) -> float:
        """Return a layer's seconds, beyond those of ``layer``, of ``loads`` and of the CPU's
        experts with ``extra`` tokens.

        waits: the router's choice is awaited, to give some experts to the CPU.
        """
        base, link = self.layer[0] + rows * self.layer[1], loads * self.load[1]
        if not waits or not self.cpu:  # the host dispatches layers meanwhile
            visit = self.load[0] + has_slots * self.slots[0]
            return max(0.0, visit + link - base) if loads else 0.0
        visit, cpu = self.cpu[0], self.on_cpu(computed, extra)
        longer, shorter = max(link, cpu), min(link, cpu)
        if shorter:
            longer += self.both[0] + self.both[1] * shorter
        # The rest of a layer, whose time grows with the rows, comes before and after.
        return max(0.0, visit + has_slots * self.slots[1] + longer - self.layer[0])


@dataclasses.dataclass(frozen=True)
class ExpertStep:
    """Means of one layer and step: seconds, experts loaded, and experts that the CPU computes."""

    seconds: float
    loads: float
    computed: float


def needed(shares: np.ndarray, tokens: int) -> np.ndarray:
    """Return the probability that at least one of ``tokens`` passes each expert."""
    return 1.0 - (1.0 - np.minimum(shares, 1.0)) ** tokens


def distribution(chances: np.ndarray) -> np.ndarray:
    """Return the probabilities of 0, 1, ... of independent events with these ``chances``."""
    found = np.ones(1)
    for chance in chances:
        found = np.convolve(found, (1.0 - chance, chance))
    return found


def layer_seconds(
    costs: ExpertCosts,
    policy: Policy,
    shares: np.ndarray,
    tokens: int,
    known: int = 0,
    waits: bool = True,
    rows: int = 1,
    has_slots: bool = False,
) -> ExpertStep:
    """Return what a layer's experts that are not on the device take for ``tokens`` tokens.

    shares: of these experts.  known: tokens of the block's earlier batches, whose loaded experts
    are still there.  waits: as for ``ExpertCosts.seconds``.  rows: of a decode step, on which a
    layer without loads depends.  has_slots: other experts are on the device.
    """
    chances = needed(shares, tokens) * (1.0 - needed(shares, known))
    mean = float(np.sum(chances))
    if not waits or not len(shares):
        # The host and the link each work off a queue of layers, so the longer mean counts.
        return ExpertStep(costs.seconds(mean, 0, 0.0, False, rows, has_slots), mean, 0.0)
    busy = max(1.0, float(np.sum(shares) * tokens) / max(mean, 1e-9))  # tokens of a needed expert
    seconds = loads = computed = 0.0
    for count, chance in enumerate(distribution(chances)):
        if chance < 1e-9:
            continue
        to_load, on_cpu = _divided(count, busy, policy)
        extra = on_cpu * (busy - 1.0)
        seconds += chance * costs.seconds(to_load, on_cpu, extra, True, rows, has_slots)
        loads += chance * to_load
        computed += chance * on_cpu
    return ExpertStep(seconds, loads, computed)


def _divided(count: int, size: float, policy: Policy) -> tuple[int, int]:
    mean = dict.fromkeys(range(count), size)
    to_load, on_cpu = divided(mean, set(), policy)
    return len(to_load), len(on_cpu)


def shares_of(cfg: ModelConfig, policy: Policy) -> list[tuple[ExpertPlace, np.ndarray]]:
    """Return (place, shares ``[E]``) of each layer with experts; an empty list without any."""
    return _shares_of(cfg, policy.experts, policy.expert_use)


@functools.lru_cache(maxsize=256)
def _shares_of(
    cfg: ModelConfig, experts: str, expert_use: str
) -> list[tuple[ExpertPlace, np.ndarray]]:
    policy = Policy(experts=experts, expert_use=expert_use)
    counts = expert_counts(cfg)
    use = use_of(policy)
    found = []
    for layer, place in places(policy, counts, use).items():
        mixture = cfg.layers[layer].experts
        assert mixture is not None
        even = np.full(mixture.n_experts, mixture.n_active / mixture.n_experts)
        found.append((place, even if use is None else use.of(layer, mixture.n_experts)))
    return found


@functools.lru_cache(maxsize=64)
def expert_counts(cfg: ModelConfig) -> Mapping[int, int]:
    """Return the number of experts of each layer that has some."""
    found = ((index, layer.experts) for index, layer in enumerate(cfg.layers))
    return {layer: experts.n_experts for layer, experts in found if experts is not None}


@functools.lru_cache(maxsize=4096)
def experts_step(
    cfg: ModelConfig,
    costs: ExpertCosts,
    policy: Policy,
    batches: Sequence[int],
    rows: int = 1,
    keeps: bool = True,
) -> tuple[ExpertStep, ...]:
    """Return the step of each layer with experts, for a block of batches of so many tokens.

    rows: as for ``layer_seconds``.  keeps: an expert is loaded once for all batches. Pieces of one
    batch's prompts each load what they need.
    """
    alike: dict[tuple[int, ...], ExpertStep] = {}
    found = []
    assert cfg.experts is not None
    for place, shares in shares_of(cfg, policy):
        cold = np.asarray((*place.host, *place.disk), np.int64)
        key = tuple(np.round(np.sort(shares[cold]) * 1e6).astype(np.int64))
        if key not in alike:
            steps, known, has_slots = [], 0, len(cold) < len(shares)
            for tokens in batches:
                own = policy.of_pairs(tokens * cfg.experts.n_active)
                waits = own.cpu_expert > 0 or (keeps and len(batches) > 1)
                how = known, waits, rows, has_slots
                steps.append(layer_seconds(costs, own, shares[cold], tokens, *how))
                if keeps and own.cpu_expert == 0:  # the CPU's experts were not loaded
                    known += tokens
            alike[key] = ExpertStep(
                sum(step.seconds for step in steps),
                sum(step.loads for step in steps),
                sum(step.computed for step in steps),
            )
        found.append(alike[key])
    return tuple(found)


def experts_seconds(
    cfg: ModelConfig,
    costs: ExpertCosts | None,
    policy: Policy,
    rows: int,
    batches: int,
    width: int,
    chunk: int,
) -> dict[int, float]:
    """Return the seconds of each layer's experts that lie one by one, for all batches of ``rows``.

    width: tokens of a prompt, which pass in pieces of ``chunk``.
    """
    if not policy.experts or costs is None:
        return {}
    whole, rest = divmod(width, chunk)
    pieces = batches * ([chunk] * whole + [rest] * (rest > 0))
    tokens = tuple(rows * tokens for tokens in pieces)
    steps = experts_step(cfg, costs, policy, tokens, rows if width == 1 else 1, batches > 1)
    return dict(zip(expert_counts(cfg), (step.seconds for step in steps), strict=True))
