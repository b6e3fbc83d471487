"""Findings: faults of an installation, each in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Literal, NamedTuple, TypeVar

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

    def when(self, condition: Callable[[A, B], object]) -> Check[A, B]:
        """Return the check that finds this under a condition."""
        return Check(self.code, self.severity, self.what, self.why, self.todo, condition)


class Check(NamedTuple, Generic[A, B]):
    """The sentences of a finding, and the condition under which two facts show the fault.

    `when` returns a list with an entry for each finding, or one value; False and None are no fault.
    The entry is `{it}` in the sentences.
    """

    code: str
    severity: Severity
    what: str
    why: str
    todo: str
    when: Callable[[A, B], object]


def run_checks(checks: Iterable[Check[A, B]], a: A, b: B) -> Iterator[Finding]:
    """Yield the findings of checks on two facts, which their sentences call `{a}` and `{b}`."""
    for check in checks:
        result = check.when(a, b)
        if result is None or result is False:
            continue
        for it in result if isinstance(result, list) else [result]:
            yield Finding(*check[:5]).about(it, a=a, b=b)
