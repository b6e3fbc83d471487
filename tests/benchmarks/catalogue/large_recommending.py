"""Recommending from a large catalogue over HTTP, beside the bare index."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.table import Table

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from service.domain.errors import Invalid, Unavailable
from service.domain.records import Event, Item
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.catalogue.bare_index import Recalls, judged, nearest, wanted
from tests.benchmarks.catalogue.enlarged import enlarged, moved
from tests.benchmarks.harness.closed_loop import connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned, serving
from tests.benchmarks.harness.timing import ProgressCallback, no_progress
from tests.benchmarks.http import latency
from tests.benchmarks.http.latency import Case
from tests.benchmarks.workload.data import BenchmarkData
from tests.benchmarks.workload.loaded import LoadedData, LoadedUser
from tests.benchmarks.workload.questions import LIMIT, questions

_PATIENCE = 1_800.0  # seconds for a server that reads and indexes millions of items
_PART = 10_000  # items and events that are stored at once
_ONE = (1,)  # connection: what waits for others is not the index's time
_ALIKE = "-recall"  # ends the name of a question beside an index of the answers' recall


@dataclass(frozen=True, slots=True)
class RecommendingResults:
    """All that was measured."""

    items: int
    copies: int  # of each item of the source
    # Each question twice: its job is the bare index, asked for as many candidates as recommending
    # asks it for, and then for as many as have what answers have.
    cases: Sequence[Case]
    candidates: Sequence[int]  # that each case asks the index for
    recalls: Recalls

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "items": self.items,
            "copies": self.copies,
            "candidates": list(self.candidates),
            "cases": [
                each.as_dict() | {"times_the_index": each.over("typed").as_dict()}
                for each in self.cases
            ],
            "recalls": asdict(self.recalls),
        }


def measure(
    ground: BenchmarkData,
    source: LoadedData,
    items: int,
    cores: Cores,
    environment: Mapping[str, str],
    *,
    rounds: int,
    requests: int,
    stage: Callable[[str], ProgressCallback] = lambda _: no_progress,
) -> RecommendingResults:
    """Serve copies of a data set's items until there are so many, and ask.

    Args:
        ground: the data set.
        source: the same in this process; its model is trained.
        items: how many there are to be at least.
        cores: of servers and client.
        environment: of the server, its HEED_* variables.
        rounds: of each question.
        requests: to each server in each round.
        stage: returns the progress callback of a stage, by its name.

    Raises:
        Invalid: when the data set has no trained model.
        Unavailable: when the server does not answer.
    """
    trained = source.snapshot.trained
    if trained is None or trained.model.config.n_items <= 1:
        raise Invalid("", "there is no trained model to recommend from a large catalogue: train")
    copies = -(-items // trained.model.config.n_items)
    progress = stage("items")
    progress(0, 1)
    large = enlarged(source.snapshot, copies)
    names = [user for user, _ in ground.askers] + list(ground.others)
    subjects = dict(zip(reversed(names), reversed(source.users), strict=True))  # each once
    memories = dict(
        zip(
            subjects,
            moved([each.memory for each in subjects.values()], source.snapshot, large),
            strict=True,
        )
    )
    events = [
        event
        for user, subject in subjects.items()
        for event in _events(user, subject, memories[user], large)
    ]
    with _stored(ground, large, copies, events, progress) as data:
        stage("index")(0, 1)
        large = large.reindexed()
        with serving(
            ["-m", "service.cli", "serve", "--data", str(data), "--port", "0"],
            core=cores.server,
            environment=environment,
            patience=_PATIENCE,
        ) as heed:
            asked = [each for each in questions(ground) if each.ask == "recommend"]
            with pinned(cores.client):
                answers = uvloop.run(_answers(heed, list(memories), asked[0].bodies[0]))
            recalls = judged(large, list(memories.values()), answers, stage("exact answers"))
            again = [replace(each, name=f"{each.name}{_ALIKE}") for each in asked]
            works = {
                question.name: [
                    partial(nearest, large, memories[question.bodies[0]["user_id"]], times)
                ]
                for times, part in ((1, asked), (recalls.times, again))
                for question in part
            }
            cases = latency.measure(
                asked + again,
                works,
                heed,
                cores,
                rounds=rounds,
                requests=requests,
                concurrency=_ONE,
                progress=stage("questions"),
            )
    counts = [
        times * wanted(large, memories[each.bodies[0]["user_id"]])
        for times in (1, recalls.times)
        for each in asked
    ]
    return RecommendingResults(len(large.catalogue), copies, cases, counts, recalls)


def shown(found: RecommendingResults) -> Table:
    """Return the results as a table."""
    recalls = found.recalls
    table = Table(
        title=f"Recommending {LIMIT} of {found.items:,} items over HTTP, one at a time",
        title_justify="left",
        caption_justify="left",
        caption=f"Milliseconds. The items are {found.copies:,} near copies of each that the model "
        "was trained on. Each question is first beside the index asked for as many candidates as "
        f"Heed asks it for, then for {recalls.times} times as many; all that answering does beside "
        "it is Heed's. Times the index: Heed's median without the floor's over the index's. "
        f"Of the exact {LIMIT} best of {recalls.users} users, {recalls.answers:.3f} are in the "
        f"answers, {recalls.index:.3f} among the candidates that Heed asks for, and "
        f"{recalls.index_times:.3f} among {recalls.times} times as many: what followed a user's "
        "last items is in answers, and in no index.",
    )
    columns = ("question", "p50", "p95", "p99", "floor p50", "candidates", "index")
    for name in (*columns, "times the index"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for each, count in zip(found.cases, found.candidates, strict=True):
        over = each.over("typed")
        table.add_row(
            each.question.removesuffix(_ALIKE),
            *(f"{1e3 * each.percentile('heed', p):.2f}" for p in (50, 95, 99)),
            f"{1e3 * each.percentile('typed', 50):.2f}",
            f"{count:,}",
            f"{1e3 * float(np.median(each.alone)):.2f}",
            f"{over.median:.2f} ({over.low:.2f}–{over.high:.2f})",
        )
    return table


# ------------------------------------------------------------------------------ the parts


@contextmanager
def _stored(
    ground: BenchmarkData,
    large: Snapshot,
    copies: int,
    events: Sequence[Event],
    progress: ProgressCallback,
) -> Iterator[Path]:
    """A data directory of the enlarged catalogue, its model, and these events."""

    async def fill(target: Path) -> None:
        old = SQLiteStore(ground.data / STORE_FILE)
        new = SQLiteStore(target / STORE_FILE)
        try:
            listed = list(old.scan_items())
            for copy in range(copies):
                for at in range(0, len(listed), _PART):
                    part = listed[at : at + _PART]
                    await new.put_items([_copied(item, copy) for item in part])
                progress(copy + 1, copies)
            for at in range(0, len(events), _PART):
                await new.append(events[at : at + _PART])
        finally:
            await old.close()
            await new.close()

    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        target = Path(folder)
        asyncio.run(fill(target))
        if large.trained is not None:
            Registry(target / MODELS_FOLDER).publish(large.trained.to_files(), {"metrics": {}})
        yield target


def _copied(item: Item, copy: int) -> Item:
    return replace(item, item_id=f"{copy}:{item.item_id}")


def _events(
    user: str, subject: LoadedUser, memory: UserMemory, snapshot: Snapshot
) -> Iterator[Event]:
    """A user's events, on the copies that the memory has of their items."""
    sent, names = subject.events, snapshot.catalogue.vocabulary
    for event, row in enumerate(memory.history.rows.tolist()):
        if row >= 0:
            yield Event(
                user,
                names.id(row),
                type=sent.type_names[sent.types[event]],
                weight=float(memory.history.weights[event]),
                timestamp=int(sent.timestamps[event]),
            )


async def _answers(heed: Server, users: Sequence[str], body: Mapping[str, Any]) -> list[list[str]]:
    """The items recommended to each user."""
    found = []
    async with connected(heed.port, 1) as (connection,):
        for user in users:
            answer = await connection.send(encode_post("/v1/recommend", {**body, "user_id": user}))
            if answer.status != 200:
                raise Unavailable(f"recommend was answered with {answer.status}: {answer.body!r}")
            found.append([item["item_id"] for item in answer.json()["items"]])
    return found
