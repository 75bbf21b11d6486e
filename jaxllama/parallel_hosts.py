"""Several hosts: one process on each joins the others, and jax then shows everybody's devices.

    join("10.0.0.1:1234,4,0")      coordinator's address, number of processes, this one's index

Every process runs the same program on the same inputs; a mesh spans all devices of all hosts, each
process reads its own part of the weights, and process 0 prints.  A process takes all of its host's
GPUs (CUDA_VISIBLE_DEVICES says otherwise).

The work is ``jax.distributed``'s.  Its own answer to a host that does not come is to abort the
process, so a roll call comes first: everybody reports to the coordinator's port, and who is missing
when the time is up is named in everybody's error.  A host that dies later is found by jax's
heartbeats, which end the other processes within HEARTBEAT seconds.

Left out: finding the coordinator by asking Slurm or Kubernetes (their launch lines say it).
"""

from __future__ import annotations

import re
import socket
import time

from jaxllama.errors import JaxLlamaError

TIMEOUT = 60.0  # seconds to wait for the others
HEARTBEAT = 60
_GO = b"go\n"
_SPEC = re.compile(r"(?P<host>[^,\s]+):(?P<port>\d{1,5}),(?P<count>\d{1,6}),(?P<index>\d{1,6})")


def join(hosts: str, timeout: float = TIMEOUT) -> int:
    """Join the processes of "ADDRESS:PORT,COUNT,INDEX"; returns the index.  Before any other use of
    jax.  Raises JaxLlamaError naming what is wrong or who did not answer within ``timeout``."""
    match = _SPEC.fullmatch(hosts.strip())
    if match is None:
        raise JaxLlamaError(f"hosts {hosts!r}: expected ADDRESS:PORT,COUNT,INDEX")
    host, port, count, index = match["host"], *(int(match[k]) for k in ("port", "count", "index"))
    if not 0 < port < 65536:
        raise JaxLlamaError(f"hosts {hosts!r}: port {port} is not from 1 to 65535")
    if not index < count:
        raise JaxLlamaError(f"hosts {hosts!r}: index {index} is not below the count, {count}")
    import jax

    if count > 1:
        roll_call(host, port, count, index, timeout)
    jax.distributed.initialize(
        f"{host}:{port}",
        count,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=round(timeout),
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    return index


def roll_call(host: str, port: int, count: int, index: int, timeout: float) -> None:
    """Returns on every process when all ``count`` are there; raises JaxLlamaError otherwise."""
    deadline = time.monotonic() + timeout
    host = host.strip("[]")
    if index == 0:
        _call(f"{host}:{port}", port, count, deadline, timeout)
    else:
        _report(host, port, count, index, deadline, timeout)


def _call(where: str, port: int, count: int, deadline: float, timeout: float) -> None:
    """Process 0: wait for the others, then send them all the same answer."""
    there: dict[int, socket.socket] = {}
    error = None
    try:
        with _listen(where, port) as server:
            while len(there) < count - 1 and error is None:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    missing = [str(i) for i in range(1, count) if i not in there]
                    error = (
                        f"hosts: process {', '.join(missing)} of {count} did not come to {where} "
                        f"within {timeout:g} s"
                    )
                    break
                error = _enter(peer, count, there, deadline)
        # The port is free again, for jax, before anybody is told to go on.
        for peer in there.values():
            peer.sendall(_GO if error is None else error.encode() + b"\n")
    finally:
        for peer in there.values():
            peer.close()
    if error is not None:
        raise JaxLlamaError(error)


def _listen(where: str, port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise JaxLlamaError(f"hosts: cannot listen at {where}: {error.strerror or error}") from None


def _enter(
    peer: socket.socket, count: int, there: dict[int, socket.socket], deadline: float
) -> str | None:
    """Read "index/count" from a newcomer; what is wrong with it, if it is one of us."""
    words = re.fullmatch(rb"jaxllama (\d+)/(\d+)\n", _line(peer, min(deadline, _soon())))
    if words is None:  # a port scan, a stray browser
        peer.close()
        return None
    index, theirs = int(words[1]), int(words[2])
    if index in there:
        peer.close()
        return f"hosts: two processes say they are {index} of {count}"
    there[index] = peer
    return None if theirs == count else f"hosts: process {index} expects {theirs}, not {count}"


def _report(host: str, port: int, count: int, index: int, deadline: float, timeout: float) -> None:
    """Any other process: tell the coordinator, wait for its answer."""
    silent = f"hosts: {host}:{port} does not answer: process {index} waited {timeout:g} s"
    while True:
        try:
            peer = socket.create_connection((host, port), max(deadline - time.monotonic(), 0.01))
            break
        except OSError as error:
            if time.monotonic() + 0.1 > deadline:
                raise JaxLlamaError(f"{silent} ({error.strerror or error})") from None
            time.sleep(0.1)
    with peer:
        try:
            peer.sendall(f"jaxllama {index}/{count}\n".encode())
            # A little longer than the coordinator itself waits, to hear its reason.
            answer = _line(peer, deadline + 2.0)
        except OSError:
            answer = b""
    if answer != _GO:
        raise JaxLlamaError(answer.decode(errors="replace").strip() or silent)


def _soon() -> float:
    return time.monotonic() + 2.0


def _line(peer: socket.socket, deadline: float) -> bytes:
    """Up to the first newline, or whatever came in time."""
    got = b""
    while not got.endswith(b"\n") and len(got) < 1024:
        peer.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            more = peer.recv(1024)
        except OSError:
            break
        if not more:
            break
        got += more
    return got
