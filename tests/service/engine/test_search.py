"""Re-ranking of search results by a user's memory, and their explanations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import UserMemory, build_memory
from models.ranking.matches import DEFAULTS
from models.ranking.scoring import score
from service.engine import search
from service.engine.explanation import Contribution
from service.engine.search import SearchOutcome, search_answer, search_items
from service.histories.event_columns import EMPTY
from service.snapshots.live_search import SearchSetup
from tests.support import asking
from tests.support.small import encode, past, snapshot

SERVED = snapshot(15)
USER = build_memory(SERVED, past([1, 3], [0, 5]), 9)
NOBODY = build_memory(SERVED, past([], []), 9)


def find(
    text: str,
    limit: int,
    user: UserMemory,
    options: AttentionOptions = DEFAULT_OPTIONS,
    personal: float = 1.0,
) -> SearchOutcome:
    """Search with every reason."""
    query = asking.search(asking.who(explain=50), text, limit, personal_weight=personal, fill=True)
    allowed = SERVED.catalogue.visible
    rows = user.history.rows
    return search_items(
        query,
        SERVED,
        user,
        SearchSetup(DEFAULTS, lambda asked: encode([asked])[0], "", quick=True),
        allowed=allowed,
        options=options,
        events=replace(EMPTY, rows=rows, types=np.zeros_like(rows), type_names=("view",)),
    )


def answer(found: SearchOutcome, requester: asking.Who) -> Any:
    """The answer, with a reason's numbers for its name."""
    row: Any = {}
    named = [tuple(Contribution(row, 0, *reason[1:]) for reason in each) for each in found.reasons]
    answer = search_answer(asking.search(requester, "about"), SERVED, found, named)
    return asking.Told(answer)


@pytest.mark.parametrize("least", [1, 2])
def test_only_the_nearest_items_are_re_ranked(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """A memory re-ranks only the items nearest to the text; only those have reasons.

    That is by their text, and so without a reason.
    """
    monkeypatch.setattr(search, "RERANKED", least)
    moved = 0
    for n in range(15):
        text = f"about {n}"
        plain = find(text, 15, NOBODY).found
        near = plain.rows[:2].tolist()
        total = score(SERVED, USER, np.array(near)).total.numpy()
        added = dict(zip(near, (total - total.mean()) / total.std(), strict=True))
        expected = {
            row: value + added.get(row, 0.0)
            for row, value in zip(plain.rows.tolist(), plain.scores.tolist(), strict=True)
        }
        found = find(text, 2, USER)
        order = sorted(expected, key=lambda row: -expected[row])[:2]
        assert found.found.rows.tolist() == order
        assert found.found.scores == pytest.approx([expected[row] for row in order], abs=1e-4)
        told = answer(found, asking.who("u", explain=50)).items
        for row, reasons, item in zip(order, found.reasons, told, strict=True):
            assert len(reasons) == (2 if row in near else 0)
            assert [reason.weight for reason in item["explanation"]] == [r.weight for r in reasons]
            assert item.get("mass") == (pytest.approx(1) if row in near else None)
            moved += row not in near
    assert moved
