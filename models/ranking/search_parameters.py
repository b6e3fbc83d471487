"""Parameters of search scores, which can be fitted to a catalogue or to judgments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast


def _is_number(value: object) -> bool:
    kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind and math.isfinite(cast(float, value))


@dataclass(frozen=True, slots=True)
class SearchParameters:
    """Weights of a match, and the temperature of the softmax over matches.

    Temperature and lexical were chosen on judgments of Cranfield and of SciFact's training queries,
    by which everything near them is as good: from .05 to .12, with .7 to 1.2. Short queries that
    name categories alone are served better by the lower temperatures. `meaning` is fitted to a
    catalogue without judgments; at 0, items rank by BM25 alone.

    Raises ValueError, naming the field, for a value out of range.
    """

    temperature: float = 0.06  # of the scores: two keys .1 apart differ fivefold in weight
    lexical: float = 1.0  # BM25 score of the best item, in cosines
    # Logits of a match in a field relative to one in the title: labels say little.
    fields: Mapping[str, float] = field(default_factory=lambda: {"tags": -1.0, "categories": -3.0})
    # Temperatures of single fields in place of the common one.
    temperatures: Mapping[str, float] = field(default_factory=dict)
    meaning: float = 1.0  # factor of all cosines; 0 = words alone

    def __post_init__(self) -> None:
        for name, value in {"temperature": self.temperature, **self.temperatures}.items():
            if not _is_number(value) or not value > 0:
                raise ValueError(f"{name} must be a temperature greater than 0, not {value!r}")
        for name, value in {"lexical": self.lexical, "meaning": self.meaning}.items():
            if not _is_number(value) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
        for name, value in self.fields.items():
            if not _is_number(value):
                raise ValueError(f"fields: {name} must be a number, not {value!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


DEFAULTS = SearchParameters()
