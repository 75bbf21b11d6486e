"""Write packed.npz: transformers' logits of packed checkpoints (``test_packed_peers.LOGITS``).

python tests/golden/make_packed_golden.py
(torch 2.13.0 CPU, transformers 5.23.0, compressed-tensors 0.15, accelerate)
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from tests.checkpoints.test_packed_peers import (  # noqa: E402
    GOLDEN,
    LOGITS,
    directory,
    transformers_logits,
)


def main() -> None:
    arrays = {}
    for case in LOGITS:
        with tempfile.TemporaryDirectory() as folder:
            arrays[case] = transformers_logits(directory(Path(folder) / "model", case))
    np.savez_compressed(GOLDEN, **arrays)
    print(GOLDEN, GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
