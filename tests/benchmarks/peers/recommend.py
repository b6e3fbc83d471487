"""Heed beside RecTools' SASRec and implicit's ALS: lists and scores over HTTP, in turns."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import typer

from models.evaluation.full_ranking import hits, ndcg_gains, standard_error
from service.datasets.movielens import LICENCE
from service.domain.timestamps import to_rfc3339
from tests.benchmarks.harness.client import Answer, ask, encode_post
from tests.benchmarks.harness.data import AT, LIMIT, TARGETS
from tests.benchmarks.harness.options import Requests, Rounds
from tests.benchmarks.harness.servers import Cores, Server, heed, pinned, serving
from tests.benchmarks.harness.tables import OUT, print_machine, table
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases
from tests.benchmarks.peers.data import ARRAYS, USER, PeerData, prepare

HEED, SASREC, ALS = "Heed", "RecTools' SASRec", "implicit's ALS"
PYTHON = Path(".venv-rectools/bin/python")
_PATIENCE = 14_400.0  # seconds for a server that fits before it listens

Python = Annotated[Path, typer.Option(help="A Python that has RecTools and implicit.")]
DataSet = Annotated[Literal["ml-100k", "ml-1m"], typer.Argument(help="It is fetched.")]
Folder = Annotated[Path, typer.Option("--data", help="Where caches and models are kept.")]


class Peer(NamedTuple):
    """A server, how it is asked to recommend or to score, and how its lists are read."""

    name: str
    server: Server
    question: Callable[[int, Sequence[int] | None], bytes]  # user, targets
    rows: Callable[[Answer], list[int]]  # item rows, best first


def recommend(
    dataset: DataSet = "ml-100k",
    data: Folder = Path("./data"),
    python: Python = PYTHON,
    sasrec_epochs: Annotated[int, typer.Option(min=1, help="Of SASRec's training at most.")] = 25,
    users: Annotated[int, typer.Option(min=1, help="Users whose questions are timed.")] = 64,
    rounds: Rounds = 7,
    requests: Requests = 128,
) -> None:
    """Compare lists and speed of Heed, SASRec and ALS.

    Heed and SASRec are trained once, and kept in the data directory under `peers`. Epochs and
    factors are chosen on validation cases; the lists are judged by each user's last event.
    """
    cores = Cores.choose()
    print_machine(cores)
    OUT.print(LICENCE, style="dim", soft_wrap=True)
    ground = prepare(dataset, data)
    test = ground.task.test
    with ExitStack() as stack:
        peers = _started(stack, ground, python, sasrec_epochs, cores)
        stack.enter_context(pinned(cores.client))
        table(
            f"Lists on {dataset}: each user's last event held out, the whole catalogue ranked",
            ("", "HR@10", "NDCG@10", "cases"),
            [_judged(peer, ground) for peer in peers],
            caption="± is the standard error.",
        )
        rng = np.random.default_rng(0)
        count = min(TARGETS, len(ground.item_ids))
        asking = test.users[:: max(1, len(test) // users)][:users].tolist()
        targets = [rng.permutation(len(ground.item_ids))[:count].tolist() for _ in asking]
        subjects = [
            Subject(
                peer.name,
                [peer.server],
                {
                    f"score {count}": list(map(peer.question, asking, targets)),
                    f"recommend {LIMIT}": [peer.question(user, None) for user in asking],
                },
            )
            for peer in peers
        ]
        cases = ask_in_turns(subjects, rounds=rounds, requests=requests)
    print_cases(f"{dataset} over HTTP, {len(asking)} users in turn", cases)


def _started(
    stack: ExitStack, ground: PeerData, python: Path, epochs: int, cores: Cores
) -> list[Peer]:
    shape = ground.preset.model_config(len(ground.item_ids), 1)
    sasrec = {
        "arrays": str(ground.arrays),
        "model": str(ground.data / f"sasrec-{epochs}-epochs.ckpt"),
        "epochs": epochs,
        # As wide, deep and long as Heed's model, over the whole softmax; the rest its defaults.
        "options": {
            "n_factors": shape.dim,
            "n_blocks": shape.blocks,
            "n_heads": shape.heads,
            "session_max_len": shape.window,
            "loss": "softmax",
        },
    }
    place = {ident: row for row, ident in enumerate(ground.item_ids)}

    def ask_heed(user: int, targets: Sequence[int] | None) -> bytes:
        body: dict[str, Any] = {"user_id": USER(user), "at": to_rfc3339(AT)}
        if targets is None:
            return encode_post("/v1/recommend", body | {"limit": LIMIT})
        ids = [ground.item_ids[row] for row in targets]
        return encode_post("/v1/score", body | {"item_ids": ids})

    def ask_peer(user: int, targets: Sequence[int] | None) -> bytes:
        wanted = {"limit": LIMIT} if targets is None else {"targets": targets}
        return encode_post("/ask", {"user": user, **wanted})

    def started(name: str, module: str, argument: str) -> Peer:
        with OUT.status(f"starting {name}, which is fitted first"):
            server = stack.enter_context(
                serving(
                    ["-m", f"{__package__}.{module}", argument],
                    core=cores.server,
                    python=python,
                    patience=_PATIENCE,
                )
            )
        return Peer(name, server, ask_peer, lambda answer: list(answer.json()["items"]))

    own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heed-bench-"))) / "data"
    shutil.copytree(ground.data, own, ignore=shutil.ignore_patterns(ARRAYS, "*.ckpt"))
    server = stack.enter_context(heed(own, core=cores.server))
    return [
        Peer(
            HEED,
            server,
            ask_heed,
            lambda answer: [place[item["item_id"]] for item in answer.json()["items"]],
        ),
        started(SASREC, "sasrec", json.dumps(sasrec)),
        started(ALS, "als", str(ground.arrays)),
    ]


def _judged(peer: Peer, ground: PeerData) -> tuple[str, str, str, str]:
    """Judge the lists that a peer answers over HTTP by each user's next event."""
    test = ground.task.test
    answers = ask(peer.server.port, [peer.question(user, None) for user in test.users.tolist()])
    ranks = []
    for answer, target in zip(answers.answers, test.targets.tolist(), strict=True):
        rows = peer.rows(answer)
        ranks.append(rows.index(target) if target in rows else sys.maxsize)
    hit, gain = hits(np.array(ranks)), ndcg_gains(np.array(ranks))
    return (
        peer.name,
        f"{hit.mean():.3f} ±{standard_error(hit):.3f}",
        f"{gain.mean():.3f} ±{standard_error(gain):.3f}",
        f"{len(ranks):,}",
    )
