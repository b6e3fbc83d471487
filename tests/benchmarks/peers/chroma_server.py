"""Chroma's server over given vectors, in the environment of peers.

    python -m tests.benchmarks.peers.chroma_server SPEC  # {"folder", "keys", "hnsw", "ef"}

The first run fills the folder; later ones serve it with another `ef_search`, which a collection
takes up when it is loaded. Vectors are always brought, so that no embedding model is fetched.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
from chromadb.config import Settings

NAME = "keys"
_PART = 2_000  # vectors added at once
_START = 120.0  # seconds until it must answer


def main(spec: dict[str, Any]) -> None:
    """Fill where that is due, then serve; the address is said on stdout."""
    folder, hnsw = Path(spec["folder"]), {**spec["hnsw"], "space": "cosine"}
    if not (folder / "filled").exists():
        with _running(folder) as (client, _):
            made = client.create_collection(
                NAME, embedding_function=None, configuration={"hnsw": hnsw}
            )
            keys = np.load(spec["keys"])
            started = time.monotonic()
            for at in range(0, len(keys), _PART):
                part = keys[at : at + _PART]
                made.add(ids=[str(at + row) for row in range(len(part))], embeddings=part)
            made.query(query_embeddings=keys[:1], n_results=1)  # once what was added is indexed
            (folder / "filled").write_text(f"{time.monotonic() - started}")
    with _running(folder) as (client, _):
        kept = client.get_collection(NAME, embedding_function=None)
        kept.modify(configuration={"hnsw": {"ef_search": spec["ef"]}})
    with _running(folder) as (_, port):
        sys.stdout.write(f"http://127.0.0.1:{port}\n")
        sys.stdout.flush()
        signal.pause()


@contextmanager
def _running(folder: Path) -> Iterator[tuple[Any, int]]:
    """Chroma's own command on a free port, and a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # It writes a line for each request unless it is told not to, which takes half of the time.
    quiet = {**os.environ, "RUST_LOG": "error", "ANONYMIZED_TELEMETRY": "False"}
    command = [str(Path(sys.executable).with_name("chroma")), "run", "--path", str(folder)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=quiet,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield _client(port, process), port
    finally:
        process.terminate()
        process.wait()


def _client(port: int, process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + _START
    while True:
        try:
            return chromadb.HttpClient(
                "127.0.0.1", port, settings=Settings(anonymized_telemetry=False)
            )
        except Exception:  # whatever it says while nobody listens
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main(json.loads(sys.argv[1]))
