"""lm-eval and inspect-ai in this process, and answers made again from a state folder."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("uvicorn")

from jaxllama.cli.main import main
from jaxllama.engine.engine import Engine
from jaxllama.errors import JaxLlamaError
from jaxllama.harnesses import local_model
from jaxllama.harnesses.local_model import MODEL_FILE, LocalModel
from jaxllama.harnesses.replay import replay
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http.server import ServerSettings, create_app
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, byte_tokenizer, tiny_checkpoint, tiny_model
from tests.helpers.lm_eval_tasks import CHOICE, WRITE

SIZES = {"max_slots": 2, "max_len": 96}
BODY = {"prompt": "ab", "max_tokens": 5, "temperature": 1.0, "logprobs": 1}


@contextlib.contextmanager
def fake_app(lm, name, options, journal=None):
    """The application over an engine without a model."""
    with FakeEngine(max_len=96) as engine:
        engine.options = SimpleNamespace(max_len=96, max_queue=8, max_slots=2)
        state = None if journal is None else journal.folder
        settings = ServerSettings(name, 96, state=state)
        yield create_app(lm, engine, settings, Metrics(), journal), engine


@pytest.fixture(autouse=True)
def only_what_is_used_is_compiled(monkeypatch):
    monkeypatch.setattr(Engine, "warm_up_behind", lambda engine: None)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_answers_are_made_again_from_the_state_folder(tmp_path, monkeypatch, real):
    if not real:
        monkeypatch.setattr(local_model, "local_app", fake_app)
    lm = tiny_model()
    with LocalModel(lm, NAME, tmp_path, deterministic=True, kv_dtype="int8", **SIZES) as model:
        answers = model.post_all("/v1/completions", [{**BODY, "seed": n} for n in range(4)])
        texts = [answer["choices"][0]["text"] for answer in answers]
        said = model.said()
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        model.post("/v1/chat/completions", chat)
        with pytest.raises(JaxLlamaError, match="temperature"):
            model.post("/v1/completions", {**BODY, "temperature": 9})
    assert model.digest in said and len(set(texts)) > 1
    report = replay(lm, tmp_path)
    assert (report.same, report.different) == (5, ()) and report.digest == report.recorded
    # A changed answer is found, by its id.
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        id = answers[2]["id"]
        wrong = json.dumps({**answers[2], "choices": []})
        db.execute("UPDATE calls SET answer = ? WHERE id = ?", (wrong, id))
    db.close()
    assert replay(lm, tmp_path).different == (id,)
    assert replay(lm, tmp_path, [answers[1]["id"]]).same == 1
    with pytest.raises(JaxLlamaError, match="no answer with the id"):
        replay(lm, tmp_path, ["cmpl-x"])
    with pytest.raises(
        JaxLlamaError, match="of another model: kv_dtype, engine_deterministic differ"
    ):
        LocalModel(lm, NAME, tmp_path, **SIZES)
    (tmp_path / MODEL_FILE).write_text("")  # as an earlier version left it when it was killed
    for begin in (lambda: replay(lm, tmp_path), lambda: LocalModel(lm, NAME, tmp_path, **SIZES)):
        with pytest.raises(JaxLlamaError, match=MODEL_FILE):
            begin()
    (tmp_path / MODEL_FILE).unlink()
    with pytest.raises(JaxLlamaError, match="no state folder of an evaluation"):
        replay(lm, tmp_path)


def test_the_options_are_named():
    with pytest.raises(JaxLlamaError, match="max_slot: unknown; known are .*max_slots"):
        LocalModel.load("x", max_slot=3)


# lm-eval

ROWS = [
    {"question": f"colour {n}?", "choices": ["red", "green", "blue"], "answer": n % 3}
    for n in range(6)
]


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICE), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(text.format(data=data, most=6))
    return folder


def run(*words: str, cwd=None) -> list[str]:
    """The lines of a process that uses one of the libraries, whose warnings are their own."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(cwd / "datasets"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
    }
    words = [sys.executable, "-P", *words]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_lm_eval_scores_a_local_task_alike_twice(tmp_path, tasks, capsys):
    pytest.importorskip("lm_eval")
    folder = tiny_checkpoint(tmp_path)
    lines = []
    for name in ("one", "two"):
        options = f"pretrained={folder / NAME},max_len=96,deterministic=True"
        words = ["run", "--model", "jaxllama", "--tasks", "local_choice,local_write"]
        words += ["--include_path", str(tasks), "--log_samples", "--batch_size", "2"]
        words += ["--output_path", str(tmp_path / name), "--model_args"]
        words += [f"{options},state={tmp_path / f's-{name}'}"]
        lines.append(run("-m", "jaxllama.harnesses.lm_eval", *words, cwd=tmp_path)[-1])
    assert lines[0] == lines[1] and lines[0].startswith(f"jaxllama {NAME}: digest ")
    lm = tiny_model(byte_tokenizer())
    [written] = (tmp_path / "one").rglob("results_*.json")
    report = json.loads(written.read_text())
    assert report["config"]["model_digest"] in lines[0]
    samples = next((tmp_path / "one").rglob("samples_local_choice*")).read_text().splitlines()
    correct = 0
    for sample in map(json.loads, samples):
        context = f"Question: {sample['doc']['question']}\nAnswer:".encode()
        mine = []
        for choice in sample["doc"]["choices"]:
            row = [*context, *f" {choice}".encode()]
            logits = np.asarray(lm.logits(np.array([row]), np.array([len(row)])), np.float64)[0]
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            places = range(len(context) - 1, len(row) - 1)
            greedy = all(int(logits[at].argmax()) == row[at + 1] for at in places)
            mine.append((sum(logprobs[at, row[at + 1]] for at in places), greedy))
        theirs = [
            (float(value), str(greedy) == "True") for value, greedy in sample["filtered_resps"]
        ]
        np.testing.assert_allclose([v for v, _ in theirs], [v for v, _ in mine], atol=1e-3)
        assert [g for _, g in theirs] == [g for _, g in mine]
        correct += int(np.argmax([value for value, _ in mine])) == sample["doc"]["answer"]
    assert report["results"]["local_choice"]["acc,none"] == correct / len(ROWS)
    samples = next((tmp_path / "one").rglob("samples_local_write*")).read_text().splitlines()
    for sample in map(json.loads, samples):
        [want] = lm.generate([list(sample["doc"]["question"].encode())], 6)
        assert sample["filtered_resps"] == [want.text.split("\n")[0]]
    words = ["eval", "--replay", str(tmp_path / "s-one"), "--model", str(folder / NAME), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["different"] == [] and report["same"] == 4 * len(ROWS)
    assert report["digest"] == report["recorded"]


INSPECT = """
import sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from jaxllama.harnesses import inspect_provider
folder, state = sys.argv[1:]
options = {"state": state, "deterministic": True, "max_slots": 2, "max_len": 96}
model = get_model(f"jaxllama/{folder}", memoize=False, **options)
samples = [Sample(input=f"colour {n}?", target="red") for n in range(5)]
task = Task(dataset=samples, solver=generate(), scorer=includes())
[log] = eval(task, model=model, max_tokens=6, temperature=1.0, seed=3, display="none")
assert log.status == "success", log.error
for sample in sorted(log.samples, key=lambda sample: sample.id):
    print(sample.output.metadata["digest"], repr(sample.output.completion))
print(model.api.local.said())
"""


@pytest.mark.slow
def test_inspect_ai_scores_a_local_task_alike_twice(tmp_path):
    pytest.importorskip("inspect_ai")
    folder = tiny_checkpoint(tmp_path) / NAME
    runs = [
        run("-c", INSPECT, str(folder), str(tmp_path / f"state-{n}"), cwd=tmp_path)
        for n in range(2)
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 6 and len(set(runs[0])) > 2
    digest = runs[0][0].split()[0]
    assert all(line.startswith(digest) for line in runs[0][:5]) and digest in runs[0][5]
    assert replay(tiny_model(), tmp_path / "state-0").same == 5


TOOLS = """
import asyncio
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import JSONSchema
from jaxllama.errors import JaxLlamaError
from jaxllama.harnesses.inspect_provider import JaxLlamaAPI
from jaxllama.harnesses.local_model import LocalModel
from tests.helpers.http_server import NAME, tiny_model

boolean = ToolParams(properties={"a": JSONSchema(type="boolean")}, required=["a"])
add = ToolInfo(name="add", description="adds", parameters=boolean)

async def main(api):
    config = GenerateConfig(max_tokens=200)
    output = await api.generate([ChatMessageUser(content="add")], [add], "any", config)
    [call, *_] = output.choices[0].message.tool_calls
    print(call.function, type(call.arguments["a"]).__name__)
    long = [ChatMessageUser(content="x" * 2000)]
    output = await api.generate(long, [], "auto", GenerateConfig())
    print(output.stop_reason)
    try:
        await api.generate(long, [], "auto", GenerateConfig(logit_bias={1: 2.0}))
    except JaxLlamaError as error:
        print(error)

with LocalModel(tiny_model(), NAME, max_slots=2, max_len=768) as local:
    asyncio.run(main(JaxLlamaAPI(NAME, local=local)))
"""


@pytest.mark.slow
def test_inspect_ais_tools_and_refusals(tmp_path):
    pytest.importorskip("inspect_ai")
    assert run("-c", TOOLS, cwd=tmp_path) == [
        "add bool",
        "model_length",
        "logit_bias: this provider does not have it",
    ]
