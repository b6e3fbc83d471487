"""Options of attention over a memory, as a request gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "exact", "coarse"]
Retrieved = Literal["exact", "coarse", "lists"]
"""How a memory was attended: every row; the rows that FAISS named; lists of rows by summaries."""

# Field keys of a search up to which `auto` compares every one.
EXACT_UP_TO = 100_000
DEFAULT_K = 256  # rows that coarse retrieval keeps for each head and target
MAX_ERROR = 0.01


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of attention over a memory.

    `exact` attends over every row. `coarse` attends over the `k` rows of largest score that FAISS
    names for each head and target. `auto` attends over every row, or over a long history by the
    summaries of FAISS's lists, with as many rows beside them as `max_error` takes; a search is
    exact up to `exact_up_to` field keys, and coarse beyond.
    """

    temperature: float = 1.0  # of the softmax
    hard: bool = False  # the best row of each head instead of the softmax
    exclude_self: bool = False  # a target that is itself in the memory does not see itself
    mode: Mode = "auto"
    k: int | None = None  # None = DEFAULT_K
    # FAISS's lists that are opened; None = all rows are compared, but in a catalogue's index.
    probes: int | None = None
    exact_up_to: int = EXACT_UP_TO
    max_error: float = MAX_ERROR  # of contexts, relative, at 99 % confidence

    @property
    def rows_kept(self) -> int:
        """Rows that coarse retrieval keeps."""
        return DEFAULT_K if self.k is None else self.k

    def resolve_mode(self, rows: int) -> Literal["exact", "coarse"]:
        """Resolve `auto` for this many keys, by `exact_up_to`."""
        if self.mode == "auto":
            return "exact" if rows <= self.exact_up_to else "coarse"
        return self.mode


DEFAULT_OPTIONS = AttentionOptions()
