"""Terms: the words, stems and keywords by which texts are compared.

HTML is read as plain text. Compatibility characters and letter case are folded as Unicode does
(NFKC, case folding). Marks that writers leave out are removed: accents, Hebrew points, Arabic
vowels. The dotted and the dotless i are one letter, since their case depends on the language.
Keywords, such as stock codes and ISBNs, match as wholes and by their beginnings.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import tantivy
from numpy.typing import NDArray
from selectolax.lexbor import LexborHTMLParser

_BLOCKS = (
    "address|article|aside|blockquote|body|br|caption|center|dd|details|div|dl|dt|fieldset|"
    "figcaption|figure|footer|form|h1|h2|h3|h4|h5|h6|header|hr|img|li|main|nav|ol|option|p|pre|"
    "section|summary|table|tbody|td|tfoot|th|thead|tr|ul|video"
)
_INLINE = (
    "a|abbr|b|bdi|bdo|big|button|cite|code|col|del|dfn|em|font|head|html|i|iframe|input|ins|kbd|"
    "label|link|mark|meta|q|s|samp|script|small|span|strike|strong|style|sub|sup|svg|template|time|"
    "title|tt|u|var|wbr"
)
# `a < b`, `<3` and `vector<int>` are no markup.
_NAMES = frozenset(f"{_BLOCKS}|{_INLINE}".split("|"))
_UNREAD = ["script", "style", "template", "title"]
_TAG = re.compile(r"<(?:!--|!doctype\b|/?([a-z][a-z\d]*)(?=[\s/>]))", re.IGNORECASE)
_BLOCK = re.compile(rf"</?(?=[a-z])(?:{_BLOCKS})(?=[\s/>])", re.IGNORECASE)
_ANY_TAG = re.compile("<[^<>]*>")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,31});", re.IGNORECASE)
_MOST_TAGS = 2_000  # that are parsed: a parser takes quadratic time for tags within each other


def plain_text(text: str) -> str:
    """Return the text of HTML, its white space as single spaces; a text without markup as it is.

    Blocks are apart from each other, and inline elements are not: `<b>st</b>urdy` is one word.
    """
    if any(tag[1] is None or tag[1].lower() in _NAMES for tag in _TAG.finditer(text)):
        spaced = _BLOCK.sub(r" \g<0>", text)
        if spaced.count("<") > _MOST_TAGS:
            return " ".join(html.unescape(_ANY_TAG.sub(" ", spaced)).split())
        tree = LexborHTMLParser(spaced)
        tree.strip_tags(_UNREAD)
        return "" if tree.body is None else " ".join(tree.body.text().split())
    if "&" in text and _ENTITY.search(text):
        return html.unescape(text)
    return text


# Breve and diaeresis make letters of their own in Cyrillic: й, ў, ї. Vowel signs of Indic scripts,
# and the voiced marks of Japanese, are no decoration.
_MARKS = re.compile(
    "(?<![иу])\u0306|(?<!і)\u0308|[\u0300-\u0305\u0307\u0309-\u036f\u0483-\u0489\u0591-\u05bd"
    "\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc"
    "\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u08ca-\u08e1\u08e3-\u08ff\u1ab0-\u1aff\u1dc0-\u1dff"
    "\u20d0-\u20ff\ufe20-\ufe2f]"
)
_FOREIGN = re.compile("[\x00-\x7f]?[^\x00-\x7f]+")  # a mark may follow a letter of ASCII
# Characters that join the one before: vowels and finals of Hangul, half-width marks of Japanese.
_JOINING = re.compile("[\u1160-\u11ff\ud7b0-\ud7ff\uff9e\uff9f\uffa0-\uffdc]")


class Folded(NamedTuple):
    """A folded text, and where each of its characters stood in the text that was folded."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


def fold(text: str) -> str:
    return (text if text.isascii() else _FOREIGN.sub(lambda run: _fold_run(run[0]), text)).lower()


def fold_aligned(text: str) -> Folded:
    """Return `fold(text)` with the places of its characters in the text."""
    if text.isascii():
        return Folded(text.lower(), range(len(text)), range(1, len(text) + 1))
    parts = [part for run in _runs(text) for part in run]
    folded = [_fold_run(part) for part in parts]
    ends = list(accumulate(map(len, parts)))
    spans = [
        (end - len(part), end)
        for part, letters, end in zip(parts, folded, ends, strict=True)
        for _ in letters
    ]
    return Folded("".join(folded), [start for start, _ in spans], [end for _, end in spans])


def _runs(text: str) -> list[list[str]]:
    """Cut a text into characters, each with the marks that belong to it."""
    runs, copied = [], 0
    for run in _FOREIGN.finditer(text):
        runs.append([*text[copied : run.start()]])
        runs.append(_characters(run[0]))
        copied = run.end()
    return [*runs, [*text[copied:]]]


def _characters(run: str) -> list[str]:
    parts: list[str] = []
    for letter in run:
        if parts and (unicodedata.category(letter)[0] == "M" or _JOINING.match(letter)):
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts


@lru_cache(65_536)
def _fold_run(run: str) -> str:
    if run.isascii():
        return run.lower()
    letters = unicodedata.normalize("NFKC", run).casefold().replace("ı", "i")
    bare = _MARKS.sub("", unicodedata.normalize("NFKD", letters))
    return unicodedata.normalize("NFKC", bare).lower()


_MAX_TERM_BYTES = 40  # longer tokens are dropped
_COMMON, _FEW = 8, 5  # a word is common from this share of the documents on, if they are not few

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

    `letters` are characters of titles, which corrections of spelling may insert.
    """

    def __init__(
        self, searcher: tantivy.Searcher, schema: tantivy.Schema, letters: Iterable[str]
    ) -> None:
        self._searcher, self._schema = searcher, schema
        self._stems, self._words = analyser(stemmed=True), analyser(stemmed=False)
        folded = [part for letter in letters for part in self._words.analyze(letter)]
        self.letters = frozenset(part for part in folded if not part.isdigit())

    def words(self, text: str) -> list[Token]:
        return _tokens(self._words, text)

    def stems(self, text: str) -> list[str]:
        return self._stems.analyze(fold(text))

    def stem_tokens(self, text: str) -> list[Token]:
        return _tokens(self._stems, text)

    def stem_frequency(self, stem: str) -> int:
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
        """True if an eighth of the documents, and over five, have a word: it tells little."""
        return self.word_frequency(word) > max(_FEW, int(self._searcher.num_docs) // _COMMON)

    def phrase_query(self, phrase: str) -> tantivy.Query:
        """Return the query for the stems of a phrase, side by side in one field."""
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


WHOLE = 2.0  # level of a keyword that was typed as a whole
MAX_COMPLETED = 20_000  # keywords at most that a beginning stands for
_MAX_CHARACTERS = 256  # longer values are texts
_SEPARATORS = re.compile(r"[\s\-\u2010-\u2015._/:]+")
_FIELD = "\0"  # between a keyword and the name of its field, in the terms of the index


class KeywordQuery(NamedTuple):
    """A part of a query that is a keyword, or begins one."""

    text: str  # normalised
    prefix: bool  # stands for all keywords that begin with the text
    is_code: bool = True  # and not words of texts too


class KeywordHits(NamedTuple):
    """Keywords of items that match a query, each item's best one."""

    rows: NDArray[np.int64]  # [M] item rows, ascending and distinct
    levels: NDArray[np.float32]  # [M] `WHOLE`, or how much of the keyword was typed, see `find`
    fields: tuple[str, ...]  # [M] names of the fields
    is_cut: bool = False  # a beginning stands for more keywords than were looked up


NO_KEYWORDS = KeywordHits(np.zeros(0, np.int64), np.zeros(0, np.float32), ())


def normalize_keyword(text: str) -> str:
    """Return a keyword in the form that is compared: case-folded, without separators.

    Separators are white space, hyphens, full stops, underscores, slashes and colons. A text of
    separators alone keeps them.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().replace(_FIELD, "")
    return _SEPARATORS.sub("", folded) or folded.strip()


def keyword_terms(keywords: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the terms of the keywords of an item, which are given by field."""
    return {
        normal + _FIELD + name
        for name, values in keywords.items()
        for value in values
        if len(value) <= _MAX_CHARACTERS and (normal := normalize_keyword(value))
    }


class KeywordIndex:
    def __init__(self, searcher: tantivy.Searcher, schema: tantivy.Schema) -> None:
        self._searcher, self._schema = searcher, schema

    def has(self, keyword: KeywordQuery) -> bool:
        return len(self._rows(self._terms(keyword), 1)) > 0

    def find(self, keywords: Sequence[KeywordQuery]) -> KeywordHits:
        """Return the items that have one of these keywords.

        The level of a keyword that was typed in part is the part's share of its length, in
        (0, 1]; if it may also be a word, the share less 1, at most 0.
        """
        rows, levels, names = [NO_KEYWORDS.rows], [NO_KEYWORDS.levels], list[str]()
        is_cut = False
        for keyword in keywords:
            terms = self._terms(keyword)
            is_cut |= len(terms) > MAX_COMPLETED
            # Keywords of a field that are equally long have one level: one query finds their items.
            alike = defaultdict[tuple[int, str], list[str]](list)
            for term in terms[:MAX_COMPLETED]:
                whole, _, field = term.partition(_FIELD)
                alike[len(whole), field].append(term)
            for (length, field), same in alike.items():
                share = len(keyword.text) / length
                level = share if keyword.is_code else share - 1
                found = self._rows(same, max(1, int(self._searcher.num_docs)))
                rows.append(found)
                levels.append(np.full(len(found), level if keyword.prefix else WHOLE, np.float32))
                names += [field] * len(found)
        every, ranked = np.concatenate(rows), np.concatenate(levels)
        order = np.lexsort((-ranked, every))
        best = order[np.flatnonzero(np.diff(every[order], prepend=-1))]  # of each row the first
        fields = tuple(names[at] for at in best.tolist())
        return KeywordHits(every[best], ranked[best], fields, is_cut)

    def _terms(self, keyword: KeywordQuery) -> list[str]:
        prefix = keyword.text if keyword.prefix else keyword.text + _FIELD
        found = self._searcher.terms_with_prefix("keywords", prefix, limit=MAX_COMPLETED + 1)
        return [term for term, _ in found]

    def _rows(self, terms: Sequence[str], most: int) -> NDArray[np.int64]:
        if not terms:
            return np.zeros(0, np.int64)
        query = tantivy.Query.term_set_query(self._schema, "keywords", [*terms])
        query = tantivy.Query.const_score_query(query, 1.0)
        hits = self._searcher.search(query, most, count=False).hits
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        return np.array(rows, dtype=np.int64)
