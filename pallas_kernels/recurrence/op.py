"""The ops of a recurrence: one skeleton for GLA and the gated delta rule.

An op over whole sequences supplies its equations as a ``Recurrence``, and one that accepts a
draft's tokens as a ``Commit``.  What is here is the same for all: the call's
checks and plan, rows that end early, segments, the zero state, and the gradients' two forms.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, is_empty, own_plan
from pallas_kernels.fixed_sums import by_blocks
from pallas_kernels.operands import check
from pallas_kernels.transform import Op, OpChoice, chosen

_Tree = TypeVar("_Tree")
Results = tuple[jax.Array, jax.Array]  # o, the state after the last token


class Heads(NamedTuple):
    """What the heads read and write at the tokens of whole sequences.

    q, k ``[B, T, Hk, Dk]``; v ``[B, T, H, Dv]``, where Hk divides H; log_decay float32
    ``[B, T, H, Dk]`` or, for one decay a head, ``[B, T, H]``; beta float32 ``[B, T, H]`` of the
    delta rule.  The operands of one step have no T.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None = None

    @property
    def by_channel(self) -> bool:
        """Whether every key channel has a decay."""
        return self.log_decay.ndim == self.q.ndim

    def check(self, op: str, lines: dict[str, str], **more: jax.Array | None) -> dict[str, int]:
        """Check these and further operands against their lines, as ``operands.check`` does."""
        own = {name: x for name, x in self._asdict().items() if name in lines}
        return check(op, lines, **own, **more)

    def in_float32(self) -> Heads:
        """Return the same with float32 gates."""
        beta = None if self.beta is None else self.beta.astype(jnp.float32)
        return self._replace(log_decay=self.log_decay.astype(jnp.float32), beta=beta)


Call = tuple[Any, Plan | None]  # options of the equations, the kernel's plan


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence:
    """The equations of a recurrence.  options: a hashable tuple, passed on as it is.

    forward: ``forward(heads, state, *options)`` -> (o, state, states for ``backward``), in XLA.
    backward: ``backward(heads, states, d_o, d_state, *options)`` -> (gradients of heads, of the
        first state).
    plan: ``plan(heads)`` -> how the kernels compute it.
    kernel: ``kernel(call, heads, state, lengths)`` -> (o, state).
    keeping: ``keeping(call, heads, state)`` -> ((o, state), what ``gradients`` finds in ``kept``),
        or None if the kernels keep nothing between the passes.
    gradients: ``gradients(call, heads, state, kept, d_o, d_state)`` -> as ``backward``, by kernels;
        None where the plan has no kernels for them.
    """

    name: str
    forward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    backward: Callable[..., tuple[Heads, jax.Array]]
    plan: Callable[[Heads], Plan | Reason]
    kernel: Callable[..., Results]
    gradients: Callable[..., tuple[Heads, jax.Array] | None]
    keeping: Callable[..., tuple[Results, object]] | None = None

    def __call__(
        self,
        options: Hashable,
        heads: Heads,
        initial_state: jax.Array | None,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None,
        implementation: Implementation | None,
    ) -> Results:
        """Return (o ``[B, T, H, Dv]``, state ``[B, H, Dk, Dv]``) of operands that were checked."""
        check_decay(self.name, heads.log_decay, lengths)
        heads = heads.in_float32()
        heads = heads._replace(log_decay=restarted(heads.log_decay, segment_ids))
        leaves = jax.tree.leaves(heads)
        found = choose_plan(self.name, implementation, lambda: self.plan(heads), *leaves)
        if is_empty(heads):  # no tokens, or none that hold anything
            batch, _, n_heads, d_v = heads.v.shape
            zero = jnp.zeros((batch, n_heads, heads.q.shape[-1], d_v), jnp.float32)
            return jnp.zeros_like(heads.v), zero if initial_state is None else initial_state
        choice = chosen(found, implementation)
        return self._op(choice, (options, found), heads, initial_state, lengths)

    @functools.cached_property
    def _op(self) -> Op[Results]:
        return Op(self.name, self._xla, self.kernel, forward=self._forward, backward=self._backward)

    @functools.cached_property
    def _kept_forward(self) -> Op[tuple[Results, object]]:
        return Op(self.name, self._keeping_nothing, self.keeping)

    @functools.cached_property
    def _kernel_backward(self) -> Op[tuple[Heads, jax.Array]]:
        return Op(self.name, self._gradients_from_inputs, self._gradients)

    def _xla(
        self, call: Call, heads: Heads, state: jax.Array | None, lengths: jax.Array | None
    ) -> Results:
        def results(operands: tuple[Heads, jax.Array | None]) -> Results:
            return self._chunked(call, *operands)[0]

        # XLA adds the chunks of several rows otherwise.
        return by_blocks(results, (zero_padding(lengths, heads), state), size=1)

    def _chunked(
        self, call: Call, heads: Heads, state: jax.Array | None
    ) -> tuple[Results, jax.Array]:
        state = zero_state(heads) if state is None else state
        o, state, states = self.forward(heads, state, *call[0])
        return (o, state), states

    def _forward(
        self,
        choice: OpChoice,
        call: Call,
        heads: Heads,
        state: jax.Array | None,
        lengths: jax.Array | None,
    ) -> tuple[Results, object]:
        inputs = zero_padding(lengths, heads)
        if choice.implementation != "mosaic":
            return self._chunked(call, inputs, state)
        if self.keeping is None:
            return self._op(choice, call, heads, state, lengths), ()
        return self._kept_forward(choice, call, inputs, state)

    def _backward(
        self, choice: OpChoice, call: Call, operands: Any, kept: Any, *d_results: jax.Array
    ) -> tuple[Heads, jax.Array | None, None]:
        heads, state, lengths = operands
        d_o, d_state = d_results
        heads, d_o = zero_padding(lengths, (heads, d_o))
        if choice.implementation == "mosaic":
            found = self._kernel_backward(choice, call, heads, state, kept, d_o, d_state)
        else:
            found = self.backward(heads, kept, d_o, d_state, *call[0])
        gradients, d_initial = found
        return zero_padding(lengths, gradients), None if state is None else d_initial, None

    def _keeping_nothing(
        self, call: Call, heads: Heads, state: jax.Array | None
    ) -> tuple[Results, object]:
        assert self.keeping is not None
        kept = jax.eval_shape(functools.partial(self.keeping, call), heads, state)[1]
        return self._chunked(call, heads, state)[0], jax.tree.map(jnp.zeros_like, kept)

    def _gradients(self, call: Call, heads: Heads, *rest: Any) -> tuple[Heads, jax.Array]:
        found = self.gradients(call, heads, *rest)
        return self._gradients_from_inputs(call, heads, *rest) if found is None else found

    def _gradients_from_inputs(
        self, call: Call, heads: Heads, state: jax.Array | None, kept: Any, *d_results: jax.Array
    ) -> tuple[Heads, jax.Array]:
        del kept
        states = self._chunked(call, heads, state)[1]
        return self.backward(heads, states, *d_results, *call[0])


Layers = Sequence[Sequence[jax.Array]]
Columns = tuple[tuple[jax.Array, ...], ...]  # an array of each layer, by kind


@dataclasses.dataclass(frozen=True, eq=False)
class Commit:
    """Acceptance of a draft's first ``count[B]`` of T tokens by all layers of a model, in place.

    operands: the lines of a layer's arrays and of count.  plan: ``plan(layers, count)``.
    kernel: ``kernel(plan, *columns, count)`` -> the new arrays of all layers, by kind.
    after: ``after(count, *layer)`` -> a layer's new arrays, in XLA.
    """

    name: str
    operands: dict[str, str]
    plan: Callable[[Layers, jax.Array], Plan | Reason]
    kernel: Callable[..., Columns]
    after: Callable[..., tuple[jax.Array, ...]]

    def __call__(self, layers: Layers, count: jax.Array, planned: Plan | None) -> Columns:
        for layer in layers:
            check(self.name, self.operands, **self.named(layer, count))
        operands = *map(tuple, zip(*layers, strict=True)), count
        found = choose_plan(self.name, None, lambda: planned or self.plan(layers, count), *operands)
        return self._op(chosen(found, None), found, *operands)

    def own(self, layers: Layers, count: jax.Array) -> Plan | None:
        """Return the plan of these operands, or None where there is no kernel for them here."""
        return own_plan(lambda: self.plan(layers, count), *layers[0]) if layers else None

    def named(self, layer: Sequence[jax.Array], count: jax.Array) -> dict[str, jax.Array]:
        return dict(zip(self.operands, (*layer, count), strict=True))

    @functools.cached_property
    def _op(self) -> Op[Columns]:
        return Op(self.name, self.xla, self.kernel)

    def xla(self, found: Plan | None, *operands: Any) -> Columns:
        del found
        *columns, count = operands
        after = [self.after(count, *layer) for layer in zip(*columns, strict=True)]
        return tuple(zip(*after, strict=True))


def default_scale(q: jax.Array, scale: float | None) -> float:
    """Return the factor of the output, Dk ** -0.5 by default."""
    return max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)


def zero_state(heads: Heads) -> jax.Array:
    """Return float32 zeros ``[B, H, Dk, Dv]``.

    They are made from v, so that inside a shard_map they vary over the same axes as v.
    """
    zero = jnp.zeros_like(heads.v[:, 0, :, None], jnp.float32)
    return jnp.broadcast_to(zero, (*zero.shape[:2], heads.q.shape[-1], zero.shape[-1]))


def zero_padding(lengths: jax.Array | None, arrays: _Tree) -> _Tree:
    """Return ``[B, T, ...]`` arrays with zeros, which change nothing, at t >= lengths[b]."""
    if lengths is None:
        return arrays

    def valid(x: jax.Array) -> jax.Array:
        inside = jnp.arange(x.shape[1], dtype=lengths.dtype)[None, :] < lengths[:, None]
        return jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

    return jax.tree.map(valid, arrays)


def restarted(log_decay: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return ``log_decay [B, T, ...]`` that forgets the state where ``segment_ids [B, T]`` differ
    from the token before: exactly, by a decay of exp(-inf) = 0."""
    if segment_ids is None:
        return log_decay
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    starts = starts.reshape(*starts.shape, *(1,) * (log_decay.ndim - 2))
    return jnp.where(starts, -jnp.inf, log_decay)


def check_decay(op: str, log_decay: jax.Array, lengths: jax.Array | None = None) -> None:
    """Raise ValueError for a positive decay; only concrete arrays have values to look at."""
    if isinstance(log_decay, Tracer) or isinstance(lengths, Tracer):
        return
    with jax.ensure_compile_time_eval():  # under jit too, for what it closes over
        log_decay = zero_padding(lengths, log_decay)
        highest = float(jnp.max(log_decay.astype(jnp.float32), initial=-jnp.inf))
    if highest > 0:
        raise ValueError(f"{op}: log_decay holds {highest:g}; a decay's logarithm is <= 0")
