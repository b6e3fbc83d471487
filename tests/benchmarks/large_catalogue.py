"""Recommending from and searching a catalogue of a million items, over HTTP.

Recall is of what the same server answers if every item, or every key, is attended.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.domain.records import Event, Item
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.enlarged import publish_enlarged
from tests.benchmarks.harness.client import ask, encode_post
from tests.benchmarks.harness.data import LIMIT, fill, prepare_data, questions
from tests.benchmarks.harness.jobs import load_data
from tests.benchmarks.harness.options import Requests, Rounds
from tests.benchmarks.harness.servers import Cores, heed, pinned
from tests.benchmarks.harness.tables import OUT, mib, print_machine
from tests.benchmarks.harness.timing import spread
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases

TOP = 10  # of a search
_PATIENCE = 7_200.0  # seconds for a server that reads and indexes millions of texts
_JUDGED = 20  # queries, or users, that are answered exactly too
_QUERY_WORDS = 4
_QUERIES = 60
_CHANGES = 10
_MOST_WORDS = 40  # of a text
_OTHER = 0.15  # share of the words of a copy that are others

Source = Annotated[Path, typer.Option("--data", help="With items, and for recommend a model.")]


def recommend(
    data: Source,
    items: Annotated[int, typer.Option(min=1_000, help="Of the catalogue, at least.")] = 1_000_000,
    rounds: Rounds = 6,
    requests: Requests = 96,
) -> None:
    """Measure recommending from a large catalogue over HTTP.

    The items are near copies of those that the model in --data was trained on: as many of each as
    make the catalogue large enough.
    """
    cores = Cores.choose()
    print_machine(cores)
    with prepare_data(data) as ground, tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        target = Path(folder) / "data"
        target.mkdir()
        users = dict.fromkeys([user for user, _ in ground.askers] + list(ground.others))
        snapshot = load_data(ground.data, ()).snapshot
        trained = snapshot.trained
        if trained is None or trained.model.config.n_items <= 1:
            raise Invalid("", f"{data} has no trained model: heed train --data {data} makes one")
        copies = -(-items // trained.model.config.n_items)
        asked = [each for each in questions(ground) if each.ask == "recommend"]
        with OUT.status("storing items"):
            listed, events = _read(ground.data, set(trained.item_ids), set(users))
            fill(
                target,
                (_copied(item, copy) for copy in range(copies) for item in listed),
                _moved(events, copies),
            )
            publish_enlarged(snapshot, copies, target)
        with (
            heed(target, core=cores.server, patience=_PATIENCE) as server,
            pinned(cores.client),
        ):
            bodies = [{"user_id": user, "limit": LIMIT} for user in users][:_JUDGED]
            recall = _recall(server.port, "/v1/recommend", bodies)
            subject = Subject("Heed", [server], {each.name: each.requests() for each in asked})
            cases = ask_in_turns([subject], connections=[1], rounds=rounds, requests=requests)
            memory = server.resident()
    print_cases(
        f"Recommending {LIMIT} of {copies * len(trained.item_ids):,} items, {copies:,} near copies "
        "of each",
        cases,
        caption=f"Of the {LIMIT} best of {len(bodies)} users, {recall:.3f} are in the answers. The "
        f"server holds {mib(memory)}.",
    )


def search(
    data: Source,
    items: Annotated[int, typer.Option(min=1_000, help="Of the catalogue.")] = 1_000_000,
    rounds: Rounds = 6,
    requests: Requests = 96,
) -> None:
    """Measure search over a large catalogue over HTTP.

    Its items are those stored in --data, then copies of them in which one word in seven is another.
    Each has two keys, its title and its description. A million of them take half an hour on one
    core and 12 GB of memory.
    """
    cores = Cores.choose()
    print_machine(cores)
    with prepare_data(data) as ground:  # a copy: a store of an older version is migrated
        listed, _ = _read(ground.data, None, set())
    source = [
        (item.title, item.description or ", ".join(item.tags)) for item in listed if item.title
    ]
    if not source:
        raise Invalid("", f"{data} has no items with a title; import a catalogue first")
    queries = _queries(source)
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        target = Path(folder) / "data"
        target.mkdir()
        with OUT.status("storing items"):
            fill(target, perturbed_copies(source, items), ())
        began = time.monotonic()
        with (
            heed(target, core=cores.server, patience=_PATIENCE) as server,
            pinned(cores.client),
        ):
            started = time.monotonic() - began
            bodies = [{"query": query, "limit": TOP} for query in queries]
            recall = _recall(server.port, "/v1/search", bodies[:_JUDGED])
            sent = [encode_post("/v1/search", body) for body in bodies]
            subject = Subject("Heed", [server], {"search": sent})
            cases = ask_in_turns([subject], connections=[1], rounds=rounds, requests=requests)
            added, visible = _add(server.port)
            memory = server.resident()
    print_cases(
        f"Search over {items:,} items, {2 * items:,} keys",
        cases,
        caption=f"Of the {TOP} best of {len(bodies[:_JUDGED])} queries, {recall:.3f} are in the "
        f"answers. A new item is stored in {1e3 * added:.1f} ms, and "
        f"{'is' if visible else 'IS NOT'} the first of the next search. The server started in "
        f"{started:.0f} s and holds {mib(memory)}.",
    )


def _read(data: Path, kept: set[str] | None, users: set[str]) -> tuple[list[Item], list[Event]]:
    store = SQLiteStore(data / STORE_FILE)
    try:
        items = [i for i in store.scan_items() if kept is None or i.item_id in kept]
        events = [each for each in store.scan_events() if each.user_id in users] if users else []
    finally:
        asyncio.run(store.close())
    return items, events


def _copied(item: Item, copy: int) -> Item:
    return Item(f"{copy}:{item.item_id}", title=item.title, description=item.description)


def _moved(events: Iterable[Event], copies: int) -> Iterator[Event]:
    """The same events, each on one of the item's copies."""
    rng = random.Random(0)
    for each in events:
        item = f"{rng.randrange(copies)}:{each.item_id}"
        yield Event(each.user_id, item, None, each.type, each.weight, each.timestamp)


def _recall(port: int, path: str, bodies: Sequence[dict[str, Any]]) -> float:
    """The mean share of exact answers that answers by default have."""

    def items(body: dict[str, Any]) -> set[str]:
        answer = ask(port, [encode_post(path, body)]).answers[0]
        return {item["item_id"] for item in answer.json()["items"]}

    shares = []
    for body in bodies:
        exact = items(body | {"retrieval": {"mode": "exact"}})
        shares.append(len(exact & items(body)) / max(1, len(exact)))
    return float(np.mean(shares))


def _add(port: int) -> tuple[float, bool]:
    """Median seconds to store a new item, and whether each was the first of the next search."""
    taken, visible = [], True
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        for number in range(_CHANGES):
            title = f"zyzzyva{number} quokka{number}"
            item = {"item_id": f"new {number}", "title": title}
            began = time.perf_counter()
            http.post("/v1/items", json={"items": [item]}).raise_for_status()
            taken.append(time.perf_counter() - began)
            found = http.post("/v1/search", json={"query": title, "limit": 1}).json()["items"]
            visible &= bool(found) and found[0]["item_id"] == item["item_id"]
    return spread(taken).median, visible


def perturbed_copies(source: Sequence[tuple[str, str]], count: int) -> Iterator[Item]:
    """Items with a title and a description: those of the source, then perturbed copies of them.

    A copy has another word for one in seven, drawn as often as the source has them.
    """
    rng = np.random.default_rng(0)
    texts = [[text.split()[:_MOST_WORDS] for text in pair] for pair in source]
    words = np.array([word for pair in texts for text in pair for word in text], dtype=object)
    for number in range(count):
        pair = texts[number % len(texts)]
        if number >= len(texts):
            pair = [_perturbed(text, words, rng) for text in pair]
        title, description = (" ".join(text) for text in pair)
        yield Item(f"item {number}", title=title, description=description)


def _perturbed(
    text: Sequence[str], words: NDArray[np.object_], rng: np.random.Generator
) -> list[str]:
    changed = list(text)
    for place in np.flatnonzero(rng.random(len(text)) < _OTHER).tolist():
        changed[place] = words[rng.integers(0, len(words))]
    return changed


def _queries(source: Sequence[tuple[str, str]]) -> list[str]:
    """Some words in a row of the titles of real items."""
    titles = [title.split() for title, _ in source]
    titles = [title for title in titles if len(title) >= _QUERY_WORDS] or titles
    chosen = random.Random(1).sample(titles, min(_QUERIES, len(titles)))
    return [" ".join(title[:_QUERY_WORDS]) for title in chosen]
