"""Search over a large catalogue beside the bare index: built, queried, added to, rebuilt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.ranking.matches import COARSE_KEYS
from models.ranking.search import search
from models.text.bm25 import BM25Writer
from models.text.encoders import TextEncoder
from service.engine.search import match_text
from tests.benchmarks.harness.processes import memory_of
from tests.benchmarks.harness.timing import ProgressCallback, Spread, alternate, no_progress, spread

TOP = 10
QUERY_WORDS = 4
_PART = 20_000  # items that are added at once while the catalogue is built
_MOST_WORDS = 40  # of a text; enough for what search does with it
_OTHER = 0.15  # share of the words of a copy that are others
_NOBODY = np.zeros(0, dtype=np.int64)  # popularity of no item


@dataclass(frozen=True, slots=True)
class SearchResults:
    """All that was measured; seconds, bytes and shares."""

    items: int
    keys: int
    texts: float  # seconds to make the texts up
    read: float  # to encode and keep them
    indexed: float  # to project and index them
    memory: dict[str, int] | None  # bytes resident then, and at most; None where nobody says
    bare: Spread  # the index alone, asked for as many keys as search asks it for
    ratio: Spread  # of a whole search, times the bare index
    whole: Spread  # a whole search, which takes a second thread for the words
    recall: float  # of the exact search's ten best
    keys_recall: float  # of the exact nearest keys, among as many from the index
    added: Spread  # until an item that is new is in what is searched
    changed: Spread  # until an item that changed is
    visible: bool  # whether each of those was found by the next search
    anew: float  # to index all that anew, in the background
    meanwhile: Spread  # a search during that
    worst: float  # the slowest of those
    during: int  # how many those were

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: value.as_dict() if isinstance(value, Spread) else value
            for name, value in plain.items()
        }


def entries(source: Sequence[tuple[str, str]], count: int, seed: int = 0) -> Iterator[ItemEntry]:
    """Items with a title and a description: those of the source, then perturbed copies of them.

    A copy has another word for one in seven, drawn as often as the source has them.

    Args:
        source: titles and descriptions.
        count: of the items.
        seed: of the copies.
    """
    generator = np.random.default_rng(seed)
    texts = [[text.split()[:_MOST_WORDS] for text in pair] for pair in source]
    words = np.array([word for pair in texts for text in pair for word in text], dtype=object)
    for number in range(count):
        pair = texts[number % len(texts)]
        if number >= len(texts):
            pair = [_perturbed(text, words, generator) for text in pair]
        title, description = (" ".join(text) for text in pair)
        yield ItemEntry(f"item {number}", title, {"title": title, "description": description})


def measure(
    source: Sequence[tuple[str, str]],
    count: int,
    encoder: TextEncoder,
    *,
    queries: int = 60,
    judged: int = 20,
    rounds: int = 5,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _whole: None,
) -> SearchResults:
    """Build, ask, add to and index anew a catalogue of `count` items.

    Args:
        source: titles and descriptions of real items.
        count: of the items.
        encoder: of the texts.
        queries: asked in turns with the bare index.
        judged: how many of them exact search answers too.
        rounds: in which each is asked.
        progress: called as work goes on: with what, how much is done, and of how much.
    """
    started = time.perf_counter()
    made = list(_told(entries(source, count), "texts", count, progress))
    texts = time.perf_counter() - started
    asked = queries_of(source, queries)
    started = time.perf_counter()
    catalogue = Catalogue.empty(encoder.dimension, bm25_writer=BM25Writer())
    for begin in range(0, count, _PART):
        catalogue = catalogue.updated(made[begin : begin + _PART], [], encoder.encode)
        progress("keys", min(count, begin + _PART), count)
    del made
    read = time.perf_counter() - started
    progress("index", 0, 1)
    started = time.perf_counter()
    snapshot = Snapshot.build(UNTRAINED, None, catalogue, _NOBODY)
    indexed = time.perf_counter() - started
    progress("index", 1, 1)
    memory = memory_of()
    found = _Asked(snapshot, encoder)
    bare, ratio, whole = found.timed(asked, rounds, lambda done, of: progress("queries", done, of))
    recall, keys_recall = found.recall(asked[:judged])
    added, changed, visible, snapshot = _grown(snapshot, encoder, progress)
    again = _indexed_anew(snapshot, encoder, asked, progress)
    return SearchResults(
        count, len(catalogue.keys), texts, read, indexed, memory, bare, ratio, whole, recall,
        keys_recall, added, changed, visible, *again,
    )  # fmt: skip


def shown(found: SearchResults) -> Table:
    """Return the results as a table."""
    table = Table(
        title=f"Search over {found.items:,} items, {found.keys:,} keys", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    memory = found.memory or {}

    def gib(name: str) -> str:
        return f"{memory[name] / 2**30:.1f} GiB" if name in memory else "n/a"

    def between(each: Spread, unit: str = "", times: float = 1) -> str:
        low, high = times * each.low, times * each.high
        return f"{times * each.median:.2f}{unit} ({low:.2f} to {high:.2f})"

    ms = partial(between, unit=" ms", times=1e3)

    rows = (
        ("texts encoded and kept", f"{found.read:.0f} s"),
        ("projected and indexed", f"{found.indexed:.0f} s"),
        ("memory of the process then, and at most", f"{gib('resident')}, {gib('highest')}"),
        (f"the index alone, asked for {COARSE_KEYS:,} keys", ms(found.bare)),
        ("a whole search, its words sought on a thread beside", ms(found.whole)),
        ("times the index alone", between(found.ratio)),
        (f"of exact search's best {TOP} it finds", f"{found.recall:.3f}"),
        (f"of the nearest {COARSE_KEYS:,} keys the index finds", f"{found.keys_recall:.3f}"),
        ("until a new item is searched", ms(found.added)),
        ("until a changed item is searched", ms(found.changed)),
        ("each of those was the next search's first", "yes" if found.visible else "NO"),
        ("all indexed anew beside searches", f"{found.anew:.0f} s"),
        (f"a search meanwhile ({found.during:,} of them)", ms(found.meanwhile)),
        ("the slowest of those", f"{1e3 * found.worst:.1f} ms"),
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


class _Asked:
    """A snapshot beside its bare index."""

    def __init__(self, snapshot: Snapshot, encoder: TextEncoder) -> None:
        self._snapshot, self._encoder = snapshot, encoder
        self._allowed = snapshot.catalogue.servable
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def ask(self, query: str, options: AttentionOptions = DEFAULT_OPTIONS) -> list[int]:
        """The rows of the ten best, as `POST /v1/search` finds them."""
        _, matches = match_text(
            query, self._snapshot, self._vector, allowed=self._allowed, options=options
        )
        rows: list[int] = search(matches, limit=TOP).rows.tolist()
        return rows

    def nearest(self, query: str) -> NDArray[np.int64]:
        """The places of the nearest keys, by the bare index."""
        index = self._snapshot.key_index
        if index is None:
            raise ValueError("so few items have no index")
        places: NDArray[np.int64] = index.search(self._vector(query)[None], COARSE_KEYS)[0]
        return places

    def timed(
        self, queries: Sequence[str], rounds: int, progress: ProgressCallback = no_progress
    ) -> tuple[Spread, Spread, Spread]:
        """Seconds of the bare index, times that of a whole search, and its seconds."""
        bare, ratio, whole = [], [], []
        for done, query in enumerate(queries, 1):
            bare_one, whole_one = partial(self.nearest, query), partial(self.ask, query)
            # By the wall: what a second thread does meanwhile is nobody's wait.
            timed = alternate(
                {"bare": bare_one, "whole": whole_one}, rounds, clock=time.perf_counter
            )
            bare.append(timed.seconds("bare").median)
            whole.append(timed.seconds("whole").median)
            ratio.append(timed.ratio("whole", "bare").median)
            progress(done, len(queries))
        return spread(bare), spread(ratio), spread(whole)

    def recall(self, queries: Sequence[str]) -> tuple[float, float]:
        """Recall of exact search's ten best items, and of the exact nearest keys."""
        found, near = [], []
        keys = self._snapshot.catalogue.keys.vectors
        for query in queries:
            exact = self.ask(query, AttentionOptions(mode="exact"))
            found.append(len({*exact} & {*self.ask(query)}) / max(1, len(exact)))
            best = np.argpartition(-(keys @ self._vector(query)), COARSE_KEYS)[:COARSE_KEYS]
            near.append(len(np.intersect1d(best, self.nearest(query))) / COARSE_KEYS)
        return float(np.mean(found)), float(np.mean(near))

    def _vector(self, text: str) -> NDArray[np.float32]:
        # The service remembers those of the latest queries too.
        if text not in self._vectors:
            self._vectors[text] = self._encoder.encode([text])[0]
        return self._vectors[text]


def _grown(
    snapshot: Snapshot,
    encoder: TextEncoder,
    progress: Callable[[str, int, int], None],
    times: int = 10,
) -> tuple[Spread, Spread, bool, Snapshot]:
    """Seconds until a new item is searched, and one that changed; and whether each was found."""
    added: list[float] = []
    changed: list[float] = []
    visible = True
    for turn in range(2 * times):
        title = f"zyzzyva{turn} quokka{turn}"
        own = f"new {turn}" if turn < times else f"item {turn}"
        started = time.perf_counter()
        catalogue = snapshot.catalogue.updated(
            [ItemEntry(own, title, {"title": title})], [], encoder.encode
        )
        snapshot = snapshot.refreshed(catalogue, snapshot.counts)
        (added if turn < times else changed).append(time.perf_counter() - started)
        best = _Asked(snapshot, encoder).ask(title)
        visible &= bool(best) and catalogue.vocabulary.id(best[0]) == own
        progress("changes", turn + 1, 2 * times)
    return spread(added), spread(changed), visible, snapshot


def _indexed_anew(
    snapshot: Snapshot,
    encoder: TextEncoder,
    queries: Sequence[str],
    progress: Callable[[str, int, int], None],
) -> tuple[float, Spread, float, int]:
    """Seconds of new indexes in the background, and of searches meanwhile: spread, worst, count."""
    took: list[float] = []

    def index() -> None:
        started = time.perf_counter()
        made = snapshot.reindexed()
        snapshot.with_indexes(snapshot, made)
        took.append(time.perf_counter() - started)

    requester = _Asked(snapshot, encoder)
    for query in queries:
        requester.ask(query)
    samples: list[float] = []
    progress("index anew", 0, 1)
    thread = threading.Thread(target=index)
    thread.start()
    while thread.is_alive():
        query = queries[len(samples) % len(queries)]
        started = time.perf_counter()
        requester.ask(query)
        samples.append(time.perf_counter() - started)
    thread.join()
    progress("index anew", 1, 1)
    return took[0], spread(samples), max(samples), len(samples)


def queries_of(source: Sequence[tuple[str, str]], count: int, seed: int = 1) -> list[str]:
    """Some words in a row of the titles of real items."""
    generator = np.random.default_rng(seed)
    titles = [title.split() for title, _ in source]
    titles = [title for title in titles if len(title) >= QUERY_WORDS] or titles
    chosen = generator.permutation(len(titles))[:count].tolist()
    return [" ".join(titles[at][:QUERY_WORDS]) for at in chosen]


def _perturbed(
    text: Sequence[str], words: NDArray[np.object_], generator: np.random.Generator
) -> list[str]:
    changed = list(text)
    count = generator.binomial(len(text), _OTHER) if text else 0
    if count:
        at = generator.integers(0, len(text), count)
        for place, word in zip(at.tolist(), words[generator.integers(0, len(words), count)],
                               strict=True):  # fmt: skip
            changed[place] = word
    return changed


def _told(
    made: Iterable[ItemEntry], what: str, whole: int, progress: Callable[[str, int, int], None]
) -> Iterator[ItemEntry]:
    for done, each in enumerate(made, 1):
        if done % _PART == 0 or done == whole:
            progress(what, done, whole)
        yield each
