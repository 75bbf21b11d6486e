"""Times flash-linear-attention's ``chunk_simple_gla`` on the local GPU.

    python -m benchmarks.peers.fla_simple_gla '[[8, 4096, 8, 64, 128, 64]]'

The shapes are B, T, groups, heads, Dk and Dv.  ``benchmarks.kernels.ssd`` starts this in a process
of its own.  It needs torch, triton and flash-linear-attention.  The groups' q and k are given as
they are, which its kernels take, and if they refuse once for each head.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    try:
        import torch
        import triton
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print(f"fla: {error}", flush=True)
        return
    for b, t, groups, h, dk, dv in json.loads(sys.argv[1]):
        at = {"device": "cuda", "dtype": torch.bfloat16}
        q, k = (torch.randn(b, t, groups, dk, **at) for _ in range(2))
        v = torch.randn(b, t, h, dv, **at)
        g = -8 * torch.nn.functional.softplus(torch.randn(b, t, h, device="cuda") - 4.6)
        for shared in (True, False):
            if not shared:
                q, k = (x.repeat_interleave(h // groups, dim=2) for x in (q, k))
            name = "q and k by group" if shared else "q and k by head"
            given = {"scale": 1.0, "output_final_state": True}
            try:
                with torch.no_grad():
                    call = lambda: chunk_simple_gla(q, k, v, g, **given)  # noqa: B023, E731
                    ms = triton.testing.do_bench(call, warmup=50, rep=100, return_mode="median")
                print(f"{(b, t, groups, h, dk, dv)} fla, {name}: {ms:.4f} ms", flush=True)
                break
            except Exception as error:
                print(f"fla, {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
