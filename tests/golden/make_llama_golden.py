"""Write llama.npz: transformers' answers for every case of ``parity_cases``, and a table of ours
beside them.

    python tests/golden/make_llama_golden.py        (torch 2.13.0 CPU, transformers 5.23.0)
    python tests/golden/make_llama_golden.py NAME..  these cases only; the others stay as they are

The file holds logits at a few positions and greedy tokens only; weights and inputs are made anew
from seeds by the tests.  The table is that of ``docs/rooms/checkpoints.md``: the largest error
of a logit in float32, over the largest logit, and of how many greedy tokens all are the same.
"""

import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from tests.helpers.parity_cases import CASES, GOLDEN, NEW, SCORED, reference  # noqa: E402
from tests.model.test_parity import ours, relative_error  # noqa: E402


def main() -> None:
    arrays, names = {}, sys.argv[1:]
    if names:
        with np.load(GOLDEN) as before:
            arrays = dict(before)
    for name in names or CASES:
        answer = reference(name)
        arrays[f"{name}/logits"] = answer.logits[SCORED]
        arrays[f"{name}/greedy"] = answer.greedy.astype(np.uint8)
        error = relative_error(ours(name).logits, answer.logits)
        same = int((ours(name).greedy == answer.greedy).sum())
        print(f"| {name} | {error:.1e} | {same} of {NEW} |", flush=True)
    np.savez_compressed(GOLDEN, **arrays)
    print(GOLDEN, GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
