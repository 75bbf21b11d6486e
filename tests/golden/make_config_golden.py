"""Write hf_configs.json.gz: transformers' default config.json of every model type, and the names
that its model reads of one (``test_hf.transformers_reads``).

python tests/golden/make_config_golden.py     (torch 2.13.0 CPU, transformers 5.24.0)
"""

import gzip
import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from tests.checkpoints.test_hf import GOLDEN, KINDS, transformers_reads  # noqa: E402


def main() -> None:
    text = json.dumps({kind: transformers_reads(kind) for kind in KINDS}, sort_keys=True)
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(GOLDEN, GOLDEN.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
