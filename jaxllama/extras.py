"""Packages that only some commands need, and the extra of this project that installs each.

missing("llguidance", "constrained output") -> JaxLlamaError     one line with what to install
"""

from __future__ import annotations

from jaxllama.errors import JaxLlamaError

EXTRAS = {
    "serve": (
        "starlette",
        "uvicorn",
        "prometheus_client",
        "pydantic",
        "msgspec",
        "python_multipart",
    ),
    "bench": ("aiohttp",),
    "completion": ("shtab",),
    "eval": ("lm_eval", "inspect_ai"),
    "experiment": ("matplotlib",),
    "grammar": ("llguidance",),
    "otel": ("opentelemetry_sdk",),
    "ray": ("ray",),
    "train": ("jsonschema",),
}
_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}


def is_optional(package: str | None) -> bool:
    """Whether an extra installs a package, or the one that a module is in."""
    return package is not None and package.partition(".")[0] in _EXTRA_OF


def missing(package: str, user: str, extra: str | None = None) -> JaxLlamaError:
    """Return the error of ``user``, which needs a package that is not installed.

    extra: the extra to name, if several install the package.  jaxllama is on no package index yet,
    so the line names the checkout.
    """
    package = package.partition(".")[0]
    return JaxLlamaError(f"{user} needs {package}: {how(extra or _EXTRA_OF[package])}")


def how(extra: str) -> str:
    return f"run pip install -e '.[{extra}]' in jaxllama's checkout"
