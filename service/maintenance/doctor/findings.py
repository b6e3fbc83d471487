"""Findings: faults of an installation, each in sentences that say what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

# An error: answers or data are at risk now. A warning: something is likely not as intended.
# A note: nothing is wrong.
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

A = TypeVar("A")
B = TypeVar("B")


class Finding(NamedTuple):
    """One fault, in sentences for the operator."""

    code: str  # stable, such as `unknown-items`
    severity: Severity
    what: str
    why: str  # it matters
    todo: str
    namespace: str | None = None  # None: the whole installation

    def about(self, it: object, **facts: object) -> Finding:
        """Return the finding with `{it}` and other facts filled into its sentences."""
        what, why, todo = (text.format(it=it, **facts) for text in self[2:5])
        return self._replace(what=what, why=why, todo=todo)


# Conditions by the name of a finding: each takes two facts, and returns a list with an entry for
# each finding, or one value; False and None are no fault. The entry is `{it}` in the sentences.
Checks = Mapping[str, Callable[[A, B], object]]


def _read_findings() -> dict[str, Finding]:
    rows = tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))
    return {name: Finding(name.partition("/")[0], **row) for name, row in rows.items()}


FINDINGS: Mapping[str, Finding] = _read_findings()


def run_checks(checks: Checks[A, B], a: A, b: B) -> Iterator[Finding]:
    """Yield the findings of checks on two facts, which their sentences call `{a}` and `{b}`."""
    for name, condition in checks.items():
        result = condition(a, b)
        if result is None or result is False:
            continue
        for it in result if isinstance(result, list) else [result]:
            yield FINDINGS[name].about(it, a=a, b=b)
