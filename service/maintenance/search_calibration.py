"""Calibration of search to a catalogue without judgments: its own texts, held out, are queries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import INDEX_FROM, UNTRAINED, Snapshot
from models.evaluation.full_ranking import first_relevant_rank, ndcg_gains, standard_error
from models.ranking.matches import DEFAULTS, SearchParameters
from models.ranking.search import nearest
from models.text.bm25 import BM25Writer
from models.text.query_table import FittedTable, TokenizingEncoder, fit_query_table
from service.domain.errors import Invalid
from service.domain.records import Item
from service.engine.search import match_text
from service.snapshots.catalogue_updates import to_entry
from service.snapshots.text_embeddings import EmbeddingCache
from service.training.training_corpus import StageProgressCallback, encode_with_progress

WEIGHTS = (0.0, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # of meaning that are compared
MIN_QUERIES = 100  # with fewer, nothing is calibrated
_QUERIES = 250  # of each kind, at most
_MAX_ITEMS = 10_000  # that are searched: a sample of larger catalogues
_LONGEST = 1_000  # characters of a query; longer ones are not typed, and take seconds
_MIN_WORDS = 20  # that a sentence leaves of its description: fewer share none with it by chance
_DEPTH = 100  # rank from which on an item counts as not found
_TELL = 20  # queries between two calls of progress

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_COARSE = AttentionOptions(mode="coarse")  # far keys cannot come among the first ranks


class HeldOut(NamedTuple):
    """Items without the texts that are held out, and those texts as queries for their own items."""

    items: list[Item]
    queries: list[tuple[str, str]]  # text, id of its item


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Search parameters fitted to a catalogue, and the gains by which they were chosen."""

    parameters: SearchParameters  # the defaults, with the chosen weight of meaning
    gains: NDArray[np.float64]  # [Q, W] discounted, of each held-out text's own item by weight

    @property
    def chosen(self) -> NDArray[np.float64]:
        """The gains [Q] by the chosen weight."""
        return self.gains[:, WEIGHTS.index(self.parameters.meaning)]

    def mean(self, weight: float) -> float:
        """Return the mean gain (nDCG@100 with one relevant item) of one of `WEIGHTS`."""
        return float(self.gains[:, WEIGHTS.index(weight)].mean())


def build_snapshot(
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    progress: StageProgressCallback = lambda *_: None,
    *,
    index_from: int = INDEX_FROM,
    keywords: bool = True,
) -> Snapshot:
    """Build a snapshot of items as the service would search them; their embeddings are saved.

    An index of keys is built from `index_from` items on. With `keywords`, items are found by their
    ids and other keywords.
    """
    empty = Catalogue.empty(embeddings.encoder.dimension, bm25_writer=BM25Writer())
    entries = [to_entry(item, embeddings.encoder.dimension) for item in items]
    if not keywords:
        entries = [replace(entry, keywords={}) for entry in entries]
    catalogue = empty.updated(entries, [], encode_with_progress(embeddings, progress))
    embeddings.save()
    counts = np.zeros(0, dtype=np.int64)
    return Snapshot.build(UNTRAINED, None, catalogue, counts, index_from=index_from)


def calibrate(
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    *,
    progress: StageProgressCallback = lambda *_: None,
) -> Calibration:
    """Choose the weight of meaning by how well held-out texts of a catalogue find their own items.

    Takes seconds, and the time to embed the texts that are new to `embeddings`.

    Raises:
        Invalid: too few items have several texts.
    """
    parts = hold_out(sample_items(items))
    return calibrate_held_out(parts, embeddings, [embeddings.query], progress)[0]


def calibrate_held_out(
    parts: Sequence[HeldOut],
    embeddings: EmbeddingCache,
    encoders: Sequence[Callable[[str], NDArray[np.float32]]],
    progress: StageProgressCallback = lambda *_: None,
) -> list[Calibration]:
    """Return the calibration of each encoder of queries, on the same texts held out.

    `embeddings` are of the items; each of `encoders` maps a query to its embedding [D].
    """
    total = sum(len(part.queries) for part in parts)
    gains: list[list[NDArray[np.float64]]] = [[] for _ in encoders]
    for part in parts:
        if not part.queries:
            continue
        # Indexes would take longer to build than they save. A title that names its item's id would
        # find it whatever the weight.
        snapshot = build_snapshot(
            part.items, embeddings, progress, index_from=_MAX_ITEMS + 1, keywords=False
        )
        for text, item_id in part.queries:
            for own, encode in zip(gains, encoders, strict=True):
                rankings = rank_by_weight(snapshot, encode, text)
                own.append(_gains(rankings, item_id))
            done = len(gains[0])
            if done % _TELL == 0 or done == total:
                progress("calibrating search", done, total, None)
    return [
        Calibration(replace(DEFAULTS, meaning=choose_weight(each)), each)
        for each in map(np.array, gains)
    ]


def choose_weight(gains: NDArray[np.float64]) -> float:
    """Choose the weight of meaning by the gains [Q, W] of held-out texts for each of `WEIGHTS`.

    The default is lowered to the next weight that finds no less than words alone. It is raised
    while the next weight finds more, by over a standard error of the paired difference.
    Between these, it stays: a held-out text is in its author's words, as queries are not, so that
    it tells when meaning harms, and when more of it helps, but not when less would be enough.
    """
    mean, at = gains.mean(axis=0), WEIGHTS.index(DEFAULTS.meaning)
    while mean[at] < mean[0]:
        at -= 1
    while at + 1 < len(WEIGHTS):
        more = gains[:, at + 1] - gains[:, at]
        if not more.mean() > standard_error(more):
            break
        at += 1
    return WEIGHTS[at]


def sample_items(items: Iterable[Item]) -> list[Item]:
    """Return all items but the hidden ones, or a uniform sample of very many.

    Reservoir sampling, Vitter 1985.
    """
    rng = np.random.default_rng(0)
    sample: list[Item] = []
    for count, item in enumerate(item for item in items if not item.hidden):
        if count < _MAX_ITEMS:
            sample.append(item)
        elif (at := int(rng.integers(count + 1))) < _MAX_ITEMS:
            sample[at] = item
    return sample


def hold_out(items: Sequence[Item]) -> list[HeldOut]:
    """Hold out titles and, apart from them, sentences.

    Raises:
        Invalid: there are too few of both.
    """
    rng = np.random.default_rng(0)
    parts = [hold_out_titles(items, rng), hold_out_sentences(items, rng)]
    total = sum(len(part.queries) for part in parts)
    if total < MIN_QUERIES:
        raise Invalid(
            "",
            f"{total} titles and sentences can be held out of these items, too few to calibrate "
            f"search: {MIN_QUERIES} are needed, of items with a title and a description, or with "
            "descriptions of several sentences",
        )
    return parts


def hold_out_titles(items: Sequence[Item], rng: np.random.Generator) -> HeldOut:
    """Hold out the titles of all items; those of a sample of items with descriptions are queries.

    A title that the item's description repeats is no query.
    """
    queries: list[tuple[str, str]] = []
    for at in rng.permutation(len(items)).tolist():
        item = items[at]
        if item.description.strip() and _is_new(item.title, item.description):
            queries.append((plain_text(item.title), item.item_id))
            if len(queries) == _QUERIES:
                break
    return HeldOut([replace(item, title="") for item in items], queries)


def hold_out_sentences(items: Sequence[Item], rng: np.random.Generator) -> HeldOut:
    """Hold out one sentence of the descriptions of a sample of items, as a query for each.

    A sentence that another text of the item repeats is none.
    """
    left, queries = list(items), list[tuple[str, str]]()
    for at in rng.permutation(len(items)).tolist():
        item = items[at]
        sentences = [part for part in SENTENCE_END.split(item.description) if part.strip()]
        if len(sentences) < 2:
            continue
        sentence = sentences.pop(int(rng.integers(len(sentences))))
        rest = " ".join(sentences)
        if len(rest.split()) >= _MIN_WORDS and _is_new(sentence, f"{item.title} {rest}"):
            left[at] = replace(item, description=rest)
            queries.append((plain_text(sentence), item.item_id))
            if len(queries) == _QUERIES:
                break
    return HeldOut(left, queries)


def rank_by_weight(
    snapshot: Snapshot, encode: Callable[[str], NDArray[np.float32]], text: str
) -> list[list[str]]:
    """Return the ids of the first items of a search, for each of `WEIGHTS`.

    `encode` maps the text to its embedding [D].
    """
    catalogue = snapshot.catalogue
    _, matches = match_text(text, snapshot, encode, allowed=catalogue.servable, options=_COARSE)
    weighted = (
        replace(matches, parameters=replace(DEFAULTS, meaning=weight)) for weight in WEIGHTS
    )
    return [catalogue.vocabulary.ids_of(nearest(each, _DEPTH).tolist()) for each in weighted]


def _gains(rankings: Sequence[Sequence[str]], item_id: str) -> NDArray[np.float64]:
    ranks = [first_relevant_rank(ranking, {item_id: 1.0}, _DEPTH) for ranking in rankings]
    return ndcg_gains(np.array(ranks), _DEPTH)


def _is_new(text: str, others: str) -> bool:
    """Report whether a text has words, is as short as a query, and other texts do not repeat it."""
    if len(text) > _LONGEST:
        return False
    words = " ".join(re.findall(r"\w+", text.casefold()))
    return bool(words) and words not in " ".join(re.findall(r"\w+", others.casefold()))


def plain_text(text: str) -> str:
    """Return a text without the operators of the query language."""
    return re.sub('["*]', " ", text)


_PIECE = 11  # words of a piece of a sentence
_KEPT = 0.5  # of what the transformer's queries add to words alone, a table adds more


@dataclass(frozen=True, slots=True, eq=False)
class QueryEncoding:
    """A table fitted to a catalogue, and searches calibrated with it and with the transformer."""

    fitted: FittedTable
    by_table: Calibration
    by_encoder: Calibration

    @property
    def is_table_good(self) -> bool:
        """Report whether the table shall encode queries.

        It shall where its queries add to words alone more than a standard error, and more than half
        of what the transformer's add; or where the transformer's add no more, or nothing.
        """
        words = self.by_table.gains[:, 0]
        table, encoder = (each.chosen - words for each in (self.by_table, self.by_encoder))
        if table.mean() >= encoder.mean() or self.by_encoder.parameters.meaning == 0:
            return True
        return bool(table.mean() > max(standard_error(table), _KEPT * encoder.mean()))


def fit_query_encoding(
    items: Iterable[Item],
    embeddings: EmbeddingCache,
    *,
    progress: StageProgressCallback = lambda *_: None,
) -> QueryEncoding:
    """Fit a table to the titles and sentences of a catalogue, and compare it on held-out ones.

    Takes minutes, most of them for encoding up to 30,000 sentences and pieces of them, and the time
    to embed the texts that are new to `embeddings`.

    Raises:
        Invalid: the encoder of `embeddings` needs no table, or too few items have several texts, or
            its vocabulary is too large.
    """
    encoder = embeddings.encoder
    if encoder.quick or not isinstance(encoder, TokenizingEncoder):
        raise Invalid("", f"{encoder.name} needs no query table: it encodes queries itself")

    def report(stage: str, done: int, total: int) -> None:
        progress(stage, done, total, None)

    searched = sample_items(items)
    parts = hold_out(searched)
    try:
        fitted = fit_query_table(encoder, _texts(searched, parts), progress=report)
    except ValueError as error:
        raise Invalid("", f"no query table can be fitted: {error}") from error
    by_table, by_encoder = calibrate_held_out(
        parts,
        embeddings,
        [lambda text: fitted.table.encode([text])[0], embeddings.query],
        progress,
    )
    return QueryEncoding(fitted, by_table, by_encoder)


def _texts(items: Sequence[Item], parts: Sequence[HeldOut]) -> list[str]:
    """Return the titles and sentences of items, without those that are held out as queries.

    Every other one is cut into pieces of about the length of a query: for the same time of the
    encoder, a table that was fitted to these too agrees better with it on whole sentences.
    """
    held = {text for part in parts for text, _ in part.queries}
    texts = (
        text
        for item in items
        for text in (item.title, *SENTENCE_END.split(item.description))
        if text.strip() and plain_text(text) not in held
    )
    found: list[str] = []
    for at, text in enumerate(dict.fromkeys(texts)):
        words = text.split()
        count = max(1, round(len(words) / _PIECE)) if at % 2 else 1
        if count == 1:
            found.append(text)
        else:
            ends = [len(words) * part // count for part in range(count + 1)]
            found += [" ".join(words[start:end]) for start, end in pairwise(ends)]
    return list(dict.fromkeys(found))
