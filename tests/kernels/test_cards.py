"""Cards' tables: a new card is a file and a line, columns are of a version of jax, and files of
plans hold formulas only."""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.card_file import write_costs
from pallas_kernels import device
from pallas_kernels.attention import op as attention
from pallas_kernels.attention import plan as many_rows_attention
from pallas_kernels.attention.codes import Codes
from pallas_kernels.attention.plan import AttentionPlan
from pallas_kernels.cards import architecture, table
from pallas_kernels.cards.architecture import BY_NAME, CARDS, MEASURED, Card
from pallas_kernels.cards.table import KernelCost, measured_cards, of_version, path_of, table_of
from pallas_kernels.device import block_bytes, gpu, planned_for
from pallas_kernels.dispatch import named_plan
from pallas_kernels.experts import plan as experts
from pallas_kernels.experts.many_pairs.plan import GroupedTilePlan, TokenTile, fitted
from pallas_kernels.experts.route_plan import RouteStatic, route_plan
from pallas_kernels.gated_delta import op as gated_delta
from pallas_kernels.gla import op as gla
from pallas_kernels.latent import plan as latent
from pallas_kernels.matmul import choice, gated, predict
from pallas_kernels.matmul.few_rows.plan import RowPlan, TilePlan
from pallas_kernels.matmul.many_rows.plan import PairTile, WeightTile
from pallas_kernels.matmul.mid_rows import plan as mid_rows
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.rows import plan as rows
from pallas_kernels.ssd import op as ssd
from tests.helpers.random_products import draw_product

PACKAGE = Path(table.__file__).parents[1]
VERSIONS = (0, 11, 2), (0, 12, 0)
BF16, F32, E4M3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
S = jax.ShapeDtypeStruct
KINDS = {"pair": PairTile, "weight": WeightTile, "pairs": WeightTile}
NEW = Card("NVIDIA Imaginary 9", 60, 1.5e12, 30 << 20, 48 << 30)


@pytest.fixture
def add_card(monkeypatch, tmp_path) -> Iterator[Callable[[str, str], None]]:
    """Return a function that adds the card ``NEW``: its line, and its file's text."""
    for card in measured_cards():
        shutil.copy(path_of(card), tmp_path)
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    table_of.cache_clear()

    def add(target: str, text: str) -> None:
        wider = [
            dataclasses.replace(one, cards=(*one.cards, NEW)) if one.name == target else one
            for one in architecture.ARCHITECTURES
        ]
        monkeypatch.setattr(architecture, "ARCHITECTURES", tuple(wider))
        monkeypatch.setitem(CARDS, NEW.name, NEW)
        path_of(NEW.name).write_text(text)

    yield add
    table_of.cache_clear()
    device._facts.cache_clear()


def own_table() -> str:
    """Return a whole table of a card: that of an H200 with other numbers."""
    text = path_of(MEASURED.name).read_text().replace("copy_rate = 4.3e12", "copy_rate = 1.3e12")
    slow = "n = 256, stages = 4, us = 21.3"
    assert slow in text
    return text.replace(slow, "n = 256, stages = 4, us = 99.0")


def products(draw: random.Random) -> None:
    """Plans of products have finite times, and fit."""
    kinds = set()
    for _ in range(150):
        call = draw_product(draw)
        plan: Any = named_plan(choice.plan(call))
        if plan is None:
            continue
        assert 0 < plan.predicted_us < math.inf and 0 < plan.xla_us < math.inf, (call, plan)
        divided = plan.divide(call) if hasattr(plan, "divide") else plan
        if isinstance(plan, RowPlan | TilePlan):
            taken = sum(divided.scratch_sizes(normed=call.norm is not None))
        elif isinstance(plan, PairTile):
            taken = divided.stages * (divided.m + divided.n) * 128
        elif isinstance(plan, WeightTile):
            taken = divided.shared_bytes(call, divided.stages, ())
        else:
            taken = plan.shared_bytes(mid_rows.MidStep.of(call))
        assert 0 < taken <= gpu().shared_bytes, (call, plan)
        assert predict.kernel_us(plan, call) == plan.predicted_us
        kinds.add(type(plan))
    assert len(kinds) >= (4 if gpu().wgmma else 3)
    x, w = (QTensor(S((n, 1024), E4M3), S((n, 1), F32)) for n in (128, 512))
    assert (named_plan(gated._plan(x, w)) is not None) == gpu().wgmma


def grouped() -> None:
    for pairs in (1, 8, 300, 4096):
        for w in (
            S((32, 512, 1024), BF16),
            QTensor(S((32, 512, 1024), jnp.int4), S((32, 512, 8), BF16)),
        ):
            plan: Any = named_plan(experts.plan(S((pairs, 1024), BF16), w, pairs, "silu"))
            if plan is None:
                assert pairs > experts.MOST_PAIRS and not gpu().wgmma
                continue
            assert 0 < plan.predicted_us < math.inf and 0 < plan.xla_us < math.inf
            if isinstance(plan, GroupedTilePlan):
                stored = StoredWeight.of(w)
                assert fitted(plan.tile, stored, True).stages >= plan.tile.stages >= 3
    static = RouteStatic(8, True, 1.0, 1e-6)
    found: Any = named_plan(route_plan(S((1, 2048), BF16), S((64, 2048), BF16), static))
    assert (found is not None) == gpu().clusters
    assert found is None or sum(found.scratch_sizes) <= gpu().shared_bytes


def attended() -> None:
    seen = 0
    for batch, capacity in ((1, 1152), (64, 8192), (200, 512)):
        q, k = S((batch, 32, 128), BF16), S((batch, capacity, 8, 128), BF16)
        plan = named_plan(attention.plan(q, k, k))
        assert plan is not None
        if isinstance(plan, AttentionPlan):
            seen += 1
            taken = many_rows_attention.shared_bytes(plan, 4, Codes.of(q, k))
            assert block_bytes(taken) <= gpu().shared_bytes
    assert seen >= 2
    q, cache = S((4, 1, 128, latent.WIDTH), BF16), S((4, 4096, latent.WIDTH), BF16)
    found: Any = named_plan(latent.plan(q, cache, None))
    assert (found is not None) == gpu().wgmma
    assert found is None or (0 < found.predicted_us < math.inf and 0 < found.xla_us < math.inf)


def others() -> None:
    for form, n in (("norm", 1), ("gate", 64), ("gate", 2048), ("copy", 8192)):
        weight = S((4096,), BF16) if form == "norm" else None
        plan = named_plan(rows.plan(form, S((n, 8192), BF16), "bfloat16", weight))
        assert isinstance(plan, rows.RowsPlan) and 128 <= plan.threads <= 1024
        assert plan.ring * plan.op.row_bytes <= gpu().shared_bytes
    q, gate = S((2, 4096, 16, 128), BF16), S((2, 4096, 16), F32)
    scan, delta = Heads(q, q, q, gate), Heads(q, q, q, gate, gate)
    for found in (gla.plan(scan), gated_delta.plan(delta), ssd.plan(scan)):
        plan = named_plan(found)
        assert (plan is not None) == gpu().wgmma
        assert plan is None or 1 <= plan.segments <= 16


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_a_new_card_is_one_table_and_one_line(target, is_whole, add_card) -> None:
    """Each op has plans for it: their times are finite, and they fit its shared memory."""
    add_card(target, own_table() if is_whole else "copy_rate = 1.3e12\n")
    with planned_for(NEW.name):
        assert (gpu().arch, gpu().sms, gpu().copy_rate) == (target, 60, 1.3e12)
        assert gpu().shared_bytes == BY_NAME[target].shared_bytes
        # What the file lacks is scaled by the data sheets.
        fewer = 1 if is_whole else MEASURED.sms / NEW.sms
        less = 1 if is_whole else NEW.l2 / MEASURED.l2
        assert math.isclose(gpu().costs["xla float"].shared[1], 4.82 * fewer)
        assert math.isclose(gpu().products.l2_bytes, 50e6 * less)
        slower = 1 if is_whole else MEASURED.bandwidth / NEW.bandwidth
        assert math.isclose(gpu().many_rows.memory_rate, 4200 / slower)
        # Planners count the work of one multiprocessor themselves.
        for family, cost in (("row int4", 0.284), ("pair int8", 94.9), ("xla float", 0.183)):
            assert gpu().costs[family].shared[-1] == cost
        products(random.Random(5))
        grouped()
        attended()
        others()


def test_the_times_of_a_new_card_decide(add_card) -> None:
    """A tile that the new card's table calls slow is not taken there."""
    codes = S((4096, 4096), jnp.int8), S((4096, 1), F32)
    call = choice.MatmulCall.of(QTensor(*codes), QTensor(*codes), BF16)
    add_card("sm_90", own_table())
    widths = {}
    for card in (MEASURED.name, NEW.name):
        with planned_for(card):
            plan = named_plan(choice.plan(call))
            assert isinstance(plan, PairTile)
            widths[card] = plan.n
    assert widths[MEASURED.name] == 256 and widths[NEW.name] < 256


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("card", measured_cards())
def test_every_tile_of_a_table_is_one_of_its_kernel(card, version) -> None:
    found = table_of(CARDS[card], version)
    for family, timed in found.tiles.items():
        kind = TokenTile if family.endswith("by tokens") else KINDS[family.split()[0]]
        assert timed or version < (0, 12) and family == "weight ahead", family
        for tile in timed:
            assert kind(**tile.fields).stages >= 3
            assert tile.us > 0 or (math.isnan(tile.us) and family in found.costs)


def test_columns_are_those_of_a_version_of_jax() -> None:
    row = {"m": 64, "us_before_0_12": 2.0, "us_from_0_12": 3.0}
    old = {"m": 128, "us_before_0_12": 1.0}
    new = {"m": 32, "us_from_0_12": 4.0}
    for version, want in (
        (VERSIONS[0], [{"m": 64, "us": 2.0}, {"m": 128, "us": 1.0}]),
        (VERSIONS[1], [{"m": 64, "us": 3.0}, {"m": 32, "us": 4.0}]),
    ):
        assert of_version([row, old, new], version) == want
    widths = [
        {tile.fields["n"] for tile in table_of(MEASURED, version).tiles["pair float8"]}
        for version in VERSIONS
    ]
    assert widths[0] - widths[1] == {192}  # two sums of 192 columns want 232 registers


@pytest.mark.parametrize(
    "text, words",
    [
        ('like = "NVIDIA H400"', "like = 'NVIDIA H400' is no other card of architecture.py"),
        (f'like = "{NEW.name}"', f"like = '{NEW.name}' is no other card"),
        ('copy_rate = "fast"', "copy_rate = 'fast' is no number"),
        ("[rows]\nfew_rows = 1.5", "rows: few_rows = 1.5 is no number"),
        ("[rows]\nring = 3", "rows: no plan asks for ring"),
        ("[colours]\nred = 3", "no plan asks for colours"),
        ("rows = 3", "rows is a section in one table and a number in another"),
        ('[costs]\n"row int4" = { serial = [1.0] }', "costs: row int4 has no start"),
    ],
)
def test_a_file_that_is_no_table_names_the_key(text, words, add_card) -> None:
    add_card("sm_90", text)
    with pytest.raises(ValueError, match=r"imaginary-9\.toml.*" + words):
        table_of(NEW)


def test_fitted_costs_are_written_into_the_table(add_card) -> None:
    """Comments and all else stay; a family that is new is added; a card without a file gets one."""
    add_card("sm_90", own_table())
    before = path_of(NEW.name).read_text().splitlines()
    costs = {"row int4": KernelCost(2.5, (0.1, 0.2, 0.3), (0.4,)), "new": KernelCost(1.0)}
    write_costs(NEW.name, costs)
    after = path_of(NEW.name).read_text().splitlines()
    changed = set(before) ^ set(after)
    assert len(changed) == 3 and len(after) == len(before) + 1
    assert table_of(NEW).costs.items() >= costs.items()
    path_of(NEW.name).unlink()
    write_costs(NEW.name, costs)
    assert tomllib.loads(path_of(NEW.name).read_text())["costs"]["new"] == {"start": 1.0}


# Units of the amounts, and numbers that no card changes: the largest codes, integer instructions
# for a code in the program of the mid-rows kernel, and what a model adds to a divisor.
UNITS = {0.0, 1.0, 1e3, 8e3, 1e6, 2e6, 1e9}
OF_PROGRAMS = {
    "rows/plan.py": {127.0, 448.0},
    "matmul/mid_rows/plan.py": {1.2, 1.5, 2.2},
    "experts/route_plan.py": {1e-20},
}


def test_files_of_plans_hold_no_measured_number_and_no_card() -> None:
    """Rates and times are floats, cards and architectures strings; docstrings may name them."""
    files = [*PACKAGE.rglob("*plan.py"), *PACKAGE.rglob("predict.py")]
    assert len(files) > 10
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                known = UNITS | OF_PROGRAMS.get(name, set())
                assert node.value in known, (name, node.lineno, node.value)


def test_architecture_alone_knows_cards() -> None:
    known = {*CARDS, *BY_NAME}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.name != "architecture.py" and any(x in text for x in ("NVIDIA", "sm_", "H200")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert node.value not in known, (path, node.lineno)
                assert not isinstance(node, ast.Name) or node.id not in ("H200", "H100"), path
