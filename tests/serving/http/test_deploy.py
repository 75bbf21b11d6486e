"""The files of deploy/: they parse, and name options, paths and metrics that exist."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("yaml")

import yaml

from jaxllama.cli import serve
from jaxllama.cli.domains import Parser
from jaxllama.engine.stats import EngineStats
from jaxllama.serving.api import keys
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http.routes import OPEN

DEPLOY = Path(__file__).parents[3] / "deploy"


class Idle:
    def stats(self):
        zeros = dict.fromkeys((f.name for f in dataclasses.fields(EngineStats)), 0)
        return EngineStats(**{**zeros, "finished": {}})


def series() -> set[str]:
    """Names of the series on the page of a server that had a request."""
    metrics = Metrics()
    metrics.watch(Idle())
    metrics.request("/", "GET", 200, 0.0)
    metrics.ended("stop")
    page = metrics.page()[1].decode()
    return set(re.findall(r"^(\w+)[{ ]", page, re.MULTILINE))


def test_the_guide_names_the_metrics_as_the_server_does():
    page = runpy.run_path(str(DEPLOY.parent / "docs/reference.py"))["http"]()
    named = dict(re.findall(r"^\| `(jaxllama_\w+)` \| (\w+)", page, re.MULTILINE))
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    wanted = {name + end for name, kind in named.items() for end in ends.get(kind, ("",))}
    names = {name for name in series() if name.startswith("jaxllama_")}
    assert wanted == {name for name in names if not name.endswith("_created")}


def test_every_metric_of_the_dashboard_exists():
    names = series()
    panels = json.loads((DEPLOY / "grafana/dashboard.json").read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"jaxllama_\w+", target["expr"])
    }
    assert len(asked) > 15 and asked <= names, asked - names


def serve_options() -> set[str]:
    parser = Parser()
    serve.options(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_the_files_name_real_options_and_paths():
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pod = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert all(probe["path"] in OPEN for probe in probes)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert "/ready" in compose["services"]["jaxllama"]["healthcheck"]["test"][-1]
    unit = (DEPLOY / "jaxllama.service").read_text().replace("\\\n", " ")
    started = re.search(r"ExecStart=\S+ (.*)", unit)[1].split()
    for words in (container["args"], compose["services"]["jaxllama"]["command"], started):
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= serve_options(), options - serve_options()
    assert yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]


def test_the_example_keys_are_read(tmp_path):
    assert [key.name for key in keys.read(DEPLOY / "keys.toml")] == ["search", "nightly"]
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    secret = next(d for d in documents if d["kind"] == "Secret")["stringData"]["keys.toml"]
    (tmp_path / "keys.toml").write_text(secret)
    assert keys.read(tmp_path / "keys.toml")[0].is_limited
