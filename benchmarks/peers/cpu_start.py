"""From the command to the first text of a GGUF file: jaxllama beside llama.cpp, in turns.

    python benchmarks/peers/cpu_start.py FILE.gguf --peer PYTHON [--rounds N]

PYTHON is that of an environment with llama-cpp-python. Each round starts three processes: ours with
an empty folder for compiled programs (cold), ours again (second), and llama.cpp. Each prints one
token behind "The capital of France is". A first, uncounted round writes Python's bytecode. Printed
are medians: seconds by the clock, seconds of CPU, and the largest resident memory. On a busy
machine only the last two mean something.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROMPT = "The capital of France is"
PEER = f"""
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=1024, flash_attn=True, verbose=False)
print(model({PROMPT!r}, max_tokens=1, temperature=0)["choices"][0]["text"])
"""


class Start(NamedTuple):
    """seconds: by the clock.  cpu: seconds of user and system.  memory: largest resident MB."""

    seconds: float
    cpu: float
    memory: float


def start(command: list[str], environment: dict[str, str]) -> Start:
    """Run a command to its end."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command}: status {status}")
    seconds = time.perf_counter() - begun
    return Start(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def main() -> None:
    """Print a line for each kind of start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ours = [sys.executable, "-m", "jaxllama", "generate", PROMPT]
    ours += ["--model", args.file, "--max-new-tokens", "1"]
    found: dict[str, list[Start]] = {"ours, cold": [], "ours, second": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as folder:
        bytecode = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        for index in range(args.rounds + 1):
            programs = Path(folder, f"programs-{index}")
            programs.mkdir()
            environment = os.environ | bytecode | {"JAX_COMPILATION_CACHE_DIR": str(programs)}
            commands = ours, ours, [args.peer, "-c", PEER, args.file]
            for kind, command in zip(found, commands, strict=True):
                found[kind].append(start(command, environment))
    medians = {
        kind: Start(*map(statistics.median, zip(*starts[1:], strict=True)))
        for kind, starts in found.items()
    }
    for kind, middle in medians.items():
        ratios = [a / b for a, b in zip(middle, medians["llama.cpp"], strict=True)]
        print(
            f"{kind}: {middle.seconds:.2f} s ({ratios[0]:.2f}x), CPU {middle.cpu:.2f} s "
            f"({ratios[1]:.2f}x), at most {middle.memory:.0f} MB ({ratios[2]:.2f}x)"
        )


if __name__ == "__main__":
    main()
