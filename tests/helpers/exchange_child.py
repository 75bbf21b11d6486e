"""Mixtures whose experts and rows are divided over a mesh, beside one device; ``test_exchange``.

    python -m tests.helpers.exchange_child SCHEME:DATAxEXPERTxMODEL:ROWS ...  |  sizes

One JSON line a case: whether tokens are the same, how far log-probabilities differ, and each
device's part of the experts' bytes.  sizes: ``exchanged`` with every size of exchange, where tokens
go to all devices, to few, and all to one.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllama.config import ExpertsConfig
from jaxllama.language_model import LanguageModel
from jaxllama.model.shardings import gather_params, shard_params
from jaxllama.parallel import mesh as parallel
from jaxllama.parallel.exchange import exchange_sizes, exchanged
from jaxllama.quantization.quantize import quantize_params
from tests.helpers.models import params_of
from tests.helpers.parallel_child import WIDE, collectives, report

CFG = WIDE.replace(
    n_layers=2, experts=ExpertsConfig(8, 2, 32, shared=64, shared_gate=True, bias=True)
)
NEW = 8


def experts_share(params) -> float:
    """The fullest device's part of the experts' bytes."""
    total, held = 0, dict.fromkeys(jax.devices(), 0)
    for path, leaf in jax.tree.leaves_with_path(params):
        if any(getattr(key, "key", "").startswith("experts_") for key in path):
            total += leaf.nbytes
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
    return max(held.values()) / total


def compare(name: str) -> None:
    scheme, shape, rows = name.split(":")
    sizes = dict(zip(parallel.AXES, map(int, shape.split("x")), strict=True))
    mesh = parallel.make_mesh(sizes)
    params = params_of(CFG)
    if scheme != "float32":
        params = quantize_params(params, scheme)
    config, on_mesh = shard_params(CFG, jax.device_get(params), mesh)
    prompts = [[3 + (7 * row + 5 * i) % 90 for i in range(2 + row)] for row in range(int(rows))]
    answers = []
    for cfg, own in ((CFG, params), (config, on_mesh)):
        answers.append(
            LanguageModel(cfg, own, None, exact=True).generate(prompts, max_new_tokens=NEW)
        )
    want, got = ([a.tokens for a in answer] for answer in answers)
    logprobs = [np.concatenate([a.logprobs for a in answer]) for answer in answers]
    back = gather_params(CFG, on_mesh, sizes["model"])
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), jax.device_get(params), back)
    report(
        case=name,
        same=want == got,
        distinct=len({token for row in want for token in row}),
        logprob=float(np.max(np.abs(logprobs[0] - logprobs[1]))),
        share=experts_share(on_mesh) * sizes["expert"] * sizes["model"],
        gathered=all(jax.tree.leaves(same)),
    )


def sizes_of_exchanges() -> None:
    n, n_tokens, k, width, per_device = 4, 256, 2, 8, 2
    mesh = parallel.make_mesh(f"expert={n}")
    rng = np.random.default_rng(0)
    matrices = jnp.asarray(rng.normal(size=(n * per_device, width, width)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(n * n_tokens, width)), jnp.float32)
    weights = jnp.asarray(rng.uniform(size=(n * n_tokens, k)), jnp.float32)
    worst, text = {}, ""
    experts = {
        "all": rng.integers(0, n * per_device, (n * n_tokens, k)),
        "few": np.repeat(np.arange(n * n_tokens)[:, None] % (n * per_device), k, axis=1),
        "one": np.zeros((n * n_tokens, k)),
    }

    def mixture(x, experts, weights, matrices):
        first = jax.lax.axis_index(parallel.EXPERT_AXIS) * per_device

        def compute(x, experts, weights):
            own = experts - first
            is_own = (own >= 0) & (own < per_device)
            products = jnp.einsum("td,tkdf->tkf", x, matrices[jnp.where(is_own, own, 0)])
            return jnp.sum(jnp.where(is_own, weights, 0.0)[..., None] * products, axis=1)

        return exchanged(x, experts, weights, per_device, compute)

    split = P(parallel.EXPERT_AXIS)
    over = jax.jit(
        jax.shard_map(mixture, mesh=mesh, in_specs=(split,) * 4, out_specs=split, check_vma=False)
    )
    for name, chosen in experts.items():
        operands = x, jnp.asarray(chosen, jnp.int32), weights, matrices
        products = jnp.einsum("td,tkdf->tkf", x, matrices[operands[1]])
        want = np.asarray(jnp.sum(weights[..., None] * products, axis=1))
        worst[name] = float(np.max(np.abs(np.asarray(over(*operands)) - want)))
        text = text or over.lower(*operands).compile().as_text()
    report(
        case="sizes",
        worst=worst,
        kinds=sorted(collectives(text)),
        sizes=exchange_sizes(n_tokens, n, k),
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sizes_of_exchanges() if name == "sizes" else compare(name)
