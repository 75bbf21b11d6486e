"""A batch on a Ray cluster of two nodes in this machine: answered, resumed, a node lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
pytest.importorskip("ray.data", reason="ray has no data: pip install -e '.[ray]'")
pytest.importorskip("httpx2")

from ray.cluster_utils import Cluster

from jaxllama.cli.main import main
from jaxllama.serving.http import batch
from tests.helpers.http_server import tiny_checkpoint, wait_until
from tests.helpers.ray_engine import open_app

# Ray's own code warns of itself, and leaves sockets and processes to its exit.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MANY = 10_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def write(path: Path, n: int, n_tokens: int) -> None:
    with path.open("w") as file:
        for number in range(n):
            body = {"prompt": f"line {number}", "max_tokens": n_tokens, "seed": number}
            line = {"custom_id": f"{number}", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def texts_of(path: Path) -> dict[str, str]:
    """The text of each line, which is there once."""
    texts = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        assert entry["custom_id"] not in texts and entry["response"]["status_code"] == 200
        texts[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["text"]
    return texts


def begin(cluster: Cluster, source: Path, target: Path, step: float = 0.001) -> subprocess.Popen:
    program = (sys.executable, "-m", "tests.helpers.ray_engine")
    words = (cluster.address, "2", f"{step}", f"{source}", f"{target}")
    return subprocess.Popen(
        [*program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def written(target: Path) -> int:
    return target.read_bytes().count(b"\n") if target.exists() else 0


@pytest.fixture
def undisturbed(tmp_path):
    """The answers of some lines without a cluster."""

    def answers(source: Path, n: int) -> dict[str, str]:
        some, target = tmp_path / "some.jsonl", tmp_path / "some-out.jsonl"
        some.write_text("".join(source.read_text().splitlines(keepends=True)[:n]))
        with open_app(0.0) as app:
            batch.run(app, "tiny", some, target, 16, show=False)
        return texts_of(target)

    return answers


def test_a_batch_whose_driver_is_killed_is_resumed(cluster, tmp_path, undisturbed):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, MANY, 4)
    killed = []
    for at in (1000, 4000):
        driver = begin(cluster, source, target)
        wait_until(lambda at=at: written(target) >= at)
        driver.kill()
        driver.wait()
        killed.append(written(target))
    with target.open("a") as file:
        file.write('{"custom_id": "torn')
    driver = begin(cluster, source, target)
    out, errors = driver.communicate(timeout=500)
    assert driver.returncode == 0, errors
    print(f"killed at {killed} of {MANY} lines; then {out.strip()}")
    assert killed[0] < killed[1] < MANY
    texts = texts_of(target)
    assert texts.keys() == {f"{number}" for number in range(MANY)}
    assert undisturbed(source, 200).items() <= texts.items()


def test_a_batch_outlives_a_node(cluster, tmp_path, undisturbed):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, 800, 30)
    driver = begin(cluster, source, target, 0.01)
    wait_until(lambda: written(target) >= 100)
    [victim] = cluster.worker_nodes
    cluster.remove_node(victim, allow_graceful=False)
    cluster.add_node(num_cpus=2)
    _, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, errors
    texts = texts_of(target)
    assert len(texts) == 800
    assert undisturbed(source, 50).items() <= texts.items()


def test_the_command_answers_a_file(cluster, tmp_path, capsys):
    folder = tiny_checkpoint(tmp_path)
    source, alone, target = (tmp_path / f"{name}.jsonl" for name in ("in", "alone", "out"))
    write(source, 20, 6)
    model = ("--model", f"{folder / 'tiny'}", "--chunk", "16", "--max-len", "64", "--json")
    assert main(["batch", f"{source}", f"{alone}", *model]) == 0
    ray = ("--ray", cluster.address, "--replicas", "2")
    assert main(["batch", f"{source}", f"{target}", *model, *ray]) == 0
    assert texts_of(target) == texts_of(alone)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answered"] == 20
    assert main(["batch", f"{source}", f"{target}", *model, *ray]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kept"] == 20
