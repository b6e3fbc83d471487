"""Requests to each peer in its own format, and the quality of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.evaluation.full_ranking import hits, ndcg_gains, standard_error
from service.domain.errors import Unavailable
from service.domain.timestamps import to_rfc3339
from tests.benchmarks.harness.http_client import Response, encode_post
from tests.benchmarks.harness.timing import ProgressCallback, no_progress
from tests.benchmarks.peers.data import ASKED, USER, PeerData
from tests.benchmarks.peers.quality import ranks
from tests.benchmarks.peers.turns import HEED, Peer, answers

TARGETS, LIMIT = 100, 20
BARE = f"{HEED}, keeping nothing"
ALONE, BATCHES = "LitServe, one by one", "LitServe, in batches"
SASREC = "RecTools' SASRec"
ALS, FRESH = "implicit's ALS", "implicit's ALS, fresh"
PADDING = 64  # histories are padded to multiples of this many events
_SAME = 1e-3  # by how much the same model's scores may differ


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a peer's lists, judged by each user's next event."""

    hr: float  # at 10
    ndcg: float  # at 10
    errors: tuple[float, float]  # their standard errors
    cases: int


def judged(
    peer: Peer, ground: PeerData, cases: Sequence[int], progress: ProgressCallback = no_progress
) -> Quality:
    """By the lists that a peer answers over HTTP to these test cases, each user's whole history.

    Raises:
        Unavailable: when an answer holds what the user had.
    """
    test = ground.task.test
    asks = [question(peer.name, ground, int(test.users[case]), None) for case in cases]
    lists = [rows_of(peer.name, ground, answer) for answer in answers(peer, asks, progress)]
    for case, items in zip(cases, lists, strict=True):
        if np.isin(items, ground.history(int(test.users[case]))[0]).any():
            raise Unavailable(f"{peer.name} recommended to a user what they had")
    found = ranks(lists, test.targets[list(cases)])
    hit, gain = hits(found), ndcg_gains(found)
    errors = standard_error(hit), standard_error(gain)
    return Quality(float(hit.mean()), float(gain.mean()), errors, len(found))


def question(name: str, ground: PeerData, user: int, targets: NDArray[np.int64] | None) -> bytes:
    """A request in the words of a peer: score targets, or recommend."""
    if name in (HEED, BARE):
        body: dict[str, Any] = {"user_id": USER(user), "at": to_rfc3339(ASKED)}
        if targets is None:
            return encode_post("/v1/recommend", body | {"limit": LIMIT})
        return encode_post(
            "/v1/score", body | {"item_ids": [ground.item_ids[row] for row in targets]}
        )
    wanted: dict[str, Any] = {"limit": LIMIT} if targets is None else {"targets": targets.tolist()}
    if name not in (ALONE, BATCHES):
        return encode_post("/ask", {"user": user, "fresh": name == FRESH} | wanted)
    items, times = ground.history(user)
    padding = [0] * (-len(items) % PADDING)
    history = {"items": items.tolist() + padding, "timestamps": times.tolist() + padding}
    asked = {"length": len(items), "at": ASKED}
    return encode_post("/predict", history | asked | wanted)


def rows_of(name: str, ground: PeerData, answer: Response) -> list[int]:
    """The item rows that a peer answered, best first."""
    items = answer.json()["items"]
    if name not in (HEED, BARE):
        return [int(row) for row in items]
    places = {item_id: row for row, item_id in enumerate(ground.item_ids)}
    return [places[item["item_id"]] for item in items]


def same_model(peers: Sequence[Peer], ground: PeerData) -> float:
    """By how much LitServe's scores of targets differ from Heed's at most: it is the same model.

    Raises:
        Unavailable: when they are not the same.
    """
    by_name = {peer.name: peer for peer in peers}
    heed, theirs = (answers(by_name[name], by_name[name].questions["score"])
                    for name in (HEED, BATCHES))  # fmt: skip
    worst = 0.0
    for one, other in zip(heed, theirs, strict=True):
        mine = [item["score"] for item in one.json()["items"]]
        worst = max(worst, float(np.abs(np.subtract(mine, other.json()["scores"])).max()))
    if worst > _SAME:
        raise Unavailable(f"LitServe's scores differ from Heed's by {worst:g}")
    return worst
