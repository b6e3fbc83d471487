"""The event log in RAM against a list of rows."""

from __future__ import annotations

import numpy as np
import pytest

from models.data import event_log
from models.data.event_log import EventLog, LoggedEvents, of_types

Row = tuple[int, int, int, int, float]


def columns(rows: list[Row]) -> LoggedEvents:
    """Rows of (user, item, type, time, weight) as columns."""
    users, items, types, times, weights = zip(*rows, strict=True) if rows else ((),) * 5
    return LoggedEvents(
        np.array(users, np.int32),
        np.array(items, np.int32),
        np.array(types, np.int32),
        np.array(times, np.int64),
        np.array(weights, np.float32),
    )


def rows_of(events: LoggedEvents) -> list[Row]:
    """Columns as sorted rows."""
    return sorted(zip(*(column.tolist() for column in events), strict=True))


@pytest.mark.parametrize("least", [0, 10, 10_000])
def test_every_selection_is_that_of_a_list(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Appends and rewritten users give the same events as a list, sorted in or beside."""
    monkeypatch.setattr(event_log, "_MIN_RECENT", least)
    rng = np.random.default_rng(least)
    log, rows = EventLog(), list[Row]()
    assert log.span is None
    for _ in range(60):
        gone = rng.choice(8, int(rng.integers(0, 3)) if rng.random() < 0.3 else 0, replace=False)
        new: list[Row] = [
            (*rng.integers([8, 5, 3, 100]).tolist(), 1.0) for _ in range(int(rng.integers(0, 6)))
        ]
        log = log.changed(gone, columns(new))
        rows = [row for row in rows if row[0] not in gone] + new
        assert len(log) == len(rows)
        times = [row[3] for row in rows]
        assert log.span == ((min(times), max(times)) if rows else None)
        since, until = sorted(rng.integers(0, 100, 2).tolist())
        between = [row for row in rows if since < row[3] <= until]
        assert rows_of(log.between(since, until)) == sorted(between)
        assert rows_of(log.between(None, None)) == sorted(rows)
        assert rows_of(log.of_item(3)) == sorted(row for row in rows if row[1] == 3)
        assert log.sizes == (len({row[0] for row in rows}), len({(row[0], row[3]) for row in rows}))
        some = np.array([1, 7, 99])
        assert rows_of(log.of_users(some)) == sorted(row for row in rows if row[0] in some)
        typed = of_types(log.between(None, None), np.array([0, 2, 50]))
        assert rows_of(typed) == sorted(row for row in rows if row[2] != 1)


def test_a_log_does_not_change() -> None:
    """A version of the log stays what it was when there is a later one."""
    first = EventLog().changed(np.zeros(0, np.int32), columns([(1, 2, 0, 5, 1.0)]))
    later = first.changed(np.array([1]), columns([(3, 2, 0, 6, 1.0)]))
    assert rows_of(first.of_item(2)) == [(1, 2, 0, 5, 1.0)]
    assert rows_of(later.of_item(2)) == [(3, 2, 0, 6, 1.0)]
