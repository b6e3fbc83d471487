"""BM25 over the texts of items, in a tantivy index that items are added to and removed from.

tantivy was kept over SQLite's FTS5: over 100,000 talks its best 200 take 1.3 ms where FTS5, which
scores every row that has one of the words, takes 68 ms; both add an item in a few milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson
import tantivy
from numpy.typing import NDArray

from models.text.query_parser import ParsedQuery, QueryParser, respelt
from models.text.terms import IndexTerms, KeywordHits, KeywordIndex, analyser, fold, keyword_terms

TITLE_WEIGHT = 3  # times that a title's words count: chosen on judgments
MAX_QUERY_TERMS = 64  # the rarest words of a query, which are searched for
_HEAP = 64_000_000  # bytes that an index may gather before it writes a segment
_BATCH = 50_000  # documents between two commits
_MAX_NAMED = 5_000  # allowed items up to which the query names them
_MAX_OVERSAMPLED = 20_000  # hits that are taken at most, to be filtered
_STARRED_SCORE = 1e-3  # of any word that begins as a starred one
_MAX_LETTERS = 100  # the most frequent of titles, which corrections of spelling may insert

_should, _must = tantivy.Occur.Should, tantivy.Occur.Must


class Document(NamedTuple):
    row: int
    title: str
    texts: Sequence[str]  # of its other fields
    keywords: Mapping[str, Sequence[str]] = MappingProxyType({})  # field name -> identifiers


class Hits(NamedTuple):
    """Items that have words of a query, best first."""

    rows: NDArray[np.int64]  # [L] item rows
    scores: NDArray[np.float32]  # [L] BM25, above 0


class BM25Writer:
    """The only writer of an index; every update returns a `BM25Index` of the state after it."""

    def __init__(self) -> None:
        # Documents by commit, as tantivy parses them, while they are recorded.
        self._recorded: list[list[str]] | None = None
        schema = tantivy.SchemaBuilder()
        schema.add_integer_field("row", indexed=True, fast=True)
        schema.add_text_field("stems", tokenizer_name="stems")
        schema.add_text_field("titles", tokenizer_name="plain", index_option="basic")
        schema.add_text_field("texts", tokenizer_name="plain", index_option="basic")
        schema.add_text_field("keywords", tokenizer_name="raw", index_option="basic")
        self._schema = schema.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer("stems", analyser(stemmed=True))
        self._index.register_tokenizer("plain", analyser(stemmed=False))
        self._writer: tantivy.IndexWriter | None = None
        self._letters: Counter[str] = Counter()  # titles that had each, removed ones included

    def update(self, documents: Iterable[Document]) -> BM25Index:
        """Replace documents by their rows, and commit; one that holds nothing is removed."""
        writer = self._opened()
        added: list[str] = []
        for count, document in enumerate(documents, 1):
            if self._recorded is None:  # a recorded writer was empty, and each row comes once
                writer.delete_documents_by_term("row", document.row)
            encoded = _encode(document)
            if encoded is None:
                continue  # an empty document would change every term's weight
            self._letters.update(set(fold(document.title)))
            writer.add_json(encoded)
            added.append(encoded)
            if count % _BATCH == 0:
                self._commit(added)
                added = []
        self._commit(added)
        return self._latest()

    def record(self) -> None:
        """Keep everything that is added from now on for `recording`; the writer must be empty."""
        self._recorded = []

    def recording(self) -> dict[str, Any]:
        """End recording, and return what was added since `record`, for `replay`, as JSON."""
        if self._recorded is None:
            raise RuntimeError("not recording")
        commits, self._recorded = self._recorded, None
        return {"commits": commits, "letters": dict(self._letters)}

    def replay(self, recording: Mapping[str, Any]) -> BM25Index:
        """Add, to an empty writer, what another one recorded, with the same commits."""
        writer = self._opened()
        self._letters.update(recording["letters"])
        for added in recording["commits"]:
            for encoded in added:
                writer.add_json(encoded)
            writer.commit()
        return self._latest()

    def _opened(self) -> tantivy.IndexWriter:
        if self._writer is None:  # its thread and its heap are held only while there is work
            self._writer = self._index.writer(_HEAP, 1)
        return self._writer

    def _commit(self, added: list[str]) -> None:
        self._opened().commit()
        if self._recorded is not None:
            self._recorded.append(added)

    def _latest(self) -> BM25Index:
        self._index.reload()
        letters = [letter for letter, _ in self._letters.most_common(_MAX_LETTERS)]
        searcher = self._index.searcher()
        return BM25Index(searcher, self._schema, IndexTerms(searcher, self._schema, letters))

    def rest(self) -> None:
        """End the writer's threads until the next update."""
        if self._writer is not None:
            self._writer.wait_merging_threads()
            self._writer = None


def _encode(document: Document) -> str | None:
    """Return a document as tantivy parses it, None for one without text."""
    row, title, texts, keywords = document
    terms = keyword_terms(keywords)
    if not terms and not any(text.strip() for text in (title, *texts)):
        return None
    title, texts = fold(title), [*map(fold, texts)]
    # One value for each text, so that no phrase spans two.
    stems = [*[title] * TITLE_WEIGHT, *texts]
    fields = {"row": row, "stems": stems, "titles": title, "texts": texts, "keywords": [*terms]}
    return orjson.dumps(fields).decode()


class BM25Index:
    """One state of an index, which later updates do not change; `parser` reads queries for it."""

    def __init__(
        self, searcher: tantivy.Searcher, schema: tantivy.Schema, terms: IndexTerms
    ) -> None:
        self._searcher, self._schema, self._terms = searcher, schema, terms
        self._keywords = KeywordIndex(searcher, schema)
        self.parser = QueryParser(terms, self._keywords)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, parsed: ParsedQuery, count: int, allowed: NDArray[np.bool_]) -> Hits:
        """Rank the allowed items [N] that have words of a query by BM25.

        There may be fewer than `count` hits if hardly any item with the words is allowed.
        """
        query = self._query(parsed)
        if query is None or not np.any(allowed) or not len(self):
            return Hits(np.zeros(0, np.int64), np.zeros(0, np.float32))
        hits = self._best(query, count, allowed)
        whole = self._query(parsed._replace(terms=parsed.terms + parsed.asides))
        if not parsed.asides or whole is None or not len(hits.rows):
            return hits
        # Two unions of bare terms take less than one query of what must and what may be there.
        ranked = self._best(whole, count, allowed)
        stays = np.isin(ranked.rows, hits.rows)
        rest = ~np.isin(hits.rows, ranked.rows)  # their scores lack the asides
        scores = np.concatenate([ranked.scores[stays], hits.scores[rest]])
        order = np.argsort(-scores, kind="stable")
        return Hits(np.concatenate([ranked.rows[stays], hits.rows[rest]])[order], scores[order])

    def rows_with_words(self, parsed: ParsedQuery, most: int) -> NDArray[np.int64]:
        """Return the rows [≤ most] that have a word of a query and all its phrases, best first."""
        query = self._query(parsed)
        if query is None or not len(self):
            return np.zeros(0, np.int64)
        return self._run(query, min(most, len(self))).rows

    def rows_with_phrases(self, parsed: ParsedQuery) -> NDArray[np.int64] | None:
        """Return the rows [L] that have every phrase, unordered; None for a query without one."""
        if not parsed.phrases:
            return None
        query = tantivy.Query.boolean_query(
            [(_must, self._terms.phrase_query(phrase)) for phrase in parsed.phrases]
        )
        return self._run(query, max(1, len(self)))[0]

    def keyword_hits(self, parsed: ParsedQuery) -> KeywordHits:
        return self._keywords.find(parsed.keywords)

    def match_spans(self, parsed: ParsedQuery) -> Callable[[str], list[tuple[int, int]]]:
        """Return a function that finds the words of a query in a text.

        It returns their places, (start, end) in characters, ascending and apart.
        """
        stems = {
            stem for words in parsed.terms for word in words for stem in self._terms.stems(word)
        }
        side_by_side = [self._terms.stems(compound.text) for compound in parsed.compounds]

        def spans_of(text: str) -> list[tuple[int, int]]:
            tokens = self._terms.stem_tokens(text)
            written = [token.text for token in tokens]
            begun = parsed.prefixes or ("\0",)
            marked = {
                at for at, stem in enumerate(written) if stem in stems or stem.startswith(begun)
            }
            for at in range(len(written)):
                for wanted in side_by_side:
                    if wanted and written[at : at + len(wanted)] == wanted:
                        marked.update(range(at, at + len(wanted)))
            spans: list[tuple[int, int]] = []
            for at in sorted(marked):
                start, end = tokens[at].start, tokens[at].end
                # Two words may be folded from one character, as those of a fraction are.
                if not (spans and start < spans[-1][1]):
                    spans.append((start, end))
            return spans

        return spans_of

    def as_written(self, text: str, title_of: Callable[[int], str], typed: str = "") -> str:
        """Return a text with its words spelt as in titles, except the words of `typed`.

        Corrections are folded, and lack the accents of the titles.
        """
        kept = {token.text for token in self._terms.words(typed)}
        tokens = self._terms.words(text)
        words = [word if word in kept else self._written(word, title_of) for word, _, _ in tokens]
        return respelt(text, tokens, words)

    def _written(self, word: str, title_of: Callable[[int], str]) -> str:
        query = tantivy.Query.term_query(self._schema, "titles", word)
        for title in map(title_of, self._run(query, 1).rows.tolist()):
            for token in self._terms.words(title):
                if token.text == word:
                    return title[token.start : token.end].lower()
        return word

    def _best(self, query: tantivy.Query, count: int, allowed: NDArray[np.bool_]) -> Hits:
        allowed_count = int(np.count_nonzero(allowed))
        taken, filtered = count, allowed_count < len(allowed)
        if filtered and allowed_count <= _MAX_NAMED:
            named = np.flatnonzero(allowed).tolist()
            among = tantivy.Query.term_set_query(self._schema, "row", named)
            among = tantivy.Query.const_score_query(among, 0.0)
            query = tantivy.Query.boolean_query([(_must, query), (_must, among)])
        elif filtered:
            taken = min(max(count, _MAX_OVERSAMPLED), 2 * count * len(allowed) // allowed_count)
        rows, scores = self._run(query, taken)
        stays = np.flatnonzero(allowed[rows])[:count]
        return Hits(rows[stays], scores[stays])

    def _run(self, query: tantivy.Query, count: int) -> Hits:
        hits = self._searcher.search(query, count, count=False).hits
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        scores = [score for score, _ in hits]
        return Hits(np.array(rows, dtype=np.int64), np.array(scores, dtype=np.float32))

    def _query(self, parsed: ParsedQuery) -> tantivy.Query | None:
        """Build one query of all words, or None without words; a repeated word counts twice."""
        clauses = [(_must, self._terms.phrase_query(phrase)) for phrase in parsed.phrases]
        counted = Counter(
            tuple(dict.fromkeys(stem for word in words for stem in self._terms.stems(word)))
            for words in parsed.terms
        )
        rarest = sorted(counted, key=lambda stems: sum(map(self._terms.stem_frequency, stems)))
        for stems in [stems for stems in rarest if stems][:MAX_QUERY_TERMS]:
            terms = [tantivy.Query.term_query(self._schema, "stems", stem) for stem in stems]
            one = terms[0] if len(terms) == 1 else tantivy.Query.disjunction_max_query(terms)
            if counted[stems] > 1:
                one = tantivy.Query.boost_query(one, float(counted[stems]))
            # Only for unions of bare terms, tantivy skips what cannot be among the best.
            clauses.append((_should, one))
        for compound in parsed.compounds[:MAX_QUERY_TERMS]:
            one = self._terms.phrase_query(compound.text)
            clauses.append((_should, tantivy.Query.boost_query(one, compound.weight)))
        for prefix in parsed.prefixes:  # the words beyond those that are ranked
            clauses += [
                (_should, tantivy.Query.const_score_query(query, _STARRED_SCORE))
                for field in ("titles", "texts")
                for query in [tantivy.Query.regex_query(self._schema, field, f"{prefix}.*")]
            ]
        return tantivy.Query.boolean_query(clauses) if clauses else None
