"""``serve --config FILE``, and ``generate`` held to a form."""

from __future__ import annotations

import json
import re

import pytest

from jaxllama.cli.config_file import expanded
from jaxllama.cli.main import main, parser
from jaxllama.errors import JaxLlamaError

CONFIG = """
model = "tiny"
port = 9000
max_slots = 8
deterministic = true
no-prefix-cache = false
served-model-name = ["a", "b"]
memory-share = 0.5
"""


def test_options_of_a_file_are_those_of_the_command_line(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text(CONFIG)
    words = ["serve", "--config", str(file), "--port", "7000", "--served-model-name", "c"]
    args = parser().parse_args(expanded(words))
    assert (args.model, args.port, args.max_slots) == ("tiny", 7000, 8), "the words go last"
    assert args.deterministic and args.prefix_cache is None and args.memory_share == 0.5
    assert args.served_model_name == ["a", "b", "c"]
    assert expanded(["serve", f"--config={file}"]) == expanded(["serve", "--config", str(file)])
    assert expanded(["chat", "--config", "x"]) == ["chat", "--config", "x"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 1e9", "--port"),
        ("slot = 1", "unrecognized arguments: --slot=1"),
        ("port", "no TOML"),
        ("[port]\nx = 1", "port: expected a value, not a table"),
        ('config = "x"', "config: a file names no other file"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, says):
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(JaxLlamaError, match=re.escape(says)):
        parser().parse_args(expanded(["serve", "--model", "m", "--config", str(file)]))
    with pytest.raises(JaxLlamaError, match="/nowhere: No such file"):
        expanded(["serve", "--config", "/nowhere"])


def test_a_flag_that_is_off_must_exist_and_a_second_file_is_refused(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("prefix-cache = false")
    words = ["serve", "--config", str(file)]
    with pytest.raises(JaxLlamaError, match="prefix-cache: unrecognized arguments: --prefix-cache"):
        expanded(words, parser().parse_args)
    file.write_text("no-prefix-cache = false")
    assert expanded(words, parser().parse_args) == ["serve"]
    with pytest.raises(JaxLlamaError, match="--config: names one file, and several are given"):
        expanded([*words, "--config", str(file)])


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("port = 7000\nmax-slot = 1", "max-slot", "did you mean --max-slots"),
        ("max_len = 1", "max_len", "must be at least 2"),
        ("memory-share = 2", "memory-share", "must be above 0 and at most 1"),
        ('quantize = "w9"', "quantize", "w9"),
        ("deterministic = 5", "deterministic", "ignored explicit argument"),
    ],
)
def test_a_wrong_option_is_named_with_its_file(tmp_path, capsys, text, key, says):
    file = tmp_path / "server.toml"
    file.write_text(text)
    assert main(["serve", "--model", "m", "--config", str(file)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: --config: {file}: {key}: ") and says in told


def test_a_form_excludes_what_cannot_keep_it(capsys):
    for words in (["--regex", "a", "--stream"], ["--regex", "a", "--draft", "ngram"]):
        assert main(["generate", "hi", "--model", "llama-1b", *words]) == 2
        assert f"--regex and {words[2]} exclude each other" in capsys.readouterr().err


@pytest.mark.slow
def test_generate_keeps_to_a_schema_or_an_expression(tmp_path, capsys):
    pytest.importorskip("llguidance")
    from tests.helpers.http_server import tiny_checkpoint

    model = ["--model", str(tiny_checkpoint(tmp_path) / "tiny"), "--max-new-tokens", "30"]
    schema = tmp_path / "schema.json"
    form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema.write_text(json.dumps({**form, "additionalProperties": False}))
    assert main(["generate", "hi", *model, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, 2)
    assert main(["generate", "hi", *model, "--regex", "(", "--json"]) == 2
    assert "regex" in capsys.readouterr().err
