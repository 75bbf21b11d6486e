"""Calibrated quantization of whole models: what methods recover, resuming, checkpoints, errors.

The model is small, and its weights come in two shapes, since compilation is what these tests cost.
Oracles: the float model itself, an uninterrupted run, and round-to-nearest on the same tokens.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pydoc
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.save import flatten
from jaxllama.cli.main import main
from jaxllama.evaluation.perplexity import perplexity
from jaxllama.evaluation.speed.harness import bytes_per_step
from jaxllama.language_model import LanguageModel
from jaxllama.quantization import calibration, gptq
from jaxllama.quantization.checkpoint import QuantizeRequest, quantize_checkpoint, table
from jaxllama.quantization.pipeline import calibrate
from jaxllama.quantization.scheme import is_packed, parse
from jaxllama.quantization.work import QuantizeWork
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.qtensor import QTensor, tree_bytes
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.models import FAMILIES, LLAMA, relative_error, tokens_of
from tests.helpers.packed_oracle import floats_of
from tests.helpers.seeded import seeded_params

TEXT = (Path(__file__).parents[1] / "golden" / "english.txt").read_text(encoding="utf-8")
CFG = LLAMA.replace(
    vocab_size=256, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=64, max_position=512
)


def planted(size: float) -> LanguageModel:
    """A model some of whose channels are ``size`` times larger behind a norm and met by weights as
    much smaller: the same function as without, and hard to quantize."""
    params = seeded_params(CFG)
    channels = np.random.default_rng(1).choice(CFG.d_model, 16, replace=False)
    for index in range(CFG.n_layers):
        layer = params[f"layer_{index}"]
        for norm, room, reader in (("mixer_norm", "mixer", "qkv"), ("mlp_norm", "mlp", "gate_up")):
            layer[norm]["weight"][channels] *= np.float32(size)
            layer[room][reader]["weight"][:, channels] /= np.float32(size)
    return LanguageModel(CFG, jax.device_put(params), Tokenizer.byte_level())


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return planted(50.0)


@pytest.fixture(scope="module")
def tokens(lm) -> np.ndarray:
    return calibration.windows(lm.tokenizer, TEXT, 128, 12)


def same(one, two) -> bool:
    """Equal trees, bit for bit."""
    a, b = jax.tree.leaves(one), jax.tree.leaves(two)
    return jax.tree.structure(one) == jax.tree.structure(two) and all(
        x.dtype == y.dtype and np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def made(lm, tokens):
    """Calibrated parameters and errors by (scheme, method), each made once."""
    done = {}

    def make(scheme: str, method: str):
        if (scheme, method) not in done:
            done[scheme, method] = calibrate(CFG, lm.params, tokens, parse(scheme), method)
        return done[scheme, method]

    return make


def kl_of(lm: LanguageModel, params) -> float:
    quantized = dataclasses.replace(lm, params=params)
    return perplexity(quantized, TEXT, 128, reference=lm)["kl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("w4a16", "awq"),
        ("w8a8", "smoothquant"),
        ("w8a8", "gptq"),
    ],
)
def test_planted_outliers_are_recovered(lm, made, scheme, method):
    """At least four fifths of what rounding to nearest costs, measured as KL to the float model."""
    nearest, _ = made(scheme, "rtn")
    got, _ = made(scheme, method)
    assert kl_of(lm, got) < 0.2 * kl_of(lm, nearest)


@pytest.mark.slow
def test_smoothquant_halves_the_errors_behind_norms(made):
    """There the outliers are; KL is as the square of these errors."""
    nearest, got = made("w8a8", "rtn")[1], made("w8a8", "smoothquant")[1]
    for one, other in zip(got, nearest, strict=True):
        assert one["weight"] == other["weight"]
        if one["weight"].endswith(("qkv", "gate_up")):
            assert one["output_error"] < 0.45 * other["output_error"], one["weight"]


def column_by_column(weight: np.ndarray, hessian: np.ndarray, grid: QTensor) -> np.ndarray:
    """Return GPTQ's codes on ``grid``'s scales and zeros, by the equations of its docstring in
    float64: no blocks of columns, and an explicit inverse."""
    h = hessian.astype(np.float64)
    order = np.argsort(-np.diagonal(h), kind="stable")
    h = h + gptq.DAMPING * np.mean(np.diagonal(h)) * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T
    rows = weight.astype(np.float64)[:, order]
    scale, zero = (
        np.repeat(np.asarray(part, np.float64), rows.shape[1] // part.shape[1], axis=1)[:, order]
        for part in (grid.scale, grid.zero)
    )
    codes = np.zeros(rows.shape)
    for j, column in enumerate(order):
        code = np.clip(np.rint(rows[:, j] / scale[:, j] + zero[:, j]), -8, 7)
        error = (rows[:, j] - (code - zero[:, j]) * scale[:, j]) / upper[j, j]
        rows[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
        codes[:, column] = code
    return codes


def test_gptq_is_its_equations_whole_and_in_parts(monkeypatch):
    """Three blocks of 64 columns. A code whose float32 value is near a border may differ, and moves
    the later columns of its row a little; without one block's errors an eighth of them differ."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(50, 192)).astype(np.float32)
    x = rng.normal(size=(256, 8)) @ rng.normal(size=(8, 192)) + 0.5 * rng.normal(size=(256, 192))
    hessian = (x.T @ x).astype(np.float32)
    shrink = np.full((50, 6), 0.9, np.float32), np.full((50, 6), 0.95, np.float32)
    how = {"shrink": shrink, "grid": ("int4", 32, True)}
    whole = gptq.gptq(weight, hessian, **how)
    same_codes = np.asarray(whole.q).astype(int) == column_by_column(weight, hessian, whole)
    assert same_codes.mean() > 0.99
    monkeypatch.setattr(gptq, "_ROWS", 20)
    parts = gptq.gptq(weight, hessian, **how)
    assert np.array_equal(whole.q, parts.q) and np.array_equal(whole.zero, parts.zero)
    assert np.array_equal(whole.scale, parts.scale)


def test_gptq_is_nearer_than_rounding_at_every_weight(made):
    nearest, got = made("w4a16", "rtn")[1], made("w4a16", "gptq")[1]
    assert [entry["weight"] for entry in got] == [entry["weight"] for entry in nearest]
    assert len(got) == 4 * CFG.n_layers + 1  # and the head
    for one, other in zip(got, nearest, strict=True):
        assert one["output_error"] < other["output_error"], one["weight"]


def test_rtn_is_quantize_params_and_its_errors_are_what_they_say(lm, made, tokens):
    assert same(made("w8a8", "rtn")[0], jl.quantize_params(lm.params, "w8a8"))
    params, errors = made("w4a16", "rtn")  # its grids are fitted to the text
    # The first weight's inputs are those of the float model: an independent way to its error.
    floats = jax.tree.map(np.asarray, lm.params)
    weight = floats["layer_0"]["mixer"]["qkv"]["weight"]
    off = floats_of(params["layer_0"]["mixer"]["qkv"]["weight"]).astype(np.float64) - weight
    assert errors[0]["weight"] == "layer_0/mixer/qkv"
    want = np.linalg.norm(off) / np.linalg.norm(weight)
    assert errors[0]["weight_error"] == pytest.approx(want, rel=1e-4)
    x = floats["embed"]["weight"][tokens.reshape(-1)].astype(np.float64)
    x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + CFG.norm_eps)
    x = x * floats["layer_0"]["mixer_norm"]["weight"]
    want = np.linalg.norm(x @ off.T) / np.linalg.norm(x @ weight.astype(np.float64).T)
    # The report looks at 512 tokens of these 1536.
    assert errors[0]["output_error"] == pytest.approx(want, rel=0.1)


def test_a_static_scale_covers_every_calibration_token(lm, tokens):
    params, errors = calibrate(CFG, lm.params, tokens, parse("none,layer_0/*=fp8-static"), "rtn")
    words = params["layer_0"]["mixer"]["qkv"]["weight"]
    assert words.activations == "float8_e4m3fn" and len(errors) == 4
    h = calibration.embed(CFG, lm.params, tokens)
    stats = calibration.observe(CFG.layers[0], lm.params["layer_0"], h, hessian=False)
    assert float(words.input_scale) * 448 == pytest.approx(float(stats["mixer/qkv"].peak.max()))
    assert isinstance(params["layer_1"]["mixer"]["qkv"]["weight"], jax.Array)


def test_second_moments_are_those_of_the_tokens_whatever_the_batches(lm, tokens):
    h = calibration.embed(CFG, lm.params, tokens)
    assert len(h) == 2  # of 6 windows each
    layer = lm.params["layer_0"]
    parts = calibration.observe(CFG.layers[0], layer, h, hessian=True)["mlp/down"]
    whole = [as_jax(np.concatenate(h))]
    whole = calibration.observe(CFG.layers[0], layer, whole, hessian=True)
    whole = whole["mlp/down"]
    for name in ("hessian", "total", "felt", "peak"):  # float32 sums in another order
        assert relative_error(getattr(parts, name), getattr(whole, name)) < 1e-5
    assert parts.sample.shape == whole.sample.shape == (512, CFG.d_ff)


@pytest.mark.slow
def test_gla_layers_are_scaled_and_folded_too():
    cfg = FAMILIES["gla"].replace(n_layers=1, layer_types=("gla",), tie_embeddings=True)
    params = jax.device_put(seeded_params(cfg))
    tokens = np.asarray(tokens_of(cfg, 2, 16))
    got, errors = calibrate(cfg, params, tokens, parse("none,mixer=w8a16"), "awq")
    assert [entry["weight"].split("/")[-1] for entry in errors] == ["q", "k", "v", "g", "o"]
    before, after = (tree["layer_0"]["mixer"]["gk_0"]["weight"] for tree in (params, got))
    assert not np.array_equal(before, after) and not isinstance(after, QTensor)
    lengths = as_jax([16, 16])
    want = jl.logits(cfg, params, as_jax(tokens), lengths)
    # 8 bits: a step is 1/127 of a row's largest weight; five weights one behind the other.
    assert relative_error(jl.logits(cfg, got, as_jax(tokens), lengths), want) < 0.02


# Resuming


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_to_the_same_bits(lm, tokens, made, tmp_path, monkeypatch):
    plan, work = parse("w4a16"), QuantizeWork(tmp_path / "work")

    def die(_: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        calibrate(CFG, lm.params, tokens, plan, "gptq", work=work, progress=die)
    assert [path.name for path in sorted(work.folder.iterdir())] == [
        "hidden-layer_1.npz",
        "layer_0.npz",
    ]
    (work.folder / "layer_1.npz.partial").write_bytes(b"it was being written")
    seen = []
    observe = calibration.observe

    def spy(part, layer, *args, **kwargs):
        seen.append(layer)
        return observe(part, layer, *args, **kwargs)

    monkeypatch.setattr("jaxllama.quantization.pipeline.observe", spy)
    params, errors = calibrate(CFG, lm.params, tokens, plan, "gptq", work=work)
    assert len(seen) == CFG.n_layers - 1 + 1  # not layer 0; the head
    want, want_errors = made("w4a16", "gptq")
    assert same(params, want) and errors == want_errors


def test_a_stored_layer_keeps_every_dtype(tmp_path):
    leaf = QTensor(
        as_jax([[-8, 7]], jnp.int4),
        as_jax([[0.5]], jnp.float16),
        as_jax([[3]], jnp.int8),
        activations="int8",
        input_scale=jnp.float32(2),
    )
    fp8 = QTensor(as_jax([[1.5, -448]], jnp.float8_e4m3fn), as_jax([[2.0]], jnp.bfloat16))
    layer = {"a": {"weight": leaf, "bias": jnp.ones((1,), jnp.bfloat16)}, "b": {"weight": fp8}}
    work = QuantizeWork(tmp_path)
    work.save("layer_0", layer, [{"weight": "a"}], "layer_1", [jnp.ones((2, 3))])
    got, entries = work.load("layer_0")
    assert same(got, layer) and entries == [{"weight": "a"}]
    assert got["a"]["weight"].activations == "int8" and work.load("layer_1") is None
    (tmp_path / "layer_0.npz").write_bytes(b"half")
    with pytest.raises(jl.JaxLlamaError, match="not a finished layer"):
        work.load("layer_0")


# The command


@pytest.fixture(scope="module")
def model(lm, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    files = lm.tokenizer.save(folder)
    return hf.save(folder / "tiny", CFG, lm.params, files)


def with_float32_scales(params):
    """The tree as a native file has it: float32 scales, of the values that float16 holds."""
    return jax.tree.map(
        lambda w: dataclasses.replace(w, scale=w.scale.astype(jnp.float32)) if is_packed(w) else w,
        params,
        is_leaf=is_packed,
    )


def test_the_command_makes_what_calibrate_makes(lm, model, tokens, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    out, report = tmp_path / "sub" / "out", tmp_path / "errors.json"
    words = [
        "--model",
        str(model),
        "--scheme",
        "w4a16",
        "--method",
        "awq",
        "--out",
        str(out),
        "--calibration",
        str(text),
        "--samples",
        "12",
        "--window",
        "128",
    ]
    assert main(["quantize", *words, "--report", str(report), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    want, errors = calibrate(CFG, lm.params, tokens, parse("w4a16"), "awq", scale_dtype=jnp.float16)
    want = with_float32_scales(want)
    assert (got["calibration_tokens"], got["layers_kept"]) == (12 * 128, 0)
    assert got["errors"] == json.loads(report.read_text())["errors"] == errors
    assert got["bytes"] < 0.4 * got["float_bytes"] and got["peak_rss_bytes"] > 0
    assert same(jl.load(out, exact=True).params, want)
    # Nothing but the checkpoint and the report is left.
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    assert main(["quantize", *words]) == 2
    assert "already exists; nothing is overwritten" in capsys.readouterr().err


# Runs the command, and dies by its own SIGKILL instead of the n-th renaming of a stored file.
DYING = """
import os, signal, sys
from pathlib import Path
from jaxllama.cli.main import main
replace, left = os.replace, int(sys.argv[1])

def dying(source, target):
    global left
    left -= Path(target).suffix == ".npz"
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = dying
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def command(model, tmp_path_factory) -> list[str]:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return [
        "quantize",
        "--model",
        str(model),
        "--scheme",
        "w4a16",
        "--method",
        "gptq",
        "--json",
        "--calibration",
        str(text),
        "--samples",
        "12",
        "--window",
        "128",
        "--out",
    ]


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory) -> dict[str, bytes]:
    """The files of a run that nothing befell."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert main([*command, str(out)]) == 0
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("renames", [3, 4], ids=["within layer 1", "before its last rename"])
def test_a_process_that_was_killed_is_taken_up_by_another(
    command, whole, renames, tmp_path, capsys
):
    """SIGKILL while layer 1 is stored: none of its files is in place, or the first of two; the
    next process makes the same bytes."""
    out = tmp_path / "out"
    killed = [sys.executable, "-c", DYING, str(renames), *command, str(out)]
    done = subprocess.run(killed, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    (work,) = tmp_path.glob(".out.*")
    assert [path.name for path in work.glob("layer_*.npz")] == ["layer_0.npz"]
    assert len(list(work.glob("*.partial"))) == 1
    capsys.readouterr()
    assert main([*command, str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["layers_kept"] == 1
    assert not work.exists()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole


@pytest.mark.parametrize("format", ["awq", *slow("compressed-tensors", "gptq")])
def test_what_is_exported_is_what_was_calibrated(lm, tokens, format, tmp_path):
    """Rounding to nearest is enough to see that scales go to the file as words were made for."""
    plan = "w4a16,head=none"
    request = QuantizeRequest(tmp_path / "out", plan, "rtn", format, TEXT, 12, 128)
    quantize_checkpoint(lm, request)
    got = jl.load(tmp_path / "out", exact=True)
    scales = jnp.float32 if format == "compressed-tensors" else jnp.float16
    want, _ = calibrate(CFG, lm.params, tokens, parse(plan), "rtn", scale_dtype=scales)
    is_near(got.params, want)


def is_near(got, want) -> None:
    """Trees that stand for the same floats; a format may store a scale and a zero in other ways."""
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        assert relative_error(floats_of(got[path]), floats_of(leaf)) < 1e-6, path


def broken(lm: LanguageModel) -> LanguageModel:
    layer = lm.params["layer_1"]
    weight = np.array(layer["mlp"]["gate_up"]["weight"])
    weight[3, 3] = np.nan
    layer = {**layer, "mlp": {**layer["mlp"], "gate_up": {"weight": weight}}}
    return dataclasses.replace(lm, params={**lm.params, "layer_1": layer})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": " \n"}, "the calibration text is empty"),
        ({"text": "a"}, "the calibration text has 1 tokens"),
        ({"scheme": "w4a16-g48"}, "groups of 48 do not divide its 64 inputs"),
        ({"scheme": "w8a8", "method": "awq"}, "'awq' is for w4a16"),
        ({"window": 4096}, "the context is 512 tokens"),
        ({"window": 1}, "window = 1: must be at least 2"),
        ({"samples": -1}, "samples = -1: must be at least 0"),
        ({"samples": 0, "method": "gptq"}, "samples = 0: gptq needs at least 1"),
        ({"samples": 0, "report": (Path("x.json"),)}, "samples = 0: a report needs at least 1"),
        ({"scheme": "w8a8", "format": "awq"}, "layer_0/mixer/qkv/weight: it has no int8 activ"),
        ({"scheme": "w4a16,down=w8a16", "format": "awq"}, "down/weight: it has no int8 codes"),
        ({"scheme": "w4a16,head=w4a16", "format": "awq"}, "leaves the head in floats"),
        ({"lm": "vast"}, "needs .* MB, and .* MB free"),
        ({"format": "exl2"}, "'exl2' is not one of native, awq"),
        ({"report": (Path("x.pdf"),)}, "a report is a .json or a .png"),
        ({"lm": "broken"}, "the inputs of layer_1/mlp/down hold NaN"),
        ({"lm": "quantized"}, "already quantized"),
    ],
    ids=str,
)
def test_bad_input_is_named_and_nothing_is_written(lm, change, words, tmp_path, monkeypatch):
    change = dict(change)
    models = {
        "broken": broken,
        "quantized": lambda lm: dataclasses.replace(
            lm, params=jl.quantize_params(lm.params, "w8a16")
        ),
        "vast": lambda lm: lm,
    }
    name = change.pop("lm", "")
    chosen = models.get(name, lambda lm: lm)(lm)
    if name == "vast":
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    if name != "broken":  # all else is seen before anything slow

        def slow(*_, **__):
            raise AssertionError("it calibrates")

        monkeypatch.setattr("jaxllama.quantization.checkpoint.calibrate", slow)
    options = {"scheme": "w4a16", "method": "rtn", "text": TEXT, "samples": 12, "window": 128}
    with pytest.raises(jl.JaxLlamaError, match=words):
        quantize_checkpoint(chosen, QuantizeRequest(out=tmp_path / "out", **{**options, **change}))
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".out.")]
    assert left == []


def test_a_full_disk_is_named_and_so_is_what_was_finished(lm, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) == 3:  # two files a layer
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    request = QuantizeRequest(tmp_path / "out", "w4a16", "rtn", "native", TEXT, 12, 128)
    with pytest.raises(jl.JaxLlamaError) as raised:
        quantize_checkpoint(lm, request)
    [work] = tmp_path.iterdir()
    assert f"{work}/hidden-head.npz: not written: No space left" in str(raised.value)
    assert f"finished layers are kept in {work}, and the same" in str(raised.value)
    assert quantize_checkpoint(lm, request)["layers_kept"] == 1


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors", "awq"])
def test_formats_hold_a_tied_head_s_copy_or_say_that_they_leave_it(lm, format, tmp_path):
    cfg = CFG.replace(tie_embeddings=True)
    params = {name: part for name, part in lm.params.items() if name != "head"}
    model = LanguageModel(cfg, params, None)
    report = quantize_checkpoint(model, QuantizeRequest(tmp_path / "out", "w4a16", format=format))
    leaves_head = format != "gptq"
    assert ("the head stays in floats: format" in table(report)) == leaves_head
    assert (report["head_copy_bytes"] > 0) != leaves_head
    got = jl.load(tmp_path / "out", exact=True)
    assert got.config.tie_embeddings == leaves_head == ("head" not in got.params)
    plan = "w4a16,head=none" if leaves_head else "w4a16"
    scales = None if format == "compressed-tensors" else jnp.float16
    want = jl.quantize_params(params, plan, cfg=cfg, scale_dtype=scales)
    is_near(got.params, want)


def test_codes_that_were_chosen_go_to_a_gguf_file(lm, tmp_path):
    """A file of another name is refused before anything is rounded, a tokenizer of bytes later."""
    plan, out = "w4a16-sym,head=w8a16", tmp_path / "m.gguf"
    with pytest.raises(jl.JaxLlamaError, match="its vocabulary has no merges"):
        lm.save(out, format="gguf")
    model = LanguageModel(CFG, lm.params, None)
    quantize_checkpoint(model, QuantizeRequest(out, plan, format="gguf"))
    got = jl.load(out, exact=True)
    want = jl.quantize_params(lm.params, plan, cfg=CFG, scale_dtype=jnp.float16)
    is_near(got.params, want)
    assert got.tokenizer is None
    with pytest.raises(jl.JaxLlamaError, match="whose name ends with .gguf"):
        quantize_checkpoint(lm, QuantizeRequest(tmp_path / "m", plan, format="gguf"))


def test_a_native_checkpoint_converts_to_formats_of_float16_scales(lm, tmp_path):
    """The command's float32 scales have values that float16 holds; other float32 scales do not."""
    plan = "w4a16,head=none"
    model = LanguageModel(CFG, lm.params, None)
    quantize_checkpoint(model, QuantizeRequest(tmp_path / "q", plan))
    native = jl.load(tmp_path / "q", exact=True)
    for format in ("gptq", "awq"):
        again = jl.load(native.save(tmp_path / format, format=format), exact=True)
        is_near(again.params, native.params)
    rounded = LanguageModel(CFG, jl.quantize_params(lm.params, plan, cfg=CFG), None, exact=True)
    with pytest.raises(jl.JaxLlamaError, match="float16 does not hold .*quantize --format gptq"):
        rounded.save(tmp_path / "no", format="gptq")


@pytest.mark.parametrize("tied", [True, False])
def test_rounding_alone_reads_no_text(lm, tied, tmp_path):
    """A tied head is a copy in int8 beside an embedding that stays exact; so it is saved and read,
    under a config that says what the file has."""
    cfg = CFG.replace(tie_embeddings=tied)
    params = {name: part for name, part in lm.params.items() if name != "head" or not tied}
    model = LanguageModel(cfg, params, None)
    report = quantize_checkpoint(model, QuantizeRequest(tmp_path / "out", "w4a16"))
    assert (report["calibration_tokens"], report["errors"]) == (0, [])
    got = jl.load(tmp_path / "out", exact=True)
    want = jl.quantize_params(params, "w4a16", cfg=cfg, scale_dtype=jnp.float16)
    want = LanguageModel(cfg, with_float32_scales(want), None, exact=True)
    assert same(got.params, want.params) and not got.config.tie_embeddings
    rows, width = params["embed"]["weight"].shape
    assert report["head_copy_bytes"] == (rows * (width + 4) if tied else 0)
    assert got.params["head"]["weight"].dtype == (jnp.int8 if tied else jnp.int4)
    assert same(got.params["embed"], params["embed"])
    assert bytes_per_step(got) == tree_bytes(got.params) - tree_bytes(params["embed"])
    with pytest.raises(jl.JaxLlamaError, match="out: its weights are already quantized.*w8a16"):
        jl.load(tmp_path / "out", quantize="w8a16")


@pytest.mark.slow
def test_four_bits_by_default_cost_half_of_what_a_symmetric_grid_does():
    """Against float32, on 1024 tokens of API documentation: neither prose nor what rounding saw."""
    text = "\n".join(pydoc.plain(pydoc.render_doc(module)) for module in (textwrap, json))
    plain = jl.load("smollm2-135m", exact=True)
    kl = {
        scheme: perplexity(
            jl.load("smollm2-135m", "float32", scheme), text, reference=plain, max_tokens=1024
        )["kl"]
        for scheme in ("w4a16", "w4a16-sym")
    }
    assert kl["w4a16"] < 0.5 * kl["w4a16-sym"]


@pytest.mark.slow
def test_a_picture_of_the_errors(made, tmp_path):
    pytest.importorskip("matplotlib")
    from jaxllama.quantization.report import picture

    picture(made("w4a16", "gptq")[1], tmp_path / "errors.png", "gptq w4a16")
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_windows_are_spread_over_the_text():
    got = calibration.windows(Tokenizer.byte_level(), "".join(chr(97 + i) for i in range(26)), 4, 3)
    assert ["".join(map(chr, row)) for row in got] == ["abcd", "ijkl", "uvwx"]
    assert calibration.windows(Tokenizer.byte_level(), "abc", 512, 32).shape == (1, 3)
    text = calibration.DEFAULT_TEXT.read_text(encoding="utf-8")
    paragraphs = set(text.split("\n\n"))
    assert len(text) > 70_000
    for name in ("held.txt", "test.txt"):  # no paragraph is in two of the three
        other = (calibration.DEFAULT_TEXT.parent / name).read_text(encoding="utf-8")
        assert not paragraphs & set(other.split("\n\n"))
        paragraphs |= set(other.split("\n\n"))
