"""Every option of every command: outside of its domain it is refused by name, before any work."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxllama import extras
from jaxllama.cli import bench, common, domains, experiment, gpu_memory, quantize, serve, train
from jaxllama.cli import main as cli
from jaxllama.cli.domains import Number, OutFile, Parser

CHECKOUT = Path(__file__).resolve().parents[2]
# A word outside of each domain that is not a number.
BAD = {
    quantize.scheme: "w3a16",
    common.rounding: "fp8-static",
    common.parse_mesh: "rows=2",
    train.parse_mesh: "stage=2,model=2",
    common.parse_hosts: "here",
    common.parse_policy: "120 0 0 0 0 0",
    bench.length: "9:2",
    bench.url: "ftp://x",
    common.parse_logit_bias: "5=nan",
    common.parse_adapter: "it=/nowhere",
    bench.goodput: "ttft=0",
    domains.filled: "",
    domains.api_key: "a b ",
    domains.text_file: "/nowhere/x.txt",
    domains.text_input: "/",
    domains.texts_folder: "/nowhere",
    experiment.run_folder: "/nowhere",
    domains.state_folder: "/nowhere",
    domains.json_table: "[1]",
    domains.out_folder: "/dev/null/x",
    domains.new_folder: "/",
}
# Words that may be anything, or that the command reads for itself and names.
FREE = {"system", "prompts", "file", "text"}


def commands(parser: Parser, words: tuple[str, ...] = ()):
    """(the words of every command, its parser)."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if words:
        yield words, parser
    for action in inner:
        for name, sub in action.choices.items():
            yield from commands(sub, (*words, name))


def cases():
    for words, parser in commands(cli.parser()):
        for action in parser._actions:
            if action.nargs == 0 or isinstance(action, argparse._SubParsersAction):
                continue
            flag = action.option_strings[0] if action.option_strings else None
            for bad in outside(action):
                yield pytest.param(
                    words, action, bad, id=" ".join((*words, flag or action.dest, bad))
                )


def outside(action: argparse.Action) -> list[str]:
    kind = action.type
    if action.choices is not None:
        return ["wat"]
    if isinstance(kind, Number):
        bad = ["wat"] if kind.least == -math.inf else ["wat", str(kind.kind(kind.least) - 1)]
        bad += [str(kind.least)] if kind.above else []
        bad += [str(kind.most * 2 + 1)] if kind.most < math.inf else []
        return bad + (["1.5"] if kind.kind is int else ["nan"])
    if isinstance(kind, OutFile):
        return ["x.wat", f"/dev/null/x{kind.suffixes[0]}"]
    if kind is None:
        assert action.dest in FREE, f"{action.dest}: an option without a domain"
        return []
    return [BAD[kind]]


@pytest.fixture(scope="module")
def parser() -> Parser:
    """One for all: no command's work may begin."""
    top = cli.parser()
    for _, parser in commands(top):
        parser.set_defaults(run=pytest.fail)
    return top


@pytest.mark.core
@pytest.mark.parametrize(("words", "action", "bad"), list(cases()))
def test_outside_of_its_domain_an_option_is_refused_by_name(
    words, action, bad, parser, monkeypatch, capsys
):
    """The command itself is never entered, so nothing slow can have begun."""
    monkeypatch.setattr(cli, "parser", lambda: parser)
    given = [bad] * (action.nargs if isinstance(action.nargs, int) else 1)
    if action.option_strings:
        given = (
            [f"{action.option_strings[0]}={bad}"]
            if len(given) == 1
            else [action.option_strings[0], *given]
        )
    assert cli.main([*words, *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert (action.option_strings or [bad])[0] in err


def test_whoever_takes_a_model_takes_random_weights_and_revisions_of_it():
    takers = []
    for words, parser in commands(cli.parser()):
        flags = {flag for action in parser._actions for flag in action.option_strings}
        if "--model" in flags and words != ("bench", "serve"):  # there it is a name on a server
            takers.append(words[0])
            assert flags >= {"--random", "--revision"}, words
    assert {"generate", "chat", "serve", "quantize", "convert", "eval", "doctor"} <= {*takers}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--batch", "3", "serve"], "--batch has no effect before serve"),
        (["generate", "hi", "--mesh", "model=99"], "--mesh data=1,model=99: needs 99 devices"),
        (["generate", "hi", "--hosts", "a:1,2,0"], "--hosts needs --mesh"),
        (["generate", "hi", "--policy", "0 100 0 100 0 100", "--mesh", "model=1"], "--mesh"),
        (
            [
                "generate",
                "hi",
                "--policy",
                "0 100 0 100 0 100 compress_cache=true",
                "--kv-dtype",
                "fp8",
            ],
            "compress_cache is int4, and kv_dtype is 'float8_e4m3fn'",
        ),
        (
            [
                "generate",
                "hi",
                "--policy",
                "0 100 0 100 0 100 compress_weight=true",
                "--quantize",
                "w8a16",
            ],
            "compress_weight is",
        ),
        (
            [
                "generate",
                "hi",
                "--policy",
                "0 100 0 100 0 100 attn_sparsity=0.5",
                "--attn-sparsity",
                "0.1",
            ],
            "attn_sparsity = 0.5, and beside it 0.1",
        ),
        (["plan", "--policy", "0 100 0 100 0 100", "--host-gb", "3"], "--host-gb"),
        (["eval", "--text", "-", "--window", "8", "--stride", "8"], "--stride = 8"),
        (["generate", "hi", "--seed", "3"], "--seed needs --temperature"),
        (["chat", "--temperature", "0", "--seed", "3"], "--seed needs --temperature"),
        (["generate", "hi", "--split", "none"], "--split needs --file"),
        (["generate", "hi", "--random", "--revision", "v1"], "random weights have none"),
        (["doctor", "--random"], "--random needs --model"),
        (["generate", "hi", "--parse-special"], "--parse-special needs --chat"),
        (["generate", "hi", "--merge"], "--merge needs --adapter"),
        (["chat", "--adapter", "a=/tmp", "--adapter", "b=/tmp"], "--adapter: one here, and 2 are"),
        (
            ["serve", "--port", "0", "--adapter", "a=/tmp", "--adapter", "a=/"],
            "--adapter: a name is given twice",
        ),
        (["generate", "hi", "--adapter", "a=/tmp", "--mesh", "model=1"], "only one, merged"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(words, says, monkeypatch, capsys):
    for work in ("hub.resolve", "hf.load.load"):
        monkeypatch.setattr(f"jaxllama.checkpoints.{work}", pytest.fail)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


MISSPELT = [
    (["generate", "hi", "--max-new-token", "5"], "--max-new-tokens"),
    (["generate", "hi", "--kv_dtype=int8"], "--kv-dtype"),
    (["serve", "--max-slot", "2"], "--max-slots"),
    (["bench", "serve", "--request", "2"], "--requests"),
    (["generat", "hi"], "generate"),
    (["generate", "hi", "--dtype", "bfloat61"], "bfloat16"),
    (["generate", "hi", "--zzz"], None),
    (["frobnicate"], None),
]


@pytest.mark.parametrize(("words", "meant"), MISSPELT)
def test_a_misspelt_word_gets_the_nearest_one(words, meant, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert f"did you mean {meant}?" in err if meant else "did you mean" not in err


# What each package of an extra is needed for.
NEEDS = [
    (package, words)
    for packages, words in (
        (extras.EXTRAS["serve"], ["serve", "--random"]),
        (extras.EXTRAS["serve"], ["batch", "{file}", "{out}", "--random"]),
        (extras.EXTRAS["bench"], ["bench", "serve"]),
        (extras.EXTRAS["completion"], ["completion", "bash"]),
        (extras.EXTRAS["experiment"], ["quantize", "--out", "{new}", "--report", "x.png"]),
    )
    for package in packages
]


@pytest.mark.parametrize(("package", "words"), NEEDS)
def test_a_missing_extra_is_one_line(package, words, tmp_path, monkeypatch, capsys):
    """It says how to install it from the checkout: no index has this project yet."""
    (tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    places = {"file": tmp_path / "in.jsonl", "out": tmp_path / "o.jsonl", "new": tmp_path / "new"}
    for name in list(sys.modules):  # as a process that has not imported them yet
        if name.startswith(OURS) or name.partition(".")[0] == package:
            parent, _, child = name.rpartition(".")
            if name.startswith(OURS) and hasattr(sys.modules.get(parent), child):
                monkeypatch.setattr(sys.modules[parent], child, sys.modules[name])  # put back
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == package else find(name, *more),
    )
    monkeypatch.setattr("jaxllama.loading.load", pytest.fail)
    assert cli.main([word.format(**places) for word in words]) == 2
    err = capsys.readouterr().err
    extra = next(name for name, packages in extras.EXTRAS.items() if package in packages)
    assert err.startswith("error: ") and err.count("\n") == 1 and package in err
    assert f"pip install -e '.[{extra}]' in jaxllama's checkout" in err


OURS = ("jaxllama.serving", "jaxllama.evaluation.speed.load_generator", "jaxllama.training")


def test_every_extra_package_is_declared():
    declared = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    for extra, packages in extras.EXTRAS.items():
        names = [
            re.split(r"[\[>=<;]", name)[0] for name in declared["optional-dependencies"][extra]
        ]
        for package in packages:
            assert package.replace("_", "-") in {n.removesuffix("-checkpoint") for n in names}


@pytest.mark.parametrize("words", [["--kv-dtype", "int8"], ["--attn-sparsity", "0.5"]])
def test_a_cache_s_options_need_a_cache(words, monkeypatch, capsys):
    """A model of GLA layers has neither keys nor values."""
    from jaxllama import loading
    from jaxllama.language_model import LanguageModel
    from tests.helpers.models import FAMILIES

    cfg = FAMILIES["gla"]
    lm = LanguageModel(cfg, {}, None)
    monkeypatch.setattr(loading, "load", lambda *_, **__: lm)
    assert cli.main(["generate", "hi", *words]) == 2
    assert f"{words[0]}: {cfg.name} has no layer with keys" in capsys.readouterr().err


@pytest.mark.parametrize("own", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}])
def test_serving_takes_most_of_a_gpu_unless_it_is_told(own, monkeypatch):
    monkeypatch.setattr(serve.os, "environ", environment := dict(own))
    serve.take_memory()
    assert int(environment.pop("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")) >= 64
    assert environment == (own or {"XLA_CLIENT_MEM_FRACTION": str(gpu_memory.gpu_share())})


@pytest.mark.parametrize(
    "said, share",
    [
        ("140000, 143771, Disabled, Disabled", 0.95),
        ("22000, 24564, Enabled, Enabled", 0.761),
        ("12000, 12288, Disabled, Enabled\n80000, 81559, Disabled, Disabled", 0.83),
        ("[N/A], [N/A], Enabled, [N/A]", 0.95),
        ("", 0.95),
    ],
)
def test_serving_leaves_a_display_its_share(said, share, monkeypatch):
    run = lambda *_, **__: SimpleNamespace(stdout=said)  # noqa: E731
    monkeypatch.setattr(gpu_memory.subprocess, "run", run)
    assert gpu_memory.gpu_share() == share
