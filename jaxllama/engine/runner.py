"""Runner: carries out the scheduler's plans on the device.

It owns the engine's arrays (``slots``) and knows which shapes there are. It decides nothing about
requests.
"""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import NGram
from jaxllama.decoding.gain import DRAFT, Gain
from jaxllama.engine import lazy_zeros, records
from jaxllama.engine import slots as device
from jaxllama.engine.adapters import AdapterSlots
from jaxllama.engine.calls import Calls, Decode, IdleCall, blank
from jaxllama.engine.grammar import NextTokens
from jaxllama.engine.options import TRANSFER_BYTES, ResolvedOptions
from jaxllama.engine.pages import KVPages, Save
from jaxllama.engine.passes import level_of
from jaxllama.engine.programs import Programs
from jaxllama.engine.scheduler import Fill, Prefix, Sequence, TurnPlan
from jaxllama.engine.slots import NOBODY
from jaxllama.engine.tier_files import TierFiles
from jaxllama.engine.tiers import Tiers
from jaxllama.engine.transfers import Arrived, Moved, OnDevice, Transfers
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import DraftSource
from jaxllama.kept import Wanted, folder, trim
from jaxllama.model.decoder import activation_dtype
from jaxllama.model.lora import for_rows
from jaxllama.parallel.mesh import mesh_of
from jaxllama.typing import LocalDevice, Tree
from pallas_kernels.qtensor import QTensor, leaves_of

LARGEST_BLOCK = 32  # pages that move together: those of a chunk of a prompt
Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=Hashable)


class Written(NamedTuple):
    """The tokens and logprobs that one row generated in a decode call.

    drafted, accepted: numbers of drafted and accepted tokens. top: ids and logprobs of the
    likeliest tokens, each ``[width, n]``, if a request of the call asked for them.
    """

    tokens: list[int]
    logprobs: list[float]
    drafted: int = 0
    accepted: int = 0
    top: tuple[np.ndarray, ...] = ()


class DrawnOnDevice(NamedTuple):
    """The results of ``slots.decode`` on the device.

    size: numbers of rows and pages. how: of ``decoding.gain``. begun: time of the call; infinite if
    its step has other calls.
    """

    row_of: dict[Sequence, int]
    rows: jax.Array
    top: tuple[jax.Array, ...]
    size: tuple[int, int]
    how: int
    begun: float


class Running(NamedTuple):
    """A step in the runner's thread.

    drawn: the results that ``Runner.read`` reads; None without a decode call. handed: set once the
    device has all work that precedes the decode call.
    """

    drawn: Future[DrawnOnDevice | None]
    handed: threading.Event


class Runner:
    def __init__(
        self,
        cfg: ModelConfig,
        params: device.Params,
        options: ResolvedOptions,
        adapters: AdapterSlots | None = None,
        drafting: DraftSource | None = None,
    ) -> None:
        self._draft = NGram() if drafting is None else drafting.plan.draft
        self.cfg = cfg.replace(taps=self._draft.taps)
        self.options, self.adapters = options, adapters
        self.params = _committed(params if adapters is None else adapters.params)
        if adapters is not None:
            adapters.params = self.params
        self.mesh = mesh_of(params)
        self.draft_params = None if drafting is None else drafting.params
        # By the size of the decode call; None if drafting may not end.
        self._gains: dict[Hashable, Gain] | None = None
        if drafting is not None and drafting.gains is not None:
            self._gains = collections.defaultdict(lambda: Gain(waits=12))
        self._read = 0.0
        self.slots = self._empty()
        pages = records.page_leaves(self.slots)
        self.transfers: Transfers | None = None
        moved: list[int] = []
        if options.has_tiers:
            _check_tiers(options, pages, records.state_leaves(self.slots))
            most = 1
            if pages:
                nbytes = min(TRANSFER_BYTES, options.host_bytes // 8)
                room = min(nbytes // records.record_bytes(pages), options.row_pages, LARGEST_BLOCK)
                most = 1 << max(room.bit_length() - 1, 0)
            [where] = self.slots.token.devices()
            self.transfers = _transfers(options, most, where)
            moved = self.transfers.tiers.sizes if pages else []
        states = options.snapshots // options.parts
        self.pools = [
            KVPages(
                options.pages // options.parts,
                options.page_size,
                states=range(part * states, (part + 1) * states),
                unit=options.unit,
                share=options.prefix_cache,
                tiers=None if self.transfers is None else self.transfers.tiers,
                has_keys=bool(pages),
            )
            for part in range(options.parts)
        ]
        self._calls = Calls(
            self.cfg,
            options,
            self.mesh,
            self._draft,
            self.draft_params,
            moved,
            routes_alone=self._routes_alone(),
        )
        where = list(self.slots.token.devices() if self.mesh is None else self.mesh.devices.flat)
        is_kept = self.mesh is None or where[0].platform == "cpu"
        self._programs = Programs(folder("engines") if is_kept else None, where)
        self._asleep = False
        self._told: dict[Sequence, int] = {}  # number of pages that the device knows, by sequence
        self._thread = ThreadPoolExecutor(1, "jaxllama-decode")

    def _routes_alone(self) -> bool:
        """Whether the weights of a mixture are codes. The bits of a deterministic engine are those
        of ``LanguageModel.generate``, whose programs XLA tunes."""
        routes = any(layer.experts is not None for layer in self.cfg.layers)
        has_codes = bool(leaves_of(self.params, QTensor))
        return routes and has_codes and not self.options.deterministic

    def _empty(self) -> device.BatchState:
        options = self.options
        sizes = (
            self.cfg,
            options.max_slots,
            options.row_pages,
            options.pages,
            options.page_size,
            options.snapshots,
            options.kv_dtype,
            0 if options.draft is None else options.max_len,
            options.draft_config(self.cfg),
            activation_dtype(self.params).name if self._draft.reads_hidden else None,
            options.parts,
        )
        if self.mesh is None:
            if jax.default_backend() != "cpu":
                return _committed(device.empty_slots(*sizes))
            layers = jax.eval_shape(lambda: device.empty_slots(*sizes)).cache.layers
            slots = jax.jit(lambda: device.empty_slots(*sizes).with_layers(()))()
            return _committed(slots.with_layers(jax.tree.map(lazy_zeros.zeros, layers)))
        places = device.slots_shardings(
            jax.eval_shape(lambda: device.empty_slots(*sizes)), self.mesh
        )
        return jax.jit(lambda: device.empty_slots(*sizes), out_shardings=places)()

    def _with(self, rows: int, sequences: Mapping[int, Sequence]) -> device.Params:
        """Return the parameters for a call of ``rows`` rows, of which ``sequences`` are in use.

        With adapters each row has its own adapter, or none, in one program.
        """
        if not self.adapters:
            return self.params
        numbers = np.zeros(rows, np.int32)
        for row, sequence in sequences.items():
            if sequence.request.adapter is not None:
                numbers[row] = self.adapters.number(sequence.request.adapter)
        return for_rows(self.params, numbers)

    def may_share(self, sequence: Sequence) -> int:
        """Return how many first tokens of a sequence other sequences may begin with.

        Generated tokens may have attended sparsely, differ from a prompt's bits, and leave no
        snapshots.
        """
        prompt = len(sequence.request.prompt)
        if self.options.deterministic:  # a decode step reads a prompt's last token
            return prompt - 1
        if self.cfg.attn_sparsity < 1.0 or self.options.snapshots:
            return min(sequence.to_fill, prompt)
        return sequence.to_fill

    # A step

    def run(self, plan: TurnPlan, masks: Mapping[Sequence, NextTokens]) -> Running:
        """Queue a plan in the runner's thread, after the plans before it.

        The thread blocks where jax blocks: on a mesh a call of a loop returns when the loop has
        ended.

        Parameters
        ----------
        plan
            One step of the scheduler.
        masks
            Allowed next tokens of the rows whose tokens are restricted.
        """
        for sequence in plan.preempted:
            self.drop(sequence)
        with_state = {who: some for who, some in plan.prefixes.items() if some.state is not None}
        others = {who: some for who, some in plan.prefixes.items() if some.state is None}
        # A snapshot that comes back may be the beginning of another newcomer.
        calls = [
            *self._moves(plan),
            *self._admissions(with_state),
            *self._states(with_state, plan.orphans),
            *self._admissions(others),
            *self._copies(plan),
            *self._fills(plan.fills),
        ]
        decode = self._decode_of(plan, masks) if plan.budgets else None
        handed = threading.Event()
        return Running(self._thread.submit(self._do, calls, decode, handed), handed)

    def _do(
        self,
        calls: list[Callable[[], device.BatchState]],
        decode: Decode | None,
        handed: threading.Event,
    ) -> DrawnOnDevice | None:
        try:
            for call in calls:
                self.slots = call()
        finally:
            handed.set()
        if decode is None:
            return None
        return self._decode(decode, math.inf if calls else time.perf_counter())

    def wait(self) -> None:
        """Wait until all queued plans are done or handed to the device."""
        self._thread.submit(lambda: None).result()

    def sleep(self) -> None:
        """Free the arrays of the slots; no request may have one."""
        self.wait()
        self._asleep = True
        self._thread.submit(self._free).result()

    def _free(self) -> None:
        for leaf in jax.tree.leaves(self.slots):
            leaf.delete()

    def wake(self) -> None:
        """Make the slots' arrays again, all empty."""
        self.slots = self._empty()
        self._asleep = False

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that has no slot any more."""
        self._told.pop(sequence, None)

    # Pages and states that leave the device and come back

    def save(self, saves: tuple[list[Save], list[Save]]) -> None:
        """Copy pages and snapshots for the tiers, after the plans so far."""
        self._thread.submit(self._do, list(self._saves(*saves)), None, threading.Event()).result()

    def _moves(self, plan: TurnPlan) -> Iterator[Callable[[], device.BatchState]]:
        yield from self._saves(*plan.saves)
        for arrived in plan.loads:
            yield lambda arrived=arrived: self._load(arrived)

    def _saves(
        self, pages: list[Save], states: list[Save]
    ) -> Iterator[Callable[[], device.BatchState]]:
        if self.transfers is None:
            return
        for group in self.transfers.tiers.runs(pages):
            yield lambda group=group: self._save(group, "pages")
        for state in states:
            yield lambda state=state: self._save([state], "state")

    def _save(self, saves: list[Save], kind: Moved) -> device.BatchState:
        assert self.transfers is not None
        indices = np.full(self.transfers.tiers.size_of(len(saves)), NOBODY, np.int32)
        indices[: len(saves)] = [save.index for save in saves]
        copies = self._programs.call(*self._calls.saving(self.slots, indices, kind))
        self.transfers.saved([save.key for save in saves], copies, kind)
        return self.slots

    def _load(self, arrived: Arrived) -> device.BatchState:
        assert self.transfers is not None
        indices = np.full(len(arrived.data), NOBODY, np.int32)
        indices[list(arrived.pages)] = list(arrived.pages.values())
        call = self._calls.loading(self.slots, indices, arrived.data, "pages")
        slots = self._programs.call(*call)
        self.transfers.placed(len(indices))
        return slots

    def _states(
        self, prefixes: Mapping[Sequence, Prefix], orphans: list[Prefix]
    ) -> Iterator[Callable[[], device.BatchState]]:
        """Yield the calls that put states into slots, and into snapshots where there is room."""
        placed = [(sequence.own_slot, prefix) for sequence, prefix in prefixes.items()]
        for slot, prefix in (*placed, *((NOBODY, orphan) for orphan in orphans)):
            row = NOBODY if prefix.snapshot is None else prefix.snapshot
            where = np.array([slot, row], np.int32)
            yield lambda where=where, state=prefix.state: self._load_state(where, state)

    def _load_state(self, where: np.ndarray, state: OnDevice) -> device.BatchState:
        assert self.transfers is not None
        slots = self._programs.call(*self._calls.loading(self.slots, where, state, "state"))
        self.transfers.placed()
        return slots

    # Prompts

    def _admissions(
        self, prefixes: Mapping[Sequence, Prefix]
    ) -> Iterator[Callable[[], device.BatchState]]:
        """Yield the calls that give the admitted sequences their slots."""
        newcomers = []
        for sequence, prefix in prefixes.items():
            request, held = sequence.request, sequence.held
            newcomers.append(
                device.Newcomer(
                    slot=sequence.own_slot,
                    pages=list(held.pages),
                    length=prefix.length,
                    snapshot=None if prefix.state is not None else prefix.snapshot,
                    sampling=request.sampling,
                    prompt=request.prompt,
                    output=sequence.output,
                    remaining=sequence.remaining,
                    ignore_eos=request.ignore_eos,
                    drafts=self.options.draft is not None,
                )
            )
            self._told[sequence] = len(held.pages)
        rows = self.options.newcomers
        for width, group in _groups(newcomers, lambda new: self._history_width(new.history)):
            for call in self._by_part(group, lambda new: new.slot, rows):
                packed = self._calls.pack(call, width)
                yield lambda packed=packed: self._admit(packed)

    def _admit(self, packed: np.ndarray) -> device.BatchState:
        return self._programs.call(*self._calls.admission(self.slots, packed))

    def _copies(self, plan: TurnPlan) -> Iterator[Callable[[], device.BatchState]]:
        """Yield the calls that copy pages for newcomers, in the order of their admission.

        A page may be given to a later newcomer of the plan, which is then copied after it.
        """
        pairs = [some.copy for some in plan.prefixes.values() if some.copy is not None]
        for first in range(0, len(pairs), self.options.newcomers):
            some = pairs[first : first + self.options.newcomers]
            yield lambda some=some: self._programs.call(*self._calls.copying(self.slots, some))

    def _history_width(self, tokens: int) -> int:
        return next(width for width in self.options.history_widths if width >= tokens)

    def _fills(self, fills: list[Fill]) -> Iterator[Callable[[], device.BatchState]]:
        """Yield the prefill calls of a plan: several prompts a call, a prompt's chunks in order."""
        rounds: dict[int, list[Fill]] = {}
        done: dict[Sequence, int] = {}
        for fill in fills:
            number = done[fill.sequence] = done.get(fill.sequence, -1) + 1
            rounds.setdefault(number, []).append(fill)
        for some in rounds.values():
            for (width, fresh), group in _groups(some, self._kind):
                rows = self.options.rows(width)
                for call in self._by_part(group, lambda fill: fill.sequence.own_slot, rows):
                    yield self._fill(call, width, fresh)

    def _by_part(
        self, items: list[Item], slot: Callable[[Item], int], most: int
    ) -> Iterator[list[list[Item]]]:
        """Yield the items of each call, for each part of the slots; at most ``most`` of a part."""
        of_parts: list[list[Item]] = [[] for _ in range(self.options.parts)]
        for item in items:
            of_parts[slot(item) // self._part_slots].append(item)
        for first in range(0, max(map(len, of_parts)), most):
            yield [part[first : first + most] for part in of_parts]

    @property
    def _part_slots(self) -> int:
        return self.options.max_slots // self.options.parts

    def _kind(self, fill: Fill) -> tuple[int, bool]:
        """Return the width of the fill's call in tokens, and whether it begins a prompt."""
        width = next(width for width in self.options.widths if width >= fill.size)
        return width, not fill.begin

    def _fill(
        self, parts: list[list[Fill]], width: int, fresh: bool
    ) -> Callable[[], device.BatchState]:
        longest = max(map(len, parts))
        # A larger program serves until the one of this size exists.
        widths = [some for some in self.options.widths if some >= width]
        enough = [
            (rows, some)
            for some in widths[: 1 if self.options.deterministic else None]
            for rows in self.options.row_counts(some)
            if rows >= longest
        ]
        keys = [Calls.filling_key(rows * len(parts), some, fresh) for rows, some in enough]
        count, width = enough[keys.index(self._programs.first_made(keys))]
        fills = {
            part * count + row: fill
            for part, some in enumerate(parts)
            for row, fill in enumerate(some)
        }
        rows = count * len(parts)
        tokens, facts = blank(rows, width)
        for row, fill in fills.items():
            sequence = fill.sequence
            tokens[row, : fill.size] = sequence.tokens[fill.begin : fill.end]
            snapshot = NOBODY if fill.snapshot is None else fill.snapshot
            prompt = len(sequence.request.prompt)
            following = sequence.tokens[fill.end]  # the last token is never filled
            facts[row] = sequence.own_slot, fill.size, prompt, snapshot, following
        params = self._with(rows, {row: fill.sequence for row, fill in fills.items()})
        return lambda: self._fill_call(params, tokens, facts, fresh)

    def _fill_call(
        self, params: device.Params, tokens: np.ndarray, facts: np.ndarray, fresh: bool
    ) -> device.BatchState:
        call = self._calls.filling(self.slots, params, tokens, facts, fresh)
        return self._programs.call(*call)

    # Answers

    def _decode_of(self, plan: TurnPlan, masks: Mapping[Sequence, NextTokens]) -> Decode:
        options, sequences = self.options, list(plan.budgets)
        [parts] = self._by_part(sequences, lambda sequence: sequence.own_slot, options.max_slots)
        longest = max(len(sequence.held.pages) for sequence in sequences)
        n, context = self._decode_size(max(map(len, parts)), longest)
        row_of = {
            sequence: sequence.own_slot
            if n == options.max_slots
            else part * (n // options.parts) + row
            for part, some in enumerate(parts)
            for row, sequence in enumerate(some)
        }
        rows = np.full((n, 3 + options.more_pages), NOBODY, np.int32)
        for sequence, budget in plan.budgets.items():
            pages, received = sequence.held.pages, self._told[sequence]
            row = rows[row_of[sequence]]
            row[:3] = sequence.own_slot, budget, received
            row[3 : 3 + len(pages) - received] = pages[received:]
            self._told[sequence] = len(pages)
        allowed: Tree = self._calls.no_masks[n]
        if masks:
            allowed, words = self._calls.masks(n), self._calls.mask_words
            for sequence, known in masks.items():
                row = allowed[row_of[sequence]]
                row[:words] = known.mask
                row[words:][: len(known.forced)] = [token + 1 for token in known.forced]
            # jit treats device arrays and numpy arrays as different arguments
            allowed = jax.device_put(allowed)
        requests = [sequence.request for sequence in sequences]
        level = level_of([request.sampling for request in requests], bool(masks))
        wants_top = any(request.logprobs for request in requests)
        how = DRAFT if self._gains is None else self._gains[n, context].next()
        orders = device.make_orders(
            rows, level=level, wants_top=wants_top, steps=plan.steps, how=how
        )
        params = self._with(n, {row: sequence for sequence, row in row_of.items()})
        return Decode(params, orders, allowed, row_of, n, context, wants_top, how)

    def _decode_size(self, rows: int, pages: int) -> tuple[int, int]:
        """Return the numbers of rows and pages of a decode call of ``rows`` rows of each part.

        They are those of the smallest program that exists, among those whose rows may get as many
        tokens as the scheduler expects.
        """
        options = self.options
        least = options.size(rows)
        enough = [
            (n, context)
            for context in options.contexts
            for n in options.sizes
            if n >= least and context >= pages
            if options.pass_widths(n) == options.pass_widths(least)
        ]
        keys = [Calls.decoding_key(*size) for size in enough]
        return enough[keys.index(self._programs.first_made(keys))]

    def _decode(self, decode: Decode, begun: float) -> DrawnOnDevice:
        self.slots, rows, top = self._programs.call(*self._calls.decoding(self.slots, decode))
        top, size = top if decode.wants_top else (), (decode.n, decode.context)
        return DrawnOnDevice(decode.row_of, rows, top, size, decode.how, begun)

    def read(self, drawn: DrawnOnDevice) -> dict[Sequence, Written]:
        """Wait for the results of a decode call, and return them by sequence."""
        rows, top = jax.device_get((drawn.rows, drawn.top))
        now, begun = time.perf_counter(), max(drawn.begun, self._read)
        self._read = now
        if self._gains is not None and begun < now:
            rate = float(rows[list(drawn.row_of.values()), 0].mean()) / (now - begun)
            self._gains[drawn.size].took(drawn.how, rate)
        width = (rows.shape[1] - 3) // 2
        numbers = rows[:, : 3 + width], rows[:, 3 + width :].view(np.float32)
        written = [  # convert to lists at once: many small slices of arrays would cost more
            Written(tokens[:n], logprobs[:n], drafted, accepted)
            for (n, drafted, accepted, *tokens), logprobs in zip(
                *(part.tolist() for part in numbers), strict=True
            )
        ]
        if top:
            written = [
                row._replace(top=tuple(pair)) for row, *pair in zip(written, *top, strict=True)
            ]
        return {sequence: written[row] for sequence, row in drawn.row_of.items()}

    # Programs

    @property
    def missing_programs(self) -> int:
        """Number of programs that a thread still compiles."""
        return self._programs.missing

    def compiled_programs(self) -> int:
        """Return the number of programs compiled outside of the warm-up."""
        return self._calls.compiled()

    def warm_up(self) -> None:
        """Compile every program in every shape, and run it once without rows; the state stays."""
        wanted, runs = self._wanted(), list[Future[None]]()
        calls = dict(zip(wanted, self._idle_calls(), strict=True))
        self._programs.add(
            wanted, lambda key: runs.append(self._thread.submit(self._run_idle, calls[key]))
        )
        for run in runs:
            run.result()
        jax.block_until_ready(self.slots)
        trim()

    def warm_up_behind(self, is_busy: Callable[[], bool]) -> None:
        """Compile and run the programs of a first request; a thread does the same for the others.

        Parameters
        ----------
        is_busy
            True while the engine has requests, to which the thread yields.
        """
        wanted, n = self._wanted(), self._calls.n_first
        calls = dict(zip(wanted, self._idle_calls(), strict=True))

        def run(key: Hashable) -> None:
            self._thread.submit(self._run_idle, calls[key]).result()

        self._programs.add_first(wanted, n)
        for key in list(wanted)[:n]:
            run(key)
        jax.block_until_ready(self.slots)
        trim()
        self._programs.add_rest(wanted, n, is_busy, run)

    def stop(self) -> None:
        """Let the threads end that compile and move pages."""
        self._programs.stop()
        if self.transfers is not None:
            self._thread.submit(lambda: None).result()
            self.transfers.close()

    def _run_idle(self, call: IdleCall) -> None:
        """Run a program without rows, in the runner's thread; a sleeping engine has no slots."""
        if self._asleep:
            return
        outcome = self._programs.call(*call())
        slots = outcome[0] if isinstance(outcome, tuple) else outcome
        if isinstance(slots, device.BatchState):  # other programs leave the slots as they are
            self.slots = slots

    def _idle_calls(self) -> list[IdleCall]:
        return self._calls.idle(lambda: self.slots, lambda rows: self._with(rows, {}))

    def _wanted(self) -> dict[Hashable, Wanted]:
        """Return every program that may be called."""
        return dict(call() for call in self._idle_calls())


def _committed(tree: Tree) -> Tree:
    """Return the tree with its arrays bound to their devices, where they lie already.

    jit compiles a program anew for arrays that are bound where others were not. New weights and the
    results of programs are bound.
    """

    def bound(leaf: Tree) -> Tree:
        return jax.device_put(leaf, leaf.sharding) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(bound, tree)


def _check_tiers(options: ResolvedOptions, *kinds: list[jax.Array]) -> None:
    """Raise JaxLlamaError for a tier without room for one record of a kind."""
    largest = max(map(records.record_bytes, kinds))
    for name, room in (
        ("host_cache_gb", options.host_bytes),
        ("disk_cache_gb", options.disk_bytes),
    ):
        if room and room < largest:
            raise JaxLlamaError(f"{name} = {room / 1e9:g}: a record takes {largest / 1e9:g} GB")


def _transfers(options: ResolvedOptions, most: int, device: LocalDevice) -> Transfers:
    files = None
    if options.disk_cache is not None:
        files = TierFiles(options.disk_cache, options.disk_bytes)
    places = records.Memories(device)
    tiers = Tiers(options.host_bytes, files, most, places.pin, places.view)
    return Transfers(tiers, places.to_device, places.to_host)


def _groups(items: list[Item], kind: Callable[[Item], Kind]) -> Iterator[tuple[Kind, list[Item]]]:
    """Group items by kind, in the order in which the kinds first occur."""
    groups: dict[Kind, list[Item]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    return iter(groups.items())
