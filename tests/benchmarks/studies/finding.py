"""Items searched for by their ids, by compounds and by their titles, and nonsense by nobody's.

Every query is made of the catalogue itself: ids as they are stored and with other separators, words
that the catalogue writes as two and the other way round, strings that resemble none of its words,
and titles.
"""

from __future__ import annotations

import random
import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.table import Table

from models.catalogue.snapshot import Snapshot
from models.ranking.matches import EncodeQuery, meaning_floor
from models.ranking.search import search
from models.text.query_parser import single_edits
from models.text.terms import analyser
from service.domain.records import Item
from service.engine.search import match_text
from service.maintenance.search_calibration import plain_text

IDS = 200
COMPOUNDS = 50
NONSENSE = 100
TITLES = 200
FIRST = 5  # results among which an item with the other spelling must be
_MIN_PART = 3  # letters of the parts of a compound
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"

Ranker = Callable[[str, int], list[str]]  # query, most results -> ids of the items found
_words = analyser(stemmed=False).analyze
_stems = analyser(stemmed=True).analyze


@dataclass(frozen=True, slots=True)
class Count:
    """Queries of one kind, and those of them that were not answered as they should be."""

    kind: str
    should: str
    total: int
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Finding:
    """Counts of all kinds, and the floor of meaning of the catalogue."""

    items: int
    floor: float
    counts: list[Count]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def measure(
    snapshot: Snapshot, items: Iterable[Item], encode: EncodeQuery, *, seed: int = 0
) -> Finding:
    """Search for what is drawn from the items of a snapshot; hidden ones are left out."""

    def rank(query: str, most: int) -> list[str]:
        allowed = snapshot.catalogue.servable
        _, matches = match_text(query, snapshot, encode, allowed=allowed)
        return snapshot.catalogue.vocabulary.ids_of(search(matches, limit=most).rows.tolist())

    rng = random.Random(seed)
    listed = [item for item in items if not item.hidden]
    counts = [
        _ids(rank, listed, rng),
        *_compounds(rank, {item.item_id: _words(item.title) for item in listed}, rng),
        _nonsense(rank, listed, rng),
        _titles(rank, listed, rng),
    ]
    return Finding(len(listed), meaning_floor(snapshot.catalogue.keys, encode), counts)


def shown(found: Finding) -> Table:
    """Return the table of all counts, with the first queries that went wrong."""
    table = Table("queries", "should", "do", "others", title=f"{found.items:,} items")
    for each in found.counts:
        right = f"{each.total - len(each.wrong)} of {each.total}"
        table.add_row(each.kind, each.should, right, ", ".join(each.wrong[:8]))
    table.caption = f"least cosine without a known word: {found.floor:.3f}"
    return table


def _ids(rank: Ranker, items: Sequence[Item], rng: random.Random) -> Count:
    drawn = rng.sample([item.item_id for item in items], min(IDS, len(items)))
    queries = {each: each for each in drawn}
    # Half of them in another case, cut in two by a hyphen.
    for each in drawn[::2]:
        at = len(each) // 2
        queries[f"{each[:at]}-{each[at:]}".swapcase()] = queries.pop(each)
    wrong = [query for query, item_id in queries.items() if rank(query, 1) != [item_id]]
    return Count("ids, half of them in another case with a hyphen", "come first", len(drawn), wrong)


def _compounds(
    rank: Ranker, titles: Mapping[str, Sequence[str]], rng: random.Random
) -> list[Count]:
    """Search for words of titles split in two words of titles, and for pairs of words joined.

    Items have a word if they have its stem; a word with an ending is no compound.
    """
    having: defaultdict[str, set[str]] = defaultdict(set)
    by_stem: defaultdict[str, set[str]] = defaultdict(set)
    for item_id, words in titles.items():
        for word in words:
            having[word].add(item_id)
            by_stem[_stems(word)[0]].add(item_id)
        for left, right in pairwise(words):
            having[f"{left} {right}"].add(item_id)
    own = sorted(word for word in having if " " not in word and word.isalpha())
    split = {
        f"{word[:at]} {word[at:]}": by_stem[_stems(word)[0]]
        for word in own
        for at in range(_MIN_PART, len(word) - _MIN_PART + 1)
        if word[:at] in having and word[at:] in having and _stems(word) != _stems(word[:at])
    }
    pairs = sorted(pair for pair in having if " " in pair)
    joined = {
        pair.replace(" ", ""): having[pair]
        for pair in pairs
        if all(len(part) >= _MIN_PART and part.isalpha() for part in pair.split())
    }
    counts = []
    for kind, queries in (("words split in two", split), ("two words joined", joined)):
        drawn = rng.sample(sorted(queries), min(COMPOUNDS, len(queries)))
        wrong = [query for query in drawn if queries[query].isdisjoint(rank(query, FIRST))]
        counts.append(Count(kind, f"find an item that has them, in {FIRST}", len(drawn), wrong))
    return counts


def _nonsense(rank: Ranker, items: Sequence[Item], rng: random.Random) -> Count:
    """Search for strings of which no word is, begins or is one edit away from a word of an item."""
    texts = (text for item in items for text in (item.title, item.description, *item.tags))
    known = {word for text in texts for word in _words(text)}
    known |= {word for item in items for text in item.categories for word in _words(text)}
    begun = {word[:end] for word in known for end in range(1, len(word) + 1)}

    def word() -> str:
        letters = range(rng.randint(4, 12))
        if rng.random() < 0.5:
            return "".join(rng.choice(string.ascii_lowercase) for _ in letters)
        return "".join(rng.choice(_VOWELS if at % 2 else _CONSONANTS) for at in letters)

    queries: list[str] = []
    while len(queries) < NONSENSE:
        words = [word() for _ in range(rng.randint(1, 3))]
        if all(
            each not in begun and known.isdisjoint(single_edits(each, string.ascii_lowercase))
            for each in words
        ):
            queries.append(" ".join(words))
    return Count("nonsense", "find nothing", NONSENSE, [each for each in queries if rank(each, 1)])


def _titles(rank: Ranker, items: Sequence[Item], rng: random.Random) -> Count:
    having: defaultdict[str, set[str]] = defaultdict(set)
    for item in items:
        if item.title.strip():
            having[plain_text(item.title)].add(item.item_id)
    drawn = rng.sample(sorted(having), min(TITLES, len(having)))
    wrong = [title for title in drawn if having[title].isdisjoint(rank(title, FIRST))]
    return Count("titles", f"find their item, in {FIRST}", len(drawn), wrong)
