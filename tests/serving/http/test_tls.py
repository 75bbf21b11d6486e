"""HTTPS by a certificate of the operator's."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2 as httpx
import pytest

pytest.importorskip("uvicorn")

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.http.process import ServeOptions
from tests.helpers.http_server import serve, tiny_checkpoint

TLS = Path(__file__).parents[2] / "golden" / "tls"
CERTIFICATE, KEY = TLS / "cert.pem", TLS / "key.pem"


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        (CERTIFICATE, None, "--ssl-certfile: HTTPS needs --ssl-certfile and --ssl-keyfile"),
        (None, KEY, "--ssl-keyfile: HTTPS needs"),
        (KEY, KEY, "cert.*key.pem"),
        (CERTIFICATE, CERTIFICATE, "--ssl-keyfile"),
        (CERTIFICATE, TLS / "locked.pem", "locked.pem has a password"),
    ],
)
def test_wrong_files_are_refused_before_the_model_is_loaded(certificate, key, said):
    with pytest.raises(JaxLlamaError, match=said):
        ServeOptions("tiny", certificate=certificate, private_key=key)


def test_a_pair_is_taken():
    assert ServeOptions("tiny", certificate=CERTIFICATE, private_key=KEY).certificate == CERTIFICATE


@pytest.mark.slow
def test_a_server_speaks_https_only(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    files = "--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(KEY)
    with serve(folder, *files) as (_, url, _):
        assert url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(CERTIFICATE))
        with httpx.Client(base_url=url, verify=trust, timeout=60) as http:
            assert http.get("/health").json() == {"status": "ok"}
            body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with httpx.Client(base_url=url, timeout=60) as http, pytest.raises(httpx.ConnectError):
            http.get("/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health", timeout=10)
