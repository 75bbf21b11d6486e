"""Training whose layers are divided among stages, beside one device's."""

from pathlib import Path

import numpy as np
import pytest

from jaxllama.config import load_config
from jaxllama.errors import JaxLlamaError
from jaxllama.parallel.mesh import make_mesh, make_stages, stage_sizes
from jaxllama.training import pipeline
from jaxllama.training.loop import data_mesh
from tests.helpers.compiling import results_of
from tests.helpers.training_cases import byte_model, run_config

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "howto" / "mesh.md"


def child(name: str) -> dict[str, dict]:
    """The results of a child process by case."""
    return {result.pop("case"): result for result in results_of("pipeline_child", name)}


@pytest.mark.slow
def test_loss_and_gradients_are_one_device_s():
    """Of Llama, GLA, a hybrid and packed rows; a device has its share of the weights."""
    results = child("gradients")
    assert len(results) == 8
    for case, result in results.items():
        stages = int(case.rsplit("=", 1)[1])
        assert result["loss"] < 1e-6 and result["mean"] < 1e-6, case
        assert result["worst"] < 1e-6, case  # of each parameter's largest gradient
        assert result["share"] == pytest.approx(1 / stages, rel=0.01), case


@pytest.mark.slow
def test_a_run_on_stages_resumes_and_moves_to_another_mesh():
    result = child("run")["run"]
    assert set(result["off"]) == {"one", "staged", "again", "moved"}
    assert max(result["off"].values()) < 1e-5  # a dozen steps
    assert result["same"]  # to the bit after an interruption


@pytest.mark.slow
def test_the_first_state_is_made_where_it_lies():
    assert child("state")["state"] == {"same": True, "there": True}


def drawn(numbers: np.ndarray) -> list[str]:
    """A line for each stage."""
    return [" ".join("." if n < 0 else str(n) for n in row) for row in numbers.T]


def test_the_schedule_is_the_guide_s():
    forward = pipeline.schedule(4, 3)
    rows = zip(drawn(forward), drawn(forward[::-1]), strict=True)
    lines = [f"stage {i}   {a}   {b}" for i, (a, b) in enumerate(rows)]
    assert "\n".join(lines) in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("microbatches,stages", [(1, 1), (1, 4), (4, 3), (16, 4)])
def test_each_stage_has_each_microbatch_once(microbatches, stages):
    found = pipeline.schedule(microbatches, stages)
    for stage, numbers in enumerate(found.T):
        assert numbers[stage : stage + microbatches].tolist() == list(range(microbatches))
    share = (stages - 1) / (microbatches + stages - 1)
    assert pipeline.idle_share(microbatches, stages) == pytest.approx(share)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"scan": False}, "needs scan = true"),
        ({"scan": True, "fsdp": True}, "excludes fsdp"),
        ({"scan": True, "lora": {"rank": 4}, "init_from": "x"}, "excludes lora"),
        ({"scan": True, "quantize": {"scheme": "w8a16"}}, "excludes quantize"),
        ({"scan": True, "router": {"balance": 0.1}}, "excludes router"),
        ({"scan": True, "distill": {"teacher": "x"}}, "not distill"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_stages_exclude(changes, words, tmp_path):
    model = None if {"distill", "init_from"} & set(changes) else byte_model("gqa")
    config = run_config(tmp_path, model, **changes)
    with pytest.raises(JaxLlamaError, match=f"mesh: stage=4: .*{words}"):
        pipeline.check_config(config, 4)


@pytest.mark.parametrize(
    "name,stages,words",
    [
        ("llama-3.1-8b", 3, "stage=3 does not divide the 32 layers of llama-3.1-8b"),
        ("qwen3.5-9b", 3, "the 8 groups of 4 layers of qwen3.5-9b"),
        ("nemotron-h-8b", 2, "the layers of nemotron-h-8b differ"),
    ],
)
def test_models_that_stages_cannot_share(name, stages, words):
    with pytest.raises(JaxLlamaError, match=words):
        pipeline.check_model(load_config(name), stages)


def test_models_that_stages_share():
    for name, stages in (("llama-3.1-8b", 4), ("gla-1.3b", 8), ("qwen3.5-9b", 4)):
        pipeline.check_model(load_config(name), stages)


def test_meshes_with_stages(tmp_path):
    mesh = make_stages("stage=1")
    assert mesh is not None and dict(mesh.shape) == {"data": 1, "stage": 1}
    assert make_stages(mesh) is mesh
    assert make_stages("data=1") is None and stage_sizes("stage=4,data=2") == (2, 4)
    with pytest.raises(JaxLlamaError, match="goes with data=N alone"):
        make_stages("stage=2,model=2")
    with pytest.raises(JaxLlamaError, match="stage=9 needs|stage=9: needs 9 devices"):
        make_stages("stage=9")
    with pytest.raises(JaxLlamaError, match="'stage' is not one of|expected data=N"):
        make_mesh("stage=2")  # other than training has none
    config = run_config(tmp_path, byte_model("gqa"), scan=True)
    assert dict(data_mesh(config, "stage=1").shape) == {"data": 1, "stage": 1}
