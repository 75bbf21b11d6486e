"""All that this project takes from jax's private modules: a new jax is checked against this file.

Kernels emit MLIR through jax's own dialects, which have no public name. Their import takes 0.1 s,
so the first kernel that asks for one imports it; ``cudnn_attention`` and ``distributed_state``
import late too. ``jax.extend.core`` has the first three names in public, but imports all of Pallas.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax._src.config import persistent_cache_min_compile_time_secs
from jax._src.core import Primitive, get_opaque_trace_state, jaxpr_as_fun

if TYPE_CHECKING:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType
    from jax._src.distributed import State
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir.dialects import arith, func, gpu, llvm, memref, scf, vector

    Value = ir.Value[ir.Type]

__all__ = [
    "Primitive",
    "arith",
    "cudnn_attention",
    "cudnn_version",
    "described_device",
    "description_of",
    "distributed_state",
    "func",
    "get_opaque_trace_state",
    "gpu",
    "ir",
    "jaxpr_as_fun",
    "llvm",
    "memref",
    "parts_of",
    "persistent_cache_min_compile_time_secs",
    "renew_threads",
    "scf",
    "vector",
]


_gone: list[object] = []
_DIALECTS = ("arith", "func", "gpu", "llvm", "memref", "scf", "vector")


def __getattr__(name: str) -> object:
    """``ir`` or a dialect, at its first use."""
    if name != "ir" and name not in _DIALECTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "jax._src.lib.mlir" + ("" if name == "ir" else ".dialects")
    globals()[name] = found = getattr(importlib.import_module(room), name)
    return found


def parts_of(lowered: Any) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """A ``jax.stages.Lowered``'s module, the arguments' leaves that it takes, by index, and the
    compiler's options. Raises ValueError if a module is not all of the program."""
    lowering = lowered._lowering
    facts = lowering.compile_args
    if lowering.const_args or facts["host_callbacks"] or facts["keepalive"]:
        raise ValueError("the program refers to objects of this process")
    options = dict(lowering._compiler_options_kvs)
    return lowering.stablehlo(), tuple(sorted(facts["kept_var_idx"])), options


def renew_threads() -> None:
    """Let a forked process, which has none of its parent's threads, lower programs."""
    from jax._src.interpreters import mlir

    contexts: Any = getattr(mlir, "_thread_local_context", None)  # of earlier modules
    # A pool whose threads are gone cannot end.
    _gone.extend((mlir.global_thread_pool, contexts and contexts.value))
    mlir.global_thread_pool = type(mlir.global_thread_pool)()
    if contexts is not None:
        contexts.set_local(None)


def description_of(device: Any) -> bytes:
    """What a compiler needs to know of a device. Raises AttributeError in versions without it."""
    return _topologies().TopologyDescription([device]).serialize()


def described_device(description: bytes) -> Any:
    """A device of CUDA that need not be there, for programs that are compiled here."""
    xla_bridge: Any = importlib.import_module("jax._src.xla_bridge")
    xla_client: Any = importlib.import_module("jax._src.lib").xla_client
    xla_bridge._discover_and_register_pjrt_plugins()
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    [device] = _topologies().TopologyDescription.deserialize(description).devices
    return device


def _topologies() -> Any:
    return importlib.import_module("jax.experimental.topologies")


def cudnn_attention() -> tuple[Callable[..., Any], type[MaskType]]:
    """cuDNN's fused attention and the enumeration of its masks."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    return dot_product_attention, MaskType


def cudnn_version() -> int:
    """The version of cuDNN, 91000 for 9.10.0; 0 without it."""
    from jax._src.lib import cuda_versions

    return 0 if cuda_versions is None else cuda_versions.cudnn_get_version()


def distributed_state() -> State:
    """The state of ``jax.distributed``, whose client is the processes' key-value store."""
    from jax._src.distributed import global_state

    return global_state
