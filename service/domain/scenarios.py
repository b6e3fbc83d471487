"""Scenarios: saved questions, in versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scenario:
    """One version of a saved question.

    Versions of a name count from 1, and none is used twice, not even after a deletion.
    """

    name: str
    version: int
    written: int  # microseconds UTC
    body: Mapping[str, Any] | None  # JSON: its question, fields and fallback; None: deleted

    @property
    def question(self) -> str:
        """The name of the question."""
        return str((self.body or {}).get("question", ""))

    @property
    def fallback(self) -> str | None:
        """The scenario that fills up what this one leaves empty."""
        return (self.body or {}).get("fallback")

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields of the question; null stands for one that is left out."""
        given = {name: value for name, value in (self.body or {}).items() if value is not None}
        return {name: given[name] for name in given if name not in {"question", "fallback"}}
