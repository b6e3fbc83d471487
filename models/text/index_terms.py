"""Terms of a tantivy index: how texts are cut into terms, and how many documents have each."""

from __future__ import annotations

from collections.abc import Iterable

import tantivy

_MAX_TERM_BYTES = 40  # longer tokens are dropped


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
        letters: characters of titles, which corrections of spelling may insert.
    """

    def __init__(self, searcher: tantivy.Searcher, letters: Iterable[str]) -> None:
        self._searcher = searcher
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

    def title_frequency(self, word: str) -> int:
        """Count the documents that have a word in their title."""
        return self._searcher.doc_freq("titles", word)

    def title_words(self, prefix: str) -> list[str]:
        """Return the words of titles that begin with a prefix, the most frequent first."""
        found = self._searcher.terms_with_prefix("titles", prefix)
        return [word for word, _ in sorted(found, key=lambda pair: (-pair[1], pair[0]))]
