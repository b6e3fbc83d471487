"""Rows of the fault matrix: a fault, what must hold under it, and a mode that must not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.tiny import World


@dataclass(frozen=True)
class Setup:
    """What a fault is injected into.

    Attributes:
        folder: an empty folder of this row.
        seed: of all that is random in the row.
        scale: factor of the numbers of repetitions; 1 for those of the matrix.
        world: a small data directory with two models, which rows copy.
    """

    folder: Path
    seed: int
    scale: float
    world: World

    def rng(self, purpose: object = "") -> Random:
        """Return a generator of random numbers for one purpose."""
        return Random(f"{self.seed}-{purpose}")

    def times(self, count: int) -> int:
        """Return a number of repetitions by the scale; at least 1."""
        return max(1, round(count * self.scale))

    def fresh(self, name: str) -> Path:
        """Return an empty folder in `folder`."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path


@dataclass(frozen=True)
class Verdict:
    """The outcome of a row.

    Attributes:
        passed: whether what is promised held.
        figure: counts, in words.
        weaker: what the deliberately weaker mode did, in words; None where a row has none.
        weaker_failed: whether the weaker mode broke the promise, which shows that the row can.
    """

    passed: bool
    figure: str
    weaker: str | None = None
    weaker_failed: bool = True

    @property
    def proven(self) -> bool:
        """True if the promise held, and the weaker mode broke it."""
        return self.passed and self.weaker_failed


@dataclass(frozen=True)
class Fault:
    """A row of the matrix."""

    name: str
    title: str
    promise: str
    run: Callable[[Setup], Verdict]
    needs_root: bool = False
