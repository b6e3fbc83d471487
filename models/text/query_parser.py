"""Parse what is typed into a search box: phrases, keywords, prefixes, compounds, misspellings.

Compounds are split and joined by the words of the catalogue: "cake stand" and "cakestand". A number
and its unit are one too, whatever their lengths: "32 GB" and "32GB", "B 12" and "B12".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple

from models.compute.checkpoint import checkpoint
from models.text.terms import (
    STOP_WORDS,
    IndexTerms,
    KeywordIndex,
    KeywordQuery,
    Token,
    normalize_keyword,
)

_MIN_CORRECTED = 3  # letters: shorter words have no correction


def near_words(terms: IndexTerms, word: str) -> list[str]:
    """Return the words of titles at a distance of one edit, the likeliest first.

    Likely words begin as the word does (few mistake the first letter), have its letters at other
    places, and are frequent. A word with a digit has none: another number is another thing.
    """
    if len(word) < _MIN_CORRECTED or has_digit(word):
        return []
    # Looking up some hundred edits takes less than comparing the word with every word.
    edits = single_edits(word, terms.letters | {*word})
    near = {other: count for other in edits if (count := terms.title_frequency(other))}

    def order(other: str) -> tuple[int, bool, int, str]:
        starts = (word[0], word[1], "")
        kind = next(at for at, start in enumerate(starts) if other.startswith(start))
        return kind, sorted(other) != sorted(word), -near[other], other

    return sorted(near, key=order)


def single_edits(word: str, letters: Iterable[str]) -> set[str]:
    """Return all strings at an optimal string alignment distance of 1.

    One letter deleted, replaced or inserted, or two neighbours transposed:
    https://norvig.com/spell-correct.html
    """
    letters = tuple(letters)
    parts = [(word[:at], word[at:]) for at in range(len(word) + 1)]
    edited = {left + right[1:] for left, right in parts if right}
    edited |= {left + right[1::-1] + right[2:] for left, right in parts if len(right) > 1}
    edited |= {left + letter + right[1:] for left, right in parts if right for letter in letters}
    edited |= {left + letter + right for left, right in parts for letter in letters}
    return edited - {word, ""}


def match_case(word: str, like: str) -> str:
    """Write a word in the letter case of another, since an encoder may depend on it."""
    if like.isupper():
        return word.upper()
    return word.capitalize() if like[:1].isupper() else word


def has_digit(text: str) -> bool:
    return any(letter.isdigit() for letter in text)


_MIN_PART = 3  # letters of the longer part of a compound; of a word that some item has, of both

_MAX_UNIT = 4  # letters of a unit that is written apart from its number
_NUMBER = re.compile(r"\d+|[^\W\d_]+")


class Compound(NamedTuple):
    """Another spelling of words of a query, which some item has."""

    text: str  # one word, or two that stand side by side
    weight: float  # factor of its BM25 score


def split_word(terms: IndexTerms, word: str) -> Compound | None:
    """Return the two words that a word is made of, if an item has them side by side.

    The split is the one whose rarer part is the most frequent. If some item has the word itself,
    the two weigh as much as it does.
    """
    is_known = terms.word_frequency(word) > 0
    best: tuple[str, ...] = ()
    most = 0
    if is_measure(word):
        best = unit_parts(word)
        if not terms.phrase_frequency(" ".join(best)):
            return None
    else:
        for at in range(1, len(word)):
            pair = word[:at], word[at:]
            count = min(map(terms.word_frequency, pair))
            if count > most and _is_compound(terms, pair, is_known=is_known):
                best, most = pair, count
    if not best:
        return None
    weight = terms.rarity(word) / sum(map(terms.rarity, best)) if is_known else 1.0
    return Compound(" ".join(best), weight)


def unit_parts(word: str) -> tuple[str, ...]:
    """Return the numbers and the letters of a word in their order: 32, gb of 32gb."""
    return tuple(_NUMBER.findall(word))


def is_measure(word: str) -> bool:
    """Report whether a word is a number with a unit, or a letter with a number: 32gb, b12."""
    parts = unit_parts(word)
    return len(parts) == 2 and parts[0].isdigit() != parts[1].isdigit()


def _is_compound(terms: IndexTerms, pair: tuple[str, str], *, is_known: bool) -> bool:
    """Report whether two words that an item has side by side may be meant by one.

    Many texts break a word by mistake. If some item has the word, both parts must therefore also be
    words apart from each other, and tell something. Two short parts are no compound if either is
    common: chance would make too many of these.
    """
    common = any(map(terms.is_common, pair))
    if max(map(len, pair)) < _MIN_PART or (common and max(map(len, pair)) <= _MIN_PART):
        return False
    if is_known and (common or min(map(len, pair)) < _MIN_PART):
        return False
    together = terms.phrase_frequency(" ".join(pair))
    apart = [terms.word_frequency(part) > together for part in pair]
    return together > 0 and (not is_known or apart[0] == apart[1])


def joined_words(terms: IndexTerms, words: Sequence[str], total: int) -> list[Compound]:
    """Return the neighbours among words that an item writes as one word.

    In a query of these two words, the one word weighs twice as much as they do together: encoders
    distinguish a compound from its parts. It weighs less in a longer query, of `total` words, whose
    other words say what is meant. A number and its unit weigh what they do together in any query,
    and as much again if they stand side by side.
    """
    compounds = []
    for left, right in pairwise(words):
        whole, share = left + right, 2 / total
        factor = share + share**2
        unit = right if left[-1].isdigit() else left
        if is_measure(whole.split()[-1]) and len(unit) <= _MAX_UNIT and unit not in STOP_WORDS:
            factor = max(factor, 1.0)
            beside = [f"{left} {right}", *([whole] if " " in whole else [])]
            compounds += [Compound(way, 1.0) for way in beside if terms.phrase_frequency(way)]
        if " " not in whole and terms.word_frequency(whole):
            apart = terms.rarity(left) + terms.rarity(right)
            compounds.append(Compound(whole, factor * apart / terms.rarity(whole)))
    return compounds


MAX_STARRED = 64  # words that a prefix with a star stands for, the most frequent
_MAX_COMPLETIONS = 3  # words that an unfinished word may stand for, the most frequent
_MIN_REPLACED = 5  # letters: of shorter unknown words, too many are a letter from some word
_RARE = 5  # documents up to which a word may be a misspelling that they have too
_FREQUENT = 100  # times as many titles must have the correction of a word that documents have
_MIN_PREFIX = 3  # characters of a keyword's beginning without a star
_MIN_STARRED = 2  # with one
_MAX_SPELLINGS = 20  # of a word, that are looked for beside its neighbours
_MAX_RUN = 6  # parts of a query that are one keyword, as "978 3 16 148410 0"
_MAX_PARTS = 64  # of a query, among which keywords are looked for
_CACHED = 4_096  # words that were looked up
_PARTS = re.compile(r'"([^"]*)"|([^\s"]+)')

_Mode = Literal["typed", "unfinished", "starred", "quoted", "exact"]


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
    prefixes: tuple[str, ...] = ()  # starred words, which stand for all words that begin with them
    asides: tuple[tuple[str, ...], ...] = ()  # words that only add to the score of those with terms


class _Word(NamedTuple):
    alternatives: tuple[str, ...]  # that are searched for
    known: bool  # an item has it, or what stands for it
    splits: tuple[Compound, ...] = ()
    offered: str | None = None  # another spelling, which is not searched for
    near: tuple[str, ...] = ()  # spellings of a word that no item has
    role: Literal["term", "aside", "part"] = "term"  # searched for; of others; of a compound only


class _Span(NamedTuple):
    start: int
    end: int
    keyword: KeywordQuery


class _Part(NamedTuple):
    """A part of a query between white space or quotes."""

    start: int
    end: int
    plain: str
    tokens: list[Token]
    modes: list[_Mode]
    words: list[_Word]
    is_code: bool  # of a keyword that is no word

    @property
    def is_apart(self) -> bool:
        """Report whether its words do not belong to their neighbours."""
        return self.is_code or "quoted" in self.modes

    @property
    def is_number(self) -> bool:
        return len(self.words) > 1 and all(word.role == "part" for word in self.words)

    @property
    def is_lost(self) -> bool:
        """Report whether it is a keyword that is no word, or a number that no item has."""
        return self.is_code or (self.is_number and not any(word.known for word in self.words))


class QueryParser:
    """Parses queries by the words and keywords of one state of an index.

    A quoted part is a phrase. A word that some item has is searched for as it is. A word that no
    item has stands for longer ones if it ends the query, as it does while somebody types, or if a
    star follows. Otherwise it stands for the two words that it is made of, or for a title's word at
    a distance of one edit, if it is long enough or that word stands beside its neighbour in some
    item. `corrections` has all of these. Other spellings of short, quoted and rare words are only
    offered. Stop words find no item if some item has another word of the query. All other text
    stays as it was typed, since its meaning may depend on more than its words.

    A keyword is the whole query, or parts of it that have a digit and are no words of any text. Its
    words are neither completed nor corrected, and are encoded only if they are also words. A number
    with separators, such as 978-0-439-02348-1 or 2.5, is one term.
    """

    def __init__(self, terms: IndexTerms, keywords: KeywordIndex) -> None:
        self._terms, self._keywords = terms, keywords
        # One state of an index never changes, and people search for the same words.
        self._look_up = lru_cache(_CACHED)(partial(_look_up, terms))
        self._rarity = lru_cache(_CACHED)(terms.rarity)

    def parse(self, query: str) -> ParsedQuery:
        query = unicodedata.normalize("NFKC", query)
        matched = list(_PARTS.finditer(query))
        spans = self._keyword_spans(query, matched)
        parts: list[_Part] = []
        for match in matched:
            parts.append(self._part(query, match, spans, parts[-1] if parts else None))
        self._correct_by_neighbours(parts)
        _set_stop_words_aside(parts)
        # The query with its corrections, and with all spellings, copied up to a position.
        text, offered, copied = "", "", 0
        runs: list[list[str]] = [[]]  # of words without a quoted part or a keyword between them
        for part in parts:
            searched = [word.alternatives[0] for word in part.words]
            spelt = [word.offered or word.alternatives[0] for word in part.words]
            kept = "" if part.is_lost else respelt(part.plain, part.tokens, searched)
            text += query[copied : part.start] + kept
            offered += query[copied : part.start] + respelt(part.plain, part.tokens, spelt)
            copied = part.end
            if part.is_apart:
                runs.append([])
            else:
                written = [token.text for token in part.tokens]
                runs[-1] += [" ".join(written)] if part.is_number else written
        text = re.sub('[*"]', " ", text + query[copied:])
        words = [word for part in parts for word in part.words]
        typed = [token.text for part in parts for token in part.tokens]
        # By the words as they were typed; what a starred word stands for is no correction.
        corrections = {
            part.plain[token.start : token.end].lower(): word.alternatives
            for part in parts
            for token, mode, word in zip(part.tokens, part.modes, part.words, strict=True)
            if mode != "starred" and word.alternatives != (token.text,)
        }
        compounds = [compound for word in words for compound in word.splits]
        for run in runs:
            compounds += joined_words(self._terms, run, len(words))
        rarities = list(map(self._rarity, typed))
        known = sum(rarity for rarity, word in zip(rarities, words, strict=True) if word.known)
        is_changed = any(
            word.alternatives != (text,) for text, word in zip(typed, words, strict=True)
        ) or any(part.is_lost for part in parts)
        quoted = [part.plain for part in parts if "quoted" in part.modes]
        return ParsedQuery(
            text=" ".join(text.split()) if is_changed else text,
            terms=tuple(word.alternatives for word in words if word.role == "term"),
            phrases=tuple(filter(self._terms.stems, quoted)),
            corrections=corrections,
            compounds=tuple(dict.fromkeys(compounds)),
            keywords=tuple(span.keyword for span in spans),
            did_you_mean=" ".join((offered + query[copied:]).split())
            if any(w.offered for w in words)
            else None,
            coverage=known / sum(rarities) if rarities else 0.0,
            prefixes=tuple(part.tokens[-1].text for part in parts if "starred" in part.modes),
            asides=tuple(word.alternatives for word in words if word.role == "aside"),
        )

    def _part(
        self, query: str, match: re.Match[str], spans: Sequence[_Span], before: _Part | None
    ) -> _Part:
        quoted = match[1] is not None
        group = 1 if quoted else 2
        plain = match[group]
        is_code = any(span.keyword.is_code and _covers(span, match) for span in spans)
        tokens = self._terms.words(plain)
        has_number = len(tokens) > 1 and any(has_digit(token.text) for token in tokens)
        modes: list[_Mode] = ["exact" if is_code else "quoted" if quoted else "typed"]
        modes *= len(tokens)
        if tokens and not quoted and plain.endswith("*"):
            modes[-1] = "starred"
        elif tokens and modes[-1] == "typed" and has_number:
            modes = ["exact"] * len(tokens)
        elif tokens and modes[-1] == "typed" and match.end() == len(query):
            follows = before is not None and before.tokens and before.tokens[-1].text.isdigit()
            is_counted = tokens[-1].text.isdigit() and follows
            modes[-1] = "exact" if is_counted else "unfinished"
        words = [self._look_up(token.text, mode) for token, mode in zip(tokens, modes, strict=True)]
        if has_number and not is_code and {*modes} == {"exact"}:
            words = self._number([token.text for token in tokens]) or words
        return _Part(match.start(group), match.end(group), plain, tokens, modes, words, is_code)

    def _number(self, typed: Sequence[str]) -> list[_Word] | None:
        """Return the words of a number that is written with separators; None for another part."""
        if not all(map(has_digit, typed)):
            return None
        apart = [part for word in typed for part in unit_parts(word)]
        ways = dict.fromkeys([" ".join(typed), " ".join(apart), "".join(typed)])
        splits = tuple(Compound(way, 1.0) for way in ways if self._terms.phrase_frequency(way))
        return [
            _Word((word,), bool(splits), () if at else splits, role="part")
            for at, word in enumerate(typed)
        ]

    def _correct_by_neighbours(self, parts: Sequence[_Part]) -> None:
        """Replace unknown words by spellings that stand beside their neighbours in some item."""
        places = [(part, at) for part in parts for at in range(len(part.words))]
        for here, (part, at) in enumerate(places):
            if not part.words[at].near or part.modes[at] not in ("typed", "unfinished"):
                continue
            before, after = (
                [
                    beside.words[place].alternatives[0]
                    for beside, place in some
                    if beside.words[place].known and not beside.is_apart
                ]
                for some in (places[max(0, here - 1) : here], places[here + 1 : here + 2])
            )
            for spelling in part.words[at].near[:_MAX_SPELLINGS]:
                phrases = [f"{word} {spelling}" for word in before]
                phrases += [f"{spelling} {word}" for word in after]
                if any(map(self._terms.phrase_frequency, phrases)):
                    part.words[at] = _Word((spelling,), True)
                    break

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
            is_code = has_digit(written) and self._is_code(written)
            normal = normalize_keyword(written.rstrip("*").strip('"'))
            if len(normal) < (_MIN_STARRED if starred else _MIN_PREFIX):
                continue
            keyword = KeywordQuery(normal, starred, is_code)
            if (is_code or starred) and self._keywords.has(keyword):
                return _Span(start, end, keyword)
        return None

    def _is_code(self, text: str) -> bool:
        """Report whether a text has a word that no item's texts have or complete."""
        words = [token.text for token in self._terms.words(text)]
        if not words:
            return True
        return any(
            not self._terms.word_frequency(word)
            and (has_digit(word) or not self._terms.title_words(word, 1))
            for word in words
        )


def _look_up(terms: IndexTerms, word: str, how: _Mode) -> _Word:
    checkpoint()
    frequency = terms.word_frequency(word)
    if how == "exact":
        split = split_word(terms, word) if is_measure(word) else None
        return _Word((word,), bool(frequency or split), () if split is None else (split,))
    if how == "starred":
        longer = tuple(terms.all_words(word, MAX_STARRED))
        return _Word(longer or (word,), bool(longer))
    split = None if how == "quoted" else split_word(terms, word)
    splits = () if split is None else (split,)
    if frequency:
        offered = next(iter(near_words(terms, word)), None) if frequency <= _RARE else None
        if offered and terms.title_frequency(offered) < _FREQUENT * frequency:
            offered = None
        return _Word((word,), True, splits, offered)
    if split is not None and is_measure(word):
        return _Word((split.text,), True, splits, role="part")
    if how == "unfinished":
        longer = tuple(
            terms.title_words(word, _MAX_COMPLETIONS) or terms.all_words(word, _MAX_COMPLETIONS)
        )
        if longer:
            return _Word(longer, True, splits)
    if split is not None:
        return _Word((split.text,), True, splits)
    near = tuple(near_words(terms, word))
    if near and how != "quoted" and len(word) >= _MIN_REPLACED:
        return _Word(near[:1], True, near=near)
    return _Word((word,), False, (), near[0] if near else None, near)


def _set_stop_words_aside(parts: Sequence[_Part]) -> None:
    """Let no stop word find an item if some item has another word."""
    places = [
        (part, at, token.text in STOP_WORDS and part.modes[at] in ("typed", "unfinished"))
        for part in parts
        for at, token in enumerate(part.tokens)
    ]
    if any(part.words[at].known for part, at, is_stop in places if not is_stop):
        for part, at, is_stop in places:
            if is_stop:
                part.words[at] = part.words[at]._replace(role="aside")


def respelt(text: str, tokens: Sequence[Token], words: Sequence[str]) -> str:
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
