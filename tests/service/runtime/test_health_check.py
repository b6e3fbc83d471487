"""The health check of containers, against a real server and by the command of process 1."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from service.runtime import health_check
from tests.support.heed_process import ROOT

READY = b'{"ready": true, "checks": {"store": true, "model": "v1"}}'
DEGRADED = (
    b'{"ready": true, "checks": {"model": "v0", "details": '
    b'{"model": {"degraded": true, "fault": "v1 is damaged"}}}}'
)


@pytest.mark.parametrize(
    ("command", "serves"),
    [
        ("/opt/heed/bin/python /opt/heed/bin/heed serve --host 0.0.0.0", True),
        ("/opt/heed/bin/python /opt/heed/bin/heed demo", True),
        ("/opt/heed/bin/python /opt/heed/bin/heed train --preset best", False),
        ("/sbin/docker-init -- heed import events /in/serve.jsonl", False),
        ("/sbin/docker-init -- heed serve", True),
        ("nginx -g daemon", True),
    ],
)
def test_a_container_that_does_not_listen_is_healthy(
    command: str, serves: bool, tmp_path: Path
) -> None:
    """Only commands of heed that listen are asked whether they are ready."""
    path = tmp_path / "cmdline"
    path.write_bytes(command.replace(" ", "\0").encode() + b"\0")
    assert health_check.serves(path) is serves
    assert health_check.serves(tmp_path / "missing")


class _Answers(BaseHTTPRequestHandler):
    reply = (200, READY)

    def do_GET(self) -> None:
        status, body = self.reply if self.path == "/health/ready" else (404, b"")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        ((200, READY), 0, "serving model v1"),
        ((200, DEGRADED), 0, "degraded: v1 is damaged"),
        ((503, b""), 1, "status 503"),
        ((200, b"<html>"), 1, "no answer"),
    ],
)
def test_the_check_ends_with_the_verdict(
    service: HTTPServer,
    reply: tuple[int, bytes],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exit code follows the readiness of the service on HEED_PORT."""
    monkeypatch.setattr(_Answers, "reply", reply)
    monkeypatch.setenv("HEED_PORT", str(service.server_port))
    done = subprocess.run(
        [sys.executable, "-S", "-m", "service.runtime.health_check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, said in done.stdout) == (code, True), done


def test_the_image_runs_the_check() -> None:
    """The image's health check is the module that knows of commands that do not listen."""
    found = re.search(r"HEALTHCHECK[^\n]*\\\n\s+CMD (\[.*\])", (ROOT / "Dockerfile").read_text())
    assert found is not None
    assert found.group(1) == '["python", "-I", "-m", "service.runtime.health_check"]'
