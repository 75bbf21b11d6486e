"""Write training.npz: torch's answers to every case of ``training_cases``.

    python tests/golden/make_training_golden.py     (torch 2.13.0 CPU, transformers 5.23.0)

The file holds losses, and every seventh value of gradients and of trained weights; first weights
and tokens are made anew from seeds by the tests.
"""

import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from tests.helpers.training_cases import CASES, GOLDEN  # noqa: E402
from tests.helpers.training_torch import reference  # noqa: E402


def main() -> None:
    arrays = {}
    for case in CASES:
        arrays |= {f"{case}/{key}": value for key, value in reference(case).items()}
    np.savez_compressed(GOLDEN, **arrays)
    print(GOLDEN, GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
