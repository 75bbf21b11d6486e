"""Training files: what they may say, what is refused and in which words; the two verbs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxllama.training
from jaxllama.cli import main as cli
from jaxllama.config import configs_dir, load_config
from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import corpus as corpus_module
from jaxllama.training import estimate as estimating
from jaxllama.training import load_train_config, train_config_from_dict
from jaxllama.training.data import TokenFile
from jaxllama.training.estimate import Estimate
from tests.helpers.training_cases import byte_model, run_config

GOOD = """
steps = 3
batch_size = 2
sequence_length = 16
learning_rate = 1e-3
model = "gla-340m"
[data]
tokens = "somewhere"
"""


REWARDS = {
    "batch_size": 16,
    "data": {"prompts": "x", "tokenizer": "bytes"},
    "rollout": {"max_new_tokens": 2},
    "reward": {"kind": "exact"},
}


def test_data_is_found_beside_its_file(tmp_path, monkeypatch):
    """Shipped data from any folder; a file of the current folder comes first."""
    monkeypatch.chdir(tmp_path)
    conversations = load_train_config("lora-chat").data.conversations
    assert Path(conversations).samefile(configs_dir() / "texts" / "pirate.jsonl")
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "a" / "run.toml").write_text(GOOD.replace('"somewhere"', '"data"'))
    assert Path(load_train_config("a/run.toml").data.tokens) == Path("a/data")
    (tmp_path / "data").mkdir()
    assert load_train_config("a/run.toml").data.tokens == "data"


def test_defaults_presets_paths_and_tables(tmp_path):
    (tmp_path / "run.toml").write_text(GOOD)
    config = load_train_config(tmp_path / "run.toml")
    assert config.model == load_config("gla-340m")
    assert (config.dtype, config.microbatches, config.optimizer.b2) == ("float32", 1, 0.95)
    preset = (configs_dir() / "models" / "gla-340m.toml").read_text()
    (tmp_path / "mine.toml").write_text(preset)
    (tmp_path / "run.toml").write_text(GOOD.replace("gla-340m", "mine.toml"))
    assert load_train_config(tmp_path / "run.toml").model == config.model.replace(name="mine")
    by_name = load_train_config("tiny-gla")
    assert by_name == load_train_config(configs_dir() / "training" / "tiny-gla.toml")
    run_config(tmp_path, byte_model("hybrid"))  # a table: the model's own name
    table = {
        "steps": 1,
        "batch_size": 1,
        "sequence_length": 8,
        "learning_rate": 1.0,
        "data": {"tokens": "x"},
        "distill": {"teacher": "smollm2-135m"},
    }
    assert train_config_from_dict(table, "x").model is None


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Unknown keys, wrong types, values that are not among the allowed ones.
        ({"stepz": 1}, "unknown key 'stepz'; allowed: data, steps, batch_size"),
        ({"optimizer": {"lr": 1}}, "unknown key 'optimizer.lr'; allowed: warmup_steps"),
        ({"distill": {"teacher": "x", "loss": 1}}, "unknown key 'distill.loss'; allowed: teacher"),
        ({"steps": "many"}, "steps = 'many': expected int"),
        ({"steps": True}, "steps = True: expected int"),
        ({"remat": 1}, "remat = 1: expected bool"),
        ({"dtype": "float64"}, "dtype = 'float64': allowed values are float32, bfloat16"),
        ({"quantize": {"scheme": "w8a8"}}, "scheme = 'w8a8': allowed values are w8a16, w4a16"),
        ({"distill": {"teacher": "x", "objective": "y"}}, "allowed values are logits, mixers"),
        ({"data": {}}, "missing key 'data.tokens'"),
        ({"model": "gla-9b"}, "no preset 'gla-9b'; presets: .*gla-1.3b"),
        ({"model": {"d_model": 3}}, "missing key 'model.vocab_size'"),
        ({"model": 3}, "model = 3: expected ModelConfig"),
        # Numbers out of range.
        ({"steps": 0}, "steps = 0: must be at least 1"),
        ({"seed": -1}, "seed = -1: must not be negative"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0: must be positive"),
        ({"optimizer": {"b1": 1.0}}, r"optimizer.b1 = 1.0: must be in \[0, 1\)"),
        ({"optimizer": {"final_share": 2.0}}, r"final_share = 2.0: must be in \[0, 1\]"),
        # Combinations that mean nothing.
        ({"model": None}, "model = None: is needed, or init_from, or "),
        ({"init_from": "x"}, "init_from = 'x': excludes model"),
        ({"microbatches": 3}, r"microbatches = 3: must divide batch_size \(2\)"),
        ({"sequence_length": 4096}, r"sequence_length = 4096: exceeds .* max_position \(2048\)"),
        ({"optimizer": {"warmup_steps": 3}}, r"warmup_steps = 3: must be below steps \(3\)"),
        ({"validate_every": 2}, "validate_every = 2: needs data.validation_tokens above 0"),
        ({"data": {"tokens": "x", "validation_tokens": 16}}, "must exceed sequence_length"),
        ({"distill": {"teacher": "x", "objective": "mixers"}}, "leave model out"),
        ({"distill": {"teacher": "x", "attention_layers": [1]}}, "here model says what it is"),
        ({"distill": {"teacher": "x", "kl_weight": 0.0, "ce_weight": 0.0}}, "nothing to minimise"),
        ({"data": {"tokens": "x", "prompts": "y"}}, "data.prompts = 'y': excludes data.tokens"),
        ({"data": {"prompts": "x", "tokenizer": "bytes"}}, "rollout = None: is needed for data.p"),
        ({"rollout": {"max_new_tokens": 2}}, "rollout = .*: is for data.prompts"),
        ({"objective": {"kind": "rloo"}}, "objective.kind = 'rloo': needs data.prompts"),
        ({**REWARDS, "batch_size": 4}, r"rollout.samples = 8: must divide batch_size \(4\)"),
        ({**REWARDS, "sequence_length": 2}, "max_new_tokens = 2: leaves no room for prompts"),
        ({**REWARDS, "reward": {"kind": "regex"}}, "reward.pattern = None: kind = regex needs it"),
        ({**REWARDS, "reward": {"kind": "exact", "schema": "x"}}, "is for kind = json_schema"),
        ({**REWARDS, "rollout": {"max_new_tokens": 2, "samples": 1}}, "must be at least 2, to c"),
        (
            {"model": None, "scan": True, "distill": {"teacher": "x", "objective": "mixers"}},
            "excludes scan; allowed with it: logits",
        ),
        (
            {
                "model": None,
                "quantize": {"scheme": "w8a16"},
                "distill": {"teacher": "x", "objective": "mixers"},
            },
            "allowed with it: logits",
        ),
    ],
)
def test_refusals_name_the_file_the_key_and_what_is_allowed(change, message):
    table = {
        "steps": 3,
        "batch_size": 2,
        "sequence_length": 16,
        "learning_rate": 1e-3,
        "model": "gla-340m",
        "data": {"tokens": "x"},
        **change,
    }
    table = {key: value for key, value in table.items() if value is not None}
    with pytest.raises(JaxLlamaError, match=f"^runs/x.toml: .*{message}"):
        train_config_from_dict(table, "runs/x.toml")


def test_shipped_files_are_legal():
    paths = sorted((configs_dir() / "training").glob("*.toml"))
    assert len(paths) >= 6
    for path in paths:
        load_train_config(path)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(JaxLlamaError, match="'gone' is no .toml file; shipped: .*tiny-gla"):
        load_train_config("gone")
    with pytest.raises(JaxLlamaError, match="gone.toml: No such file"):
        load_train_config(tmp_path / "gone.toml")
    (tmp_path / "x.toml").write_text("steps = = 3")
    with pytest.raises(JaxLlamaError, match="x.toml: not a TOML file"):
        load_train_config(tmp_path / "x.toml")


# The verbs


def test_tokenize_and_train_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("So it goes. " * 60)
    words = ["tokenize", "a.txt", "--out", "ids", "--tokenizer", "bytes", "--json"]
    assert cli.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tokens"] == 12 * 60 and made["directory"] == "ids"
    (tmp_path / "run.toml").write_text(
        GOOD.replace("somewhere", "ids").replace('"gla-340m"', '"tiny.toml"')
    )
    (tmp_path / "tiny.toml").write_text(
        "vocab_size = 256\nd_model = 16\nn_layers = 1\nn_heads = 2\nn_kv_heads = 1\nhead_dim = 8\n"
        "d_ff = 24\nnorm_eps = 1e-5\nmax_position = 32\ntie_embeddings = true\n"
        "rope = { theta = 10000.0 }\n"
    )
    assert cli.main(["train", "run.toml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 3 and report["tokens"] == 3 * 2 * 16
    assert report["directory"] == "runs/run" and (tmp_path / "runs/run/model").is_dir()
    assert cli.main(["train", "run.toml"]) == 0  # it is done, and says the same
    assert f"{report['loss']:,.4g}" in capsys.readouterr().out
    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text().replace("1e-3", "1e-2"))
    assert cli.main(["train", "run.toml"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: runs/run: another run is there: its learning_rate is 0.001, and here it is 0.01; "
        "choose another --out\n"
    )
    assert cli.main(["tokenize", "a.txt", "--out", "ids"]) == 2
    assert cli.main(["tokenize", "b.txt", "--out", "more", "--tokenizer", "bytes"]) == 2


def test_the_readme_s_sequence_trains_the_folder_that_it_makes():
    text = (Path(jaxllama.training.__file__).parent / "README.md").read_text(encoding="utf-8")
    commands = [shlex.split(line, comments=True) for line in text.split("```")[1].splitlines()[1:]]
    made = [words[words.index("--out") + 1] for words in commands if words[1] == "tokenize"]
    trained = [load_train_config(words[2]) for words in commands if words[1] == "train"]
    assert made and [config.data.tokens for config in trained] == made
    with pytest.raises(JaxLlamaError, match="jaxllama tokenize TEXT --out none"):
        TokenFile.open("none")


def test_a_dry_run_of_train_writes_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    asked = []
    found = Estimate(7, 96, 84, 1.0, 0.5, 0.0, 2.5)
    monkeypatch.setattr(TokenFile, "open", lambda folder: folder)
    monkeypatch.setattr(
        estimating, "estimate", lambda config, data, mesh: asked.append((data, mesh)) or found
    )
    assert cli.main(["train", "run.toml", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["seconds"], said["steps"], said["state_bytes"]) == (2.5, 3, 84)
    assert asked == [("somewhere", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


# The corpus


def test_the_bible_s_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(corpus_module.shutil, "which", lambda _: None)
    with pytest.raises(JaxLlamaError, match="apt-get install bible-kjv"):
        corpus_module.bible()


def test_verses_lose_their_numbers(monkeypatch, tmp_path):
    script = tmp_path / "bible"
    script.write_text(
        "#!/bin/sh\necho 'Ge1:1 In the beginning'\necho\necho 'Ge1:2 And the earth'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert corpus_module.bible() == "In the beginning\nAnd the earth\n"


def test_requests_are_all_visited_before_one_returns():
    count = len(corpus_module.FORMS) * len(corpus_module.SUBJECTS)
    assert len({number * corpus_module.STRIDE % count for number in range(count)}) == count


def test_documents_begin_with_the_token_that_begins_documents():
    """And a text depends on its number, not on the batch it is written in."""

    class Writer:
        tokenizer = SimpleNamespace(encode=lambda text, add_special: [7])

        def generate(self, rows, max_new_tokens, sampling, seeds):
            assert rows == [[7]] * len(seeds) and sampling.temperature == 1.0
            return [SimpleNamespace(text=f"{seed}:{max_new_tokens}") for seed in seeds]

    texts = [
        list(corpus_module.documents(Writer(), 5, batch=batch, max_new_tokens=9, seed=3))
        for batch in (2, 5)
    ]
    assert texts[0] == texts[1] == [f"<|endoftext|>{n}:9\n" for n in range(3, 8)]
    Writer.tokenizer = Tokenizer.byte_level()
    with pytest.raises(JaxLlamaError, match=r"no token <\|endoftext\|>"):
        list(corpus_module.documents(Writer(), 1, batch=1, max_new_tokens=9, seed=0))
