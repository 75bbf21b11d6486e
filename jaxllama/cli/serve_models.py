"""``jaxllama serve --config FILE`` with ``[[model]]`` tables: several models behind one port.

    [[model]]
    model = "smollm2-135m"       # required; every option of ``serve`` that concerns one model
    name = "small"               # by default the model's own
    memory-gb = 2                # that it takes of ``memory-gb`` of the server

``serving.http.model_pool`` starts and ends the models, each as a ``jaxllama serve`` of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxllama.cli.config_file import words_of
from jaxllama.cli.gpu_memory import gpu_share, gpu_total
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import JsonObject

# The options of the server; a model's table has the others.
SERVER = (
    "host",
    "port",
    "api_key",
    "api_keys_file",
    "ssl_certfile",
    "ssl_keyfile",
    "allowed_origin",
    "allowed_host",
    "max_body",
    "drain_timeout",
    "state",
    "otlp_traces_endpoint",
    "memory_gb",
    "unload_after",
    "model_table",
)
# A model's process, with the words of its spec.
PROGRAM = (sys.executable, "-P", "-m", "jaxllama.cli.model_process")
_OWN = ("run", "top", "inner")


def run(args: argparse.Namespace) -> None:
    from jaxllama.serving.http.model_pool import ModelPool
    from jaxllama.serving.http.model_router import RouterSettings, application, serve_models
    from jaxllama.serving.http.process import ServeOptions, bind, url

    _check_server(args)
    # It checks the keys, the hosts and the certificate.
    options = ServeOptions(
        "several models",
        args.host,
        args.port,
        tuple(args.api_key),
        state=args.state,
        hosts=tuple(args.allowed_host),
        keys_file=args.api_keys_file,
        certificate=args.ssl_certfile,
        private_key=args.ssl_keyfile,
        traces=args.otlp_traces_endpoint,
    )
    keys = options.keys
    with tempfile.TemporaryDirectory(prefix="jaxllama-") as folder:
        shared = _shared(args)
        if keys:
            shared.append(f"--api-keys-file={_write_keys(Path(folder), keys)}")
        total = None if os.environ.get("JAX_PLATFORMS") == "cpu" else gpu_total()
        budget = None if args.memory_gb is None else int(args.memory_gb * 1e9)
        if total is not None:
            budget = min(budget or total, int(total * gpu_share()))
        specs = [_spec(args, table, shared, budget, total) for table in args.model_table]
        names = [name for spec in specs for name in (spec.name, *spec.aliases)]
        for name in names:
            if names.count(name) > 1:
                raise JaxLlamaError(f"[[model]]: the name {name} is there twice")
        shares = {
            spec.name: {"XLA_CLIENT_MEM_FRACTION": str(round(spec.memory / total, 3))}
            for spec in specs
            if total is not None and spec.memory is not None
        }
        environment = {
            spec.name: {"JAXLLAMA_API_KEY": ""} | shares.get(spec.name, {}) for spec in specs
        }
        pool = ModelPool(
            PROGRAM, specs, budget, args.unload_after, environment, args.drain_timeout + 20
        )
        settings = RouterSettings(
            keys, args.max_body, tuple(args.allowed_origin), options.known_hosts
        )
        listener = bind(args.host, args.port)
        address = url(args.host, listener.getsockname()[1], args.ssl_certfile is not None)
        serve_models(
            application(pool, settings),
            listener,
            f"{len(specs)} models on {address}",
            args.drain_timeout,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
        )


def _check_server(args: argparse.Namespace) -> None:
    """Raise JaxLlamaError for an option of one model among the server's."""
    plain = vars(args.top.parse_args(["serve"]))
    for name, value in vars(args).items():
        if name not in (*SERVER, *_OWN) and value != plain[name]:
            option = name.replace("_", "-")
            raise JaxLlamaError(f"--{option}: belongs into a [[model]] table of the file")


def _shared(args: argparse.Namespace) -> list[str]:
    """Return the words that every model gets."""
    words = [f"--max-body={args.max_body}", f"--drain-timeout={args.drain_timeout}"]
    if args.otlp_traces_endpoint is not None:
        words.append(f"--otlp-traces-endpoint={args.otlp_traces_endpoint}")
    return words


def _spec(
    args: argparse.Namespace,
    table: JsonObject,
    shared: list[str],
    budget: int | None,
    total: int | None,
) -> Any:
    """Return a table's ModelSpec. total: bytes of the smallest GPU, None without one."""
    from jaxllama.serving.http.model_pool import ModelSpec
    from jaxllama.serving.http.process import model_name

    table = {key.replace("_", "-"): value for key, value in table.items()}
    model, size = table.get("model"), table.pop("memory-gb", None)
    if not isinstance(model, str) or not model:
        raise JaxLlamaError("[[model]]: model: is required, a preset, directory, file or hub id")
    name = table.pop("name", None) or model_name(model)
    where = f"[[model]] {name}"
    if not isinstance(name, str) or ":" in name or "/" in name and args.state is not None:
        raise JaxLlamaError(f"{where}: name: must be a text without ':' (and '/' with --state)")
    for key in table:
        if key.replace("-", "_") in (*SERVER, "config") and key != "model":
            raise JaxLlamaError(f"{where}: {key}: is an option of the server")
    if size is not None and not (type(size) in (int, float) and 0 < size <= 1e9):
        raise JaxLlamaError(f"{where}: memory-gb: must be a number above 0 and at most 1e9")
    memory = None if size is None else int(size * 1e9)
    if memory is None and total is not None:
        memory = budget  # a GPU's memory is taken as a whole
    if memory is not None and budget is not None and memory > budget:
        raise JaxLlamaError(
            f"{where}: memory-gb: {memory / 1e9:g} is more than the server's {budget / 1e9:g}"
        )
    aliases = table.pop("served-model-name", [])
    aliases = [aliases] if isinstance(aliases, str) else aliases
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
        raise JaxLlamaError(f"{where}: served-model-name: expected a text, or a list of texts")
    words = words_of(table, where, lambda some: args.top.parse_args(["serve", *some]))
    try:
        args.top.parse_args(["serve", *words])
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{where}: {error}") from None
    words += [f"--served-model-name={alias}" for alias in (name, *aliases)]
    words += [*shared, "--host=127.0.0.1", "--port=0", "--allowed-host=localhost"]
    if args.state is not None:
        words.append(f"--state={args.state / name}")
    return ModelSpec(name, tuple(words), tuple(aliases), memory)


def _write_keys(folder: Path, keys: Any) -> Path:
    """Write the keys with their limits to a file that only this user can read."""
    path = folder / "keys.toml"
    lines: list[str] = []
    for number, key in enumerate(keys, start=1):
        lines += ["[[key]]", f"name = {json.dumps(key.name or f'key-{number}')}"]
        lines.append(f"key = {json.dumps(key.key)}")
        for limit in ("requests_per_minute", "tokens_per_minute"):
            if (value := getattr(key, limit)) is not None:
                lines.append(f"{limit} = {value}")
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path
