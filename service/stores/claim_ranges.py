"""Ranges of a user's seqs that imports claim: how they are made, and which import has a seq.

A range may include seqs without an event, since no seq is given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_SEQ_BITS = 32  # of a user's code and a seq in one integer; histories read seqs as uint32


def claim_ranges(places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Iterate over runs of consecutive seqs: the user, the first seq and the last.

    Args:
        places: the user, as any integer, and the seq of each event.
    """
    codes: dict[int, int] = {}
    numbers = [codes.setdefault(user, len(codes)) << _SEQ_BITS | seq for user, seq in places]
    if not numbers:
        return
    users = list(codes)
    ordered = np.sort(np.array(numbers, np.int64))
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts, lasts = ordered[np.append(0, breaks + 1)], ordered[np.append(breaks, -1)]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        yield users[first >> _SEQ_BITS], first % (1 << _SEQ_BITS), last % (1 << _SEQ_BITS)


def find_claimants(ranges: Sequence[tuple[int, int, int]], seqs: Iterable[int]) -> dict[int, int]:
    """Return one import that claims the event, for each of a user's seqs that has any.

    Args:
        ranges: the first seq, the last and the import of each range, ordered by the first.
        seqs: of the events.
    """
    found: dict[int, int] = {}
    place, last, import_no = 0, 0, 0
    for seq in sorted(seqs):
        # Of the ranges that begin up to here, the one that ends last has the seq if any has it.
        while place < len(ranges) and ranges[place][0] <= seq:
            if ranges[place][1] > last:
                _, last, import_no = ranges[place]
            place += 1
        if last >= seq:
            found[seq] = import_no
    return found
