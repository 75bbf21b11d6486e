"""``jaxllama serve --ray ADDRESS``: put the server onto a Ray cluster, and take it off again.

    serve(options, cluster, start)       blocks until SIGTERM or Ctrl-C

The cluster's nodes have jaxllama with the extra ``ray`` and see the model under the same path. The
address, the port and the certificate are those of Serve's proxy on the head node. A Serve instance
that runs already keeps its own. SIGTERM removes the application, and Serve too if it has no
other one. The requests in flight have ``drain_timeout`` seconds. If this process is killed, the
application goes on, and the next ``serve --ray`` replaces it. Logs are Ray's (``ray logs``).
"""

from __future__ import annotations

import signal
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

import ray
from ray import serve as ray_serve

from jaxllama import progress
from jaxllama.engine.options import EngineOptions
from jaxllama.errors import JaxLlamaError
from jaxllama.serving.http.process import ServeOptions, url
from jaxllama.serving.ipc.replica import Start
from jaxllama.serving.ray.app import ReplicaPool, application_of
from jaxllama.serving.ray.cluster import connect, free_port, resources_of
from jaxllama.serving.ray.options import ClusterOptions

NAME = "jaxllama"  # of the application
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ANSWERS = 30.0  # seconds for the proxy to answer


def serve(options: ServeOptions, cluster: ClusterOptions, start: Start) -> None:
    """Run the server until SIGTERM or Ctrl-C; the module docstring has the details.

    start: called in each replica; picklable.
    """
    connect(cluster.address)
    settings = options.settings(max_len=0)  # the actor fills in the engine's
    pool = ReplicaPool(
        cluster.replicas,
        cluster.most,
        options.engine.get("max_slots") or EngineOptions().max_slots,
        options.engine.get("max_queue") or EngineOptions().max_queue,
        resources_of(cluster),
        cluster.hosts,
        drain=options.drain_timeout,
    )
    port = options.port or free_port(options.host)
    proxy: dict[str, Any] = {"host": options.host, "port": port}
    if options.certificate is not None and options.private_key is not None:
        files = {"ssl_certfile": options.certificate, "ssl_keyfile": options.private_key}
        proxy |= {key: str(path.resolve()) for key, path in files.items()}
    address = url(options.host, port, options.certificate is not None)
    for number in SIGNALS:  # also while Serve waits, without a limit, for devices
        signal.signal(number, signal.default_int_handler)
    try:
        with progress.working("loading and compiling on the cluster"):
            ray_serve.start(proxy_location="HeadOnly", http_options=proxy)
            application = application_of(settings, pool, start)
            ray_serve.run(application, name=NAME, route_prefix="/", blocking=False)
            _check(address)
        print(f"jaxllama serves {settings.name} on {address}", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:  # Serve's, for an application that does not start
        raise JaxLlamaError(f"--ray: {_reason(error)}") from None
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        ray_serve.delete(NAME)
        if not ray_serve.status().applications:
            ray_serve.shutdown()
        ray.shutdown()


def _reason(error: Exception) -> str:
    """Return the line of Serve's report that names the fault: the last one with an exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or [type(error).__name__])[-1]


def _check(url: str) -> None:
    """Raise JaxLlamaError if the head node is this host and no server answers there."""
    head = next(n for n in ray.nodes() if "node:__internal_head__" in n["Resources"])
    if head["NodeID"] != ray.get_runtime_context().get_node_id():
        return
    target = url.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    end = time.monotonic() + ANSWERS
    while True:
        try:
            with urllib.request.urlopen(f"{target}/live", timeout=ANSWERS, context=context):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > end:
                raise JaxLlamaError(
                    f"nothing answers on {url} ({error}): if Ray Serve ran before, it keeps its "
                    "address; end it with serve shutdown"
                ) from None
            time.sleep(0.2)
