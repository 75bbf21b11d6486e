"""The loop over turns, on the device.

    rows, found = run(forward, rows, draw, stop_ids, unfinished, ...)

``forward`` is an argument, so that any executor whose pass is part of a program can use the loop.
A pass takes the smallest compiled width that holds the longest draft of any row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.decoding.drafts import Drafted
from jaxllama.decoding.rows import Rows
from jaxllama.decoding.turn import Draw, Forward, Inputs, Pass, TurnReport, finish, start
from jaxllama.typing import Params, Tree

Carry = TypeVar("Carry")


class Drafting(NamedTuple):
    """How a loop drafts.

    propose: returns (rows with the draft's new state, proposals).
    widths: numbers of tokens of a row for which a pass is compiled, in ascending order.
    adapts_to: as for ``finish``.
    """

    propose: Callable[[Rows], tuple[Rows, Drafted]]
    widths: tuple[int, ...]
    adapts_to: int | None = None


class Collector(NamedTuple):
    """Results that a loop collects: ``empty``, then ``add(found, inputs, report)`` after a turn."""

    empty: Tree
    add: Callable[[Tree, Inputs, TurnReport], Tree]


def run(
    forward: Forward,
    rows: Rows,
    draw: Draw,
    stop_ids: jax.Array,
    unfinished: Callable[[Rows], jax.Array],
    *,
    limit: jax.Array | int | None = None,
    drafting: Drafting | None = None,
    observe: Callable[[Rows, Inputs, Pass], Rows] | None = None,
    ignores_stops: jax.Array | None = None,
    collector: Collector | None = None,
) -> tuple[Rows, Tree]:
    """Take turns while ``unfinished(rows)``, a bool scalar.

    forward, draw, stop_ids, limit, ignores_stops: as for ``start`` and ``finish``.
    observe: called after each turn with the new rows and its pass; returns the rows with another
        ``kept``.
    collector: what the caller collects.
    Returns (rows, what was collected).

    The loop's condition is computed anew in each iteration.  Carrying it would save a kernel, but a
    CUDA graph then reads it before the step has written it (``docs/lab/speed.md``).
    """
    adapts_to = None if drafting is None else drafting.adapts_to
    found = () if collector is None else collector.empty

    def one_pass(draft: Drafted | None, width: int, carry: tuple[Rows, Tree]) -> tuple[Rows, Tree]:
        rows, found = carry
        inputs = start(rows, draft, width, limit)
        passed = forward(rows, inputs)
        rows, report = finish(
            rows,
            inputs,
            passed,
            draw,
            stop_ids,
            ignores_stops=ignores_stops,
            adapts_to=adapts_to,
        )
        if observe is not None:
            rows = observe(rows, inputs, passed)
        if collector is not None:
            assert report is not None
            found = collector.add(found, inputs, report)
        return rows, found

    def turn(carry: tuple[Rows, Tree]) -> tuple[Rows, Tree]:
        if drafting is None:
            return one_pass(None, 1, carry)
        rows, draft = drafting.propose(carry[0])
        needed = jnp.max(draft.lengths) + 1
        run_pass = functools.partial(one_pass, draft)
        if len(drafting.widths) == 1:
            return run_pass(drafting.widths[0], (rows, carry[1]))
        return in_width(drafting.widths, needed, run_pass, (rows, carry[1]))

    return lax.while_loop(lambda carry: unfinished(carry[0]), turn, (rows, found))


def observer(draft: Any, params: Params | None, may_end: bool = True) -> Callable[..., Rows] | None:
    """Return ``loop.run``'s ``observe`` for a draft that reads the passes of a model, or None.

    may_end: whether rows may have ended drafting, for which nothing is to be read.
    """
    if not draft.reads_hidden:
        return None
    observe = functools.partial(draft.observe, params)

    def observe_drafting(rows: Rows, inputs: Inputs, passed: Pass) -> Rows:
        def read(carry: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
            before = dataclasses.replace(rows, kept=carry[0])
            return observe(before, inputs, passed).kept, jnp.bool_(False)

        # A loop of at most one iteration, because lax.cond would copy the cache.
        is_read = jnp.any((inputs.live > 0) & (rows.fields.ask > 0))
        kept, _ = lax.while_loop(lambda carry: carry[1], read, (rows.kept, is_read))
        return dataclasses.replace(rows, kept=kept)

    return observe_drafting if may_end else observe


def in_width(
    widths: tuple[int, ...], needed: jax.Array, run: Callable[[int, Carry], Carry], carry: Carry
) -> Carry:
    """Return ``run(width, carry)`` for the smallest of ``widths`` that is at least ``needed``, or
    ``carry`` if ``needed`` is 0.
    """
    # A loop of at most one iteration chooses a width, because lax.switch would copy the cache.
    once, least = (carry, jnp.bool_(True)), 0
    for width in widths:
        is_it = (least < needed) & (needed <= width)
        once = lax.while_loop(
            lambda once, is_it=is_it: once[1] & is_it,
            lambda once, width=width: (run(width, once[0]), jnp.bool_(False)),
            once,
        )
        least = width
    return once[0]
