"""The calls of an engine's programs: each one's key among ``Programs``, and its arguments.

    admission(slots, newcomers)     rows get their slots
    copying(slots, pairs)           pages of whole prompts that are known
    filling(slots, params, ...)     pieces of prompts
    decoding(slots, decode)         tokens of answers
    saving, loading(slots, ...)     pages and states to the tiers and back

``idle`` lists a call without rows of every shape that there is, so it also says which programs a
warm-up compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllama import compiler_options
from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import Draft
from jaxllama.decoding.gain import DRAFT
from jaxllama.engine import records, scheduler
from jaxllama.engine import slots as device
from jaxllama.engine.options import ResolvedOptions
from jaxllama.engine.passes import CallSizes
from jaxllama.engine.slots import NOBODY
from jaxllama.engine.transfers import Moved
from jaxllama.kept import Wanted
from jaxllama.typing import Jitted, Params
from pallas_kernels.experts.route_plan import MOST_TOKENS

ProgramCall = tuple[Hashable, Wanted]
IdleCall = Callable[[], ProgramCall]
MOVES = records.save, records.load_pages, records.load_state


class Decode(NamedTuple):
    """The arguments of a decode call of ``n`` rows with up to ``context`` pages each.

    row_of: the call's row of each sequence. how: of ``decoding.gain``.
    """

    params: device.Params
    orders: np.ndarray
    masks: jax.Array
    row_of: dict[scheduler.Sequence, int]
    n: int
    context: int
    wants_top: bool
    how: int = DRAFT


class Calls:
    """The programs of an engine with these options.

    draft, draft_params: the source of drafts, and its parameters if it is a model. moved: numbers
    of pages that move between the device and the tiers together.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        options: ResolvedOptions,
        mesh: Mesh | None,
        draft: Draft,
        draft_params: Params | None,
        moved: Sequence[int] = (),
        *,
        routes_alone: bool = False,
    ) -> None:
        self._cfg, self._options, self._moved = cfg, options, moved
        self._draft, self._draft_params = draft, draft_params
        # Loops and branches that run without the host. On a mesh prompts gain nothing from this.
        how = {"static_argnums": 0, "donate_argnums": 2}
        few = many = functools.partial(
            compiler_options.compiled_for, mesh=mesh, fixed=options.deterministic, **how
        )
        if routes_alone and mesh is None:
            small = compiler_options.for_small_products()
            many = functools.partial(compiler_options.compiled_with, small, **how)
        self._fill: Jitted = device.fill
        if mesh is None:
            self._fill = many(device.fill, static_argnames=("fresh", "draft"))
        # A router's product of few tokens is a kernel, and codes are multiplied in XLA's form.
        self._decode_few: Jitted = few(device.decode, static_argnames="sizes")
        self._decode_many: Jitted = many(device.decode, static_argnames="sizes")
        self._stop_ids = jax.device_put(np.array(cfg.eos_token_ids, np.int32))
        self.mask_words = -(-cfg.vocab_size // 32)
        # Masks on the device that allow everything, by the number of rows.
        self.no_masks = {size: jax.device_put(self.masks(size)) for size in options.sizes}

    def compiled(self) -> int:
        """Return the number of programs that jit has compiled."""
        of_slots = device.admit, device.copy_pages
        decodes = {self._decode_few, self._decode_many}
        programs: tuple[Jitted, ...] = (*of_slots, self._fill, *decodes, *MOVES)
        return sum(program._cache_size() for program in programs)

    def masks(self, size: int) -> np.ndarray:
        """Return masks for ``size`` rows that allow everything."""
        masks = np.zeros((size, self.mask_words + self._width(size)), np.uint32)
        masks[:, : self.mask_words] = 2**32 - 1
        return masks

    def _width(self, size: int) -> int:
        """Return the largest number of tokens that a row of such a decode call generates."""
        return self._options.steps_per_call * self._options.pass_widths(size)[-1]

    # The calls

    def pack(self, newcomers: list[list[device.Newcomer]], width: int) -> np.ndarray:
        """Return the newcomers of each part as the array that ``admission`` takes; width: of
        histories."""
        options, rows = self._options, []
        for some in newcomers:
            rows += [*some, *[None] * (options.newcomers - len(some))]
        return device.pack(
            device.make_rows(
                rows,
                options.newcomers * options.parts,
                width,
                options.row_pages,
                self._cfg.vocab_size,
            )
        )

    def admission(self, slots: device.BatchState, packed: np.ndarray) -> ProgramCall:
        return ("admit", *packed.shape), Wanted(device.admit, (slots, packed))

    def copying(self, slots: device.BatchState, pairs: Sequence[tuple[int, int]]) -> ProgramCall:
        pages = np.full((self._options.newcomers, 2), NOBODY, np.int32)
        pages[: len(pairs)] = np.reshape(pairs, (-1, 2))
        return "copy", Wanted(device.copy_pages, (slots, pages))

    def filling(
        self,
        slots: device.BatchState,
        params: device.Params,
        tokens: np.ndarray,
        facts: np.ndarray,
        fresh: bool,
    ) -> ProgramCall:
        operands = params, slots, tokens, facts, self._draft_params
        static = {"fresh": fresh, "draft": self._draft}
        rows, width = tokens.shape
        key = self.filling_key(rows, width, fresh)
        return key, Wanted(self._fill, operands, self._cfg, static)

    @staticmethod
    def filling_key(rows: int, width: int, fresh: bool) -> Hashable:
        return "fill", rows, width, fresh

    def decoding(self, slots: device.BatchState, decode: Decode) -> ProgramCall:
        n, context = decode.n, decode.context
        operands = (
            decode.params,
            slots,
            decode.orders,
            decode.masks,
            self._stop_ids,
            self._draft_params,
        )
        widths, most = self._options.pass_widths(n), self._options.longest_draft
        sizes = CallSizes(n, context, self._width(n), widths, most, self._draft)
        key = self.decoding_key(n, context)
        is_few = n * widths[0] <= MOST_TOKENS
        program = self._decode_few if is_few else self._decode_many
        return key, Wanted(program, operands, self._cfg, {"sizes": sizes})

    @staticmethod
    def decoding_key(n: int, context: int) -> Hashable:
        return "decode", n, context

    def saving(self, slots: device.BatchState, indices: np.ndarray, kind: Moved) -> ProgramCall:
        """Return the call that copies pages, or a snapshot, as records."""
        operands = _leaves(slots, kind), indices
        return ("save", kind, len(indices)), Wanted(records.save, operands)

    def loading(
        self, slots: device.BatchState, indices: np.ndarray, moved: jax.Array, kind: Moved
    ) -> ProgramCall:
        """Return the call that puts records into pages, or one into a slot and a snapshot."""
        if kind == "state":
            return ("load", kind), Wanted(records.load_state, (slots, indices, moved))
        return ("load", kind, len(indices)), Wanted(records.load_pages, (slots, indices, moved))

    # Calls without rows

    @property
    def n_first(self) -> int:
        """How many of the ``idle`` calls a first request may need."""
        return len(self._options.history_widths[:2]) + len(self._first_widths) + 1

    @property
    def _first_widths(self) -> tuple[int, ...]:
        """Widths of the prompt calls that a first request may need.

        The widest serves in place of the others until they exist. Padding is cheap on a GPU, and
        each program's kernels take seconds to assemble. The bits of a deterministic engine are
        those of the narrowest width.
        """
        on_cpu = jax.default_backend() == "cpu"
        is_each = on_cpu or self._options.deterministic
        return self._options.widths if is_each else self._options.widths[-1:]

    def idle(
        self, slots: Callable[[], device.BatchState], params: Callable[[int], device.Params]
    ) -> list[IdleCall]:
        """Return a call without rows of every program, in the order in which requests need them.

        The first programs are for one request at a time: the decode call of one row, an admission
        without and with a short history, and prompts of ``_first_widths``. A decode call comes
        first because it takes the longest to compile. The largest calls follow, which serve any
        number of requests until the smaller ones exist.

        slots, params: of the call, asked when it is made; params by the number of rows.
        """
        options = self._options

        def admission(width: int) -> IdleCall:
            return lambda: self.admission(slots(), self.pack([[]] * options.parts, width))

        def filling(rows: int, width: int, fresh: bool) -> IdleCall:
            rows *= options.parts
            return lambda: self.filling(slots(), params(rows), *blank(rows, width), fresh)

        def decoding(n: int, context: int) -> IdleCall:
            return lambda: self.decoding(slots(), self._without_rows(n, context, params(n)))

        shapes = [(rows, width) for width in options.widths for rows in options.row_counts(width)]
        first = self._first_widths
        widths = *first, *(width for width in options.widths if width not in first)
        alone = [(options.row_counts(width)[0], width) for width in widths]
        largest = [(options.row_counts(width)[-1], width) for width in options.widths]
        between = [shape for shape in shapes if shape not in (*alone, *largest)]
        decodes = [(n, context) for context in options.contexts for n in options.sizes]
        return [
            decoding(*decodes[0]),
            *(admission(width) for width in options.history_widths[:2]),
            *(filling(*shape, True) for shape in alone),
            *(decoding(*size) for size in decodes[1:][-1:]),
            *(filling(*shape, True) for shape in largest if shape not in alone),
            *(admission(width) for width in options.history_widths[2:]),
            *(filling(*shape, False) for shape in dict.fromkeys((*largest, *alone))),
            *(decoding(*size) for size in decodes[1:-1]),
            *(filling(*shape, fresh) for shape in between for fresh in (True, False)),
            *((lambda: self.copying(slots(), ()),) if options.shares_prompts else ()),
            *self._moving(slots),
        ]

    def _moving(self, slots: Callable[[], device.BatchState]) -> list[IdleCall]:
        """Return calls that move no page and no state."""

        def save(kind: Moved, n: int) -> IdleCall:
            return lambda: self.saving(slots(), np.full(n, NOBODY, np.int32), kind)

        def load(kind: Moved, n: int) -> IdleCall:
            def call() -> ProgramCall:
                size = records.record_bytes(_leaves(slots(), kind)) // 4
                # States go to a slot and to a snapshot.
                nowhere = np.full(n if kind == "pages" else 2, NOBODY, np.int32)
                return self.loading(slots(), nowhere, jnp.zeros((n, size), jnp.uint32), kind)

            return call

        kinds: list[tuple[Moved, int]] = [("pages", n) for n in self._moved]
        if self._options.has_tiers and self._options.snapshots:
            kinds.append(("state", 1))
        return [move(*which) for which in kinds for move in (save, load)]

    def _without_rows(self, n: int, context: int, params: device.Params) -> Decode:
        rows = np.full((n, 3 + self._options.more_pages), NOBODY, np.int32)
        rows[:, 1] = 0
        orders = device.make_orders(rows, level=0, wants_top=False, steps=0)
        return Decode(params, orders, self.no_masks[n], {}, n, context, False)


def _leaves(slots: device.BatchState, kind: Moved) -> list[jax.Array]:
    return records.page_leaves(slots) if kind == "pages" else records.state_leaves(slots)


def blank(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and facts of ``Calls.filling`` for unused rows."""
    facts = np.zeros((rows, 5), np.int32)
    facts[:, [0, 3]] = NOBODY
    return np.zeros((rows, width), np.int32), facts
