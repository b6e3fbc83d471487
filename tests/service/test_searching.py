"""What a memory re-ranks of what a text finds, and what is said of the rest."""

from __future__ import annotations

import numpy as np
import pytest

import models.search
from models.scoring import SOFTMAX, score
from models.user_memory import UserMemory, remember
from service import searching
from service.queries import Answer, Asker, Contribution, SearchQuery
from service.searching import Searched, found_answer, search_items
from tests.models.small import encode, past, snapshot

SERVED = snapshot(15)
USER = remember(SERVED, past([1, 3], [0, 5]), 9)
NOBODY = remember(SERVED, past([], []), 9)


def find(text: str, limit: int, user: UserMemory) -> Searched:
    """What is found, with every reason."""
    query = SearchQuery(Asker(explain=50), text, limit)
    allowed = SERVED.catalogue.listed
    return search_items(query, SERVED, user, encode([text])[0], allowed=allowed, how=SOFTMAX)


def answer(found: Searched, asker: Asker) -> Answer:
    """The answer, with a reason's numbers for its name."""
    named = [
        tuple(Contribution(None, None, "", "", None, *reason[1:]) for reason in each)
        for each in found.reasons
    ]
    return found_answer(asker, SERVED, found, named)


def test_only_the_nearest_items_are_re_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some that are further down come up all the same: by their text, and so without a reason."""
    monkeypatch.setattr(searching, "_PERSONAL", 2)
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
        told = answer(found, Asker("u", explain=50)).items
        for row, reasons, item in zip(order, found.reasons, told, strict=True):
            assert len(reasons) == (2 if row in near else 0)
            assert item.explanation is not None
            assert [reason.weight for reason in item.explanation] == [r.weight for r in reasons]
            assert item.mass == (pytest.approx(1) if row in near else None)
            moved += row not in near
    assert moved


def test_a_memory_that_counts_for_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: the impersonal order, weights and scores."""
    monkeypatch.setattr(models.search, "PERSONAL", 0.0)
    plain, found = (find("about 3", 15, user).found for user in (NOBODY, USER))
    np.testing.assert_array_equal(found.rows, plain.rows)
    np.testing.assert_array_equal(found.weights, plain.weights)
    np.testing.assert_array_equal(found.scores, plain.scores)
    assert found.matched == plain.matched


@pytest.mark.parametrize(
    ("asker", "explained"),
    [
        (Asker(explain=5), False),
        (Asker("u"), False),
        (Asker("u", explain=5), True),
        (Asker(history=(), explain=5), True),
    ],
)
def test_reasons_are_given_to_somebody_who_asks(asker: Asker, explained: bool) -> None:
    """There is a list for each item, though it may be empty, or there is none."""
    found = find("about 3", 4, NOBODY)
    assert [item.explanation for item in answer(found, asker).items] == (
        [()] * 4 if explained else [None] * 4
    )
