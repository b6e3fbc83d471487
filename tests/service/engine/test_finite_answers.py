"""A number that is not finite fails a question: as JSON it would be null."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from service.engine import attend, popular, recommend, related, rows, search, users
from service.engine.engine import Engine
from service.engine.explanation import Contribution, write_explanation
from tests.support import asking
from tests.support.tiny import NOON, item_id

USER = asking.who("u3", at=NOON)
ITEM = item_id(0, 3)


def score_of_first(entries: Any) -> Any:
    """Return items whose first has no score that is a number."""
    entries[0]["score"] = math.nan
    return entries


def score_of_one(user: Any) -> Any:
    """Return a user of whom the score is no number."""
    return user | {"score": math.nan}


def found(outcome: Any) -> Any:
    """Return matches that are compared with NaN."""
    return replace(outcome, found=replace(outcome.found, scores=outcome.found.scores * math.nan))


def similar(outcome: Any) -> Any:
    """Return similar items of scores of NaN."""
    return replace(outcome, scores=outcome.scores * math.nan)


def ranked(outcome: Any) -> Any:
    """Return popularity that overflowed."""
    return outcome._replace(parts={**outcome.parts, "overflow": outcome.scores + math.inf})


def values_of(name: str) -> Callable[[Any], Any]:
    """Return what makes one number of every value NaN."""
    return lambda answer: ([replace(each, **{name: math.nan}) for each in answer[0]], answer[1])


def context(outcome: Any) -> Any:
    """Return attention whose contexts overflowed."""
    return outcome._replace(context=torch.full_like(outcome.context, math.inf))


@pytest.mark.parametrize(
    ("room", "name", "spoil", "question"),
    [
        (recommend, "scored_items", score_of_first, asking.score(USER, [ITEM])),
        (recommend, "scored_items", score_of_first, asking.recommend(USER)),
        (rows, "scored_items", score_of_first, asking.rows(USER)),
        (search, "search_items", found, asking.search(USER, "a moon rocket", fill=True)),
        (related, "similar", similar, asking.similar(ITEM)),
        (related, "_items", score_of_first, asking.together(ITEM, at=NOON)),
        (popular, "popular", ranked, asking.popular(at=NOON)),
        (users, "audience_user", score_of_one, asking.audience(ITEM, at=NOON)),
        (users, "affinities", values_of("mass"), asking.affinities("u3")),
        (users, "affinities", values_of("score"), asking.affinities("u3")),
        (attend, "attend", context, asking.attend({"catalogue": True}, item_id=ITEM)),
    ],
)
async def test_no_answer_has_a_number_that_is_not_finite(
    trained: Engine,
    monkeypatch: pytest.MonkeyPatch,
    room: Any,
    name: str,
    spoil: Callable[[Any], Any],
    question: Any,
) -> None:
    """Each question is answered, and fails once what it is ranked by is NaN or infinite."""
    real = getattr(room, name)
    assert await asking.ask(trained, question)
    monkeypatch.setattr(room, name, lambda *given, **named: spoil(real(*given, **named)))
    with pytest.raises(ArithmeticError, match="came out as NaN or infinity"):
        await asking.ask(trained, question)


@pytest.mark.parametrize("spoilt", ["weight", "contribution", "effect"])
def test_no_explanation_has_a_number_that_is_not_finite(spoilt: str) -> None:
    """A weight, a contribution or an effect of NaN is not written."""
    row: Any = {}
    reason: Any = Contribution(row, 0, 0.5, 1.0, 0.25)
    assert write_explanation([reason])
    with pytest.raises(ArithmeticError, match=rf"{spoilt}s came out as NaN"):
        write_explanation([reason._replace(**{spoilt: math.nan})])
