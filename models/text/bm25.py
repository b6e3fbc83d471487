"""The lexical head of search: BM25 over the words of items, in an index that items come and go in.

tantivy was kept over SQLite's FTS5: over 100,000 talks its best 200 take 1.3 ms where FTS5, which
scores every row that has one of the words, takes 68 ms; both add an item in a few milliseconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tantivy
from numpy.typing import NDArray

TITLE = 3  # times that a title's words count, each as one in the other texts: chosen on judgments
MOST_WORDS = 64  # of a query that are looked up, the rarest: the rest would hardly change a score
_LONGEST = 40  # bytes of a word; what is longer is no word
_HEAP = 64_000_000  # bytes that an index may gather before it writes a segment
_BATCH = 50_000  # documents between two commits
_NARROW = 5_000  # open items up to which they are named to the index, rather than sifted after it
_OVER = 20_000  # items that are asked of the index at most, to be sifted
_STARTED = 3  # words that the start of a word may stand for, the most frequent
_SHORT = 3  # letters: what is shorter is not taken for another word, mistyped
_RARE = 5  # items up to which a word may be one that was mistyped there too
_KNOWN = 4_096  # words of queries of which is remembered what they stand for
_OFTEN = 100  # times as many titles have the word that it then may stand for beside itself
_LETTERS = 100  # that may be put into a word: the most frequent of titles
_PARTS = re.compile(r'"([^"]*)"|([^\s"]+)')

_should, _must = tantivy.Occur.Should, tantivy.Occur.Must


class Document(NamedTuple):
    """The texts of one item."""

    row: int
    title: str
    texts: Sequence[str]  # of its other fields


class Hits(NamedTuple):
    """What the words of a query found, best first."""

    rows: NDArray[np.int64]  # [L] item rows
    scores: NDArray[np.float32]  # [L] BM25, above 0


class ParsedQuery(NamedTuple):
    """What a query asks for."""

    text: str  # as it is meant, to be encoded
    words: tuple[tuple[str, ...], ...]  # one after the other; of each what it may stand for
    phrases: tuple[str, ...]  # what was quoted: every answer has it
    corrections: Mapping[str, tuple[str, ...]]  # words of the query -> what they stand for


class WordIndex:
    """The words of all items. It changes; the `Words` that it gives do not."""

    def __init__(self) -> None:
        schema = tantivy.SchemaBuilder()
        schema.add_integer_field("row", indexed=True, fast=True)
        schema.add_text_field("stems", tokenizer_name="stems")
        schema.add_text_field("titles", tokenizer_name="plain", index_option="basic")
        self._schema = schema.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer("stems", _analyser(stemmed=True))
        self._index.register_tokenizer("plain", _analyser(stemmed=False))
        self._writer: tantivy.IndexWriter | None = None
        self._letters: Counter[str] = Counter()  # in how many titles each was, of those there were

    def updated(self, documents: Iterable[Document], removed: Iterable[int] = ()) -> Words:
        """What is found after these documents took the place of those of their rows.

        Args:
            documents: of new or changed items.
            removed: rows of items that are no longer there.
        """
        if self._writer is None:  # its thread and its heap are for those who write
            self._writer = self._index.writer(_HEAP, 1)
        for row in removed:
            self._writer.delete_documents_by_term("row", row)
        for count, (row, title, texts) in enumerate(documents, 1):
            self._writer.delete_documents_by_term("row", row)
            if not any(text.strip() for text in (title, *texts)):
                continue  # it would make every word rarer, and documents shorter on the whole
            document = tantivy.Document()
            document.add_integer("row", row)
            # One by one, so that no phrase goes over the end of one.
            for text in [*[title] * TITLE, *texts]:
                document.add_text("stems", text)
            document.add_text("titles", title)
            self._letters.update(set(title.lower()))
            self._writer.add_document(document)
            if count % _BATCH == 0:
                self._writer.commit()
        self._writer.commit()
        self._index.reload()
        letters = [letter for letter, _ in self._letters.most_common(_LETTERS)]
        return Words(self._index.searcher(), self._schema, letters)

    def rest(self) -> None:
        """End the threads of those who write, until there is something to write again."""
        if self._writer is not None:
            self._writer.wait_merging_threads()
            self._writer = None


class Words:
    """The words of all items, as they were at one time."""

    def __init__(
        self, searcher: tantivy.Searcher, schema: tantivy.Schema, letters: Iterable[str]
    ) -> None:
        self._searcher, self._schema = searcher, schema
        self._stems, self._plain = _analyser(stemmed=True), _analyser(stemmed=False)
        self._letters = {own for letter in letters for own in self._plain.analyze(letter)}
        # Of the same words the answer is always the same, and people search for the same words.
        self._known: dict[tuple[str, bool, bool], tuple[str, ...]] = {}

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    # ------------------------------------------------------------------ reading

    def read(self, query: str) -> ParsedQuery:
        """What a query asks for.

        What is quoted is a phrase. A word that no item has is taken for one that titles have: for
        a longer one where it ends the query, as it does while somebody types, or has a star after
        it; else for one that differs in one letter, or by two that changed places. A word that
        hardly any item has, while many titles have such another, may be both. The rest of the text
        stays as it was typed, for what it means may depend on more than its words.
        """
        words: list[tuple[str, ...]] = []
        phrases: list[str] = []
        meant: dict[str, tuple[str, ...]] = {}
        text, copied = "", 0  # the query as it is meant, up to this place
        for part in _PARTS.finditer(query):
            quoted = part[1] is not None
            start, plain = part.start(1 if quoted else 2), part[1 if quoted else 2]
            starred = not quoted and plain.endswith("*")
            tokens = self._plain.pre_tokenize(plain).tokens
            phrase, phrased = "", 0
            for at, token in enumerate(tokens):
                word, last = token.text, at == len(tokens) - 1 and not quoted
                ends = last and (starred or part.end() == len(query))
                stands = self._stands_for(word, ends=ends, starred=last and starred)
                words.append(stands)
                if stands != (word,):
                    meant[word] = stands
                if stands[0] == word:
                    continue
                begin = token.char_offset_from
                end = begin if token.char_offset_to is None else token.char_offset_to
                other = _cased(stands[0], plain[begin:end])
                text += query[copied : start + begin] + other
                phrase += plain[phrased:begin] + other
                copied, phrased = start + end, end
            phrase += plain[phrased:]
            if quoted and self._stems.analyze(phrase):
                phrases.append(phrase)
        text = re.sub('[*"]', " ", text + query[copied:])
        return ParsedQuery(
            " ".join(text.split()) if meant else text, tuple(words), tuple(phrases), meant
        )

    def _stands_for(self, word: str, *, ends: bool, starred: bool) -> tuple[str, ...]:
        """The words that a word of a query may stand for, the most frequent first."""
        asked = (word, ends, starred)
        found = self._known.get(asked)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[asked] = self._looked_up(word, ends=ends, starred=starred)
        return found

    def _looked_up(self, word: str, *, ends: bool, starred: bool) -> tuple[str, ...]:
        known = 0 if starred else sum(map(self._frequency, self._stems.analyze(word)))
        if known:
            near = self._mistyped(word) if known <= _RARE else ()
            often = [other for other in near if self._titles(other) >= _OFTEN * known]
            return (word, *often)
        if ends:
            longer = self._titled(word)
            if longer:
                return tuple(longer[:_STARTED])
        return self._mistyped(word) or (word,)

    def _mistyped(self, word: str) -> tuple[str, ...]:
        """The most frequent word of titles at a distance of 1, if there is one."""
        if len(word) < _SHORT:
            return ()
        # To look for some hundred words takes less than to compare one with all that there are.
        near = {other: self._titles(other) for other in _edited(word, self._letters | {*word})}
        for start in (word[0], word[1], ""):  # few are wrong in the first letter
            found = [other for other, count in near.items() if count and other.startswith(start)]
            if found:
                return (min(found, key=lambda other: (-near[other], other)),)
        return ()

    def _titled(self, start: str) -> list[str]:
        """The words of titles that begin so, the most frequent first."""
        found = self._searcher.terms_with_prefix("titles", start)
        return [word for word, _ in sorted(found, key=lambda pair: (-pair[1], pair[0]))]

    def _frequency(self, stem: str) -> int:
        return int(self._searcher.doc_freq("stems", stem))

    def _titles(self, word: str) -> int:
        return int(self._searcher.doc_freq("titles", word))

    def marks(self, reading: ParsedQuery, text: str) -> list[tuple[int, int]]:
        """Where the words of a query stand in a text: (start, end) in characters, rising."""
        stems = {
            stem for words in reading.words for word in words for stem in self._stems.analyze(word)
        }
        return [
            (token.char_offset_from, token.char_offset_to or token.char_offset_from)
            for token in self._stems.pre_tokenize(text).tokens
            if token.text in stems
        ]

    # ------------------------------------------------------------------ searching

    def search(self, reading: ParsedQuery, count: int, allowed: NDArray[np.bool_]) -> Hits:
        """The items that have the words of a query, by BM25.

        Args:
            reading: from `read`.
            count: how many at most; fewer too where hardly any of those that have them are open.
            allowed: bool [N], what may be answered.
        """
        query = self._query(reading)
        open_rows = int(np.count_nonzero(allowed))
        if query is None or not open_rows or not len(self):
            return _NOTHING
        asked, barred = count, open_rows < len(allowed)
        if barred and open_rows <= _NARROW:
            named = np.flatnonzero(allowed).tolist()
            among = tantivy.Query.term_set_query(self._schema, "row", named)
            among = tantivy.Query.const_score_query(among, 0.0)
            query = tantivy.Query.boolean_query([(_must, query), (_must, among)])
        elif barred:
            asked = min(max(count, _OVER), 2 * count * len(allowed) // open_rows)
        rows, scores = self._ask(query, asked)
        stays = np.flatnonzero(allowed[rows])[:count]
        return Hits(rows[stays], scores[stays])

    def holding(self, reading: ParsedQuery) -> NDArray[np.int64] | None:
        """The rows [L] that have every phrase, in any order; None where none was asked for."""
        if not reading.phrases:
            return None
        query = tantivy.Query.boolean_query(
            [(_must, self._phrase(phrase)) for phrase in reading.phrases]
        )
        return self._ask(query, max(1, len(self)))[0]

    def _ask(self, query: tantivy.Query, count: int) -> Hits:
        hits = self._searcher.search(query, count, count=False).hits
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        scores = [score for score, _ in hits]
        return Hits(np.array(rows, dtype=np.int64), np.array(scores, dtype=np.float32))

    def _query(self, reading: ParsedQuery) -> tantivy.Query | None:
        """The words as one query, None where it has none: a word twice counts twice."""
        clauses = [(_must, self._phrase(phrase)) for phrase in reading.phrases]
        counted = Counter(
            tuple(dict.fromkeys(stem for word in words for stem in self._stems.analyze(word)))
            for words in reading.words
        )
        rarest = sorted(counted, key=lambda stems: sum(self._frequency(stem) for stem in stems))
        for stems in [stems for stems in rarest if stems][:MOST_WORDS]:
            terms = [tantivy.Query.term_query(self._schema, "stems", stem) for stem in stems]
            one = terms[0] if len(terms) == 1 else tantivy.Query.disjunction_max_query(terms)
            if counted[stems] > 1:
                one = tantivy.Query.boost_query(one, float(counted[stems]))
            # Of bare terms alone tantivy passes over what cannot be among the best.
            clauses.append((_should, one))
        return tantivy.Query.boolean_query(clauses) if clauses else None

    def _phrase(self, phrase: str) -> tantivy.Query:
        stems = self._stems.analyze(phrase)
        if len(stems) == 1:
            return tantivy.Query.term_query(self._schema, "stems", stems[0])
        return tantivy.Query.phrase_query(self._schema, "stems", [*stems])


def _edited(word: str, letters: Iterable[str]) -> set[str]:
    """What differs from a word in one letter, or by two neighbours that changed places.

    All at a distance of 1 (optimal string alignment): https://norvig.com/spell-correct.html
    """
    letters = tuple(letters)
    parts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    edited = {left + right[1:] for left, right in parts if right}
    edited |= {left + right[1::-1] + right[2:] for left, right in parts if len(right) > 1}
    edited |= {left + letter + right[1:] for left, right in parts if right for letter in letters}
    edited |= {left + letter + right for left, right in parts for letter in letters}
    return edited - {word, ""}


def _cased(word: str, like: str) -> str:
    """A word in the capitals of another, for what a text means may depend on them."""
    if like.isupper():
        return word.upper()
    return word.capitalize() if like[:1].isupper() else word


_NOTHING = Hits(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))


def _analyser(*, stemmed: bool) -> tantivy.TextAnalyzer:
    """Words in lower case without accents, and of English ones the stems."""
    kept = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(kept.remove_long(_LONGEST)).filter(kept.lowercase())
    builder = builder.filter(kept.ascii_fold())
    return (builder.filter(kept.stemmer("english")) if stemmed else builder).build()
