"""The command line, in this process over a tiny random model, and as a real process."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints import hub
from jaxllama.checkpoints.hf import load as hf
from jaxllama.cli import chat, common
from jaxllama.cli import doctor as doctor_command
from jaxllama.cli import generate as generate_command
from jaxllama.cli.main import main
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation import doctor
from jaxllama.quantization.scheme import SCHEMES
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels import dispatch
from tests.helpers import eagle_cases
from tests.helpers.models import LLAMA, params_of

CHECKOUT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A directory in HF's layout: random weights over bytes, a template, a short context."""
    folder = tmp_path_factory.mktemp("models")
    cfg = LLAMA.replace(vocab_size=256, eos_token_ids=(0,), max_position=200)
    Tokenizer.byte_level()._backend.save(str(folder / "tokenizer.json"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": TEMPLATE}))
    files = [folder / "tokenizer.json", config]
    return str(hf.save(folder / "tiny", cfg, params_of(cfg), files))


@pytest.fixture
def run(model, capsys):
    """run(words...) -> (status, stdout, stderr); the model is filled in."""

    def call(command: str, *words: str, model: str | None = model) -> tuple[int, str, str]:
        named = [] if model is None else ["--model", model]
        status = main([command, *words, *named])
        return status, *capsys.readouterr()

    return call


def generate(run, *words: str) -> dict:
    status, out, err = run("generate", *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


# generate


@pytest.mark.core
def test_text_is_what_the_library_generates(run, model):
    [want] = jl.load(model).generate("hello", max_new_tokens=12)
    status, out, err = run("generate", "hello", "--max-new-tokens", "12")
    assert (status, out, err) == (0, want.text + "\n", "")
    [got] = generate(run, "hello", "--max-new-tokens", "12")["generations"]
    assert got == {
        "prompt": "hello",
        "text": want.text,
        "tokens": want.tokens,
        "logprobs": want.logprobs,
        "finish_reason": "length",
    }


@pytest.mark.core
def test_stream_adds_up_to_the_text(run):
    words = ["hello", "--temperature", "1", "--seed", "3", "--max-new-tokens", "12"]
    _, plain, _ = run("generate", *words)
    status, streamed, _ = run("generate", *words, "--stream")
    assert status == 0 and streamed == plain and len(plain) > 6


@pytest.mark.core
def test_sampling_options_reach_the_sampler(run, monkeypatch):
    words = [
        "--temperature",
        "0.9",
        "--top-k",
        "30",
        "--top-p",
        "0.95",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.2",
        "--frequency-penalty",
        "0.1",
        "--presence-penalty",
        "-0.2",
        "--logit-bias",
        "65=1.5",
        "--logit-bias",
        "66=-inf",
        "--seed",
        "9",
    ]
    sampling = jl.Sampling(
        temperature=0.9,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        presence_penalty=-0.2,
        logit_bias={65: 1.5, 66: -math.inf},
        seed=9,
    )
    seen = []

    def generate(lm, rows, new, sampling, **_):
        seen.append(sampling)
        return [jl.Generation("", [], [], "stop")]

    monkeypatch.setattr(jl.LanguageModel, "generate", generate)
    run("generate", "hello", *words)
    assert seen == [sampling]


def test_stop_strings_cut_the_text(run):
    words = ["hello", "--temperature", "1", "--seed", "3", "--max-new-tokens", "12"]
    text = generate(run, *words)["generations"][0]["text"]
    [cut] = generate(run, *words, "--stop", text[4:7], "--stop", "nowhere")["generations"]
    assert cut["text"] == text[: text.index(text[4:7])] and cut["finish_reason"] == "stop"


def test_many_prompts_from_words_file_and_stdin(run, tmp_path, monkeypatch):
    few = ["--max-new-tokens", "12"]
    want = generate(run, "one", "two and more", *few)["generations"]
    assert [row["prompt"] for row in want] == ["one", "two and more"]
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffone\n\ntwo and more\n", encoding="utf-8")
    got = generate(run, "--file", str(path), *few)["generations"]
    stdin = io.TextIOWrapper(io.BytesIO(path.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    piped = generate(run, "--file", "-", *few)["generations"]
    for rows in (got, piped):
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in want]
    _, out, _ = run("generate", "one", "two and more", *few)
    headed = [f'=== "{row["prompt"]}"\n{row["text"]}\n' for row in want]
    assert out == "\n".join(headed)


def test_a_file_s_lines_may_be_requests_and_the_answers_lines(run, tmp_path):
    few = ["--max-new-tokens", "12"]
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n\n{{"messages": {json.dumps(messages)}}}\n')
    want = generate(run, "one", "<u>hi\n<a>", *few)["generations"]
    status, out, err = run("generate", "--file", str(path), "--json", *few)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "") and [row["tokens"] for row in rows] == [
        row["tokens"] for row in want
    ]
    assert rows[0]["prompt"] == "one" and rows[1]["messages"] == messages
    _, out, _ = run("generate", "--file", str(path), *few)
    assert out.endswith(f"=== {json.dumps(messages)}\n{rows[1]['text']}\n")


def test_a_file_may_be_one_prompt(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("two\n lines \n")
    got = generate(run, "--file", str(path), "--split", "none", "--max-new-tokens", "12")
    assert [row["prompt"] for row in got["generations"]] == ["two\n lines "]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\n{', "line 2: not JSON"),
        ("[1]", "line 1: expected an object with"),
        ('{"prompt": "a", "messages": []}', 'expected an object with "prompt" or "messages"'),
        ('{"prompt": ""}', "line 1: prompt: expected text"),
        ('{"prompt": [1]}', "line 1: prompt: expected text"),
        ('{"messages": "hi"}', "line 1: messages: expected a list"),
        ('{"messages": [{"content": "hi"}]}', "line 1: messages: expected a list"),
        ('{"prompt": "a", "top_k": 3}', "line 1: 'top_k' is not prompt or messages"),
        ("\n", "no prompts in it"),
    ],
)
def test_bad_requests_are_named_by_their_line(run, tmp_path, text, says):
    path = tmp_path / "x"
    path.write_text(text)
    assert_error(run("generate", "--file", str(path), "--split", "jsonl"), says)


def test_a_models_own_sampling_is_chats_and_said(run, model, monkeypatch, tmp_path):
    own = Path(shutil.copytree(model, tmp_path / "own"))
    said = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **said}))
    seen = []
    monkeypatch.setattr(chat, "converse", lambda lm, sampling, *_: seen.append(sampling))
    status, _, err = run("chat", "--top-k", "9", "--seed", "4", model=str(own))
    assert status == 0 and seen[-1] == jl.Sampling(0.7, 9, 0.9, seed=4)
    assert err.startswith("sampling: temperature 0.7, top_k 9, top_p 0.9") and err.count("\n") == 1
    assert run("chat", "--temperature", "0", model=str(own))[0] == 0
    assert seen[-1].temperature == 0
    assert_error(run("chat", "--seed", "4"), "--seed needs --temperature")
    answer = [jl.Generation("", [], [], "stop")]
    monkeypatch.setattr(
        jl.LanguageModel, "generate", lambda _, rows, new, how, **__: seen.append(how) or answer
    )
    _, _, err = run("generate", "hi", model=str(own))
    assert seen[-1] == jl.Sampling(seed=0)
    assert err == (
        "sampling: greedy; chat and serve take the model's own: temperature 0.7, top_p 0.9\n"
    )


@pytest.mark.parametrize(
    ("words", "finds"),
    [
        (["jaxllama", "conv"], "convert"),
        (["jaxllama", "generate", "--split", ""], "jsonl"),
        (["jaxllama", "quantize", "--meth"], "--method"),
    ],
)
def test_completion_completes(words, finds, capsys):
    assert main(["completion", "zsh"]) == 0 and "#compdef jaxllama" in capsys.readouterr().out
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out + (
        f"\nCOMP_WORDS=({' '.join(map(repr, words))}) COMP_CWORD={len(words) - 1}\n"
        '_shtab_jaxllama\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert finds in out.stdout.split(), out.stderr


def test_chat_prompts_go_through_the_template(run, model):
    few = ["--max-new-tokens", "12"]
    [got] = generate(run, "hi", "--chat", *few)["generations"]
    [want] = generate(run, "<u>hi\n<a>", *few)["generations"]
    assert got["tokens"] == want["tokens"] and got["prompt"] == "hi"


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        (["--chunk", "7"], lambda lm, told: told.get("chunk") == 7),
        (["--attn-sparsity", "0.1"], lambda lm, told: lm.config.attn_sparsity == 0.1),
        (["--kv-dtype", "fp8"], lambda lm, told: told["kv_dtype"] == "float8_e4m3fn"),
        (["--quantize", "w8a16"], lambda lm, told: "int8" in str(lm)),
        (["--dtype", "bfloat16"], lambda lm, told: lm.dtype == "bfloat16"),
    ],
)
def test_model_options_reach_the_model(run, monkeypatch, words, is_told):
    """Without the option it is otherwise."""
    seen = []

    def generate(lm, *arguments, **told):
        seen.append((lm, told))
        return [jl.Generation("", [], [], "stop")]

    monkeypatch.setattr(jl.LanguageModel, "generate", generate)
    run("generate", "hi")
    run("generate", "hi", *words)
    assert [is_told(*one) for one in seen] == [False, True]


def test_json_has_no_word_for_nan_and_uses_null(capsys):
    common.print_json({"a": [float("nan"), 1.5, float("inf")], "b": "ä"})
    assert capsys.readouterr().out == '{"a": [null, 1.5, null], "b": "ä"}\n'


# chat


def talk(run, monkeypatch, lines: str, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return run("chat", "--max-new-tokens", "12", *words)


@pytest.mark.core
def test_conversation_is_the_template_over_all_turns(run, model, monkeypatch):
    lm = jl.load(model)
    asked = [{"role": "system", "content": "be"}, chat.user("one")]
    [first] = lm.generate([lm.encode_chat(asked)], 12)
    asked += [{"role": "assistant", "content": first.text}, chat.user("two")]
    [second] = lm.generate([lm.encode_chat(asked)], 12)
    status, out, err = talk(run, monkeypatch, "one\n\ntwo\n", "--system", "be")
    assert (status, out, err) == (0, f"{first.text}\n{second.text}\n", "")


def test_reset_begins_anew_and_exit_ends(run, monkeypatch):
    _, once, _ = talk(run, monkeypatch, "one\n")
    status, out, err = talk(run, monkeypatch, "one\n/reset\none\n/help\n/exit\nnever\n")
    assert (status, out) == (0, once * 2)
    assert "/help is not a command" in err and "a new conversation\n" in err


def test_a_line_may_begin_with_a_slash(run, monkeypatch):
    _, once, _ = talk(run, monkeypatch, "/etc/passwd is a file\n")
    status, twice, err = talk(run, monkeypatch, "//etc/passwd is a file\n/tmp\n//tmp\n")
    assert status == 0 and twice.startswith(once) and twice != once
    assert err == "/tmp is not a command; there are /reset and /exit, and //tmp says /tmp\n"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(run, monkeypatch):
    """What was said of it stays: the next answer is that of a conversation with both."""
    asked = []
    generate = jl.LanguageModel.generate

    def interrupted(self, rows, *arguments, on_text, **options):
        asked.append(self.tokenizer.decode(rows[0]))
        if len(asked) > 1:
            return generate(self, rows, *arguments, on_text=on_text, **options)
        on_text(0, "well")
        raise KeyboardInterrupt

    monkeypatch.setattr(jl.LanguageModel, "generate", interrupted)
    status, out, err = talk(run, monkeypatch, "one\ntwo\n")
    assert status == 0 and out.startswith("well\n") and out.count("\n") >= 2
    assert "(interrupted)" in err and asked[1].startswith("<u>one\n<a>well")


def test_bytes_that_are_no_text_are_noted_and_the_conversation_goes_on(run, monkeypatch):
    _, once, _ = talk(run, monkeypatch, "one\n")
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\none\n"), "utf-8", "strict")
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, err = run("chat", "--max-new-tokens", "12")
    assert (status, out) == (0, once) and "not Unicode" in err


def test_conversation_beyond_the_context_says_so_and_goes_on(run, monkeypatch):
    _, once, _ = talk(run, monkeypatch, "one\n")
    status, out, err = talk(run, monkeypatch, "x" * 300 + "\none\n")
    assert (status, out) == (0, once)
    assert "307 tokens and the context 200" in err


def test_model_without_a_template_cannot_chat(run, model, tmp_path):
    for file in Path(model).iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert_error(run("chat", model=str(tmp_path)), "no chat template")
    (tmp_path / "tokenizer.json").unlink()
    assert_error(run("chat", model=str(tmp_path)), "no tokenizer")


# bench, eval, doctor


def test_a_draft_changes_no_text(run, model):
    words = ("generate", "abcabcab", "--max-new-tokens", "12", "--json")
    [plain] = json.loads(run(*words)[1])["generations"]
    status, out, _ = run(*words, "--draft", f"{model}:layers=1", "--draft-tokens", "3")
    [got] = json.loads(out)["generations"]
    assert status == 0 and got["tokens"] == plain["tokens"]
    assert got["drafted"] >= got["accepted"] >= 0 and "drafted" not in plain
    assert jl.load(f"{model}:layers=1").config.n_layers == 1
    assert_error(run("generate", "a", "--draft-tokens", "3"), "--draft-tokens needs --draft")
    assert_error(run("generate", "a", "--draft", f"{model}:layers=9"), "layers = 9: ")
    assert_error(run("generate", "a", "--draft", f"{model}:layers=x"), "layers=x: expected a whole")
    assert_error(run("bench", "--draft", "ngram", "--batch", "2"), "--batch and --draft exclude")


def test_the_folder_of_a_head_is_a_draft(run, model, tmp_path):
    """It reads the states before both layers of the model, and the output of the last."""
    taps = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    head = str(eagle_cases.write(tmp_path / "head", {"eagle_config": taps}))
    words = ("generate", "abcabcab", "--max-new-tokens", "12", "--json")
    [plain] = json.loads(run(*words)[1])["generations"]
    status, out, _ = run(*words, "--draft", head, "--draft-tokens", "3")
    [got] = json.loads(out)["generations"]
    assert status == 0 and got["tokens"] == plain["tokens"] and got["drafted"] > 0
    deep = str(eagle_cases.write(tmp_path / "deep"))
    assert_error(run("generate", "a", "--draft", deep), "layers [1, 2, 3], but tiny has 2 layers")
    assert_error(run("generate", "a", model=head), "name its folder as the draft")


def test_eval_is_the_mean_of_the_models_own_logprobs(run, model, tmp_path):
    text = "The quick brown fox jumps over the lazy dog."
    path = tmp_path / "text.txt"
    path.write_text(text)
    status, out, _ = run("eval", "--text", str(path), "--window", "16", "--json")
    got = json.loads(out)
    lm, ids = jl.load(model), list(text.encode())
    want = []
    for first in range(0, len(ids) - 1, 15):
        row = ids[first : first + 16]
        logits = np.asarray(lm.logits([row], [len(row)]), np.float64)[0]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        want += [logprobs[i, token] for i, token in enumerate(row[1:])]
    assert status == 0 and got["tokens"] == len(want) == len(ids) - 1
    assert got["perplexity"] == pytest.approx(math.exp(-np.mean(want)), rel=1e-4)
    for text, counted, noted in (("ab", "1 token\n", 1), ("ab" * 70, "139 tokens\n", 0)):
        path.write_text(text)
        status, out, error = run("eval", "--text", str(path), "--window", "16")
        assert out.endswith(f" over {counted}") and error.count("note: too few tokens") == noted
    _, out, _ = run("eval", "--text", str(path), "--window", "16", "--reference", model)
    assert re.search(r"perplexity [+-]0\.0%, KL 0\.0000 nats, top-1 100\.0%\n$", out)
    path.write_text("The quick brown fox jumps over the lazy dog.")
    report = tmp_path / "report.json"
    words = ("--texts", str(tmp_path), "--reference", model, "--window", "16")
    status, out, _ = run("eval", *words, "--report", str(report))
    assert status == 0 and "text" in out and "KL 0.0000" in out
    assert json.loads(report.read_text())["kinds"]["text"]["perplexity"] == got["perplexity"]


def test_doctor_says_what_runs_where_and_why(run, model):
    status, out, _ = run("doctor", "--json")
    got = json.loads(out)
    assert status == 0 and got["packages"]["jax"] == jax.__version__
    assert got["backend"] == jax.default_backend() and len(got["devices"]) == jax.device_count()
    assert got["model"]["bytes_by_dtype"] == {"float32": 4 * got["model"]["parameters"]}
    assert got["model"]["tokenizer"] and got["model"]["chat_template"]
    assert {op["op"] for op in got["ops"]} >= {"quantized_matmul", "gla", "rms_norm", "attention"}
    calls = got["model"]["calls"]
    for op in got["ops"] + calls:
        assert (op["reason"] is None) == (op["implementation"] != "xla")
    assert {"decode, 1 row", "decode, 16 rows"} < {op["call"] for op in calls}
    assert {op["op"] for op in calls} >= {"quantized_matmul", "rms_norm", "rope_and_attend"}
    assert max(op.get("count", 1) for op in calls) >= got["model"]["layers"]
    status, out, _ = run("doctor")
    assert status == 0 and "op        decode, 1 row: " in out
    assert f"model     {model}: " in out


@pytest.mark.skipif(jax.__version_info__ < dispatch.TESTED_JAX[0], reason="needs jax >= 0.11.2")
def test_doctor_looks_at_what_a_hopper_gpu_would_run(monkeypatch):
    hopper = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", memory_stats=dict
    )
    monkeypatch.setattr(dispatch, "device_of", lambda _: hopper)
    ops = [doctor._op(*row) for row in doctor._typical_calls()]
    got = {(op["op"], op["call"]): op for op in ops}
    for op in got.values():
        assert (op["reason"] is None) == (op["implementation"] == "mosaic") == bool(op["kernel"]), (
            op
        )
    assert got["gla", "64 tokens"]["kernel"] == "gla_mosaic"
    assert got["quantized_matmul", "w4a16, 512 tokens"]["plan"].startswith("WeightTile(tokens=128")
    one = got["quantized_matmul", "w8a8, 1 token"]
    assert one["kernel"] or "XLA's form is predicted to take" in one["reason"]


# Bad input

RESIDENT, NARROW = "100 0 100 0 100 0", "compress_cache=true"


def assert_error(result: tuple[int, str, str], *words: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hi", "--logit-bias", "9999=1"], "token id 9999"),
        (["hi", "--top-k", "5"], "--top-k needs --temperature"),
        (["hi", "--max-new-tokens", "1000"], "prompt 0: 2 tokens and 1000 new ones"),
        (["x" * 300], "prompt 0: 300 tokens"),
        ([""], "prompt 0 is empty"),
        ([], "no prompt"),
        (["hi", "--file", "-"], "exclude each other"),
        (["hi", "--stream", "--json"], "exclude each other"),
        (["hi", "ho", "--stream"], "--stream"),
        (["--file", "/nowhere/x.txt"], "/nowhere/x.txt: No such file"),
        (["--file", "/"], "/: Is a directory"),
        (
            ["hi", "--attn-sparsity", "0.1", "--policy", "0 0 0 0 0 0 attn_sparsity=0.2"],
            "attn_sparsity = 0.2, and beside it 0.1 is asked for",
        ),
        (["caf\udce9"], "not Unicode"),
    ],
)
def test_generate_refuses(run, words, says):
    """``test_options`` has every option outside of its domain."""
    assert_error(run("generate", *words), says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--prompt-tokens", "500"], "context is 200"),
        (["bench", "--random"], "no preset"),
        (["eval"], "--text"),
        (["eval", "--text", "/nowhere"], "/nowhere: No such file"),
        (["eval", "--text", "EMPTY"], "0 tokens"),
        (["eval", "--text", "BINARY"], "not UTF-8"),
        (["eval", "--text", "EMPTY", "--report", "r.json"], "--report needs --texts"),
        (["eval", "--text", "EMPTY", "--window", "500"], "from 2 to 200"),
        (["plan", "--mesh", "model=99"], "--mesh"),
        (["plan", "--host-gb", "1", "--policy", RESIDENT], "--host-gb bounds what is solved for"),
        (["plan", "--chunk", "8", "--policy", f"{RESIDENT} prefill_batch_size=9"], "size = 9"),
        (
            ["eval", "--text", "EMPTY", "--kv-dtype", "int8", "--policy", f"{RESIDENT} {NARROW}"],
            "compress_cache is int4, and kv_dtype is 'int8'",
        ),
    ],
)
def test_other_commands_refuse(run, tmp_path, words, says):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    files = {"EMPTY": str(tmp_path / "empty"), "BINARY": str(tmp_path / "binary")}
    assert_error(run(*(files.get(word, word) for word in words)), says)


def test_generate_says_how_far_a_long_prompt_is(monkeypatch):
    notes, lines, clock = [], [], iter((0.0, 10.0, 30.0))
    sign = SimpleNamespace(note=notes.append, say=lines.append)
    monkeypatch.setattr(generate_command.time, "monotonic", lambda: next(clock))
    lm = SimpleNamespace(config=LLAMA.replace(max_position=40000), dtype=np.float32)
    tell = generate_command._reading(sign, lm, 1, None)
    for done in (4096, 8192, 16384):
        tell(done, 16384)
    assert notes == [
        "4,096 of 16,384 prompt tokens",
        "8,192 of 16,384 prompt tokens, 410 tokens/s, 20 s left",
        "",
    ]
    [line] = lines
    assert line.startswith("the cache of 16,384 tokens takes ") and "--kv-dtype int8" in line


def test_plan_measures_anew_for_what_it_is_asked(run, monkeypatch):
    def calibrate(cfg, *_, chunk, fresh, **__):
        raise JaxLlamaError(f"{fresh} {cfg.attn_sparsity} {chunk}")

    monkeypatch.setattr("jaxllama.evaluation.plan.calibrate", calibrate)
    words = ["plan", "--random", "--prompt-tokens", "64"]
    assert_error(run(*words, model="smollm2-135m"), "False 1.0 512")
    words += ["--recalibrate", "--attn-sparsity", "0.1", "--chunk", "64"]
    assert_error(run(*words, model="smollm2-135m"), "True 0.1 64")


@pytest.mark.core
def test_unknown_models_are_named(run, tmp_path):
    missing = str(tmp_path / "missing.gguf")
    assert_error(run("generate", "hi", model=missing), missing)
    assert_error(run("generate", "hi", model=str(tmp_path)), "config.json")


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "generate" in out and "doctor" in out


@pytest.mark.parametrize("command", [["doctor"], ["bench", "--preset", "gla-340m", "--random"]])
def test_a_device_that_is_not_there_is_one_sentence(command, capsys, monkeypatch):
    """jax raises an AssertionError without words, or a RuntimeError, by the kind of device."""
    import jax

    def fail(*_):
        raise AssertionError

    for name in ("devices", "local_devices", "default_backend"):
        monkeypatch.setattr(jax, name, fail)
    status = main(command)
    assert_error((status, *capsys.readouterr()), "jax finds no such device on this machine")


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device", "/cache/x"), 2, "error: /cache/x: No space left"),
        (MemoryError("no room"), 2, "error: out of memory: no room"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of\nmemory"), 2, "error: out of memory: RESOURCE"),
    ],
)
def test_what_happens_meanwhile_is_one_line(monkeypatch, capsys, raised, status, says):
    def load(*_, **__):
        raise raised

    monkeypatch.setattr("jaxllama.loading.load", load)
    assert main(["generate", "hi"]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(says) and err.count("\n") == (status == 2)


def test_a_character_that_stdout_lacks_is_escaped(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(doctor_command, "run", lambda _: print("caf\xe9"))
    assert main(["doctor"]) == 0 and screen.buffer.getvalue() == b"caf\\xe9\n"


@pytest.mark.core
def test_bugs_of_ours_are_not_hidden(monkeypatch):
    monkeypatch.setattr("jaxllama.loading.load", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "hi"])


# As a process


ENV = {**os.environ, "PYTHONPATH": str(CHECKOUT)}


def silence(stderr: str) -> str:
    """Without the lines of work that took long on a busy machine."""
    return re.sub(r"^(reading|generating).* \d+ s\n", "", stderr, flags=re.MULTILINE)


def test_help_imports_no_jax_and_names_every_scheme():
    code = (
        "import sys\nfrom jaxllama.cli.main import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: print('jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == "False" and "--temperature" in out.stdout
    assert [scheme for scheme in SCHEMES if scheme not in out.stdout] == []


def test_closed_pipe_ends_quietly(model):
    """The reader is gone before the first character."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "jaxllama", "generate", "hi", "--model", model, "--stream"]
    got = subprocess.run(words, env=ENV, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (got.returncode, silence(got.stderr)) == (0, "")


@pytest.mark.slow
def test_the_main_job():
    """The command of the README, on the real weights."""
    try:
        hub.resolve("smollm2-135m")
    except JaxLlamaError as error:
        pytest.skip(f"no weights here: {error}")
    words = ["generate", "--chat", "Hi! Who are you?", "--max-new-tokens", "8"]
    command = [sys.executable, "-m", "jaxllama", *words]
    got = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert got.returncode == 0, got.stderr
    assert got.stdout.startswith("Hello! I'm here to") and silence(got.stderr) == ""
