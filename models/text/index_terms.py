"""Terms of a tantivy index: how texts are cut into terms, and how many documents have each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import tantivy

from models.text.folding import fold, fold_aligned

_MAX_TERM_BYTES = 40  # longer tokens are dropped
_COMMON, _FEW = 8, 5  # a word is common in one of so many documents, if they are not few

# Words of English that say nothing about a text; of several words in a query they are not searched.
STOP_WORDS = frozenset(
    """
    a about above after again all also am an and any are as at be because been before being below
    between both but by can could did do does doing down during each few for from further had has
    have having he her here hers him his how i if in into is it its itself just me more most my no
    nor not of off on once only or other our ours out over own same she should so some such than
    that the their theirs them then there these they this those through to too under until up us
    very was we were what when where which while who whom why will with would you your yours
    """.split()  # noqa: SIM905 - a line for each word would hide the code
)


def analyser(*, stemmed: bool) -> tantivy.TextAnalyzer:
    """Split texts into lower-case words without accents; if `stemmed`, into their English stems."""
    kept = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(kept.remove_long(_MAX_TERM_BYTES)).filter(kept.lowercase())
    builder = builder.filter(kept.ascii_fold())
    return (builder.filter(kept.stemmer("english")) if stemmed else builder).build()


class Token(NamedTuple):
    """A term of a text, and its place there in characters."""

    text: str
    start: int
    end: int


class IndexTerms:
    """Document frequencies in one state of an index: of stems in all fields, of words in titles.

    Args:
        searcher: the state of the index.
        schema: of the index.
        letters: characters of titles, which corrections of spelling may insert.
    """

    def __init__(
        self, searcher: tantivy.Searcher, schema: tantivy.Schema, letters: Iterable[str]
    ) -> None:
        self._searcher, self._schema = searcher, schema
        self._stems, self._words = analyser(stemmed=True), analyser(stemmed=False)
        folded = [own for each in letters for own in self._words.analyze(each)]
        self.letters = frozenset(own for own in folded if not own.isdigit())

    def words(self, text: str) -> list[Token]:
        """Return the words of a text in their order."""
        return _tokens(self._words, text)

    def stems(self, text: str) -> list[str]:
        """Return the stems of a text in their order."""
        return self._stems.analyze(fold(text))

    def stem_tokens(self, text: str) -> list[Token]:
        """Return the stems of a text in their order, with their places."""
        return _tokens(self._stems, text)

    def stem_frequency(self, stem: str) -> int:
        """Count the documents that have a stem in any field."""
        return self._searcher.doc_freq("stems", stem)

    def word_frequency(self, word: str) -> int:
        """Count the documents that have the stem of a word in any field."""
        return sum(map(self.stem_frequency, self.stems(word)))

    def rarity(self, word: str) -> float:
        """Return the inverse document frequency of a word as BM25 has it, above 0."""
        documents, having = int(self._searcher.num_docs), self.word_frequency(word)
        # Frequencies may still count documents that were removed.
        return math.log(1 + (max(0, documents - having) + 0.5) / (having + 0.5))

    def title_frequency(self, word: str) -> int:
        """Count the documents that have a word in their title."""
        return self._searcher.doc_freq("titles", word)

    def title_words(self, prefix: str, most: int) -> list[str]:
        """Return the words [≤ most] of titles that begin with a prefix, the most frequent first."""
        return [word for word, _ in self._searcher.terms_with_prefix("titles", prefix, limit=most)]

    def all_words(self, prefix: str, most: int) -> list[str]:
        """Return the words [≤ most] of any field that begin with a prefix, as `title_words`."""
        counts: Counter[str] = Counter()
        for field in ("titles", "texts"):
            counts.update(dict(self._searcher.terms_with_prefix(field, prefix, limit=most)))
        return sorted(counts, key=lambda word: (-counts[word], word))[:most]

    def phrase_frequency(self, phrase: str) -> int:
        """Count the documents that have the stems of a phrase side by side."""
        found: Any = self._searcher.search(self.phrase_query(phrase), 1, count=True)
        return int(found.count)  # which tantivy's type stubs lack

    def is_common(self, word: str) -> bool:
        """True if so many documents have a word that it tells little: an eighth, and over five."""
        return self.word_frequency(word) > max(_FEW, int(self._searcher.num_docs) // _COMMON)

    def phrase_query(self, phrase: str) -> tantivy.Query:
        """Return the query for the stems of a phrase, side by side in one field.

        Raises ValueError for a phrase without stems.
        """
        stems = self.stems(phrase)
        if len(stems) == 1:
            return tantivy.Query.term_query(self._schema, "stems", stems[0])
        return tantivy.Query.phrase_query(self._schema, "stems", [*stems])


def _tokens(analyser: tantivy.TextAnalyzer, text: str) -> list[Token]:
    folded, starts, ends = fold_aligned(text)
    return [
        Token(each.text, starts[each.char_offset_from], ends[each.char_offset_to - 1])
        for each in analyser.pre_tokenize(folded).tokens
    ]
