"""``jaxllama serve``: see ``jaxllama.serving.http.process``."""

from __future__ import annotations

import argparse
import functools
import math
import os
from typing import TYPE_CHECKING

from jaxllama.cli import common
from jaxllama.cli.config_file import MODEL_TABLE, OPTION
from jaxllama.cli.domains import (
    COUNT,
    POSITIVE,
    Number,
    Parser,
    add_list,
    add_value,
    api_key,
    filled,
    json_table,
    out_folder,
    text_file,
)
from jaxllama.cli.gpu_memory import gpu_share
from jaxllama.engine.declared import DECLARED, Option
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Options

if TYPE_CHECKING:
    from jaxllama.language_model import LanguageModel
    from jaxllama.serving.http.process import ServeOptions
    from jaxllama.serving.ray.options import ClusterOptions

HELP = "OpenAI's API, a chat page and metrics over HTTP."


def engine_options(sub: Parser) -> None:
    sub.add_argument("--slots", dest="max_slots", type=COUNT, help=argparse.SUPPRESS)  # older names
    sub.add_argument("--chunk", type=COUNT, help=argparse.SUPPRESS)
    groups = {"command": sub, "engine": sub.add_argument_group("engine", "sizes of the engine")}
    for option in DECLARED.values():
        if option.group in groups:
            declared_option(groups[option.group], option)
    common.chat_option(sub)
    common.draft_options(sub)


def declared_option(group: common.OptionGroup, option: Option) -> None:
    """Add the flag of an engine's option. Without it the engine's own default holds."""
    flag = option.name.replace("_", "-")
    if option.kind is bool:
        group.add_argument(
            f"--no-{flag}" if option.default else f"--{flag}",
            dest=option.name,
            action="store_false" if option.default else "store_true",
            default=None,
            help=option.text,
        )
        return
    default = "" if option.default is None else f" (default {option.default})"
    if option.kind is str:
        add_value(group, f"--{flag}", out_folder, "DIR", option.text)
        return
    is_float = option.kind is float
    add_value(
        group,
        f"--{flag}",
        Number(option.kind, option.least, option.most, above=is_float),
        option.unit if is_float else "N",
        f"{option.text}{default}",
    )


def engine_of(args: argparse.Namespace) -> Options:
    """Return the options of ``Engine``; those of the cache are in ``common``."""
    if args.draft is None and args.draft_tokens is not None:
        raise JaxLlamaError("--draft-tokens needs --draft: who proposes them")
    engine = {
        "kv_dtype": common.kv_dtype(args),
        "prefill_chunk": args.chunk,
        "draft_tokens": args.draft_tokens,
    }
    engine |= {name: getattr(args, name) for name in DECLARED if name in args}
    if args.disk_cache is not None:
        engine["disk_cache"] = str(args.disk_cache)
    if args.draft is not None:
        engine["draft"] = functools.partial(common.proposer, plain(args))
    return {name: value for name, value in engine.items() if value is not None}


def plain(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments without the parser, which cannot be sent to replicas."""
    options = {name: value for name, value in vars(args).items() if name not in ("run", "top")}
    return argparse.Namespace(**options)


def take_memory() -> None:
    """Let jax use most of a GPU's memory, less what a display needs, and pin the host's.

    Unused memory holds no cache. jax takes three quarters of the GPU's by default. Call this before
    jax starts its devices.
    """
    common.pin_all()  # the cache's host tier
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(gpu_share())


def ray_options(sub: Parser) -> None:
    group = sub.add_argument_group("several hosts", "engines on a Ray cluster (extra ray)")
    group.add_argument(
        "--ray",
        type=filled,
        metavar="ADDRESS",
        help="address of the cluster's head node, auto for the cluster of this host",
    )
    add_value(
        group, "--max-replicas", COUNT, "N", "with --ray: engines by load, from --replicas to N"
    )


def hosts_option(sub: Parser) -> None:
    sub.add_argument(
        "--hosts-per-replica",
        type=COUNT,
        default=1,
        metavar="N",
        help="with --ray and --mesh: hosts over which the mesh of each engine spreads",
    )


def options(sub: Parser) -> None:
    # ``config_file`` puts the file's options into its place before the words are parsed.
    sub.add_argument(
        OPTION,
        type=text_file,
        metavar="TOML",
        help="these options from a file, by their names; [[model]] tables for several models",
    )
    sub.add_argument(
        MODEL_TABLE, action="append", type=json_table, default=[], help=argparse.SUPPRESS
    )
    sub.add_argument(
        "--memory-gb",
        type=Number(float, 0, 1e9, above=True),
        metavar="GB",
        help="with several models: memory of those that run at once; the least used one ends "
        "(default: no bound on a CPU, the GPU's memory)",
    )
    sub.add_argument(
        "--unload-after",
        type=POSITIVE,
        metavar="SECONDS",
        help="with several models: end a model that was not used for so long (default never)",
    )
    sub.add_argument("--host", type=filled, default="127.0.0.1", help="(default %(default)s)")
    add_value(sub, "--port", Number(int, 0, 65535), "N", "port; 0 takes a free one", default=8000)
    add_value(sub, "--api-servers", COUNT, "N", "processes for HTTP beside the engine", default=1)
    sub.add_argument(
        "--replicas",
        type=COUNT,
        default=1,
        metavar="N",
        help="engines, each with the model on a device of its own (default %(default)s)",
    )
    ray_options(sub)
    hosts_option(sub)
    add_list(
        sub,
        "--api-key",
        api_key,
        "KEY",
        "key that clients must send; may be repeated ($JAXLLAMA_API_KEY)",
    )
    sub.add_argument(
        "--api-keys-file",
        type=text_file,
        metavar="FILE",
        help="TOML of keys with names, requests and tokens a minute",
    )
    engine_options(sub)
    sub.add_argument(
        "--max-body",
        type=Number(int, 1, 2**31),
        default=4 * 2**20,
        metavar="BYTES",
        help="bytes of a request; larger ones get 413 (default %(default)s)",
    )
    sub.add_argument(
        "--drain-timeout",
        type=Number(int, 0, 86400),
        default=30,
        metavar="SECONDS",
        help="seconds for running requests after SIGTERM (default %(default)s)",
    )
    sub.add_argument(
        "--state",
        type=out_folder,
        metavar="DIR",
        help="folder of requests and answers; finishes those of a killed server",
    )
    add_list(
        sub,
        "--served-model-name",
        filled,
        "NAME",
        "name for clients instead of --model's; the first is shown, others are accepted too",
    )
    add_list(
        sub,
        "--allowed-origin",
        filled,
        "URL",
        "web origin whose pages may call the server, * for all; may be repeated",
    )
    add_list(
        sub,
        "--allowed-host",
        filled,
        "NAME",
        "name that a Host header may have beside local names, * for any; "
        "may be repeated (default any, but on a local address without --api-key "
        "local names only)",
    )
    add_value(sub, "--ssl-certfile", text_file, "FILE", "certificate chain (PEM), for HTTPS")
    add_value(sub, "--ssl-keyfile", text_file, "FILE", "its private key (PEM), without password")
    sub.add_argument(
        "--otlp-traces-endpoint",
        type=filled,
        metavar="URL",
        help="OpenTelemetry collector that gets a trace of each request (OTLP over HTTP)",
    )
    for option in DECLARED.values():
        if option.group == "adapters":
            declared_option(sub, option)
    common.policy_option(sub)
    common.mesh_option(sub)
    common.model_options(sub)
    common.exact_option(sub)
    common.adapter_options(sub, '; clients choose it as "model:NAME"; may be repeated')
    common.cache_options(sub, "--prefill-chunk")


def load_on_cluster(args: argparse.Namespace, folder: str) -> LanguageModel:
    """Load the model in a process of a cluster; relative paths begin at ``folder``, if it exists
    on that host."""
    if os.path.isdir(folder):
        os.chdir(folder)
    take_memory()
    return common.load(args)


def cluster_of(args: argparse.Namespace) -> ClusterOptions:
    """Return the options of ``--ray``. Raises JaxLlamaError for others that it excludes."""
    from jaxllama.parallel.mesh import mesh_sizes
    from jaxllama.serving.ray.options import ClusterOptions

    devices = 1 if args.mesh is None else math.prod(mesh_sizes(args.mesh))
    hosts: int = getattr(args, "hosts_per_replica", 1)
    if hosts > 1 and devices % hosts:
        raise JaxLlamaError(
            f"--hosts-per-replica = {hosts}: --mesh has {devices} devices, the same number on each"
        )
    replicas = args.replicas or 1
    most = args.max_replicas or replicas
    return ClusterOptions(args.ray, replicas, most, devices // hosts, hosts)


def _run_on_ray(args: argparse.Namespace, options: ServeOptions) -> None:
    if args.api_servers > 1:
        raise JaxLlamaError("--api-servers: on a Ray cluster one actor speaks HTTP")
    if args.lora_slots:
        raise JaxLlamaError("--lora-slots: engines on a Ray cluster load no adapters at run time")
    cluster = cluster_of(args)
    from jaxllama.serving.ipc.replica import StartEngine
    from jaxllama.serving.ray.driver import serve
    from jaxllama.serving.ray.hosts import StartOnHosts

    load = functools.partial(load_on_cluster, plain(args), os.getcwd())
    if cluster.hosts > 1:
        serve(options, cluster, StartOnHosts(load, options.engine, cluster.hosts))
    else:
        serve(options, cluster, StartEngine(load, options.engine))


def run(args: argparse.Namespace) -> None:
    if args.max_replicas is not None and args.ray is None:
        raise JaxLlamaError("--max-replicas needs --ray: the cluster that has them")
    if args.hosts_per_replica > 1 and (args.ray is None or args.policy is not None):
        raise JaxLlamaError("--hosts-per-replica needs --ray and --mesh, without --policy")
    if args.model_table:
        from jaxllama.cli import serve_models

        return serve_models.run(args)
    for name in ("memory_gb", "unload_after"):
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise JaxLlamaError(f"--{option}: needs [[model]] tables in the file of --config")
    if args.replicas > 1 and args.policy is not None:
        raise JaxLlamaError("--replicas: an offloaded model is one engine, without --policy")
    if args.replicas > 1 and args.mesh is not None and args.ray is None:
        raise JaxLlamaError("--replicas: each has one device, so --mesh has no use beside it")
    if args.replicas > 1 and args.lora_slots:
        raise JaxLlamaError("--lora-slots: several replicas load no adapters at run time")
    from jaxllama.serving.http.process import ServeOptions, serve

    if args.ray is None:
        take_memory()
    engine = engine_of(args)
    if args.max_lora_rank is not None and not args.lora_slots:
        raise JaxLlamaError("--max-lora-rank needs --lora-slots: the adapters that it bounds")
    options = ServeOptions(
        args.model,
        args.host,
        args.port,
        tuple(args.api_key),
        args.max_body,
        args.drain_timeout,
        args.state,
        engine,
        tuple(args.served_model_name),
        tuple(args.allowed_origin),
        tuple(args.allowed_host),
        args.api_servers,
        args.replicas,
        args.api_keys_file,
        args.ssl_certfile,
        args.ssl_keyfile,
        args.otlp_traces_endpoint,
    )
    if args.ray is not None:
        _run_on_ray(args, options)
    else:
        serve(options, functools.partial(common.load, plain(args)))
