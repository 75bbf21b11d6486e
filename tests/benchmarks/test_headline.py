"""The headline rows: what their commands print is found, and is written with the machine."""

from __future__ import annotations

import json

import pytest

from benchmarks import engine, headline, results, verify
from jaxllama.engine.engine import Engine
from tests.helpers.engine_cases import OPTIONS, model

write = results.write
# Lines as the programs print them.
PRINTED = {
    "matmul-decode": [
        "w4a16-g128-sym   gate or up 14336x4096      1      9.90     2.97 TB/s"
        "    71%    113.00     32.10"
    ],
    "matmul-prefill": [
        "w8a8             gate or up 14336x4096   8192    582.71   1651 TFLOP/s"
        "    94%   1035.00   1200.10"
    ],
    "gla": [
        "(8, 4096, 16, 128, 128) forward+backward, saving states: 1.5200 ms (bar 2.0; wall 1.6)"
    ],
    "gated-delta": [
        "(8, 4096, 4, 16, 128, 128) forward 279.0 us: chunks 150.0 scan 129.0",
        "(8, 4096, 4, 16, 128, 128) forward of the XLA form 2100.0 us",
    ],
    "kda": ["(1, 8192, 64, 64, 128, 128) forward 648.0 us: channels 300.0 scan 348.0"],
    "attention": [
        "decode_attention   64 x   8192 int8              mosaic    283.0 us  3.91 TB/s   93%",
        "decode_attention   64 x   8192 int8              xla      2912.0 us  0.38 TB/s    9%",
    ],
    "training": ["step 30: loss 2.1000, 61,476 tokens/s, MFU 49.0%"],
    "cpu-decode": ["decode, tokens/s: ours 425.0, llama.cpp 144.0, ratio 2.95 (5 rounds)"],
    "cpu-prefill": ["prefill, tokens/s: ours 3000.0, llama.cpp 1115.0, ratio 2.69 (5 rounds)"],
    "decode": ["{", '  "decode_tokens_per_second": 261.0,', '  "runs": 5', "}"],
    "parallel": ['{"speedup": 1.0}', '{"speedup": 1.54}', '{"step_parts": null}'],
    "offload": [
        '{"budget": {"tokens_per_second": 60.0}}',
        '{"budget": {"tokens_per_second": 114.0}}',
    ],
    "quantization": ['{"texts": {"api": {"rise": 0.093}, "code": {"rise": 0.086}}}'],
}
FIGURES = {
    "matmul-decode": 9.9,
    "matmul-prefill": 1651,
    "gla": 1.52,
    "gated-delta": 279,
    "kda": 648,
    "attention": 283,
    "training": 61_476,
    "cpu-decode": 425,
    "cpu-prefill": 2.69,
    "decode": 261,
    "parallel": 1.54,
    "offload": 114,
    "quantization": [0.093, 0.086],
}
IN_OUTPUT = {"matmul-decode": 113, "gated-delta": 2100, "attention": 2912, "cpu-decode": 144}


@pytest.mark.parametrize("name", PRINTED)
def test_a_rows_figure_is_found_in_what_its_command_prints(name):
    row = headline.ROWS[name]
    assert headline.find(row.figure, PRINTED[name]) == FIGURES[name]
    for peer in row.peers.values():
        if isinstance(peer, str):
            assert headline.find(peer, PRINTED[name]) == IN_OUTPUT[name]


def test_every_row_with_an_expression_has_such_lines():
    assert {name for name, row in headline.ROWS.items() if "(" in row.figure} <= PRINTED.keys()


def test_a_row_is_written_with_machine_versions_and_commands(tmp_path, monkeypatch, capsys):
    row = headline.Row(
        "a row",
        {"a": "echo '{{\"rate\": 3}}'", "b": "echo '{{\"rate\": 4}}'"},
        "rate",
        "tokens/s",
        {"peer": 2},
        "a book",
        server="echo serves at http://here; sleep 100",
    )
    monkeypatch.setitem(headline.ROWS, "row", row)
    monkeypatch.setattr(results, "write", lambda *a, **k: write(*a, **k, folder=tmp_path))
    path = headline.measure("row", only=["b"])
    record = json.loads(path.read_text())
    assert record["figures"] == {"b": 4} and record["peers"] == {"peer": 2}
    assert record["versions"]["jax"] and record["machine"]["cores"] >= 1
    assert record["machine"]["devices"] and record["commands"].keys() == {"b"}
    assert "a row: {'b': 4} tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_the_engines_steady_rate():
    eng = Engine(model("llama"), **{**OPTIONS, "prefix_cache": False})
    report = engine.run(eng, prompt=9, new=6, in_flight=4, seconds=0.5)
    assert report["tokens_per_second"] > 0 and report["requests_per_second"] > 0
    assert report["tokens_per_second"] / report["requests_per_second"] == pytest.approx(6, rel=0.5)


@pytest.mark.parametrize("family", ["llama", pytest.param("mtp", marks=pytest.mark.slow)])
def test_passes_keep_the_accepted_tokens(family):
    is_mtp = family == "mtp"
    report = verify.run(model(family), 8, accepted=3, drafted=4, kv_dtype=None, runs=1, mtp=is_mtp)
    if is_mtp:
        assert report["mtp_drafted"] > 3  # of 4; the last draft may be shorter
        assert report["mtp_times_plain"] == 4 * report["step_seconds"] / report["mtp_pass_seconds"]
    assert report["times_plain"] == pytest.approx(
        4 * report["step_seconds"] / report["pass_seconds"]
    )


def test_the_readme_shows_what_the_files_hold(monkeypatch):
    monkeypatch.syspath_prepend(str(headline.ROOT / "docs"))
    from pictures import FOLDER, PICTURES
    from results import readme_with

    readme = (headline.ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == readme_with(readme), "python docs/results.py"
    assert len(readme.split()) <= 900  # a page that is read in a minute or two
    assert len(headline.README) <= 10
    for name, draw in PICTURES.items():
        picture = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert picture == draw(), f"{name}: python docs/results.py"
