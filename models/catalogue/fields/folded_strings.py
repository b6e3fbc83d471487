"""`FoldedStrings`: the strings of a vocabulary joined in blocks, to search many at once."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from models.compute.checkpoint import checkpoint
from models.data.vocabulary import Vocabulary

_BLOCK = 4_096  # strings that are searched in one call, in some tenths of a millisecond


class FoldedStrings:
    """Case-folded strings, folded when a search first needs them and kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Whole ones, which never change, by number: searches on several threads fold them.
        self._blocks: dict[int, tuple[str, list[int]]] = {}

    def containing(self, part: str, count: int) -> NDArray[np.bool_]:
        """Mark which of the first `count` strings contain another, in upper or lower case."""
        # A block that a newer catalogue has completed holds more strings than `count`.
        found, part = np.zeros(count + _BLOCK, np.bool_), part.casefold()
        for first in range(0, count, _BLOCK):
            checkpoint()
            text, starts = self._block(first, count)
            at = text.find(part)
            while at >= 0:
                place = bisect_right(starts, at) - 1
                end = starts[place + 1] - 1 if place + 1 < len(starts) else len(text)
                if at + len(part) <= end:  # not across two strings
                    found[first + place] = True
                    at = end
                at = text.find(part, at + 1)
        return found[:count]

    def _block(self, first: int, count: int) -> tuple[str, list[int]]:
        """Return the strings of a block, a line each, and where each starts."""
        number = first // _BLOCK
        block = self._blocks.get(number)
        if block is not None:
            return block
        last = min(first + _BLOCK, count)
        strings = [one.casefold() for one in self._vocabulary.ids[first:last]]
        starts = list(accumulate((len(one) + 1 for one in strings[:-1]), initial=0))
        block = ("\n".join(strings), starts)
        if len(strings) == _BLOCK:
            self._blocks[number] = block
        return block
