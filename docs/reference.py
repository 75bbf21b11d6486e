"""The reference's pages, made of docstrings and of the code's own tables at each build.

write(folder)      one Markdown file a page, written only where its text changed

``python docs/reference.py`` writes ``docs/reference``, for readers of the Markdown files.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllama.checkpoints.hf.family import Family

NOTE = "This page is generated from the code at each build.\n"


def write(folder: Path) -> None:
    """Write all pages of the reference into ``folder``, and remove what is no page any more."""
    folder.mkdir(exist_ok=True)
    texts = {name: page() for name, page in PAGES.items()}
    texts["index"] = _index(texts)
    for name, text in texts.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.stem not in texts:
            path.unlink()


def _index(pages: Iterable[str]) -> str:
    names = "\n".join(pages)
    return f"# Reference\n\n{NOTE}\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(x) for x in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# Python


def _api(title: str, module: ModuleType, text: str) -> str:
    """Return a page with an entry for each public name of ``module``."""
    parts = [f"# {title}\n\n{text}\n\n```{{eval-rst}}\n"]
    for name in module.__all__:
        found = getattr(module, name)
        kind, options = "autofunction", ""
        if inspect.isclass(found):
            is_error = issubclass(found, Exception)
            kind = "autoexception" if is_error else "autoclass"
            options = "" if is_error else "   :members:\n"
        parts.append(f".. {kind}:: {module.__name__}.{name}\n{options}\n")
    return "".join([*parts, "```\n"])


def python() -> str:
    """The page of ``jaxllama``."""
    import jaxllama

    text = "The public names of `import jaxllama as jl`. Other names may change without notice."
    return _api("Python: jaxllama", jaxllama, text)


def modules() -> str:
    """The page of ``jaxllama.modules``."""
    from jaxllama import modules

    text = "The layers as Flax (linen) modules. [Add a mixer](../howto/mixer.md) uses them."
    return _api("Python: jaxllama.modules", modules, text)


def kernels() -> str:
    """The page of ``pallas_kernels``."""
    import pallas_kernels

    text = (
        "The ops, usable without jaxllama. [How an implementation is "
        "chosen](../concepts/implementations.md) explains `implementation=`."
    )
    return _api("Python: pallas_kernels", pallas_kernels, text)


# The command line


def cli() -> str:
    """The page of the ``jaxllama`` command."""
    from jaxllama.cli.main import COMMANDS, parser

    top = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    parts = ["# Command line\n\n", NOTE, "\n"]
    parts.append(
        "`jaxllama COMMAND --help` prints the same. `python -m jaxllama` is the same command.\n\n"
    )
    for name, command in COMMANDS.items():
        parts.append(f"## jaxllama {name}\n\n{command.HELP}\n\n")
        parts.append(_options(top.choices[name]))
    return "".join(parts)


def _options(sub: argparse.ArgumentParser) -> str:
    parts = []
    inner = next((a for a in sub._actions if isinstance(a, argparse._SubParsersAction)), None)
    first, second, *others = sub._action_groups  # the words, and the options without a group
    groups = [(second, first._group_actions + second._group_actions)]
    for group, actions in groups + [(one, one._group_actions) for one in others]:
        shown = [a for a in actions if a.help != argparse.SUPPRESS and a is not inner]
        rows = [_option(a) for a in shown if "--help" not in a.option_strings]
        if rows:
            if group is not second:
                text = f": {group.description}" if group.description else ""
                parts.append(f"**{group.title}**{text}\n\n")
            parts.append(_table(("option", "meaning"), rows) + "\n")
    for name, found in () if inner is None else inner.choices.items():
        parts.append(f"### {sub.prog} {name}\n\n{found.description or ''}\n\n{_options(found)}")
    return "".join(parts)


def _option(action: argparse.Action) -> tuple[str, str]:
    """Return an option's words and its meaning."""
    words = ", ".join(action.option_strings) or action.metavar or action.dest
    values = action.metavar
    if values is None and action.choices is not None:
        values = "|".join(map(str, action.choices))
    if action.option_strings and action.nargs != 0 and values:
        words += f" {values}"
    facts = {**vars(action), "prog": "jaxllama"}
    return _code(str(words)), (action.help or "") % facts


# Tables


def models() -> str:
    """The page of presets, families and layers."""
    from jaxllama.checkpoints.gguf.architectures import ARCHITECTURES
    from jaxllama.checkpoints.hf.families import FAMILIES
    from jaxllama.checkpoints.hf.refused import REFUSED, WRAPPERS
    from jaxllama.checkpoints.hub import REPOSITORIES, WHEELS
    from jaxllama.config import load_config, preset_names
    from jaxllama.model.mixers import MIXERS
    from tests.helpers.dense_cases import ORACLES

    presets = []
    for name in preset_names():
        cfg = load_config(name)
        kinds = ", ".join(dict.fromkeys(cfg.layer_types))
        weights = "in a Python package" if name in WHEELS else REPOSITORIES.get(name, "")
        presets.append((_code(name), str(cfg.n_layers), str(cfg.d_model), kinds, weights))
    families = [
        (
            _code(kind),
            ", ".join(family.architectures),
            _oracle(ORACLES.get(kind, "transformers")),
            _differs(family),
            _runs(family),
        )
        for kind, family in sorted(FAMILIES.items())
    ]
    gguf = [(_code(kind), _code(found.family)) for kind, found in ARCHITECTURES.items()]
    return (
        f"# Models\n\n{NOTE}\n## Presets\n\n"
        "A preset is a shape. `--random` fills it with random weights. Where no weights are named, "
        "give a directory, a `.gguf` file or a hub id instead of the preset's name.\n\n"
        + _table(("preset", "layers", "width", "layer kinds", "weights"), presets)
        + "\n## Families of Hugging Face checkpoints\n\n`model_type` of `config.json`. Another "
        "architecture is refused by name. The tests compare the oracle's logits in float32 and 64 "
        "greedy tokens with ours. A mesh is `--mesh model=N` with N > 1.\n\n"
        + _table(("model_type", "architectures", "oracle", "beside Llama", "runs on"), families)
        + "\nOf these models with image input the text decoder is read: "
        + ", ".join(f"{_code(kind)} (as {_code(text)})" for kind, text in WRAPPERS.items())
        + ".\n\n## Refused types\n\nThe other causal language models of transformers, and what "
        "each would need.\n\n"
        + _table(("reason", "model_type"), _refused(REFUSED))
        + "\n## Architectures of GGUF files\n\n"
        + _table(("general.architecture", "read as"), gguf)
        + "\n## Kinds of layers\n\n`layer_types` of a configuration takes these words: "
        + ", ".join(map(_code, MIXERS))
        + ". [Add a mixer](../howto/mixer.md) adds one.\n"
    )


def _oracle(name: str | None) -> str:
    """Return the program that the tests compare a family with."""
    if name is None:
        return "its authors' code"
    return name if name == "transformers" else f"the class of {_code(name)}"


def _refused(refused: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return rows of a reason and its types, in the order of the reasons."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in refused.items():
        kinds.setdefault(reason, []).append(_code(kind))
    return [(reason, ", ".join(of)) for reason, of in kinds.items()]


_FACTS = {
    "attn_gate": "gated attention",
    "attn_sinks": "attention sinks",
    "embed_norm": "a norm of embeddings",
    "embedding_scale": "scaled embeddings",
    "gated_mlp": "feed-forward without a gate",
    "head_bias": "head with a bias",
    "layer_scale": "a multiplier of each layer",
    "inner_norms": "norms before the last products",
    "learned_positions": "learned positions",
    "norm": "LayerNorm",
    "norm_weight": "norms without a weight",
    "parallel_block": "parallel sublayers",
    "post_norms": "norms behind the sublayers",
    "pre_norms": "no norms before them",
    "qk_norm": "norms of q and k",
    "qk_norm_last": "which follow RoPE",
}


def _differs(family: Family) -> str:
    """Say what a family has that Llama lacks, from its entry."""
    found = [text for fact, text in _FACTS.items() if fact in family.facts]
    parts = family.facts.get("attention_parts", ())
    found += ["norms of v" if part == "value_norm" else _code(part) for part in parts]
    keys = {*family.keys, *family.defaults}
    found += ["xIELU"] * (family.defaults.get("hidden_act") == "xielu")
    found += ["parallel sublayers"] * ("use_parallel_residual" in {key for key, *_ in family.same})
    found += ["parallel sublayers"] * ("parallel_attn" in keys)
    scaling = family.defaults.get("rope_parameters") or {}
    found += ["q scaled by its position"] * ("llama_4_scaling_beta" in scaling)
    found += ["multipliers"] * bool({"logits_scaling", "query_pre_attn_scalar", "scale_emb"} & keys)
    found += ["short convolutions"] * ("conv_L_cache" in keys)
    found += ["Mamba-2"] * ("time_step_limit" in keys)
    found += ["gated delta rule"] * ("linear_conv_kernel_dim" in keys)
    found += ["latent keys and values"] * ("kv_lora_rank" in keys)
    found += ["two widths of heads, keys that are values"] * ("attention_k_eq_v" in keys)
    found += ["keys that layers share"] * ("num_kv_shared_layers" in keys)
    found += ["inputs of each layer"] * ("hidden_size_per_layer_input" in keys)
    found += ["norms of q and k"] * ("qk_layernorm" in keys)
    found += ["experts"] * _has_experts(family)
    found += ["sliding windows"] * (family.window != "none")
    is_nope = family.is_nope is not None and "learned_positions" not in family.facts
    found += ["layers without positions"] * is_nope
    found += ["neighbouring features turn"] * bool(family.stored.get("interleaved"))
    return ", ".join(found)


def _has_experts(family: Family) -> bool:
    counts = {"num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "ffn_config"}
    return bool(counts & set(family.keys) and family.to_hf)


def _runs(family: Family) -> str:
    """Say where models of a family run, as ``model.split.check_shards`` decides."""
    return "CPU, GPU" if family.facts.get("qk_norm") == "full" else "CPU, GPU, mesh"


def schemes() -> str:
    """The page of quantization schemes."""
    from jaxllama.cli.quantize import FORMATS, METHODS
    from jaxllama.quantization.scheme import SCHEMES, parse

    rows = []
    for name in SCHEMES:
        scheme = parse(name).default
        assert scheme is not None
        size = scheme.group_size
        group = (
            "whole rows" if size is None else "widest of 128, 64, 32" if size == 0 else str(size)
        )
        scale = "one scale a token"
        if scheme.static:
            scale = "one calibrated scale; experts' one a token"
        elif scheme.is_format:
            scale = f"one scale for {size} of a token's columns"
        inputs = f"{scheme.activations}, {scale}" if scheme.activations else "floats"
        rows.append((_code(name), scheme.weights, group, "yes" if scheme.zeros else "no", inputs))
    return (
        f"# Quantization schemes\n\n{NOTE}\n"
        + _table(("scheme", "weights", "columns a scale", "zero points", "activations"), rows)
        + f"\nMethods of `jaxllama quantize --method`: {', '.join(map(_code, METHODS))}. "
        + f"Formats of `--format`: {', '.join(map(_code, FORMATS))}.\n\n"
        "[Quantized weights](../concepts/quantized-weights.md) explains suffixes and mixtures.\n"
    )


def http() -> str:
    """The page of the server's routes and metrics."""
    from jaxllama.serving.http.routes import ROUTES

    rows = [
        (row.method, _code(row.path), row.summary, "yes" if row.scope == "key" else "no")
        for row in ROUTES
    ]
    return (
        f"# HTTP\n\n{NOTE}\n## Routes\n\nThe last column says whether a server with `--api-key` "
        "asks for the key. `/openapi.json` of a running server describes every body and answer.\n\n"
        + _table(("method", "path", "", "key"), rows)
        + "\n## Metrics\n\n`GET /metrics` answers in Prometheus' text format. A histogram has the "
        "series `NAME_bucket`, `NAME_sum` and `NAME_count`.\n\n"
        + _table(("metric", "type", "meaning"), _metrics())
    )


def _metrics() -> list[tuple[str, str, str]]:
    from prometheus_client.parser import text_string_to_metric_families

    from jaxllama.engine.stats import EngineStats
    from jaxllama.serving.api.metrics import Metrics

    class Idle:
        def stats(self) -> EngineStats:
            names = [field.name for field in dataclasses.fields(EngineStats)]
            return EngineStats(**{**dict.fromkeys(names, 0), "finished": {}})  # type: ignore[arg-type]

    metrics = Metrics()
    metrics.watch(Idle())
    families = text_string_to_metric_families(metrics.page()[1].decode())
    # The parser takes the end of a counter's name off.
    ends = {"counter": "_total"}
    return [
        (_code(one.name + ends.get(one.type, "")), one.type, one.documentation)
        for one in families
        if one.name.startswith("jaxllama_") and not one.name.endswith("_created")
    ]


def toml() -> str:
    """The page of the keys of TOML files."""
    from jaxllama.config import ModelConfig
    from jaxllama.config.flat import FlatConfig
    from jaxllama.training.config import TrainConfig

    return (
        f"# TOML files\n\n{NOTE}\nAn unknown key is an error that names it. A key without a "
        "default must be given. `configs/` in the checkout has complete examples.\n"
        + _keys("## Training: `jaxllama train FILE`", TrainConfig, (ModelConfig,))
        + _keys("## Models: `configs/models`, and `[model]` of a training file", FlatConfig)
        + "\nA file of `configs/models` may also have `[sampling]`, fields of `jl.Sampling`.\n"
    )


def _keys(title: str, record: type, elsewhere: Sequence[type] = ()) -> str:
    """Return a section with the record's keys, and one for each table inside of it."""
    rows, tables = [], []
    for name, hint in typing.get_type_hints(record).items():
        field = record.__dataclass_fields__[name]
        inner = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        tables += [(name, one) for one in inner if one not in elsewhere]
        default = "" if field.default is dataclasses.MISSING else _code(repr(field.default))
        if field.default_factory is not dataclasses.MISSING:
            default = "its own defaults"
        is_choice = typing.get_origin(hint) is typing.Literal
        kind = " or ".join(map(repr, typing.get_args(hint))) if is_choice else str(field.type)
        rows.append((_code(name), f"table `[{name}]`" if inner else _code(kind), default))
    head = f"\n{title}\n\n{_table(('key', 'type', 'default'), rows)}"
    return head + "".join(_keys(f"### `[{name}]`", one, elsewhere) for name, one in tables)


PAGES: dict[str, Callable[[], str]] = {
    "python": python,
    "modules": modules,
    "kernels": kernels,
    "cli": cli,
    "models": models,
    "schemes": schemes,
    "toml": toml,
    "http": http,
}


if __name__ == "__main__":
    write(Path(__file__).parent / "reference")
