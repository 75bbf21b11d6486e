"""Whether a change leaves every Mosaic kernel as it was: their modules, without debug locations.

    python -m tests.helpers.kernel_modules record FILE [WORD ...]     before the change
    python -m tests.helpers.kernel_modules compare FILE [WORD ...]    after it

The cases are those of ``kernel_cases``, or those whose names hold one of the words.  A case takes
about a second on a CPU and needs no GPU.  ``--text FOLDER`` writes the modules as text, to compare
them by ``diff``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.interpreters import mlir

from pallas_kernels import dispatch
from pallas_kernels.jax_internals import ir
from tests.helpers.kernel_cases import CASES, VARIANTS

ALL = CASES | VARIANTS


def modules(case: str) -> dict[str, str]:
    """Return the text of each kernel's module and of its call, by the kernel's name."""
    return modules_of(*ALL[case]())


def modules_of(f: Callable[..., Any], operands: Any) -> dict[str, str]:
    """Return the same of a function of these operands."""
    with mock.patch.object(dispatch, "hopper_reason", lambda *_: None):
        program = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir()
    found: dict[str, str] = {}
    for call in calls_in(program.operation):
        attributes = {name: call.attributes[name] for name in call.attributes}
        config = ir.DictAttr(attributes.pop("mhlo.backend_config"))
        facts = {key: str(x) for key, x in attributes.items()}
        types = [str(x.type) for x in (*call.operands, *call.results)]
        text = f"{text_of(ir.StringAttr(config['module']).value_bytes)}\n{types}\n{facts}\n"
        name = re.findall(r'sym_name = "(\w+?)_mosaic_gpu', text)[0]
        found[f"{name} {len(found)}"] = text
    return found


def calls_in(operation: Any) -> list[Any]:
    """Return a program's calls of Mosaic kernels, in order."""
    here = operation.attributes.get("call_target_name") if operation.attributes else None
    own = [operation] if here is not None and "mosaic_gpu" in str(here) else []
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                own += calls_in(inner.operation)
    return own


def text_of(bytecode: bytes) -> str:
    """Return a module in generic form, without locations; values are numbered by their order."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        module = ir.Module.parse(bytecode)
        return module.operation.get_asm(print_generic_op_form=True, enable_debug_info=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    names = [name for name in ALL if not given.words or any(x in name for x in given.words)]
    known = json.loads(given.file.read_text()) if given.file.exists() else {}
    wrong = 0
    for case in names:
        texts = modules(case)
        for name, text in texts.items():
            if given.text:
                given.text.mkdir(parents=True, exist_ok=True)
                (given.text / f"{case}, {name}.mlir".replace("/", "-")).write_text(text)
        hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
        if given.action == "record":
            known[case] = hashes
            print(f"{case}: {', '.join(hashes)}", flush=True)
        elif hashes != known.get(case):
            wrong += 1
            old = known.get(case, {})
            changed = [
                name for name in hashes.keys() | old.keys() if hashes.get(name) != old.get(name)
            ]
            print(f"{case}: {', '.join(sorted(changed))} differ", flush=True)
    if given.action == "record":
        given.file.write_text(json.dumps(known, indent=1))
    print(
        f"{len(names)} cases, {wrong} differ"
        if given.action == "compare"
        else f"{len(names)} cases"
    )
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
