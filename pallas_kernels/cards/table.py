"""The measured times, rates and limits of a card, from its file in this folder.

Plans hold formulas; every number that another card or another jax would change is here.  A file's
sections are the fields of ``CardTable``, and ``docs/howto/gpu.md`` says how a new one is made.
``python -m benchmarks.kernels.fit`` writes the costs.

A key that ends in ``_before_0_12`` or ``_from_0_12`` is a column for these versions of jax.  An
entry of a list that has no column for the present one does not exist with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import jax

from pallas_kernels.cards.architecture import CARDS, MEASURED, Card

FOLDER = Path(__file__).parent
_COLUMN = re.compile(r"(.+)_(before|from)_(\d+)_(\d+)")
# Amounts of work that all multiprocessors share, by family and place.  The others behind the first
# are those of the busiest one, or are rounds of all.
_OF_ALL_SMS = {
    **dict.fromkeys(("xla words", "xla copy", "xla sums"), 1),
    **dict.fromkeys(("xla float", "xla int8", "xla float8_e4m3fn"), 1),
    "xla row sums": 2,
}
# Share of the sheet's bandwidth that a card without measured rates is taken to reach.
_SHEET_SHARE = 0.9
Version = tuple[Any, ...]
Sections = Mapping[str, Any]


class KernelCost(NamedTuple):
    """Microseconds of one family of kernels: to start, and for a unit of each amount of work
    (``matmul.predict``)."""

    start: float
    serial: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()


class TileTime(NamedTuple):
    """A tile that a planner may choose, and its microseconds.

    fields: of the tile's class.  us: of one round of tiles, or of a slot, as the planner says; NaN
    where a family of costs times the tile.
    """

    fields: Mapping[str, Any]
    us: float = math.nan


class Products(NamedTuple):
    """Of the predicted times of products (``matmul.predict``).

    fitted_rows: the most rows that were measured; a larger call is so many of these.
    l2_bytes: the largest 32-bit sums of XLA's form that stay in L2.
    odd_groups: times as long as "xla words" takes where the groups are no power of two.
    """

    fitted_rows: int
    l2_bytes: float
    odd_groups: float


class FewRows(NamedTuple):
    """Of products of few rows.

    cluster_sms: multiprocessors that clusters of 1, 2, 4 and 8 blocks keep at work.
    paired_columns: up to so many, a warp takes two rows of 8 bits if one round then holds them.
    chained_columns: up to so many, int4 beside groups has two chains of sums.
    narrow_columns: up to so many, a block has 8 warps.
    wide_columns: from ``narrow_columns`` to these, blocks of 4 bits with several units to a warp
        have 24 warps.
    narrow_bytes: with less shared memory to a block, more blocks share K, with shorter runs.
    """

    cluster_sms: tuple[int, ...]
    paired_columns: int
    chained_columns: int
    narrow_columns: int
    wide_columns: int
    narrow_bytes: int


class ManyRows(NamedTuple):
    """Of products of many rows where one tile has all rows of x.

    sm_rate, memory_rate: bytes a nanosecond that a multiprocessor copies, and that memory gives.
    split_us: to add the two halves of a split K.
    ring_bytes: of a block's ring; with more the first slot is full later.
    """

    sm_rate: float
    memory_rate: float
    split_us: float
    ring_bytes: int


class MidRows(NamedTuple):
    """Of a multiprocessor without wgmma, in a clock.

    products: multiply-adds of 16-bit floats.  integers: integer operations.  copied: bytes.
    step_clocks: of a step besides: a barrier, and the first loads behind it.
    late_clocks: of a step besides where only one step is copied ahead.
    hidden, hidden_by_one: share of the shorter works that the longest hides, with two warps to a
        scheduler and with one.
    """

    products: int
    integers: int
    copied: int
    step_clocks: float
    late_clocks: float
    hidden: float
    hidden_by_one: float


class Experts(NamedTuple):
    """Of grouped products.

    unpack_rate: bytes a second that stand for a cost of 1 where int4 codes are unpacked.
    sort_rate: bytes a second at which rows of x are sorted.
    sorted_tiles, sorted_fill: two blocks share sorted rows of x from so many tiles to a row on, and
        from so many tiles of pairs of an average expert on.
    alone_us: of a slot of the tile by tokens whose block shares no weight.
    end_us: of that tile's gate and stores, which nothing overlaps.
    summed_tokens: the most that the kernel of sums over experts takes.
    """

    unpack_rate: float
    sort_rate: float
    sorted_tiles: int
    sorted_fill: int
    alone_us: float
    end_us: float
    summed_tokens: int


class Cache(NamedTuple):
    """Of decode attention over a cache of one number of bits.

    tiles, depth, warps: of a block.
    least_chunk, most_chunk: tokens of a chunk; between them a chunk is 1/128 of the capacity.
    long: tokens times kv heads of a cache from which on chunks are faster with a ring for each warp
        on a GPU with wgmma.
    """

    tiles: int
    depth: int
    warps: int
    least_chunk: int
    most_chunk: int
    long: float


class Attention(NamedTuple):
    """Of decode attention.

    direct_rows, direct_tokens: the most of a call whose clusters need no ring (``direct``).
    direct_blocks: its most blocks, as many clusters of 8 as run at a time.
    shared_rope_rows: rows of one token each from which on a warp that writes a cache has all heads
        of a kv head.
    few_chunks: a row with no more chunks is one cluster's instead.
    longest_first: tokens of a row from which on the longest rows begin first.
    """

    direct_rows: int
    direct_tokens: int
    direct_blocks: int
    shared_rope_rows: int
    few_chunks: int
    longest_first: int


class Latent(NamedTuple):
    """Of latent attention.

    l2_rate: bytes a second from the L2.  round_us: the products of a round of 128 tokens.
    few_round_us: of such a round of few query rows, whose products run beside copies.
    block_us: of a block besides: start, queries, first tile, outputs.
    merge_us: of the kernel that sums chunks, without its bytes.  xla_us: of XLA's form to start.
    """

    l2_rate: float
    round_us: float
    few_round_us: float
    block_us: float
    merge_us: float
    xla_us: float


class Rows(NamedTuple):
    """Of row-wise kernels.

    least_width: columns below which XLA's form is as fast.
    adapted_rows: most rows that each read an adapter for itself.
    split_width: columns above which two blocks have a row with adapters.
    few_rows: up to so many, a thread has two pieces of codes, not four.
    ring_rows: from so many on, gates take turns in a ring.
    split_gate_rows, split_gate_width: up to so many rows, from so many columns on, four blocks have
        a gate's row.
    slow_gates: rows between which XLA's form of a gate with a given scale is as fast.
    """

    least_width: int
    adapted_rows: int
    split_width: int
    few_rows: int
    ring_rows: int
    split_gate_rows: int
    split_gate_width: int
    slow_gates: tuple[int, ...]


class DeltaTimes(NamedTuple):
    """Microseconds of a chunk of the gated delta rule.

    wave, wide: of one wave of blocks, with heads of up to 128 key channels and of more.
    block, identity: of a block's memory traffic, in the scan and in the pass for transitions.
    segment: of the first state and the ends of one more segment, not of a chunk.
    """

    wave: float
    wide: float
    block: float
    identity: float
    segment: float


class SsdTimes(NamedTuple):
    """Microseconds of a chunk of Mamba-2's scan.

    wave, state: of one wave of blocks, and of one in the pass without outputs.
    segment: of the segments' first states and the second launch, not of a chunk.
    """

    wave: float
    state: float
    segment: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CardTable:
    """What was measured on a card.

    copy_rate, sum_rate: bytes a second that a copy, and a sum, of device memory reach.
    product_rates: operations a second that XLA's products reach, by the operands' dtype.
    costs: of kernels and of XLA's forms, by family.  tiles: that planners choose from, by family.
    cache16, cache8, cache4: by the bits of a number of the cache.
    """

    copy_rate: float
    sum_rate: float
    product_rates: Mapping[str, float]
    costs: Mapping[str, KernelCost]
    tiles: Mapping[str, tuple[TileTime, ...]]
    products: Products
    few_rows: FewRows
    many_rows: ManyRows
    mid_rows: MidRows
    experts: Experts
    attention: Attention
    cache16: Cache
    cache8: Cache
    cache4: Cache
    latent: Latent
    rows: Rows
    gated_delta: DeltaTimes
    ssd: SsdTimes


def path_of(card: str) -> Path:
    """Return the file of a card's table."""
    return FOLDER / f"{re.sub('[^A-Za-z0-9]+', '-', card.removeprefix('NVIDIA ')).lower()}.toml"


def measured_cards() -> list[str]:
    """Return the names of the cards that have a table."""
    return [card for card in CARDS if path_of(card).exists()]


@functools.cache
def table_of(card: Card, version: Version = jax.__version_info__) -> CardTable:
    """Return a card's table for a version of jax.

    What its file lacks is that of the card in ``like``, or else of ``MEASURED`` scaled by the data
    sheets.

    Raises
    ------
    ValueError
        The file has a section or a key that no plan asks for, or lacks one.
    """
    return _record(CardTable, _sections(card, version), str(path_of(card.name)))


def _record(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    """Return a record of this class from a file's section."""
    if kind is TileTime:
        us = values.get("us", math.nan)
        return TileTime({key: x for key, x in values.items() if key != "us"}, us)
    hints = get_type_hints(kind)
    if unknown := values.keys() - hints.keys():
        raise ValueError(f"{where}: no plan asks for {min(unknown)}")
    if missing := hints.keys() - values.keys() - getattr(kind, "_field_defaults", {}).keys():
        raise ValueError(f"{where} has no {min(missing)}")
    return kind(**{key: _value(hints[key], x, f"{where}: {key}") for key, x in values.items()})


def _value(hint: Any, x: Any, where: str) -> Any:
    """Return a file's value as the type that a record has it in."""
    if isinstance(x, list):
        return tuple(_value(get_args(hint)[0], one, where) for one in x)
    if hint in (int, float) and not isinstance(x, int | hint):
        raise ValueError(f"{where} = {x!r} is no number")
    if not isinstance(x, dict):
        return x
    if get_origin(hint) is None:
        return _record(hint, x, where)
    return {key: _value(get_args(hint)[1], one, f"{where}: {key}") for key, one in x.items()}


def _sections(card: Card, version: Version) -> Sections:
    """Return a card's sections, with what its file lacks."""
    path = path_of(card.name)
    own = of_version(tomllib.loads(path.read_text()), version) if path.exists() else {}
    if card == MEASURED:
        return own
    like = own.pop("like", None)
    if like is None:
        base = _scaled(_sections(MEASURED, version), card)
    elif like in CARDS and like != card.name:
        base = _sections(CARDS[like], version)
    else:
        raise ValueError(f"{path}: like = {like!r} is no other card of architecture.py")
    for key, x in base.items():
        if isinstance(x, dict) != isinstance(own.get(key, x), dict):
            raise ValueError(f"{path}: {key} is a section in one table and a number in another")
        own[key] = {**x, **own.get(key, {})} if isinstance(x, dict) else own.get(key, x)
    return own


def of_version(value: Any, version: Version) -> Any:
    """Return a file's value with the columns of a version of jax alone."""
    if isinstance(value, list):
        rows = [(x, of_version(x, version)) for x in value]
        return [kept for x, kept in rows if not isinstance(x, dict) or _columns(x) <= kept.keys()]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, x in value.items():
        if (match := _COLUMN.fullmatch(key)) is None:
            kept[key] = of_version(x, version)
            continue
        name, word, *first = match.groups()
        if (version >= tuple(map(int, first))) == (word == "from"):
            kept[name] = x
    return kept


def _columns(row: Mapping[str, Any]) -> set[str]:
    """Return the keys of a row that have columns."""
    return {match[1] for key in row if (match := _COLUMN.fullmatch(key))}


def _scaled(sections: Sections, card: Card) -> Sections:
    """Return the measured card's sections for one that was not measured.

    Megabytes of memory, the first of the amounts that overlap, take longer by the sheets'
    bandwidths.  Work that all multiprocessors share takes longer by their numbers; planners count
    the work of one by the card's own number already.  Costs of experts are relative to the rate of
    a copy already.
    """
    copy_rate = _SHEET_SHARE * card.bandwidth
    slower, fewer = MEASURED.bandwidth / card.bandwidth, MEASURED.sms / card.sms
    costs = {}
    for family, cost in sections["costs"].items():
        if shared := cost.get("shared"):
            first, *rest = shared
            # A fit beside other amounts may give memory no time at all; a slower memory shows.
            first = slower * max(first, 1e12 / sections["copy_rate"])
            place = _OF_ALL_SMS.get(family, 0) - 1
            rest = [x * fewer if i == place else x for i, x in enumerate(rest)]
            cost = {**cost, "shared": [first, *rest]}
        costs[family] = cost
    products, many_rows = dict(sections["products"]), dict(sections["many_rows"])
    products["l2_bytes"] *= card.l2 / MEASURED.l2
    many_rows["memory_rate"] /= slower
    scaled = {"costs": costs, "products": products, "many_rows": many_rows}
    return {**sections, "copy_rate": copy_rate, "sum_rate": copy_rate, **scaled}
