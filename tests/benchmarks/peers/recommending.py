"""Servers that score and recommend: their environments and settings."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from service import __version__
from service.domain.settings import Settings
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from tests.benchmarks.harness import conditions
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, serving
from tests.benchmarks.peers.data import PeerData
from tests.benchmarks.peers.environments import Pythons, ran, versions
from tests.benchmarks.peers.questions import (
    ALONE,
    ALS,
    BARE,
    BATCHES,
    FRESH,
    SASREC,
    TARGETS,
    question,
)
from tests.benchmarks.peers.turns import HEED, Peer, answers

_BATCH = 16
_ROOM = "tests.benchmarks.peers"
_PATIENCE = 600.0  # seconds for a server that fits before it listens


@contextmanager
def running(
    ground: PeerData,
    pythons: Pythons,
    cores: Cores,
    users: Sequence[int],
    *,
    epochs: int,
    console: Console,
) -> Iterator[list[Peer]]:
    """All servers, each on the servers' core, until the block ends.

    Args:
        ground: what is served.
        pythons: where peers are installed.
        cores: one for the servers, one for the client.
        users: who asks.
        epochs: of SASRec's training at most; it ends sooner where validation says so.
        console: for what is being waited for.

    Raises:
        Unavailable: when one does not start, with its last words.
    """
    arrays = str(ground.arrays)
    sasrec: dict[str, Any] = {
        "arrays": arrays,
        "model": str(ground.data / f"sasrec-{epochs}-epochs.ckpt"),
        "options": sasrec_options(ground),
        "epochs": epochs,
    }
    if not Path(sasrec["model"]).exists():
        ran(
            pythons.rectools,
            "sasrec",
            ["fit", json.dumps(sasrec)],
            f"training {SASREC}",
            console,
            threads=os.cpu_count() or 1,  # how long it takes is not measured here
        )
    own = Settings.read()
    texts = {"HEED_ENCODER": own.encoder, "HEED_EMBEDDING_DIM": str(own.embedding_dim)}
    bare = {"HEED_HISTORY_CACHE_BYTES": "0"}
    models = str(ground.data / MODELS_FOLDER)
    lit = [json.dumps({"models": models, "arrays": arrays, "batch": n}) for n in (1, _BATCH)]
    with ExitStack() as stack:

        def started(name: str, arguments: list[str], python: Path | None, **more: str) -> Server:
            with console.status(f"starting {name}"):
                return stack.enter_context(
                    serving(
                        arguments,
                        core=cores.server,
                        environment=more,
                        python=sys.executable if python is None else str(python),
                        patience=_PATIENCE,
                    )
                )

        def heed(name: str, **more: str) -> Server:
            own = stack.enter_context(_copied(ground.data))
            serve = ["-m", "service.cli", "serve", "--data", str(own), "--port", "0"]
            return started(name, serve, None, **conditions.SETTINGS, **texts, **more)

        litserve = ["-m", f"{_ROOM}.litserve_server"]
        implicit = ["-m", f"{_ROOM}.implicit_server", arrays]
        theirs = {
            ALONE: started(ALONE, [*litserve, lit[0]], pythons.peers),
            BATCHES: started(BATCHES, [*litserve, lit[1]], pythons.peers),
            SASREC: started(
                SASREC, ["-m", f"{_ROOM}.sasrec", "serve", json.dumps(sasrec)], pythons.rectools
            ),
        }
        theirs[ALS] = theirs[FRESH] = started(ALS, implicit, pythons.peers)
        yield _peers(ground, heed(HEED), heed(BARE, **bare), theirs, users, versions(pythons))


def sasrec_options(ground: PeerData) -> dict[str, Any]:
    """As wide, deep and long as Heed's model, over the whole softmax; the rest its defaults."""
    shape = ground.preset.model_config(len(ground.item_ids), 1)
    return {
        "n_factors": shape.dim,
        "n_blocks": shape.blocks,
        "n_heads": shape.heads,
        "session_max_len": shape.window,
        "loss": "softmax",
    }


# ------------------------------------------------------------------------------ the parts


def _peers(
    ground: PeerData,
    heed: Server,
    bare: Server,
    theirs: dict[str, Server],
    users: Sequence[int],
    version: Mapping[str, str],
) -> list[Peer]:
    rng = np.random.default_rng(0)
    count = min(TARGETS, len(ground.item_ids))
    targets = [rng.permutation(len(ground.item_ids))[:count] for _ in users]

    def asking(name: str, server: Server, settings: str, why: str = "") -> Peer:
        questions = {
            "score": [question(name, ground, user, own) for user, own in
                      zip(users, targets, strict=True)],
            "recommend": [question(name, ground, user, None) for user in users],
        }  # fmt: skip
        return Peer(name, server.port, questions, settings, why)

    lit = f"litserve {version['litserve']}, one worker, fast_queue; Heed's model, padded histories"
    batches = f"max_batch_size {_BATCH}, batch_timeout 2 ms"
    both = (
        "It is told the history and keeps none: no store, no events, nothing named by id, no "
        "parts of the score and no reason."
    )
    answers_less = "Its answers are rows and scores alone, out of memory: no store and no reason. "
    als = answers_less + (
        "A user is one vector, and a score one product; what came last, and when, does not count."
    )

    def settings_of(name: str) -> str:
        settings = answers(Peer(name, theirs[name].port, {}, ""), [encode_post("/settings", {})])
        return str(settings[0].json()["settings"])

    return [
        asking(HEED, heed, f"heed {__version__}, {ground.preset}; histories stored, caches as set"),
        asking(BARE, bare, "the same with HEED_HISTORY_CACHE_BYTES=0"),
        asking(ALONE, theirs[ALONE], f"{lit}; batches off", both),
        asking(BATCHES, theirs[BATCHES], f"{lit}; {batches}", both),
        asking(SASREC, theirs[SASREC], f"rectools {version['rectools']}: {settings_of(SASREC)}",
               answers_less),
        asking(ALS, theirs[ALS], f"implicit {version['implicit']}: {settings_of(ALS)}",
               als + " It does not see events after the fit."),
        asking(FRESH, theirs[FRESH], "the same, recalculate_user=True", als),
    ]  # fmt: skip


@contextmanager
def _copied(data: Path) -> Iterator[Path]:
    """A copy of a data directory for one server, which may write to it."""
    with tempfile.TemporaryDirectory(prefix="heed-peers-") as folder:
        shutil.copy(data / STORE_FILE, folder)
        shutil.copytree(data / MODELS_FOLDER, Path(folder) / MODELS_FOLDER)
        yield Path(folder)
