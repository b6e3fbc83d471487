"""Parse what is typed into a search box: phrases, keywords, prefixes, compounds, misspellings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from models.compute.checkpoint import checkpoint
from models.text.compounds import Compound, joined_words, split_word
from models.text.index_terms import IndexTerms, Token
from models.text.keywords import KeywordIndex, KeywordQuery, normalize_keyword
from models.text.spelling import match_case, nearest_word

MAX_STARRED = 64  # words that a prefix with a star stands for, the most frequent
_MAX_COMPLETIONS = 3  # words that an unfinished word may stand for, the most frequent
_MIN_REPLACED = 5  # letters: of shorter unknown words, too many are a letter from some word
_RARE = 5  # documents up to which a word may be a misspelling that they have too
_FREQUENT = 100  # times as many titles must have the correction of a word that documents have
_MIN_PREFIX = 3  # characters of a keyword's beginning without a star
_MIN_STARRED = 2  # with one
_MAX_RUN = 6  # parts of a query that are one keyword, as "978 3 16 148410 0"
_MAX_PARTS = 64  # of a query, among which keywords are looked for
_CACHED = 4_096  # words that were looked up
_PARTS = re.compile(r'"([^"]*)"|([^\s"]+)')


class ParsedQuery(NamedTuple):
    """A query as it was understood."""

    text: str  # with its corrections and without its keywords, to be encoded
    terms: tuple[tuple[str, ...], ...]  # the words in their order, each with its alternatives
    phrases: tuple[str, ...]  # quoted parts, which every result must have
    corrections: Mapping[str, tuple[str, ...]]  # words that no item has -> what they stand for
    compounds: tuple[Compound, ...] = ()  # other spellings of the words
    keywords: tuple[KeywordQuery, ...] = ()
    did_you_mean: str | None = None  # the query with spellings that were not applied
    coverage: float = 0.0  # share of the words' inverse document frequencies that is of known ones


class _Word(NamedTuple):
    """A word of a query, and what was found out about it."""

    alternatives: tuple[str, ...]  # that are searched for
    known: bool  # an item has it, or what stands for it
    split: Compound | None = None
    offered: str | None = None  # another spelling, which is not searched for


class _Span(NamedTuple):
    """A part of a query that is a keyword."""

    start: int
    end: int
    keyword: KeywordQuery


class QueryParser:
    """Parses queries by the words and keywords of one state of an index.

    A quoted part is a phrase. A word that some item has is searched for as it is. One that no item
    has stands for longer ones where it ends the query, as it does while somebody types, or where a
    star follows; otherwise for the two words that it is made of, or for a title's word at a
    distance of one edit, if it is long enough. All of this is told in `corrections`. Other
    spellings are only offered: of short words, of quoted ones, and of words that hardly any item
    has. All other text stays as it was typed, since what it means may depend on more than its
    words.

    A keyword is the whole query, or parts of it that have a digit and are no words of any text. Its
    words are neither completed nor corrected, and what is not a word too is not encoded.
    """

    def __init__(self, terms: IndexTerms, keywords: KeywordIndex) -> None:
        self._terms, self._keywords = terms, keywords
        # One state of an index never changes, and people search for the same words.
        self._look_up = lru_cache(_CACHED)(partial(_look_up, terms))
        self._rarity = lru_cache(_CACHED)(terms.rarity)

    def parse(self, query: str) -> ParsedQuery:
        """Parse a query; any text is one."""
        query = unicodedata.normalize("NFKC", query)
        parts = list(_PARTS.finditer(query))
        spans = self._keyword_spans(query, parts)
        words: list[_Word] = []
        typed: list[str] = []
        runs: list[list[str]] = [[]]  # of words without a quoted part or a keyword between them
        phrases: list[str] = []
        # The query with its corrections, and with all spellings, copied up to a position.
        text, offered, copied = "", "", 0
        for part in parts:
            quoted = part[1] is not None
            start, plain = part.start(1 if quoted else 2), part[1 if quoted else 2]
            is_code = any(span.keyword.is_code and _covers(span, part) for span in spans)
            tokens = self._terms.words(plain)
            modes: list[_Mode] = ["exact" if is_code else "quoted" if quoted else "typed"]
            modes *= len(tokens)
            if tokens and not quoted and plain.endswith("*"):
                modes[-1] = "starred"
            elif tokens and modes[-1] == "typed" and part.end() == len(query):
                modes[-1] = "unfinished"
            own = [token.text for token in tokens]
            found = list(map(self._look_up, own, modes))
            words += found
            typed += own
            searched = [word.alternatives[0] for word in found]
            spelt = [word.offered or word.alternatives[0] for word in found]
            text += query[copied:start] + ("" if is_code else _respelt(plain, tokens, searched))
            offered += query[copied:start] + _respelt(plain, tokens, spelt)
            copied = part.end(1 if quoted else 2)
            if quoted and self._terms.stems(plain):
                phrases.append(plain)
            if quoted or is_code:
                runs.append([])
            else:
                runs[-1] += own
        text = re.sub('[*"]', " ", text + query[copied:])
        corrections = {
            word: each.alternatives
            for word, each in zip(typed, words, strict=True)
            if each.alternatives != (word,)
        }
        compounds = [word.split for word in words if word.split is not None]
        for run in runs:
            compounds += joined_words(self._terms, run, len(words))
        rarities = list(map(self._rarity, typed))
        known = sum(rarity for rarity, word in zip(rarities, words, strict=True) if word.known)
        is_changed = bool(corrections) or any(span.keyword.is_code for span in spans)
        is_offered = any(word.offered for word in words)
        return ParsedQuery(
            " ".join(text.split()) if is_changed else text,
            tuple(word.alternatives for word in words),
            tuple(phrases),
            corrections,
            tuple(dict.fromkeys(compounds)),
            tuple(span.keyword for span in spans),
            " ".join((offered + query[copied:]).split()) if is_offered else None,
            known / sum(rarities) if rarities else 0.0,
        )

    def _keyword_spans(self, query: str, parts: Sequence[re.Match[str]]) -> list[_Span]:
        """Return the parts of a query that are keywords, apart from each other."""
        bare = query.strip()
        if len(bare) > 1 and bare[0] == bare[-1] == '"':
            bare = bare[1:-1]
        whole = normalize_keyword(bare)
        starred = whole.endswith("*")
        typed = KeywordQuery(whole.rstrip("*"), starred, self._is_code(bare))
        if not typed.text:
            return []
        if not starred and self._keywords.has(typed):
            return [_Span(0, len(query), typed)]
        begun = typed._replace(prefix=True)
        least = _MIN_STARRED if starred else _MIN_PREFIX
        if (starred or begun.is_code) and len(begun.text) >= least and self._keywords.has(begun):
            return [_Span(0, len(query), begun)]
        spans: list[_Span] = []
        at = 0
        while at < min(len(parts), _MAX_PARTS):
            span = self._keyword_at(query, parts, at)
            if span is not None:
                spans.append(span)
            at += 1 if span is None else sum(_covers(span, part) for part in parts[at:])
        return spans

    def _keyword_at(self, query: str, parts: Sequence[re.Match[str]], at: int) -> _Span | None:
        """Return the longest keyword that begins with one of the parts of a longer query."""
        for count in range(min(_MAX_RUN, len(parts) - at), 0, -1):
            start, end = parts[at].start(), parts[at + count - 1].end()
            written = query[start:end]
            starred = count == 1 and written.endswith("*")
            is_code = _has_digit(written) and self._is_code(written)
            normal = normalize_keyword(written.rstrip("*").strip('"'))
            if len(normal) < (_MIN_STARRED if starred else _MIN_PREFIX):
                continue
            keyword = KeywordQuery(normal, starred, is_code)
            if (is_code or starred) and self._keywords.has(keyword):
                return _Span(start, end, keyword)
        return None

    def _is_code(self, text: str) -> bool:
        """Whether a text has a word that no item's texts have, nor any that titles complete."""
        words = [token.text for token in self._terms.words(text)]
        if not words:
            return True
        return any(
            not self._terms.word_frequency(word)
            and (_has_digit(word) or not self._terms.title_words(word, 1))
            for word in words
        )


_Mode = Literal["typed", "unfinished", "starred", "quoted", "exact"]


def _look_up(terms: IndexTerms, word: str, how: _Mode) -> _Word:
    """Return what stands for a word, and what is offered in its place."""
    checkpoint()
    frequency = terms.word_frequency(word)
    if how == "exact":
        return _Word((word,), frequency > 0)
    if how == "starred":
        longer = tuple(terms.all_words(word, MAX_STARRED))
        return _Word(longer or (word,), bool(longer))
    split = None if how == "quoted" else split_word(terms, word)
    if frequency:
        offered = nearest_word(terms, word) if frequency <= _RARE else None
        if offered and terms.title_frequency(offered) < _FREQUENT * frequency:
            offered = None
        return _Word((word,), True, split, offered)
    if how == "unfinished":
        longer = tuple(
            terms.title_words(word, _MAX_COMPLETIONS) or terms.all_words(word, _MAX_COMPLETIONS)
        )
        if longer:
            return _Word(longer, True, split)
    if split is not None:
        return _Word((split.text,), True, split)
    near = nearest_word(terms, word)
    if near is not None and how != "quoted" and len(word) >= _MIN_REPLACED:
        return _Word((near,), True)
    return _Word((word,), False, None, near)


def _respelt(text: str, tokens: Sequence[Token], words: Sequence[str]) -> str:
    """Return a text with other words in the places of its tokens, in the letter case of these."""
    out, copied = "", 0
    for token, word in zip(tokens, words, strict=True):
        begin, end = token.start, token.end
        own = text[begin:end]
        out += text[copied:begin] + (own if word == token.text else match_case(word, own))
        copied = end
    return out + text[copied:]


def _covers(span: _Span, part: re.Match[str]) -> bool:
    return span.start <= part.start() and part.end() <= span.end


def _has_digit(text: str) -> bool:
    return any(letter.isdigit() for letter in text)
