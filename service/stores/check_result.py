"""Results of checking a store, whatever holds it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class CheckResult(NamedTuple):
    """One result of a check: a problem, something to know, or what was found intact."""

    level: Literal["ok", "note", "problem"]
    sentence: str
