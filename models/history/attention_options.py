"""Options of attention over a memory, as a request gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from models.attention.clustered.clustered_attention import MAX_ERROR

Mode = Literal["auto", "exact", "coarse"]

# Measured by `make bench`: with the index at hand, coarse retrieval is faster from 60,000 rows on
# for one target and from 100,000 on for many; and it leaves softmax mass behind.
EXACT_UP_TO = 100_000
DEFAULT_K = 256  # rows that coarse retrieval keeps for each head and target


class Crossover(NamedTuple):
    """Items of a long history from which clusters are faster than attending each, by targets."""

    one: float = 30_000  # for one target
    many: float = 10_000  # for `MANY`

    def rows(self, targets: int) -> float:
        """Interpolate for any number of targets, on a line between the logarithms of both."""
        share = min(1.0, math.log(max(1, targets)) / math.log(MANY_TARGETS))
        return math.exp((1 - share) * math.log(self.one) + share * math.log(self.many))


MANY_TARGETS = 100
CROSSOVER = Crossover()


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of attention over a memory.

    Over keys of the catalogue or of a client `exact` attends over every row, `coarse` over the `k`
    rows that FAISS finds, and `auto` is exact up to `exact_up_to` rows. Over a user's memory every
    row is attended, but that clusters may stand for the older events of a long history, to
    `max_error`: with `coarse` wherever they are built, with `auto` from the `crossover` on.
    """

    temperature: float = 1.0  # of the softmax
    hard: bool = False  # the best row of each head instead of the softmax
    exclude_self: bool = False  # a target that is itself in the memory does not see itself
    mode: Mode = "auto"
    k: int | None = None
    probes: int | None = None
    exact_up_to: int = EXACT_UP_TO
    max_error: float = (
        MAX_ERROR  # of contexts, relative, where clusters answer: see `attend_clusters`
    )
    order: int = 2  # of the moments: see `attend_clusters`
    crossover: Crossover = CROSSOVER

    def resolve_mode(self, rows: int) -> Literal["exact", "coarse"]:
        """Resolve `auto` for this many keys, by `exact_up_to`."""
        if self.mode == "auto":
            return "exact" if rows <= self.exact_up_to else "coarse"
        return self.mode


DEFAULT_OPTIONS = AttentionOptions()
