"""Heed's own trained model served by LitServe, in the environment of peers.

    python -m tests.benchmarks.peers.litserve_server '{"models": …, "arrays": …, "batch": 16}'

Every request brings a padded history, as its client keeps it; what arrives together is one batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import litserve
import numpy as np
import torch

from models.recommender.artifact import TrainedModel
from service.snapshots.registry import Registry
from tests.benchmarks.peers.padded import Padded

WAIT = 0.002  # seconds that a batch waits to be filled; one request alone waits them too


class Model(litserve.LitAPI):  # type: ignore[misc]  # it is not installed where types are checked
    """Scores of targets where a request names them, else the best of what was not had."""

    def __init__(self, spec: dict[str, Any]) -> None:
        batch = spec["batch"]
        super().__init__(max_batch_size=batch, batch_timeout=WAIT if batch > 1 else 0.0)
        self._given = spec

    def setup(self, device: str) -> None:
        """In the worker."""
        torch.set_num_threads(1)
        registry = Registry(Path(self._given["models"]))
        trained = TrainedModel.from_files(registry.load(registry.current() or ""))
        self._model = Padded(trained.model, np.load(self._given["arrays"])["content"])

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def predict(self, asked: Any) -> Any:
        """Predict for a list of requests, or for one where batches are off."""
        if isinstance(asked, dict):
            return self._answers([asked])[0]
        out: list[dict[str, Any]] = [{}] * len(asked)
        for scores in (True, False):  # those with targets, and those without
            rows = [row for row, each in enumerate(asked) if ("targets" in each) is scores]
            if rows:
                found = self._answers([asked[row] for row in rows])
                for row, each in zip(rows, found, strict=True):
                    out[row] = each
        return out

    @torch.inference_mode()
    def _answers(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        longest = max(len(each["items"]) for each in asked)
        items, times = (
            torch.tensor([each[name] + [0] * (longest - len(each[name])) for each in asked])
            for name in ("items", "timestamps")
        )
        lengths, at = (torch.tensor([each[name] for each in asked]) for name in ("length", "at"))
        if "targets" in asked[0]:
            targets = torch.tensor([each["targets"] for each in asked])
            scores = self._model.scores(items, times, lengths, at, targets)
            return [{"items": each["targets"], "scores": row.tolist()}
                    for each, row in zip(asked, scores, strict=True)]  # fmt: skip
        scores = self._model.scores(items, times, lengths, at)
        for row, length in enumerate(lengths.tolist()):
            scores[row, items[row, :length]] = -torch.inf
        best = torch.topk(scores, asked[0]["limit"])
        return [{"items": rows.tolist(), "scores": row.tolist()}
                for rows, row in zip(best.indices, best.values, strict=True)]  # fmt: skip


def main(spec: dict[str, Any]) -> None:
    """Serve on a free port; the address is said once the workers answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = litserve.LitServer(
        Model(spec), accelerator="cpu", workers_per_device=1, timeout=60, fast_queue=True
    )
    threading.Thread(target=_announce, args=(port,), daemon=True).start()
    server.run(
        host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False,
        log_level="warning", pretty_logs=False, access_log=False, timeout_keep_alive=60,
    )  # fmt: skip


def supervise(spec: str) -> None:
    """Serve in a session of its own and end all of it: LitServe's workers outlive their parent."""
    command = [sys.executable, "-m", "tests.benchmarks.peers.litserve_server", spec, "inside"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    process = subprocess.Popen(command, start_new_session=True)
    try:
        sys.exit(process.wait())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _announce(port: int) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                if answer.status == 200:
                    break
        except OSError:
            time.sleep(0.1)
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[2:] == ["inside"]:
        main(json.loads(sys.argv[1]))
    else:
        supervise(sys.argv[1])
