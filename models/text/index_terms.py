"""Terms of a tantivy index: how texts are cut into terms, and how many documents have each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tantivy

_MAX_TERM_BYTES = 40  # longer tokens are dropped
_COMMON, _FEW = 8, 5  # a word is common in one of so many documents, if they are not few


def analyser(*, stemmed: bool) -> tantivy.TextAnalyzer:
    """Split texts into lower-case words without accents; if `stemmed`, into their English stems."""
    kept = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(kept.remove_long(_MAX_TERM_BYTES)).filter(kept.lowercase())
    builder = builder.filter(kept.ascii_fold())
    return (builder.filter(kept.stemmer("english")) if stemmed else builder).build()


def fold_sigma(text: str) -> str:
    """Write the final sigma as any other, as case folding does and tantivy's `lowercase` does not.

    With it, two texts that differ in letter case alone have the same terms.
    """
    return text.replace("ς", "σ")


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
        self.letters = frozenset(own for each in letters for own in self._words.analyze(each))

    def words(self, text: str) -> list[tantivy.Token]:
        """Return the words of a text as tantivy's tokens, with their offsets in characters."""
        return self._words.pre_tokenize(fold_sigma(text)).tokens

    def stems(self, text: str) -> list[str]:
        """Return the stems of a text in their order."""
        return self._stems.analyze(fold_sigma(text))

    def stem_tokens(self, text: str) -> list[tantivy.Token]:
        """Return the stems of a text as tantivy's tokens, with their offsets in characters."""
        return self._stems.pre_tokenize(fold_sigma(text)).tokens

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
        """Whether so many documents have a word that it tells little: an eighth, and over five."""
        return self.word_frequency(word) > max(_FEW, int(self._searcher.num_docs) // _COMMON)

    def phrase_query(self, phrase: str) -> tantivy.Query:
        """Return the query for the stems of a phrase, side by side in one field.

        Raises ValueError for a phrase without stems.
        """
        stems = self.stems(phrase)
        if len(stems) == 1:
            return tantivy.Query.term_query(self._schema, "stems", stems[0])
        return tantivy.Query.phrase_query(self._schema, "stems", [*stems])
