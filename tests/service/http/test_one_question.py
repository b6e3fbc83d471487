"""A new question: one file, as this one, and one row in the table of questions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from models.catalogue.item_filter import EVERYTHING
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.engine.pipeline import Request
from service.http import app
from service.http.routes import questions
from service.http.routes.context import Question, routes_of
from service.questions.answers import AnswerOut
from service.questions.parts import FilterField
from service.questions.scalars import Body, Limit
from tests.support import tiny


class AlphabetIn(Body):
    """The first items by title."""

    limit: Limit = 20
    filter: FilterField = EVERYTHING


async def answer_alphabet(request: Request[AlphabetIn]) -> AnswerOut:
    """Return the items that pass the filter, by their titles."""
    question = request.question
    await request.open_snapshot()
    catalogue = request.snapshot.catalogue
    selection = await request.select(question.filter)
    rows = sorted(selection.allowed.nonzero()[0].tolist(), key=lambda row: catalogue.titles[row])
    ids = catalogue.vocabulary.ids_of(rows[: question.limit])
    answer: AnswerOut = {
        "items": [
            {"item_id": name, "title": catalogue.titles[catalogue.row(name)]} for name in ids
        ],
        "model_version": request.snapshot.version,
        "retrieval": "exact",
        "degraded": False,
    }
    selection.describe(answer)
    return request.finish(answer)


ROW = Question(
    "/v1/alphabet",
    "alphabet",
    AlphabetIn,
    answer_alphabet,
    AnswerOut,
    "List items by title.",
    saved="alphabet",
)


def test_a_question_is_a_function_and_a_row(
    world: tiny.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row alone gives it a route, scopes, a place in the document, batches and scenarios."""
    monkeypatch.setattr(questions, "QUESTIONS", (*questions.QUESTIONS, ROW))
    monkeypatch.setattr(app, "ROUTERS", (routes_of((ROW,)), *app.ROUTERS))
    settings = Settings(data=world.copy(tmp_path / "data"), deadline=60)
    even = {"limit": 3, "filter": {"field": "categories", "eq": "even"}}

    async def story() -> None:
        made = app.create_app(settings, engine=await open_engine(settings))
        operation = made.openapi()["paths"]["/v1/alphabet"]["post"]
        assert (operation["summary"], operation["operationId"]) == (ROW.text, ROW.name)
        assert operation["security"] == [{}, {"key": ["read"]}]
        async with (
            made.router.lifespan_context(made),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(made), base_url="http://localhost"
            ) as client,
        ):
            alone = (await client.post("/v1/alphabet", json=even)).json()
            titles = [item["title"] for item in alone["items"]]
            assert titles == sorted(titles)
            assert len(titles) == 3
            (pointer,) = [
                error["pointer"]
                for error in (await client.post("/v1/alphabet", json={"limit": 0})).json()["errors"]
            ]
            assert pointer == "/limit"
            both = {"requests": [{"path": "/v1/alphabet", "body": even}]}
            (one,) = (await client.post("/v1/batch", json=both)).json()["responses"]
            assert one == {"status": 200, "body": alone}
            saved = {"question": "alphabet", **even}
            assert (await client.put("/v1/scenarios/abc", json=saved)).status_code == 200
            asked = (await client.post("/v1/scenarios/abc", json={"limit": 2})).json()
            assert asked["items"] == alone["items"][:2]

    asyncio.run(story())
