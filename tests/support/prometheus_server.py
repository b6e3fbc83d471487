"""A real Prometheus that scrapes a server of the tests by the project's own configuration."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import yaml  # type: ignore[import-untyped]

from tests.support.heed_process import PATIENCE, ROOT
from tests.support.waiting import eventually

CONFIGURATION = ROOT / "deploy" / "prometheus"


def program(name: str) -> str:
    """Return the path of prometheus or promtool, which `make prometheus` provides."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), beside)))
    assert found, f"{name} is not on PATH: run `make prometheus`, or install Prometheus"
    return found


class PrometheusServer:
    """Prometheus with deploy/prometheus/prometheus.yml, but each second and of another address.

    Args:
        target: host and port that are scraped.
        folder: of its data and its log.
        key_file: holds the API key that it sends.
    """

    def __init__(self, target: str, folder: Path, key_file: Path) -> None:
        configuration = yaml.safe_load((CONFIGURATION / "prometheus.yml").read_text())
        configuration["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
        heed, *_ = configuration["scrape_configs"]  # the others are the cluster's
        configuration["scrape_configs"] = [heed]
        heed["static_configs"] = [{"targets": [target]}]
        heed["authorization"]["credentials_file"] = str(key_file)
        shutil.copy(CONFIGURATION / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = open(folder / "prometheus.log", "wb")  # noqa: SIM115 - closed at the end
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._http = httpx.Client(base_url=f"http://{address}", timeout=PATIENCE)

    def __enter__(self) -> Self:
        eventually(self._is_ready, lambda: "it did not become ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression as of now, each with `metric` and `value`."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer.get("error"))
        assert not answer.get("warnings"), (expression, answer["warnings"])
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def get(self, path: str) -> Any:
        """Return `data` of another route of its API."""
        return self._http.get(path).json()["data"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "it ended; see prometheus.log"
        with suppress(httpx.TransportError):
            return self._http.get("/-/ready").status_code == 200
        return False
