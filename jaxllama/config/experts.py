"""Options of mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxllama.config.reader import check_types, requirement


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Options of a mixture of experts in place of a layer's feed-forward (arXiv 1701.06538).

    A router scores the experts for each token. The token passes the ``n_active`` best ones, and
    their outputs are summed with weights.

    Parameters
    ----------
    n_experts, n_active : int
        Number of experts, and number of experts that a token passes.
    d_ff : int
        Width of an expert.
    scores : {"softmax", "sigmoid", "sparsemixer"}
        Function of the router's logits that gives the scores. "sparsemixer" (arXiv 2409.12136)
        takes only logits near the best one (``jitter``).
    normalize : bool
        Whether a token's weights sum to 1. With "softmax" they are then the softmax over the chosen
        experts.
    scale : float
        Factor of the weights.
    router_bias : bool
        Whether the router's logits have a bias.
    choice_bias : bool
        Whether a bias is added to the scores for the choice, but not for the weights.
    n_groups, n_active_groups : int
        The experts form ``n_groups`` groups, and a token chooses from the ``n_active_groups`` best
        ones.
    group_best : int
        Number of a group's best scores whose sum is the group's score: 2 in DeepSeek-V3 (arXiv
        2412.19437), 1 in DeepSeek-V2.
    shared : int
        Width of the expert that every token passes; 0 for none.
    shared_gate : bool
        Whether the shared expert's output is multiplied by the sigmoid of a product.
    shared_bias : bool
        Whether the shared expert's products have biases.
    bias : bool
        Whether the experts' products have biases.
    gate_limit, gate_alpha : float
        Limit and factor of gpt-oss's clamped SwiGLU (``pallas_kernels.ClampedGate``). A limit of
        None takes the model's own activation.
    jitter : float
        "sparsemixer" takes logits whose relative distance from the best is at most 2 ``jitter``.
    choice_by_logits : bool
        Whether experts are chosen by logits, and not by scores; ``choice_bias`` is added to these.
    out_norm : bool
        Whether the layers with experts have a norm of their output.
    shared_norms : bool
        Whether the expert that every token passes is a dense feed-forward beside the others, with
        norms of its own. The router then has a norm too, and a factor of each expert.
    shards : int
        Devices that hold ``n_experts / shards`` experts each (``split.local_config``).
    exchanges : bool
        Whether the devices have different tokens and exchange them (``split.local_config``).

    Raises
    ------
    JaxLlamaError
        If a field is out of range or contradicts another. The message names the field.
    """

    n_experts: int
    n_active: int
    d_ff: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    router_bias: bool = False
    choice_bias: bool = False
    n_groups: int = 1
    n_active_groups: int = 1
    group_best: int = 2
    shared: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    bias: bool = False
    gate_limit: float | None = None
    gate_alpha: float = 1.702
    jitter: float = 0.01
    out_norm: bool = False
    choice_by_logits: bool = False
    shared_norms: bool = False
    shards: int = 1
    exchanges: bool = False

    def __post_init__(self) -> None:
        check_types(self, "experts.")
        need = requirement(self, "experts.")
        counts = ("n_experts", "n_active", "d_ff", "n_groups", "n_active_groups", "group_best")
        for key in (*counts, "shards"):
            value = getattr(self, key)
            need(value > 0, key, "must be positive")
        limit = self.gate_limit
        need(limit is None or limit > 0, "gate_limit", "must be positive")
        need(self.shared >= 0, "shared", "must not be negative")
        need(self.shared > 0 or not self.shared_gate, "shared_gate", "needs shared")
        need(self.shared > 0 or not self.shared_norms, "shared_norms", "needs shared")
        need(self.shared > 0 or not self.shared_bias, "shared_bias", "needs shared")
        need(
            self.n_experts % self.n_groups == 0,
            "n_groups",
            f"must divide n_experts ({self.n_experts})",
        )
        need(
            self.n_active_groups <= self.n_groups,
            "n_active_groups",
            f"must not exceed n_groups ({self.n_groups})",
        )
        most = self.n_experts // self.n_groups * self.n_active_groups
        need(
            self.n_active <= most,
            "n_active",
            f"must not exceed the {most} experts that a token chooses among",
        )
        need(
            self.scores != "sparsemixer" or not (self.choice_bias or self.n_groups > 1),
            "scores",
            "has neither groups nor a bias of the choice",
        )
