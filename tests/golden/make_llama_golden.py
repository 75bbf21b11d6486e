"""Write llama.npz: transformers' answers for every case of ``parity_cases``.

    python tests/golden/make_llama_golden.py        (torch 2.13.0 CPU, transformers 5.23.0)

The file holds logits at a few positions and greedy tokens only; weights and inputs are made anew
from seeds by the tests.
"""

import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from tests.helpers.parity_cases import CASES, GOLDEN, SCORED, reference  # noqa: E402


def main() -> None:
    arrays = {}
    for name in CASES:
        answer = reference(name)
        arrays[f"{name}/logits"] = answer.logits[SCORED]
        arrays[f"{name}/greedy"] = answer.greedy.astype(np.uint8)
        print(name, answer.greedy[:12], float(np.abs(answer.logits).max()))
    np.savez_compressed(GOLDEN, **arrays)
    print(GOLDEN, GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
