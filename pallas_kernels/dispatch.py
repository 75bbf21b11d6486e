"""Which implementation an op uses.

"xla" is plain jax.numpy and runs anywhere.  "mosaic" is the Pallas Mosaic GPU kernel, or
NotImplementedError that names the fact that rules it out.  None is the kernel on Hopper where the
op's ``unsupported(...)`` has no objection, and XLA everywhere else.  Nothing is tried and caught.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax

Implementation = Literal["xla", "mosaic"]


@functools.cache
def hopper_reason() -> str | None:
    """Why Mosaic kernels cannot run natively here, or None if they can."""
    backend = jax.default_backend()
    if backend != "gpu":
        return f"the default backend is {backend!r}, not a Hopper GPU"
    capability = getattr(jax.devices()[0], "compute_capability", "?")
    if capability != "9.0":
        return f"compute capability {capability} is not Hopper's 9.0"
    version = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
    if version < (0, 11, 2):
        return f"jax {jax.__version__} is older than 0.11.2"
    return None


def wants_kernel(implementation: Implementation | None) -> bool:
    """Can ``choose`` come to "mosaic"?  Only then need an op ask its ``unsupported()``, which may
    import the kernels: a third of a second, and jax's private modules, that XLA does without."""
    return implementation == "mosaic" or (implementation is None and hopper_reason() is None)


def choose(op: str, implementation: Implementation | None, reason: str | None) -> Implementation:
    """Resolve ``implementation`` for ``op``; ``reason`` is what its ``unsupported()`` returned.

    An explicit "mosaic" is honoured on any platform (lowering for cuda, the interpreter), so only
    the op's own reason can refuse it.
    """
    if implementation is None:
        return "mosaic" if reason is None and hopper_reason() is None else "xla"
    if implementation not in ("xla", "mosaic"):
        raise ValueError(f"{op}: implementation {implementation!r} is not 'xla', 'mosaic' or None")
    if implementation == "mosaic" and reason is not None:
        raise NotImplementedError(f"{op}: no Mosaic kernel for this call: {reason}")
    return implementation
