"""Vector search: the catalogue, Heed's answers beside Chroma's, and indexes in one process."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from models.catalogue.catalogue import Catalogue
from service.cli.console import open_store
from service.domain.errors import NotFound
from service.domain.records import Item
from service.domain.settings import Settings
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots import served
from service.snapshots.live_snapshot import LiveSnapshot
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks.catalogue.large_search import entries, queries_of
from tests.benchmarks.harness import conditions
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned, serving
from tests.benchmarks.harness.timing import ProgressCallback
from tests.benchmarks.peers.effort import Chosen, least
from tests.benchmarks.peers.environments import Pythons, ran
from tests.benchmarks.peers.quality import Nearest, recall
from tests.benchmarks.peers.turns import HEED, Case, Peer, answers, measure

TOP = 10
COARSE = f"{HEED}, coarse"
VECTORS = f"{HEED}, vector by /v1/attend"
CHROMA = "Chroma"
# Its defaults are 16 neighbours and 100 for both efs.
HNSW = {"max_neighbors": 32, "ef_construction": 200}
_KEYS, _QUERIES = "keys.npy", "queries.npy"
_PATH = "/api/v2/tenants/default_tenant/databases/default_database/collections"
_PATIENCE = 3_600.0  # seconds until all is indexed
_PART = 1_000  # items that are stored at once


@dataclass(frozen=True, slots=True)
class Searched:
    """A catalogue that is served, its field keys, and what is asked."""

    data: Path
    items: int
    keys: NDArray[np.float32]  # [F, D] unit vectors
    texts: tuple[str, ...]  # Q queries
    queries: NDArray[np.float32]  # [Q, D] unit vectors
    nearest: Nearest  # what of the exact ten keys others find


@contextmanager
def catalogue(
    data: Path, items: int | None, count: int, progress: ProgressCallback
) -> Iterator[Searched]:
    """A copy of the catalogue in `data`, or one of so many perturbed copies of its texts.

    Args:
        data: a data directory with a catalogue of texts; only read.
        items: how many; None = those that there are.
        count: of queries, the first words of titles.
        progress: called with the number of items that are stored.

    Raises:
        NotFound: when there is no catalogue in `data`.
    """
    if not (data / STORE_FILE).is_file():
        raise NotFound(f"{data} has no {STORE_FILE}: `heed import` a catalogue into it first")
    with tempfile.TemporaryDirectory(prefix="heed-peers-") as folder:
        target = Path(folder)
        with open_store(data) as store:
            own = list(store.scan_items())
        if not own:
            raise NotFound(f"{data} has no items: `heed import` a catalogue into it first")
        source = [(item.title, item.description) for item in own]
        made = own if items is None else [_item(each) for each in entries(source, items)]
        with open_store(target) as store:
            for at in range(0, len(made), _PART):
                asyncio.run(store.put_items(made[at : at + _PART]))
                progress(at, len(made))
        encoder = open_encoder(Settings.read().encoder)
        keys = _served(target).keys.vectors
        texts = tuple(queries_of(source, count))
        asked = encoder.encode(texts)
        asked /= np.linalg.norm(asked, axis=1, keepdims=True)
        np.save(target / _KEYS, keys)
        np.save(target / _QUERIES, asked)
        nearest = Nearest(keys, asked, TOP)
        yield Searched(target, len(made), keys, texts, asked, nearest)


@dataclass(frozen=True, slots=True)
class Served:
    """Results over HTTP."""

    peers: Sequence[Peer]
    cases: Sequence[Case]
    recalls: dict[str, float]  # of each one's own exact best ten, on queries not chosen on


def over_http(
    searched: Searched,
    pythons: Pythons,
    cores: Cores,
    version: str,
    *,
    goal: float,
    rounds: int,
    requests: int,
    console: Console,
    progress: ProgressCallback,
) -> Served:
    """Heed's search and Chroma's server, on the same core, asked in turns.

    Chroma's effort is chosen on the first half of the queries, and all is reported on the second.

    Raises:
        Unavailable: when a server does not start, or does not answer.
    """
    half = len(searched.texts) // 2
    own = Settings.read()
    texts = {"HEED_ENCODER": own.encoder, "HEED_EMBEDDING_DIM": str(own.embedding_dim)}
    serve = ["-m", "service.cli", "serve", "--data", str(searched.data), "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="chroma-") as folder, ExitStack() as stack:
        with console.status("Chroma indexes the keys, and is asked with rising ef_search"):
            effort = _effort(searched, pythons, cores, folder, goal, half)
        with console.status("starting servers"):
            heed = stack.enter_context(
                serving(
                    serve, core=cores.server, environment={**conditions.SETTINGS, **texts},
                    patience=_PATIENCE,
                )
            )  # fmt: skip
            chroma = stack.enter_context(_chroma(searched, pythons, cores, folder, effort.effort))
        later = range(half, len(searched.texts))
        peers = [
            Peer(HEED, heed.port, {"search": [_search(searched, at) for at in later]},
                 "POST /v1/search: the query's text is encoded, its words are counted beside what "
                 "it means, items are weighed"),
            Peer(COARSE, heed.port, {"search": [_search(searched, at, "coarse") for at in later]},
                 "the same, retrieval coarse: the index names 1,000 keys"),
            Peer(VECTORS, heed.port, {"search": [_attend(searched, at) for at in later]},
                 "POST /v1/attend: the client brings the vector, every key is compared",),
            Peer(CHROMA, chroma.port, {"search": _asked(chroma.port, searched, later)},
                 f"chromadb {version}, its server, RUST_LOG=error; the client brings the vector; "
                 f"HNSW, cosine, {HNSW['max_neighbors']} neighbours, "
                 f"ef_construction {HNSW['ef_construction']}, ef_search {effort.effort}",
                 "It is asked with a vector that is encoded already, and knows no words: no "
                 "BM25, no typing errors, no items that hold several keys."),
        ]  # fmt: skip
        cases = measure(peers, (1, 16), rounds=rounds, requests=requests, progress=progress)
        recalls = {
            HEED: _of_itself(peers[0], peers[0], searched, later),
            COARSE: _of_itself(peers[0], peers[1], searched, later),
            VECTORS: searched.nearest.recall(_rows(peers[2]), later),
            CHROMA: searched.nearest.recall(_found(peers[3]), later),
        }
    return Served(peers, cases, recalls)


def in_process(
    searched: Searched, python: Path, cores: Cores, *, goal: float, rounds: int, console: Console
) -> dict[str, Any]:
    """Heed's coarse index beside qdrant-edge: what `in_process.py` answers.

    Raises:
        Unavailable: when it fails, with its last words.
    """
    spec = {
        "keys": str(searched.data / _KEYS),
        "queries": str(searched.data / _QUERIES),
        "goal": goal,
        "rounds": rounds,
    }
    with pinned(cores.server):
        answer = ran(python, "in_process", [json.dumps(spec)], "indexes in one process", console)
    found: dict[str, Any] = json.loads(answer)
    return found


# ------------------------------------------------------------------------------ the parts


def _item(entry: Any) -> Item:
    return Item(entry.item_id, entry.title, entry.fields["description"])


def _served(data: Path) -> Catalogue:
    """The catalogue as the service holds it."""

    async def load() -> Catalogue:
        encoder = open_encoder(Settings.read().encoder)
        store = SQLiteStore(data / STORE_FILE)
        try:
            with ThreadPoolExecutor(1) as workers:
                embeddings = EmbeddingCache(encoder, data / EMBEDDINGS_FILE)
                state = served.Served(embeddings)
                opened = LiveSnapshot(store, Registry(data / MODELS_FOLDER), state, workers)
                await opened.open()
                return opened.snapshot.catalogue
        finally:
            await store.close()

    return asyncio.run(load())


def _search(searched: Searched, at: int, mode: str = "auto") -> bytes:
    body = {"query": searched.texts[at], "limit": TOP, "retrieval": {"mode": mode}}
    return encode_post("/v1/search", body)


def _attend(searched: Searched, at: int) -> bytes:
    asked = {"memory": {"catalogue": True}, "query": {"vector": searched.queries[at].tolist()}}
    return encode_post("/v1/attend", asked | {"scorer": "cosine", "limit": TOP})


def _of_itself(exact: Peer, peer: Peer, searched: Searched, later: Sequence[int]) -> float:
    """Recall of the ten best items of an exact search by words and meaning."""
    best, found = (
        [[item["item_id"] for item in answer.json()["items"]] for answer in answers(each, asks)]
        for each, asks in (
            (exact, [_search(searched, at, "exact") for at in later]),
            (peer, peer.questions["search"]),
        )
    )
    return recall(found, best)


def _rows(peer: Peer) -> list[list[int]]:
    """The keys that the bare operator weighs most."""
    return [answer.json()["rows"] for answer in answers(peer, peer.questions["search"])]


@contextmanager
def _chroma(
    searched: Searched, pythons: Pythons, cores: Cores, folder: str, effort: int
) -> Iterator[Server]:
    spec = {"folder": folder, "keys": str(searched.data / _KEYS), "hnsw": HNSW, "ef": effort}
    arguments = ["-m", "tests.benchmarks.peers.chroma_server", json.dumps(spec)]
    python = str(pythons.peers)
    with serving(
        arguments, core=cores.server, environment={}, python=python, patience=_PATIENCE
    ) as server:
        yield server


def _effort(
    searched: Searched, pythons: Pythons, cores: Cores, folder: str, goal: float, half: int
) -> Chosen:
    def look(effort: int) -> Sequence[Sequence[int]]:
        with _chroma(searched, pythons, cores, folder, effort) as server:
            asks = _asked(server.port, searched, range(half))
            return _found(Peer(CHROMA, server.port, {"search": asks}, ""))

    ladder = (16, 32, 64, 128, 256, 512, 1024)
    return least(
        look, lambda found: searched.nearest.recall(found, range(half)), goal=goal, ladder=ladder
    )


def _asked(port: int, searched: Searched, rows: Sequence[int]) -> list[bytes]:
    """Queries of the one collection."""
    named = [encode_post(_PATH, {"name": "keys", "get_or_create": True})]
    made = answers(Peer(CHROMA, port, {}, ""), named)[0].json()["id"]
    wanted = {"n_results": TOP, "include": ["distances"]}
    return [
        encode_post(
            f"{_PATH}/{made}/query", {"query_embeddings": [searched.queries[at].tolist()], **wanted}
        )
        for at in rows
    ]


def _found(peer: Peer) -> list[list[int]]:
    responses = answers(peer, peer.questions["search"])
    return [[int(row) for row in answer.json()["ids"][0]] for answer in responses]
