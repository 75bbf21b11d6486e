"""Checkpoints that are damaged, cut or not written: found, named, and left for the one before."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.training import loop
from jaxllama.training.checkpoint import DIGESTS, Checkpoints, CheckpointWarning
from jaxllama.training.checkpoint import STATE as CHECKPOINT

STATE = {"w": jnp.arange(600, dtype=jnp.float32).reshape(20, 30), "step": jnp.int32(0)}


def state_of(step: int):
    return {"w": STATE["w"] * step, "step": jnp.int32(step)}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with checkpoints of the steps 2, 4 and 6, and a file that grew beside them."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder / "checkpoints", 3)
    for step in (1, 2, 4, 6):
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(f'{{"step": {step}}}\n')
        checkpoints.save(step, state_of(step), [folder / "metrics.jsonl"])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7}\n')
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_the_newest_are_kept_and_restored(folder):
    (folder / "checkpoints/.8.part").mkdir()
    checkpoints = Checkpoints(folder / "checkpoints", 3)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["2", "4", "6"] and checkpoints.steps() == [2, 4, 6]
    assert checkpoints.newest_whole() == (6, {"metrics.jsonl": 4 * len('{"step": 1}\n')})
    for step in (2, 4, 6):
        found = checkpoints.restore(step, jax.device_put(STATE, jax.devices()[0]))
        jax.tree.map(np.testing.assert_array_equal, found, state_of(step))
    checkpoints.keep_until(4)
    assert checkpoints.steps() == [2, 4]
    assert Checkpoints(folder / "none", 1).newest_whole() == (0, {})


def test_every_bit_of_a_checkpoint_counts(folder):
    checkpoints = Checkpoints(folder / "checkpoints", 3)
    for name, step in ((DIGESTS, 1), (CHECKPOINT, 97)):
        path = folder / "checkpoints/6" / name
        whole = path.read_bytes()
        for at in range(0, len(whole), step):
            flip(path, at)
            found = checkpoints.damage(6)
            assert found is not None and "\n" not in found
            assert name != CHECKPOINT or found == f"{path}: damaged"
            path.write_bytes(whole)
        for cut in (whole[:-1], whole[: len(whole) // 2], b"", None):
            path.unlink()
            if cut is not None:
                path.write_bytes(cut)
            assert str(path) in checkpoints.damage(6)
        path.write_bytes(whole)
    assert checkpoints.damage(6) is None


def test_a_damaged_one_is_left_for_the_one_before(folder):
    checkpoints = Checkpoints(folder / "checkpoints", 3)
    flip(folder / "checkpoints/6" / CHECKPOINT, 1000)
    with pytest.warns(CheckpointWarning, match=r"checkpoints/6/.*: damaged: not used"):
        assert checkpoints.newest_whole() == (4, {"metrics.jsonl": 36})
    # A line of the file beside it: its third, which step 4 has and step 2 has not.
    flip(folder / "metrics.jsonl", 30)
    with pytest.warns(CheckpointWarning) as told:
        assert checkpoints.newest_whole() == (2, {"metrics.jsonl": 24})
    assert len(told) == 2 and "metrics.jsonl: damaged before step 4" in str(told[1].message)
    (folder / "metrics.jsonl").write_bytes(b"")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(JaxLlamaError, match="no whole checkpoint to go on from: .*before step 2"),
    ):
        checkpoints.newest_whole()


def test_the_best_parameters_are_made_again_from_before(folder):
    checkpoints, best = (Checkpoints(folder / name, 3) for name in ("checkpoints", "best"))
    best.save(5, state_of(5))
    assert loop._whole(checkpoints, best)[0] == 6
    flip(folder / "best/5" / DIGESTS, 20)
    with pytest.warns(CheckpointWarning, match="best/5/.*: made again"):
        assert loop._whole(checkpoints, best)[0] == 4
    shutil.rmtree(folder / "checkpoints/6")
    assert loop._whole(checkpoints, best)[0] == 4, "it is younger, so it is made again anyway"


def test_a_stopped_run_has_the_best_parameters_up_to_its_checkpoint(tmp_path):
    """Better ones after it are lost with the run's process."""
    checkpoints, best = (Checkpoints(tmp_path / name, 2) for name in ("checkpoints", "best"))
    for step, own in ((60, best), (100, checkpoints), (105, best), (110, best)):
        if own is best:
            best.keep_until(checkpoints.latest() or 0)
        own.save(step, state_of(step))
    assert best.steps() == [60, 110]
    first, _ = loop._whole(checkpoints, best)
    best.keep_until(first)
    assert (first, best.latest_or_raise()) == (100, 60)


def test_a_state_of_another_shape_is_named(folder):
    checkpoints = Checkpoints(folder / "checkpoints", 3)
    here = jax.devices()[0]
    for like, said in (
        (
            {**STATE, "w": STATE["w"].T},
            r"\['w'\]: F32\[20, 30\], but the run has float32\[30, 20\]",
        ),
        ({**STATE, "w": STATE["w"].astype(jnp.bfloat16)}, "but the run has bfloat16"),
        ({"w": STATE["w"]}, r"\['step'\] is part of one state only"),
    ):
        with pytest.raises(JaxLlamaError, match=said):
            checkpoints.restore(6, jax.device_put(like, here))


def test_a_full_disk_is_one_line_and_loses_nothing(folder):
    checkpoints = Checkpoints(folder / "checkpoints", 3)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, most))
    try:
        with pytest.raises(JaxLlamaError) as caught:
            checkpoints.save(8, state_of(8), [folder / "metrics.jsonl"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    said = f"{folder}/checkpoints/8: cannot be written: File too large; the checkpoints before"
    assert str(caught.value).startswith(said)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["2", "4", "6"] and checkpoints.newest_whole()[0] == 6
    checkpoints.save(8, state_of(8), [folder / "metrics.jsonl"])
    assert checkpoints.newest_whole()[0] == 8
