"""Lists of all users at once and in one process, without HTTP."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from service.domain.settings import Settings
from service.engine.lists import write_lists
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, pinned
from tests.benchmarks.harness.timing import ProgressCallback, no_progress
from tests.benchmarks.peers.data import ASKED, PeerData
from tests.benchmarks.peers.questions import LIMIT
from tests.benchmarks.peers.turns import HEED, Peer, answers
from tests.support import asking


def measure(
    ground: PeerData,
    peers: Sequence[Peer],
    cores: Cores,
    rounds: int,
    progress: ProgressCallback = no_progress,
) -> dict[str, list[float]]:
    """Users a second, round by round, everybody on the servers' core.

    Args:
        ground: whose users.
        peers: those that answer POST /everyone; Heed writes what `heed recommend-all` does.
        cores: of which the servers' is taken.
        rounds: in which everybody has a turn.
        progress: called with the number of turns that are done.
    """
    rates: dict[str, list[float]] = {name: [] for name in (HEED, *(peer.name for peer in peers))}
    total = rounds * len(rates)
    for done in range(total):
        progress(done, total)
        number, place = divmod(done, len(rates))
        at = (number + place) % len(rates)
        if at == 0:
            with pinned(cores.server):
                rates[HEED].append(_heed(ground))
        else:
            peer = peers[at - 1]
            said = answers(peer, [encode_post("/everyone", {"user": 0, "limit": LIMIT})])[0].json()
            rates[peer.name].append(said["users"] / said["seconds"])
    progress(total, total)
    return rates


def _heed(ground: PeerData) -> float:
    with tempfile.TemporaryDirectory() as folder:
        done = asyncio.run(
            write_lists(
                Settings.read({"data": ground.data}),
                Path(folder) / "lists.jsonl",
                asking.recommend(asking.who(at=ASKED), LIMIT),
                progress=lambda _done, _total: None,
            )
        )
    return done.users / done.seconds
