"""Recommending from a large catalogue over HTTP, beside the bare index that it asks."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from rich.table import Table

from models.attending import Attending
from models.ranking import candidate_count, recommend
from models.snapshot import Snapshot
from models.target_attention import candidate_query
from models.user_memory import UserMemory
from service.bench import latency
from service.bench.client import connected, post
from service.bench.enlarged import enlarged, moved
from service.bench.ground import Ground
from service.bench.latency import Case
from service.bench.processes import Cores, Server, pinned, serving
from service.bench.questions import LIMIT, questions
from service.bench.subjects import Subject, Subjects
from service.bench.timing import Told, silent
from service.errors import Invalid, Unavailable
from service.layout import MODELS_FOLDER, STORE_FILE
from service.records import Event, Item
from service.registry import Registry
from service.stores.sqlite import SQLiteStore

_PATIENCE = 1_800.0  # seconds for a server that reads and indexes millions of items
_PART = 10_000  # items and events that are stored at once
_ONE = (1,)  # connection: what waits for others is not the index's time


@dataclass(frozen=True, slots=True)
class Found:
    """All that was measured."""

    items: int
    copies: int  # of each item of the source
    cases: Sequence[Case]  # whose job is the bare index
    candidates: Sequence[int]  # that each case asks the index for
    index_recall: float  # of the exact best, among as many candidates from the bare index
    recall: float  # of the exact best, in the answers
    users: int  # that those are a mean of

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
            "index_recall": self.index_recall,
            "recall": self.recall,
            "users": self.users,
        }


def measure(
    ground: Ground,
    source: Subjects,
    items: int,
    cores: Cores,
    environment: Mapping[str, str],
    *,
    rounds: int,
    requests: int,
    told: Callable[[str], Told] = lambda _: silent,
) -> Found:
    """Serve copies of a data set's items until there are so many, and ask.

    Args:
        ground: the data set.
        source: the same in this process; its model is trained.
        items: how many there are to be at least.
        cores: of servers and client.
        environment: of the server, its HEED_* variables.
        rounds: of each question.
        requests: to each server in each round.
        told: gives for each stage whom to tell how much is done.

    Raises:
        Invalid: when the data set has no trained model.
        Unavailable: when the server does not answer.
    """
    trained = source.snapshot.trained
    if trained is None or trained.model.config.items <= 1:
        raise Invalid("", "there is no trained model to recommend from a large catalogue: train")
    copies = -(-items // trained.model.config.items)
    progress = told("items")
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
        told("index")(0, 1)
        large = large.indexing()
        with serving(
            ["-m", "service.cli", "serve", "--data", str(data), "--port", "0"],
            core=cores.server,
            environment=environment,
            patience=_PATIENCE,
        ) as heed:
            asked = [each for each in questions(ground) if each.ask == "recommend"]
            works = {
                question.name: [partial(nearest, large, memories[question.bodies[0]["user_id"]])]
                for question in asked
            }
            cases = latency.measure(
                asked,
                works,
                heed,
                cores,
                rounds=rounds,
                requests=requests,
                concurrency=_ONE,
                told=told("questions"),
            )
            with pinned(cores.client):
                answers = uvloop.run(_answers(heed, list(memories), asked[0].bodies[0]))
    near, found = _recalls(large, list(memories.values()), answers, told("exact answers"))
    counts = [wanted(large, memories[each.bodies[0]["user_id"]]) for each in asked]
    return Found(len(large.catalogue), copies, cases, counts, near, found, len(memories))


def nearest(snapshot: Snapshot, user: UserMemory) -> NDArray[np.int64]:
    """As many candidates as recommending asks the bare index for, best first."""
    if snapshot.index is None:
        raise ValueError("so few items have no index")
    query = candidate_query(user.summary, user.memory.values.transpose(0, 1), user.bias)
    rows: NDArray[np.int64] = snapshot.index.search(
        query[None, :-1].numpy(), wanted(snapshot, user)
    ).rows[0]
    return rows


def wanted(snapshot: Snapshot, user: UserMemory) -> int:
    """How many candidates recommending asks for."""
    return candidate_count(user, LIMIT, len(snapshot.catalogue))


def shown(found: Found) -> Table:
    """What was found, for people."""
    table = Table(
        title=f"Recommending {LIMIT} of {found.items:,} items over HTTP, one at a time",
        title_justify="left",
        caption_justify="left",
        caption=f"Milliseconds. The items are {found.copies:,} near copies of each that the model "
        "was trained on. The index is asked for as many candidates as Heed scores; all that "
        "answering does beside it is Heed's. Times the index: Heed's median without the floor's "
        "over the index's. "
        f"Of the exact {LIMIT} best of {found.users} users, {found.index_recall:.3f} are among the "
        f"index's candidates and {found.recall:.3f} in the answers.",
    )
    columns = ("question", "p50", "p95", "p99", "floor p50", "candidates", "index")
    for name in (*columns, "times the index"):
        table.add_column(name, justify="left" if name == "question" else "right")
    for each, count in zip(found.cases, found.candidates, strict=True):
        over = each.over("typed")
        table.add_row(
            each.question,
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
    ground: Ground,
    large: Snapshot,
    copies: int,
    events: Sequence[Event],
    told: Told,
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
                told(copy + 1, copies)
            for at in range(0, len(events), _PART):
                await new.append(events[at : at + _PART])
        finally:
            await old.close()
            await new.close()

    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        target = Path(folder)
        asyncio.run(fill(target))
        if large.trained is not None:
            Registry(target / MODELS_FOLDER).publish(large.trained.pack(), {"metrics": {}})
        yield target


def _copied(item: Item, copy: int) -> Item:
    return replace(item, item_id=f"{copy}:{item.item_id}")


def _events(user: str, subject: Subject, memory: UserMemory, snapshot: Snapshot) -> Iterator[Event]:
    """A user's events, on the copies that the memory has of their items."""
    asked, names = subject.asked, snapshot.catalogue.vocabulary
    for event, row in enumerate(memory.past.rows.tolist()):
        if row >= 0:
            yield Event(
                user,
                names.id(row),
                type=asked.type_names[asked.types[event]],
                weight=float(asked.past.weights[event]),
                timestamp=int(asked.past.timestamps[event]),
            )


async def _answers(heed: Server, users: Sequence[str], body: Mapping[str, Any]) -> list[list[str]]:
    """The items recommended to each user."""
    found = []
    async with connected(heed.port, 1) as (connection,):
        for user in users:
            answer = await connection.ask(post("/v1/recommend", {**body, "user_id": user}))
            if answer.status != 200:
                raise Unavailable(f"recommend was answered with {answer.status}: {answer.body!r}")
            found.append([item["item_id"] for item in answer.json()["items"]])
    return found


def _recalls(
    snapshot: Snapshot,
    memories: Sequence[UserMemory],
    answers: Sequence[Sequence[str]],
    told: Told,
) -> tuple[float, float]:
    """How much of the best of users, had every item been scored, the index and the answers have."""
    index, found = [], []
    for number, (memory, answer) in enumerate(zip(memories, answers, strict=True)):
        told(number, len(memories))
        seen = np.unique(memory.past.rows[memory.past.rows >= 0]).astype(np.int64)
        best = recommend(
            snapshot,
            memory,
            limit=LIMIT,
            allowed=snapshot.known,
            excluded=seen,
            how=Attending(mode="exact"),
        ).rows
        index.append(float(np.isin(best, nearest(snapshot, memory)).mean()))
        names = {snapshot.catalogue.vocabulary.id(row) for row in best.tolist()}
        found.append(len(names.intersection(answer)) / len(best))
    told(len(memories), len(memories))
    return float(np.mean(index)), float(np.mean(found))
