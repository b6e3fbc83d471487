"""Folding: the one form in which texts and queries are compared, and what it was made of.

Compatibility characters and letter case are folded as Unicode does (NFKC, case folding), so that it
does not matter how a text was encoded or typed. Marks that writers leave out are removed: accents,
Hebrew points, Arabic vowels. The dotted and the dotless i are one letter, since the case of neither
can be told without the language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

# Breve and diaeresis make letters of their own in Cyrillic: й, ў, ї. Vowel signs of Indic scripts,
# and the voiced marks of Japanese, are no decoration.
_MARKS = re.compile(
    "(?<![иу])\u0306|(?<!і)\u0308|[\u0300-\u0305\u0307\u0309-\u036f\u0483-\u0489\u0591-\u05bd"
    "\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc"
    "\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u08ca-\u08e1\u08e3-\u08ff\u1ab0-\u1aff\u1dc0-\u1dff"
    "\u20d0-\u20ff\ufe20-\ufe2f]"
)
_FOREIGN = re.compile("[\x00-\x7f]?[^\x00-\x7f]+")  # a mark may follow a letter of ASCII
# What joins the character before it: vowels and finals of Hangul, half-width marks of Japanese.
_JOINING = re.compile("[\u1160-\u11ff\ud7b0-\ud7ff\uff9e\uff9f\uffa0-\uffdc]")


class Folded(NamedTuple):
    """A folded text, and where each of its characters stood in the text that was folded."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]


def fold(text: str) -> str:
    """Return a text folded."""
    return (text if text.isascii() else _FOREIGN.sub(_fold_match, text)).lower()


def fold_aligned(text: str) -> Folded:
    """Return `fold(text)` with the places of its characters in the text."""
    if text.isascii():
        return Folded(text.lower(), range(len(text)), range(1, len(text) + 1))
    parts = [part for run in _runs(text) for part in run]
    folded = [_fold_run(part) for part in parts]
    ends = list(accumulate(map(len, parts)))
    spans = [
        (end - len(part), end)
        for part, own, end in zip(parts, folded, ends, strict=True)
        for _ in own
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


def _fold_match(run: re.Match[str]) -> str:
    return _fold_run(run[0])


@lru_cache(65_536)
def _fold_run(run: str) -> str:
    if run.isascii():
        return run.lower()
    letters = unicodedata.normalize("NFKC", run).casefold().replace("ı", "i")
    bare = _MARKS.sub("", unicodedata.normalize("NFKD", letters))
    return unicodedata.normalize("NFKC", bare).lower()
