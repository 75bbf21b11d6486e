"""Start the server, call it by plain HTTP, and stop it.

    python -m jaxllama.examples.serve_and_call [MODEL]

Any OpenAI client works as well: ``OpenAI(base_url=url + "/v1", api_key="-")``.
"""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
# Port 0 selects any free port. The server prints the port when it listens.
command = ["serve", "--model", model, "--port", "0", "--max-slots", "1", "--max-len", "64"]
with subprocess.Popen(
    [sys.executable, "-m", "jaxllama", *command], stdout=subprocess.PIPE, text=True
) as server:
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        body = {"model": Path(model).name, "prompt": "The capital of France is", "max_tokens": 8}
        request = urllib.request.Request(
            url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)
        print(repr(answer["choices"][0]["text"]), answer["usage"])
    finally:
        server.send_signal(signal.SIGTERM)  # accepted requests are still answered
print("ended with status", server.returncode)
