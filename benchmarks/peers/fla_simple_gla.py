"""Times flash-linear-attention's ``chunk_simple_gla`` on the local GPU.

    python -m benchmarks.peers.fla_simple_gla '[[8, 4096, 8, 64, 128, 64]]'

The shapes are B, T, groups, heads, Dk and Dv.  ``benchmarks.kernels.ssd`` starts this in a process
of its own.  It needs torch, triton and flash-linear-attention.  Its kernels take q and k of every
head, which are made before the clock starts.

It tries 48 forms of one of its kernels.  ``--part 0/4`` compiles a quarter of them for a tiny
call: several such processes fill triton's cache at once, and the time follows in seconds.
"""

from __future__ import annotations

import argparse
import functools
import json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", type=json.loads)
    parser.add_argument("--part", help="I/N: compile every N-th form from the I-th on")
    options = parser.parse_args()
    try:
        import torch
        import triton
        from fla.ops.common import chunk_h
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print(f"fla: {error}", flush=True)
        return
    if options.part:
        part, count = map(int, options.part.split("/"))
        tuner = chunk_h.chunk_fwd_kernel_h
        while not hasattr(tuner, "configs"):
            tuner = tuner.fn
        tuner.configs = tuner.configs[part::count]

    def inputs(b, t, h, dk, dv):
        at = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v = (torch.randn(b, t, h, n, **at) for n in (dk, dk, dv))
        return q, k, v, -8 * torch.nn.functional.softplus(torch.randn(b, t, h, **at).float() - 4.6)

    def call(x):
        with torch.no_grad():
            return chunk_simple_gla(*x, scale=1.0, output_final_state=True)

    for b, t, groups, h, dk, dv in options.shapes:
        if options.part:
            call(inputs(1, 128, h, dk, dv))
            torch.cuda.synchronize()
            continue
        x = inputs(b, t, h, dk, dv)
        timed = functools.partial(call, x)
        ms = triton.testing.do_bench(timed, warmup=50, rep=100, return_mode="median")
        print(f"{(b, t, groups, h, dk, dv)} fla chunk_simple_gla {ms:.4f} ms", flush=True)


if __name__ == "__main__":
    main()
