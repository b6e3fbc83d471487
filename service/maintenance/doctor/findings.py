"""Findings: faults of an installation, with what to do about them."""

from __future__ import annotations

from typing import Literal, NamedTuple

# An error: answers or data are at risk now. A warning: something is likely not as intended.
# A note: nothing is wrong.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(NamedTuple):
    """One fault, in sentences for the operator."""

    code: str  # stable, such as `unknown-items`
    severity: Severity
    what: str
    why: str  # it matters
    todo: str
    namespace: str | None = None  # None: the whole installation
