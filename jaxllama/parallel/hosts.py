"""Several hosts: one process on each joins the others, and jax then shows everybody's devices.

    join("10.0.0.1:1234,4,0")      coordinator's address, number of processes, this one's index

Every process runs the same program on the same inputs, and a mesh spans all devices of all hosts.
Each process reads its own part of the weights. Process 0 prints.  A process takes all of its host's
GPUs (CUDA_VISIBLE_DEVICES says otherwise).

``jax.distributed`` does the work: no process continues until all have joined.  If a host does not
come, jax aborts the process with a dump of its stack, later than the timeout.  A timer here reports
it in one line before.  jax does not say which host is missing; each host that has joined says so.
If a host dies later, jax's heartbeats end the other processes within HEARTBEAT seconds.

Left out: finding the coordinator by asking Slurm or Kubernetes (their launch lines say it).
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading

from jaxllama.errors import JaxLlamaError

TIMEOUT = 60.0  # seconds to wait for the others
HEARTBEAT = 60
_SPEC = re.compile(r"(?P<host>[^,\s]+):(?P<port>\d{1,5}),(?P<count>\d{1,6}),(?P<index>\d{1,6})")


def join(hosts: str, timeout: float = TIMEOUT) -> int:
    """Join the processes of "ADDRESS:PORT,COUNT,INDEX" and return the index.

    Call it before any other use of jax.  Raises JaxLlamaError naming the fault.  If not all
    processes have joined within ``timeout`` seconds, it ends the process with status 2 and one line
    on stderr.
    """
    host, port, count, index = read_hosts(hosts)
    where = f"{host}:{port}"
    if index == 0:
        _check_port(port, where)
    import jax

    late = threading.Timer(timeout, _give_up, (where, count, index, timeout))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            where,
            count,
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=round(timeout) + 10,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
        _agree(count, index)
    except RuntimeError as error:
        raise JaxLlamaError(f"hosts: {where}: {' '.join(str(error).split())}") from None
    finally:
        late.cancel()
    return index


def read_hosts(hosts: str) -> tuple[str, int, int, int]:
    """Return (address, port, count, index).  Raises JaxLlamaError naming the fault."""
    match = _SPEC.fullmatch(hosts.strip())
    if match is None:
        raise JaxLlamaError(f"hosts {hosts!r}: expected ADDRESS:PORT,COUNT,INDEX")
    port, count, index = (int(match[key]) for key in ("port", "count", "index"))
    if not 0 < port < 65536:
        raise JaxLlamaError(f"hosts {hosts!r}: port {port} is not from 1 to 65535")
    if not index < count:
        raise JaxLlamaError(f"hosts {hosts!r}: index {index} is not below the count, {count}")
    return match["host"], port, count, index


def _check_port(port: int, where: str) -> None:
    """jax dies of a port that is taken."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise JaxLlamaError(f"hosts: cannot listen at {where}: {error.strerror}") from None


def _give_up(where: str, count: int, index: int, timeout: float) -> None:
    print(
        f"error: hosts: process {index} waited {timeout:g} s, and not all {count} came to {where}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)  # the main thread is in jax and cannot be woken


def _agree(count: int, index: int) -> None:
    """JaxLlamaError, the same on all, where a process was started for another number of them."""
    from pallas_kernels.jax_internals import distributed_state

    store = distributed_state().client
    assert store is not None  # the processes have found each other
    store.key_value_set(f"jaxllama/hosts/{index}", str(count))

    def count_of(index: int) -> int:
        return int(store.blocking_key_value_get(f"jaxllama/hosts/{index}", 10_000))

    right = count_of(0)
    for other in range(right):
        if count_of(other) != right:
            raise JaxLlamaError(f"hosts: process {other} expects {count_of(other)}, not {right}")
