"""An engine on a mesh of devices writes the tokens of an engine on one."""

from __future__ import annotations

import pytest

from tests.helpers.compiling import results_of

# kv heads, and those of one device; number of devices
MESHES = {"model=2": (2, 1, 2), "data=2,model=4": (4, 1, 8), "data=2": (2, 2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gqa", "delta", "kda"])
def test_tokens_on_a_mesh_are_those_of_one_device(family):
    alone, *meshes = results_of("engine_mesh_child", family, *MESHES, PYTHONWARNINGS="error")
    assert {key: len(tokens) for key, tokens in alone["tokens"].items()} == {
        "one": 8,
        "short": 12,
        "drawn": 12,
        "long": 18,
        "again": 18,
        "repeats": 18,
    }
    assert alone["devices"] == 1 and alone["cached"] > 0
    for mesh, (name, (*heads, devices)) in zip(meshes, MESHES.items(), strict=True):
        # Sums of float32 in other orders, and tokens that no two of these logits are near for.
        assert mesh["tokens"] == alone["tokens"], name
        # Each device of "data=2" has slots and pages of its own, and so other prefixes.
        assert mesh["parts"] == (2 if name == "data=2" else 1)
        assert mesh["cached"] == alone["cached"] if mesh["parts"] == 1 else mesh["cached"] > 0
        assert mesh["pages"] * mesh["parts"] == alone["pages"]
        # Every device holds its heads alone; a mesh of 4 repeats the 2 of the model.
        assert mesh["kv_heads"] == heads
        assert mesh["devices"] == devices
        assert mesh["compilations"] == alone["compilations"] == 0
        assert (mesh["accepted"] > 0) == (name == "data=2,model=4")  # which alone drafts


@pytest.mark.slow
def test_a_second_start_on_a_mesh_reads_the_programs(tmp_path):
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    first, again = (
        results_of("engine_mesh_child", "gqa", "model=2", n_devices=2, **kept) for _ in range(2)
    )
    assert all(engine.pop("lowered") > 4 for engine in first)
    assert [engine.pop("lowered") for engine in again] == [0, 0]
    assert first == again
