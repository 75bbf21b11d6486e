"""Makes the four texts of this folder from installed packages, whose licences are in README.md.

    python make_unseen.py /usr/share/vim/vim90/tutor

starlette 1.10.0, Jinja2 3.1.6 (code), numpy 2.4.6, scipy 1.17.1 (documentation, constants), tzdata
2026.6 (lists) and Vim 9.0's tutorials (French and Spanish, whole files as they are).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.resources import files
from pathlib import Path

CODE = (
    "starlette/applications.py",
    "starlette/background.py",
    "starlette/concurrency.py",
    "starlette/datastructures.py",
    "starlette/formparsers.py",
    "starlette/staticfiles.py",
    "jinja2/lexer.py",
)
API = ("numpy.linalg", "scipy.signal", "numpy.random", "scipy.optimize", "numpy.fft")
EACH = 20_000  # characters of a module's documentation


def code() -> str:
    parts = (path.partition("/") for path in CODE)
    return "\n\n".join((files(package) / name).read_text() for package, _, name in parts)


def api(module: str) -> str:
    """Signatures and docstrings of a module's functions, in the order of their names."""
    found = importlib.import_module(module)
    out: list[str] = []
    for name in sorted(found.__all__):
        member = getattr(found, name)
        if not callable(member) or inspect.isclass(member) or sum(map(len, out)) > EACH:
            continue
        out.append(f"{module}.{name}{inspect.signature(member)}\n\n{inspect.getdoc(member)}\n")
    return "\n\n".join(out)


def lists() -> str:
    """Physical constants, the world's time zones, and the rules by which clocks change."""
    from scipy.constants import _codata

    constants = _codata.txt2022.strip("\n").splitlines()
    zones = files("tzdata") / "zoneinfo"
    rules = (zones / "tzdata.zi").read_text().splitlines()
    return "\n".join(
        ["\n".join(constants[:190]), "", (zones / "zone1970.tab").read_text(), *rules[:500], ""]
    )


def main() -> None:
    here, tutor = Path(__file__).parent, Path(sys.argv[1])
    french, spanish = ((tutor / f"tutor.{tongue}.utf-8").read_text() for tongue in ("fr", "es"))
    texts = {
        "code": code(),
        "api": "\n\n".join(map(api, API)),
        "lists": lists(),
        "language": french + spanish,
    }
    for name, text in texts.items():
        (here / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
