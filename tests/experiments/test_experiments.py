"""Experiment files: what is refused, what is measured once, what tables and comparisons say."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import statistics
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllama import progress
from jaxllama.cli.main import main
from jaxllama.config import configs_dir
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.perplexity import perplexity
from jaxllama.experiments import estimate, learning, workloads
from jaxllama.experiments import plan as planning
from jaxllama.experiments import run as running
from jaxllama.experiments.compare import compare, text
from jaxllama.experiments.config import load_experiment
from jaxllama.experiments.estimate import Duration, measured
from jaxllama.experiments.plan import _size as size
from jaxllama.experiments.plan import cost, plan
from jaxllama.experiments.run import run
from jaxllama.experiments.settings import FILES
from jaxllama.experiments.table import cell, check_columns, markdown
from jaxllama.language_model import LanguageModel
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import param_shapes, random_params
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.seeded import seeded_params

TINY = """
[models.tiny]
vocab_size = 256
d_model = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
d_ff = 64
norm_eps = 1e-5
max_position = 64
tie_embeddings = true
rope = { theta = 10000.0 }
"""
SPEED = """
title = "Tiny"
workload = "speed"
seeds = [0, 1]
[settings]
model = "tiny"
batch = [1, 2]
scheme = ["none", "w8a16"]
prompt_tokens = 8
new_tokens = 4
runs = 1
"""


@pytest.fixture
def write(tmp_path):
    """write(text, **replaced lines) -> path of the file"""

    def make(content: str = SPEED, name: str = "tiny.toml", models: str = TINY) -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(content) + models)
        return str(path)

    return make


@pytest.fixture
def fake(monkeypatch):
    """A workload without jax: its calls, and numbers that follow from the point and the seed."""
    calls = []

    def measure(experiment, settings, seed, room):
        calls.append((settings.batch, settings.scheme, seed))
        speed = 100.0 * settings.batch + (50 if settings.scheme == "w8a16" else 0) + seed
        return {"speed": speed, "words": settings.scheme, "at": [1, 2, 3], "curve": [3, 2, speed]}

    monkeypatch.setitem(workloads.WORKLOADS, "speed", measure)
    monkeypatch.setitem(workloads.RESULTS, "speed", ("speed", "words", "at", "curve", "later"))
    return calls


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """Every result of a real workload is a setting, or one that the workload declares."""
    measure, real = running._measure, dict(workloads.WORKLOADS)

    def checked(experiment, *args):
        rows, name = measure(experiment, *args), experiment.workload
        for row in rows if workloads.WORKLOADS.get(name) == real.get(name) else ():
            assert set(row["results"]) <= {*row["settings"], *workloads.RESULTS[name]}
        return rows

    monkeypatch.setattr(running, "_measure", checked)


def quiet(_: str) -> None:
    pass


# The file


def test_lists_are_axes_and_cases_follow_each_other(write):
    assert [point.name for point in load_experiment(write()).points] == [
        "scheme=none, batch=1",
        "scheme=w8a16, batch=1",
        "scheme=none, batch=2",
        "scheme=w8a16, batch=2",
    ]
    cases = write(SPEED + '[[case]]\nscheme = "none"\n[[case]]\nbatch = 4\nkv_dtype = "int8"\n')
    experiment = load_experiment(cases)
    flats = [point.flat for point in experiment.points]
    assert [(f["batch"], f["scheme"], f["kv_dtype"]) for f in flats] == [
        (1, "none", None),
        (2, "none", None),
        (4, "none", "int8"),
        (4, "w8a16", "int8"),
    ]
    assert experiment.axes == ("scheme", "kv_dtype", "batch")
    assert experiment.seeds == (0, 1) and experiment.models["tiny"].name == "tiny"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("runs = 1", "runz = 1", "did you mean 'runs'?"),
        ("runs = 1", 'runs = "1"', "settings.runs = '1': expected int"),
        ("batch = [1, 2]", "batch = [1, 2.5]", "settings.batch = 2.5: expected int"),
        ("batch = [1, 2]", "batch = []", "settings.batch = []: an axis needs a value"),
        ("batch = [1, 2]", "batch = [1, 1]", "two points are the same"),
        ("runs = 1", "runs = 0", "runs = 0: must be at least 1"),
        ('workload = "speed"', 'workload = "sped"', "allowed values are quality, speed"),
        ('title = "Tiny"', "", "missing key 'title'"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seeds = [0, 0]"),
        ("seeds = [0, 1]", "seed = 1", "unknown key 'seed'; allowed: title, workload, settings"),
        ('"none", "w8a16"', '"w3a16"', "'w3a16' is not one of w8a16"),
        ("runs = 1", 'kv_dtype = "int3"', "settings.kv_dtype = 'int3': allowed values are float32"),
        ("runs = 1", 'method = "awk"', "settings.method = 'awk': allowed values are rtn, awq"),
        ("runs = 1", 'method = "awq"', "scheme 'none' quantizes nothing"),
        ('"none", "w8a16"', '"fp8-static"', "scheme = 'fp8-static': needs calibration"),
        ("runs = 1", "[[picture]]\nx = 1", "picture.x = 1: expected str"),
        ("runs = 1", '[[picture]]\nx = "batch"\ny = "z"\nby = ["q"]', "picture.by = 'q'"),
        ("d_ff = 64", "d_f = 64", "did you mean 'd_ff'?"),
        ("n_heads = 4", "n_heads = 3", "n_kv_heads = 2: must divide n_heads (3)"),
        ("runs = 1", "runs = ", "not a TOML file"),
    ],
)
def test_file_that_cannot_be_is_refused_by_name(write, capsys, old, new, said):
    text = SPEED + TINY
    assert old in text
    path = write(text.replace(old, new), models="")
    assert main(["experiment", path, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert path in error and said in error and len(error.strip().splitlines()) == 1


def test_method_must_fit_its_scheme(write):
    content = SPEED.replace('"speed"', '"quality"').replace(
        "runs = 1", 'text = "a"\nmethod = "awq"'
    )
    for key in ("batch = [1, 2]", "prompt_tokens = 8", "new_tokens = 4"):
        content = content.replace(key, "")
    with pytest.raises(JaxLlamaError, match="'awq' is for w4a16 or w8a16"):
        load_experiment(write(content.replace('"none", "w8a16"', '"w8a8"')))


def test_every_shipped_file_is_read_and_planned(capsys):
    names = sorted(path.stem for path in (configs_dir() / "experiments").glob("*.toml"))
    assert len(names) >= 5
    for name in names:
        experiment = load_experiment(name)
        assert experiment.title and experiment.pictures
        assert cost(experiment, experiment.points[-1]) is not None
        check_columns(experiment, workloads.RESULTS[experiment.workload])
    assert main(["experiment", "nothing"]) == 2
    assert f"shipped: {', '.join(names)}" in capsys.readouterr().err


# The run


@pytest.mark.core
def test_point_that_is_done_is_not_done_again(write, fake, tmp_path, monkeypatch):
    """Killed at the third of eight, continued, and run once more: eight measurements."""
    experiment, out = load_experiment(write()), tmp_path / "out"
    real = workloads.WORKLOADS["speed"]

    def killed(*args):
        if len(fake) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setitem(workloads.WORKLOADS, "speed", killed)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, out, quiet)
    assert len(fake) == 3 and not (out / "table.md").exists()
    monkeypatch.setitem(workloads.WORKLOADS, "speed", real)
    told = []
    run(experiment, out, told.append)
    assert len(fake) == len(set(fake)) == 8 and "3 of 8 are there already" in told[0]
    before = (out / "results.json").read_bytes()
    run(experiment, out, quiet)
    assert len(fake) == 8 and (out / "results.json").read_bytes() == before
    rows = json.loads(before)["rows"]
    assert [row["seed"] for row in rows] == [0] * 4 + [1] * 4  # seed by seed
    assert rows[5]["results"]["speed"] == 151.0 and rows[5]["settings"]["scheme"] == "w8a16"


def test_another_run_is_never_written_over(write, fake, tmp_path, monkeypatch):
    experiment, out = load_experiment(write()), tmp_path / "out"
    run(experiment, out, quiet)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for change in (("batch = [1, 2]", "batch = [1, 3]"), ("d_ff = 64", "d_ff = 96")):
        other = load_experiment(write((SPEED + TINY).replace(*change), models=""))
        assert other.digest != experiment.digest
        with pytest.raises(JaxLlamaError, match="holds a run with other (points|models)"):
            run(other, out, quiet)
    # Titles, tables and pictures are not what the numbers depend on.
    titled = load_experiment(write(SPEED.replace('"Tiny"', '"Title"')))
    assert titled.digest == experiment.digest
    machine = running.machine()
    monkeypatch.setattr(running, "machine", lambda: {**machine, "device": "H200"})
    with pytest.raises(JaxLlamaError, match="begun with device cpu, and this is H200"):
        run(experiment, out, quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(JaxLlamaError, match="not a run's directory"):
        run(experiment, tmp_path / "mine", quiet)
    assert len(fake) == 8
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


def test_default_directory_is_of_the_configuration(write, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write()
    assert main(["experiment", path, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["directory"] == f"runs/tiny-{load_experiment(path).digest}"
    assert len(got["rows"]) == 8 and got["title"] == "Tiny"
    config = json.loads((tmp_path / got["directory"] / "config.json").read_text())
    assert config["seeds"] == [0, 1] and config["points"][3]["batch"] == 2
    environment = json.loads((tmp_path / got["directory"] / "environment.json").read_text())
    assert environment["jax"] == jax.__version__ and environment["device"] == "cpu"


def test_changed_text_is_another_run(write, tmp_path, monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "quality", lambda *_: {"kl": 0.0})
    content = """
    title = "Text"
    workload = "quality"
    settings = { model = "tiny", text = "words.txt" }
    """
    experiment, out = load_experiment(write(content)), tmp_path / "out"
    with pytest.raises(JaxLlamaError, match=r"words\.txt: No such file"):
        run(experiment, out, quiet)
    (tmp_path / "words.txt").write_text("one")
    run(experiment, out, quiet)
    (tmp_path / "words.txt").write_text("two")
    with pytest.raises(JaxLlamaError, match="holds a run with other files"):
        run(experiment, out, quiet)


# What is shown


def test_the_guide_names_every_shipped_experiment_and_its_workload():
    page = Path(__file__).parents[2] / "docs" / "howto" / "experiment.md"
    named = dict(re.findall(r"^\| `([\w-]+)` \| .* \| `(\w+)` \|$", page.read_text(), re.M))
    files = {path.stem: load_experiment(path) for path in (configs_dir() / "experiments").glob("*")}
    assert named == {name: e.workload for name, e in files.items() if not name.endswith("-h200")}


def test_table_has_mean_and_spread_over_seeds(write, fake, tmp_path):
    table = '[table]\ncolumns = ["scheme", "batch", "speed", "words"]\n'
    experiment = load_experiment(write(SPEED + table))
    out = run(experiment, tmp_path / "out", quiet)
    lines = (out / "table.md").read_text().splitlines()
    assert lines[:3] == ["# Tiny", "", "| scheme | batch | speed | words |"]
    assert lines[4] == "| none | 1 | 100.5 ± 0.5 | none |"
    assert lines[7] == "| w8a16 | 2 | 250.5 ± 0.5 | w8a16 |"
    assert "model = tiny" in lines[9] and "batch" not in lines[9]
    assert lines[11].startswith("Means of seeds 0, 1; ± is half of the range")
    environment = json.loads((out / "environment.json").read_text())
    machine = (environment["device"], environment["system"], f"jax {jax.__version__}")
    assert lines[12] == f"Machine: {', '.join(machine)}, {environment['date'][:10]}."
    rows = json.loads((out / "results.json").read_text())["rows"]
    default = markdown(load_experiment(write()), rows, environment).splitlines()[2]
    assert default == "| scheme | batch | speed |"  # the axes, and the numbers


@pytest.mark.parametrize(
    "entries, shown",
    [
        ([16384], "16,384"),
        ([0.0001234], "0.0001234"),
        ([12345.6], "12,346"),
        ([None], ""),
        (["w8a16"], "w8a16"),
        ([True], "True"),
        ([1.0, 3.0], "2 ± 1"),
        ([2.0, 2.0], "2"),
    ],
)
def test_cells_are_written_as_people_do(entries, shown):
    assert cell(entries) == shown


@pytest.mark.parametrize(
    "addition, said",
    [
        ('[table]\ncolumns = ["sped"]\n', "table.columns = 'sped': allowed: model"),
        ('[[picture]]\nx = "batch"\ny = "sped"\n', "picture.y = 'sped'"),
    ],
)
def test_columns_and_pictures_must_name_what_is_there(
    write, fake, tmp_path, capsys, addition, said
):
    """A dry run says so, too; nothing is measured."""
    path, out = write(SPEED + addition), tmp_path / "out"
    for words in ([], ["--dry-run"]):
        assert main(["experiment", path, "--out", str(out), *words]) == 2
        error = capsys.readouterr().err
        assert f"{path}: {said}" in error and error.count("\n") == 1
    assert fake == [] and not out.exists()


def test_a_result_that_these_settings_do_not_have_ends_the_first_point(write, fake, tmp_path):
    addition = '[table]\ncolumns = ["later"]\n'
    with pytest.raises(JaxLlamaError, match="table.columns = 'later': allowed: model"):
        run(load_experiment(write(SPEED + addition)), tmp_path / "out", quiet)
    assert len(fake) == 1


def test_pictures_show_the_numbers(write, fake, tmp_path, monkeypatch):
    axes_module = pytest.importorskip("matplotlib.axes")
    drawn = {"errorbar": [], "plot": [], "bar": []}
    for name, calls in drawn.items():
        real = getattr(axes_module.Axes, name)

        def spy(self, x, y, *args, real=real, calls=calls, **kwargs):
            calls.append((list(x), list(y), kwargs.get("label")))
            return real(self, x, y, *args, **kwargs)

        monkeypatch.setattr(axes_module.Axes, name, spy)
    pictures = """
    [[picture]]
    x = "batch"
    y = "speed"
    by = ["scheme"]
    x_scale = "log"
    [[picture]]
    x = "at"
    y = "curve"
    by = ["scheme", "kv_dtype"]
    [[picture]]
    x = "words"
    y = "speed"
    """
    content = textwrap.dedent(SPEED) + textwrap.dedent(pictures)
    out = run(load_experiment(write(content)), tmp_path / "out", quiet)
    assert drawn["errorbar"][:2] == [
        ([1, 2], [100.5, 200.5], "none"),
        ([1, 2], [150.5, 250.5], "w8a16"),
    ]
    assert drawn["plot"][0] == ([1, 2, 3], [3, 2, 100.5], "none")
    assert drawn["bar"][0][0] == ["none", "w8a16", "none", "w8a16"]
    for name in ("1-speed-by-batch", "2-curve-by-at", "3-speed-by-words"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        drawing = (out / f"{name}.svg").read_text()
        assert "bars and bands reach from the smallest" in drawing and "Machine: " in drawing


@pytest.mark.core
def test_comparison_lists_what_exceeds_the_noise(write, tmp_path, monkeypatch):
    """Three seeds with a deviation of 1 around means that differ by 1 (noise) and by 10."""
    content = SPEED.replace("[0, 1]", "[0, 1, 2]").replace("batch = [1, 2]", "batch = 1")

    def measure(shift):
        return lambda e, s, seed, r: {
            "quiet": 100.0 + seed + shift,
            "loud": 100.0 + seed + 10 * shift,
            "same": 7,
        }

    experiment = load_experiment(write(content))
    for name, shift in (("a", 0), ("b", 1)):
        monkeypatch.setitem(workloads.WORKLOADS, "speed", measure(shift))
        run(experiment, tmp_path / name, quiet)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [(one.point, one.name) for one in found] == [
        ("scheme=none", "loud"),
        ("scheme=w8a16", "loud"),
    ]
    # Two samples of three with a variance of 1: t(4) at 99% is 4.604.
    assert found[0].noise == pytest.approx(4.604 * (2 / 3) ** 0.5)
    assert (found[0].a, found[0].b) == (101.0, 111.0)
    assert "| scheme=none | loud | 101 | 111 | 1.099 | 3.8 |" in text(found)
    assert "no difference" in text(compare(tmp_path / "a", tmp_path / "a"))


def test_comparison_of_single_seeds_says_that_noise_is_unknown(write, tmp_path, monkeypatch):
    content = SPEED.replace("[0, 1]", "[0]")
    experiment = load_experiment(write(content))
    for name, value in (("a", 1.0), ("b", 1.1)):
        monkeypatch.setitem(workloads.WORKLOADS, "speed", lambda *_, value=value: {"x": value})
        run(experiment, tmp_path / name, quiet)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert len(found) == 4 and found[0].noise is None and "unknown: one seed" in text(found)
    other = load_experiment(write(content.replace("batch = [1, 2]", "batch = 3")))
    run(other, tmp_path / "c", quiet)
    with pytest.raises(JaxLlamaError, match="no point in common"):
        compare(tmp_path / "a", tmp_path / "c")
    with pytest.raises(JaxLlamaError, match="not a finished run"):
        compare(tmp_path / "a", tmp_path / "d")


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "no experiment"),
        (["f.toml", "--compare", ".", "."], "--compare takes two runs"),
        (["--compare", ".", "/nowhere"], "--compare = /nowhere: no such folder"),
        (["/tmp"], "'/tmp' is no .toml file; shipped: batching, context, "),
        (["missing.toml"], "missing.toml: No such file"),
    ],
)
def test_words_that_cannot_be_are_refused(capsys, words, said):
    assert main(["experiment", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, said",
    [
        (('model = "tiny"', 'model = ["tiny", "smolm2-135m"]'), "unknown model 'smolm2-135m'"),
        (('model = "tiny"', 'model = ["tiny", "llama-9b/"]'), "unknown model 'llama-9b/'"),
        (('model = "tiny"', 'model = "smolm"\nrandom = true'), "'smolm' is not a preset"),
    ],
)
def test_what_would_stop_a_later_point_stops_the_first(write, fake, tmp_path, capsys, change, said):
    """Also of a dry run; nothing is measured, and nothing written."""
    path, out = write(SPEED.replace(*change)), tmp_path / "out"
    for words in ([], ["--dry-run"]):
        assert main(["experiment", path, "--out", str(out), *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert fake == [] and not out.exists()


def test_a_dry_run_misses_the_command_that_the_run_will_need(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["experiment", "gla-vs-llama", "--text", "bible", "--dry-run"]) == 2
    assert "the command `bible` is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (configs_dir() / "experiments").glob("*.toml"))
)
def test_a_shipped_experiment_finds_its_texts_in_the_package(monkeypatch, name):
    monkeypatch.setenv("PATH", "")
    experiment = load_experiment(name)
    for point in experiment.points:
        for key in FILES:
            path = getattr(point.settings, key, None)
            assert path in (None, "facts") or experiment.find(path).is_file()
        workloads._check_files(experiment, point.settings)


@pytest.mark.parametrize("name", ["gla-vs-llama", "linear-family"])
def test_a_text_of_one_s_own_takes_the_place_of_the_file_s(tmp_path, monkeypatch, name):
    (tmp_path / "own.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    own = str(tmp_path / "own.txt")
    before, after = load_experiment(name), load_experiment(name, "own.txt")
    texts = [point.settings.text for point in after.points]
    assert texts == [
        text if (text := point.settings.text) == "facts" else own for point in before.points
    ]
    assert {picture.where.get("text") for picture in after.pictures} <= {None, "facts", own}
    assert after.digest != before.digest
    with pytest.raises(JaxLlamaError, match="the experiment reads no text"):
        load_experiment("context", "own.txt")


# The plan


@pytest.fixture
def durations(monkeypatch):
    """What ``plan`` hears of each point that it measures: 1 s, 2 s, ..."""
    count = itertools.count(1)

    def duration(*_):
        seconds = float(next(count))
        return Duration(seconds, seconds / 2)

    monkeypatch.setattr(planning, "measured", duration)


def test_plan_knows_shapes_and_bytes(write, durations):
    experiment = load_experiment(write())
    plain, quantized = (cost(experiment, point) for point in experiment.points[:2])
    cfg = experiment.models["tiny"]
    params = seeded_params(cfg)
    assert plain.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert plain.weight_bytes == 4 * plain.parameters
    words = jax.eval_shape(lambda params: quantize_params(params, "w8a16"), params)
    assert quantized.weight_bytes == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(words)
    )
    # 5 held and 4 new tokens of 2 layers' keys and values, 2 heads of 8, float32.
    assert plain.cache_bytes == 2 * 2 * 9 * 2 * 8 * 4
    said = plan(experiment, experiment.path.parent / "out")
    assert "4 points x 2 seeds of 'speed'" in said
    assert "scheme=none, batch=2: 2 attention layers of 32; 0.0 M parameters" in said
    # Two kinds, of which one point each is measured; the others' bounds are microseconds longer.
    assert said.count("; about 1.0 s\n") == said.count("; about 2.0 s\n") == 2
    assert "\nabout 9.0 s in all" in said
    assert not os.path.exists(experiment.path.parent / "out")


def test_a_dry_run_shows_the_point_that_it_measures(write, monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    monkeypatch.setattr(planning, "measured", lambda *_: time.sleep(0.3) or Duration(1.0, 1.0))
    experiment = load_experiment(write())
    plan(experiment, experiment.path.parent / "out")
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("timing a piece")]
    assert line == "timing a piece of each: 0 of 4 points, 0 s: scheme=w8a16, batch=1"


def test_plan_does_not_guess_how_long_calibration_takes(write, durations):
    content = """
    title = "Quality"
    workload = "quality"
    [settings]
    model = "tiny"
    text = "words.txt"
    scheme = "w8a16"
    method = ["rtn", "gptq"]
    """
    experiment = load_experiment(write(content))
    *_, rtn, gptq, _, total = plan(experiment, experiment.path.parent / "out").splitlines()
    assert rtn.endswith("; about 1.0 s") and gptq.endswith("time unknown (calibration)")
    assert total.startswith("about 1.0 s") and total.endswith("without 1 points that calibrate")


def test_plan_says_the_memory_of_each_place(write, durations):
    content = """
    title = "Offload"
    workload = "offload"
    [settings]
    model = "tiny"
    random = true
    policy = ["100 0 100 0 100 0", "0 100 100 0 100 0", "0 0 100 0 100 0"]
    """
    experiment = load_experiment(write(content))
    said = plan(experiment, experiment.path.parent / "out")
    needs = [workloads.offload_need(experiment, point.settings) for point in experiment.points]
    places = [(need.device, need.host, need.disk) for need in needs]
    for line, need in zip(said.splitlines()[3:], places, strict=False):
        words = ("on the device", "in host memory", "on disk")
        text = ", ".join(f"{word} {size(part)}" for word, part in zip(words, need, strict=True))
        assert f"{text}; " in line
    assert places[0][1:] == (0, 0) and places[1][1] > 0 == places[1][2] and places[2][2] > 0


def test_a_piece_too_large_for_this_machine_is_not_run(write, durations, monkeypatch):
    """Neither one that takes long, nor one that fills the memory."""
    path = write()
    for name, value in (("_LONGEST", 0.0), ("available_memory", lambda: 1)):
        with monkeypatch.context() as patch:
            patch.setattr(planning, name, value)
            said = plan(load_experiment(path), Path("out"))
        assert said.count("; at least ") == 4 and "about" not in said
        assert "4 points without loading and compiling" in said


MEASURES = {
    "quality": 'text = "words.txt"\nwindow = 33\nmax_tokens = 97\ndecode_tokens = 4',
    "speed": "prompt_tokens = 8\nnew_tokens = 9\nruns = 3",
    "train": 'text = "words.txt"\nsteps = 40\nbatch_size = 2\nsequence_length = 16\n'
    "learning_rate = 0.01",
    "offload": 'policy = "100 0 100 0 100 0"\nprompt_tokens = 8\nnew_tokens = 11',
    "serve": "requests = 5\nslots = 2\nprompt_tokens = 4\nnew_tokens = 5",
    "learn": 'text = "facts"\nlearning_rates = [1e-3]\nsteps = 40\nbatch_size = 2\n'
    "sequence_length = 16\nfacts = [2, 4]\ndistances = [4]\ntrials = 64",
}


@pytest.fixture
def measuring(write, tmp_path):
    """measuring(workload) -> an experiment of one point of the tiny model and three seeds"""

    def make(workload: str):
        (tmp_path / "words.txt").write_text("to be or not to be, that is the question. " * 9)
        head = f'title = "T"\nworkload = "{workload}"\nseeds = [0, 1, 2]\n[settings]\n'
        return load_experiment(write(head + 'model = "tiny"\n' + MEASURES[workload]))

    return make


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def takes(self, result, *seconds):
        """A function that takes the next of the seconds at each call, the last ones for ever."""
        left = list(seconds)

        def call(*_, **__):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return result

        return call


@dataclasses.dataclass(frozen=True)
class FakeModel:
    config: Any
    params: tuple = ()
    exact: bool = True


class FakeDecoding:
    """Compiling takes 5 s, then 1 s; a prompt 2 s, a decode step 3 s."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.compiles = clock, iter((5.0, 1.0))

    def prefilled(self, *_):
        self.clock.now += 2.0
        return 0, 2.0

    def compile(self, _):
        seconds = next(self.compiles)
        self.clock.now += seconds
        return SimpleNamespace(compile_seconds=seconds)

    def run(self, _, until):
        self.clock.now += 3.0 * (until - 1)
        return 3.0 * (until - 1)


BENCH = 7 * (2 + 3 * 3 + 2)  # runs and warm-ups of a prompt, three steps, a prompt
EXPECTED = {
    # Models 10 s, three windows of 1 s, 4 s of compiling; then the decoding of four tokens.
    "quality": (10 + 4 + 3 + 2 + 5 + BENCH, 10 + 3 + 4 + 1 + BENCH),
    # Five runs and warm-ups of a prompt, eight steps, a prompt.
    "speed": (10 + 2 + 5 + 5 * (2 + 8 * 3 + 2), 10 + 4 + 1 + 5 * (2 + 8 * 3 + 2)),
    # Twice a prompt and ten steps, and a prompt alone: 2 s and 3 s.
    "offload": (10 + 3 * 2 + 2 * 10 * 3 + 4, 10 + 3 * 2 + 2 * 10 * 3),
    # 40 and 2 x 20 steps, two to a call of 1 s; three seeds of two and one recalls of 64 rows.
    "learn": (4 + (40 + 2 * 20) / 2 + 1 + 2 * 3 * 3, 0),
}


@pytest.mark.core
@pytest.mark.parametrize("workload", EXPECTED)
def test_a_piece_is_counted_as_often_as_the_work_has_it(measuring, monkeypatch, workload):
    clock, lm = Clock(), FakeModel(SimpleNamespace(max_position=64))
    monkeypatch.setattr(estimate, "time", clock)
    monkeypatch.setattr(estimate, "perplexity", clock.takes(0, 5.0, 1.0))
    monkeypatch.setattr(estimate, "Decoding", lambda *_: FakeDecoding(clock))
    generated = SimpleNamespace(generate=lambda _, new, **__: generate(new))
    compiling = clock.takes(0, 4.0, 0.0)

    def generate(new):
        compiling()
        clock.now += 2.0 + 3.0 * (new - 1)

    for module, name, call in (
        (workloads, "quality_models", clock.takes((lm, lm), 10.0)),
        (workloads, "speed_model", clock.takes(lm, 10.0)),
        (workloads, "offload_task", clock.takes((generated, []), 10.0)),
        (learning, "first_state", clock.takes(0, 0.0)),
        (learning, "steps", clock.takes(([{}], 0), 5.0, 1.0)),
        (learning, "said_after", clock.takes(0, 2.0, 1.0)),
    ):
        monkeypatch.setattr(module, name, call)
    experiment = measuring(workload)
    found = measured(experiment, experiment.points[0].settings)
    assert (found.first, found.later) == EXPECTED[workload]
    assert found.of(3) == found.first + 2 * found.later


@pytest.mark.slow
@pytest.mark.parametrize("workload", MEASURES)
def test_a_piece_of_every_workload_runs(measuring, workload):
    experiment = measuring(workload)
    found = measured(experiment, experiment.points[0].settings)
    assert found.first > 0 and found.later >= 0


# The workloads


def test_quality_is_what_evaluate_says(write, tmp_path):
    (tmp_path / "words.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    content = """
    title = "Quality"
    workload = "quality"
    [settings]
    model = "tiny"
    text = "words.txt"
    window = 32
    max_tokens = 60
    scheme = "w8a16"
    """
    experiment = load_experiment(write(content))
    out = run(experiment, tmp_path / "out", quiet)
    [row] = json.loads((out / "results.json").read_text())["rows"]
    cfg, tokenizer = experiment.models["tiny"], Tokenizer.byte_level()
    params = random_params(cfg, jax.random.key(0))
    plain = LanguageModel(cfg, params, tokenizer)
    rounded = LanguageModel(cfg, quantize_params(params, "w8a16"), tokenizer, exact=True)
    text = (tmp_path / "words.txt").read_text()
    want = perplexity(rounded, text, 32, reference=plain, max_tokens=60)
    for key in ("perplexity", "kl", "top1", "tokens"):
        assert row["results"][key] == want[key]
    assert 0 < row["results"]["kl"] < 0.01
    assert row["results"]["weight_megabytes"] == pytest.approx(
        sum(leaf.nbytes for leaf in jax.tree.leaves(rounded.params)) / 1e6
    )


@pytest.mark.slow
def test_speed_raises_the_context_of_random_weights(write, tmp_path):
    """The preset ends at 64 positions, which random weights know nothing of."""
    content = SPEED.replace("batch = [1, 2]", "context = 200").replace("[0, 1]", "[0]")
    content = content.replace('["none", "w8a16"]', '"w8a16"')
    out = run(load_experiment(write(content)), tmp_path / "out", quiet)
    [row] = json.loads((out / "results.json").read_text())["rows"]
    results = row["results"]
    assert results["cache_megabytes"] * 1e6 == 2 * 2 * 204 * 2 * 8 * 4
    assert results["decode_tokens_per_second"] > 0 and "peak_rss_bytes" not in results
    assert not set(results) & set(row["settings"])


def test_train_gives_curves_of_every_seed(write, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question. " * 40)
    content = """
    title = "Train"
    workload = "train"
    seeds = [0, 1]
    [settings]
    model = "tiny"
    text = "words.txt"
    steps = 6
    batch_size = 2
    sequence_length = 16
    learning_rate = 0.01
    validate_every = 3
    data.validation_tokens = 100
    [[picture]]
    x = "tokens"
    y = "loss"
    """
    out = run(load_experiment(write(content)), tmp_path / "out", quiet)
    rows = json.loads((out / "results.json").read_text())["rows"]
    for row in rows:
        results = row["results"]
        assert results["tokens"] == [32 * step for step in range(1, 7)]
        assert len(results["loss"]) == 6 and results["final_loss"] == results["loss"][-1]
        assert results["validation_tokens"] == [96, 192]
        assert results["final_validation_loss"] < np.log(256) + 0.1
    curves = [row["results"]["loss"] for row in rows]
    assert curves[0] != curves[1] and abs(statistics.mean(curves[0]) - np.log(256)) < 1


def test_train_refuses_what_contradicts_the_file(write):
    content = """
    title = "Train"
    workload = "train"
    [settings]
    model = "tiny"
    steps = 6
    batch_size = 2
    sequence_length = 16
    learning_rate = 0.01
    """
    for addition, said in (
        ("", "exactly one of text and data.tokens"),
        ('text = "a"\ndata.tokens = "b"', "exactly one of text and data.tokens"),
        ('text = "a"\nseed = 1', "settings.seed"),
        ('text = "a"\nstep = 1', "unknown key 'step'"),
        ('text = "a"\ntokenizer = 1', "settings.tokenizer = 1: expected str"),
    ):
        with pytest.raises(JaxLlamaError, match=said):
            load_experiment(write(content + textwrap.indent(addition, "    ") + "\n"))


@pytest.mark.slow
def test_offload_says_speed_and_places(write, tmp_path):
    content = """
    title = "Offload"
    workload = "offload"
    [settings]
    model = "tiny"
    policy = "0 100 100 0 100 0 gpu_batch_size=2"
    batch = 2
    prompt_tokens = 8
    new_tokens = 3
    """
    experiment = load_experiment(write(content))
    out = run(experiment, tmp_path / "out", quiet)
    [row] = json.loads((out / "results.json").read_text())["rows"]
    results = row["results"]
    matrices = [
        leaf for leaf in jax.tree.leaves(param_shapes(experiment.models["tiny"])) if leaf.ndim >= 2
    ]
    assert results["host_megabytes"] * 1e6 == sum(4 * leaf.size for leaf in matrices)
    assert results["tokens_per_second"] > 0 and results["disk_megabytes"] == 0
    with pytest.raises(JaxLlamaError, match="expected six percentages"):
        load_experiment(write(content.replace("0 100 100", "0 100")))


@pytest.mark.slow
def test_every_point_of_the_quantization_experiment_runs_on_a_tiny_model(write, tmp_path):
    """The shipped file: its schemes, methods and caches, on a smaller model and a shorter text."""
    content = (configs_dir() / "experiments" / "quantization.toml").read_text(encoding="utf-8")
    for old, new in (
        ('"smollm2-135m"', '"tiny"'),
        ('"../texts/test.txt"', json.dumps(str(configs_dir() / "texts" / "test.txt"))),
        ("max_tokens = 6144", "max_tokens = 120\nwindow = 60\ncalibration_window = 60"),
        ("calibration_samples = 32", "calibration_samples = 4"),
        ("decode_tokens = 17", "decode_tokens = 2"),
    ):
        assert old in content
        content = content.replace(old, new)
    experiment = load_experiment(write(content))
    out = run(experiment, tmp_path / "out", quiet)
    rows = json.loads((out / "results.json").read_text())["rows"]
    kl = {row["point"]: row["results"]["kl"] for row in rows}
    floats = "scheme=none, method=rtn, kv_dtype=None"
    assert len(kl) == len(experiment.points) > 10 and abs(kl.pop(floats)) < 1e-9
    assert all(0 < value < 0.1 for value in kl.values())
    assert (out / "1-kl-by-weight_megabytes.png").exists()


SERVE = """
title = "Serve"
workload = "serve"
[settings]
model = "tiny"
batching = ["continuous", "whole"]
requests = 5
slots = 2
prompt_tokens = 4
new_tokens = 6
"""


def test_serve_gives_every_answer_its_tokens(write, tmp_path, monkeypatch):
    """A whole batch waits for its longest answer; a slot of the engine takes the next prompt."""
    asked: list[tuple[int, int]] = []
    generate = LanguageModel.generate

    def noted(self, prompts, new_tokens, **how):
        asked.append((len(prompts), new_tokens))
        return generate(self, prompts, new_tokens, **how)

    monkeypatch.setattr(LanguageModel, "generate", noted)
    experiment = load_experiment(write(SERVE))
    _, _, lengths = workloads.serve_task(experiment, experiment.points[0].settings, 0)
    assert len(lengths) == 5 and min(lengths) >= 1 and max(lengths) <= 6
    out = run(experiment, tmp_path / "out", quiet)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["point"] for row in rows] == ["batching=continuous", "batching=whole"]
    for row in rows:
        found = row["results"]
        assert found["tokens_per_second"] == pytest.approx(sum(lengths) / found["seconds"])
        assert 0 < found["request_seconds"] <= found["seconds"]
    batches = [(2, max(lengths[:2])), (2, max(lengths[2:4])), (1, lengths[4])]
    assert asked == 2 * batches


def test_quality_by_sparsity_and_under_a_policy(write, tmp_path):
    """A policy alone changes nothing; its 4-bit cache and a sparsity do."""
    (tmp_path / "words.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    content = """
    title = "Sparsity"
    workload = "quality"
    [settings]
    model = "tiny"
    dtype = "float32"
    text = "words.txt"
    window = 60
    [[case]]
    attn_sparsity = [1.0, 0.1]
    [[case]]
    scheme = ["none", "w8a16"]
    policy = "0 100 100 0 100 0"
    [[case]]
    policy = "0 100 100 0 100 0 compress_cache=true"
    """
    experiment = load_experiment(write(content))
    out = run(experiment, tmp_path / "out", quiet)
    rows = json.loads((out / "results.json").read_text())["rows"]
    kl = [row["results"]["kl"] for row in rows]
    assert abs(kl[0]) < 1e-9 and abs(kl[2]) < 1e-7  # other programs round in another way
    assert min(kl[1], kl[3], kl[4]) > 10 * abs(kl[2])
    weights = [row["results"]["weight_megabytes"] for row in rows]
    assert weights[0] == weights[2] and weights[3] < 0.7 * weights[2]


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["speed", "offload", "serve"])
def test_drafts_are_settings(write, tmp_path, monkeypatch, workload):
    few = functools.partial(workloads.run_drafts, prompts=1)
    monkeypatch.setattr(workloads, "run_drafts", lambda *a, **how: few(*a, **{**how, "prompts": 1}))
    head = f'title = "T"\nworkload = "{workload}"\n[settings]\nmodel = "tiny"\n'
    more = "" if workload == "speed" else MEASURES[workload] + "\n"
    runs = "new_tokens = 4\nruns = 1\n" if workload == "speed" else ""
    text = f'{head}{more}{runs}draft = ["ngram", "layers=1"]\n'
    if workload == "offload":
        with pytest.raises(JaxLlamaError, match="draft = 'layers=1': the layers are offloaded"):
            load_experiment(write(text))
        text = text.replace("layers=1", "tiny")
    experiment = load_experiment(write(text))
    out = run(experiment, tmp_path / "out", quiet)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert all(row["results"]["tokens_per_second"] > 0 for row in rows) and len(rows) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("attn_sparsity = 0.0", "attn_sparsity = 0.0: must be in (0, 1]"),
        ("draft_tokens = 3", "draft_tokens = 3: needs a draft"),
        ("slots = 0", "slots = 0: must be at least 1"),
        ('batching = "some"', "settings.batching = 'some'"),
    ],
)
def test_settings_of_serve_that_cannot_be_are_refused(write, line, said):
    with pytest.raises(JaxLlamaError, match=re.escape(said)):
        key = line.partition(" ")[0]
        lines = [one for one in SERVE.splitlines() if not one.startswith(f"{key} ")]
        load_experiment(write("\n".join([*lines, line])))
