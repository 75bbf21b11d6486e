"""The public API as text: names and signatures, one a line.

    python -m tests.golden.make_public_api      writes public_api.txt beside this file

``tests/test_public_api.py`` compares the file with the code.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("public_api.txt")
MODULES = ("jaxllama", "jaxllama.modules", "pallas_kernels")
OURS = ("jaxllama", "pallas_kernels")
FLAX = ("parent", "name")  # parameters that flax adds to each module


class _Text(str):
    """A text that is its own repr, so that signatures show it without quotes."""

    __repr__ = str.__str__


def public_api() -> str:
    """Return a line for each public name, and one for each public member of a class."""
    lines = []
    for module in MODULES:
        found = importlib.import_module(module)
        for name in found.__all__:
            lines += _described(f"{module}.{name}", getattr(found, name))
    return "\n".join(lines) + "\n"


def _described(path: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        return
    is_error = issubclass(value, Exception)
    yield f"class {path}{'' if is_error else _signature(value)}"
    for name, member in inspect.getmembers_static(value):
        if not name.startswith("_") and _is_own(value, name):
            yield from _member(f"  {name}", member)


def _is_own(cls: type, name: str) -> bool:
    """Whether a class of ours defines the member, and not a library's base class."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    return owner.__module__.partition(".")[0] in OURS


def _member(label: str, member: Any) -> Iterator[str]:
    if isinstance(member, property):
        yield f"{label}: {getattr(member.fget, '__annotations__', {}).get('return', '')}"
    elif isinstance(member, classmethod | staticmethod):
        yield f"{label}{_signature(member.__func__)}  ({type(member).__name__})"
    elif callable(member):
        yield f"{label}{_signature(member)}"


def _signature(function: Any) -> str:
    """Return the signature, without what differs between machines or versions of a library."""
    signature = inspect.signature(function)
    is_module = any(
        base.__module__.startswith("flax.") for base in getattr(function, "__mro__", ())
    )
    parameters = [
        one.replace(annotation=_annotation(one.annotation), default=_default(one.default))
        for one in signature.parameters.values()
        if not (is_module and one.name in FLAX)
    ]
    result = _annotation(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=result))


def _annotation(value: Any) -> Any:
    return _Text(value) if isinstance(value, str) else value


def _default(value: Any) -> Any:
    """Return a default that is shown without an address."""
    is_named = callable(value) and hasattr(value, "__name__")
    return _Text(value.__name__) if is_named and value is not inspect.Parameter.empty else value


if __name__ == "__main__":
    GOLDEN.write_text(public_api(), encoding="utf-8")
