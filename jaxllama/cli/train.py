"""``jaxllama train`` and ``jaxllama tokenize``: files in, a summary out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxllama.checkpoints import hub
from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import data
from jaxllama.training.config import load_train_config
from jaxllama.training.loop import TrainResult, train


def run_file(file: str | Path, out: Path | None, mesh: str | Mesh | None = None) -> dict[str, Any]:
    """Train what ``file`` (or the shipped one of that name) says in ``out`` (by default runs/NAME)
    and sum it up."""
    config = load_train_config(file)
    return summary(train(config, out or Path("runs") / Path(file).stem, mesh=mesh, progress=True))


def summary(result: TrainResult) -> dict[str, Any]:
    """Speed is the median over the steps after the first, which compiles."""
    steps = result.metrics
    last, timed = steps[-1], steps[1:] or steps
    rows = {
        "directory": str(result.directory),
        "model": str(result.model),
        "steps": last["step"],
        "tokens": last["tokens"],
        "loss": last["loss"],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in timed),
        "mfu": last["mfu"] and statistics.median(row["mfu"] for row in timed),
    }
    if result.validation:
        rows["validation_loss"] = result.validation[-1]["validation_loss"]
    return rows


def table(rows: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else str(value)

    return "\n".join(f"{key:18} {text(value)}" for key, value in rows.items() if value is not None)


def tokenize_files(texts: Sequence[Path], out: Path, tokenizer: str) -> dict[str, Any]:
    """tokenizer: "bytes", or a model whose tokenizer it is: only that is read."""
    file = data.tokenize(texts, out, load_tokenizer(tokenizer), progress=True)
    return {"directory": str(file.directory), "tokens": len(file), "sha256": file.sha256}


def load_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return Tokenizer.byte_level()
    path = hub.resolve(name, progress=True)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(path)
    if not (path / "tokenizer.json").is_file():
        raise JaxLlamaError(f"{name}: no tokenizer.json; --tokenizer takes a model's name or bytes")
    return Tokenizer.from_file(path)
