"""The least search effort of each index that reaches the recall goal, on queries of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.benchmarks.peers.quality import Rows

GOAL = 0.99  # of the exact best
LADDER = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class Chosen(NamedTuple):
    """The least effort that finds enough, else the greatest that was tried."""

    effort: int
    recall: float  # on the queries that it was chosen on


def least(
    look: Callable[[int], Rows],
    judge: Callable[[Rows], float],
    *,
    goal: float = GOAL,
    ladder: Iterable[int] = LADDER,
) -> Chosen:
    """Try rising efforts until the recall is enough.

    Args:
        look: what is found of each query with an effort (`ef`, clusters probed).
        judge: the recall of what was found.
        goal: the recall that is enough.
        ladder: efforts, rising, at least one.
    """
    chosen = Chosen(0, -1.0)
    for effort in ladder:
        found = judge(look(effort))
        # Where more effort finds no more, the lesser one is as good.
        if found > chosen.recall:
            chosen = Chosen(effort, found)
        if found >= goal:
            break
    return chosen
