"""Kinds of requests: which wait for their turn, and which have no deadline."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from service.domain.settings import Settings
from service.http.access import Kind
from service.http.app import create_app
from service.http.limits import kind_of
from service.http.scope_keys import BODY, ROW


def rows(count: int) -> list[dict[str, str]]:
    return [{"item_id": f"i{number}"} for number in range(count)]


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("POST", "/v1/score", {"item_ids": ["a"]}, Kind.QUESTION),
        ("POST", "/v1/recommend", {}, Kind.QUESTION),
        ("POST", "/v1/batch", {"requests": []}, Kind.QUESTION),
        ("POST", "/v1/scenarios/home", {}, Kind.QUESTION),
        ("GET", "/v1/items/a/similar", None, Kind.QUESTION),
        ("GET", "/v1/items/a/events", None, Kind.QUESTION),
        ("GET", "/v1/users/u/affinities", None, Kind.QUESTION),
        ("GET", "/v1/users/u/history", None, Kind.QUESTION),
        ("GET", "/v1/items", None, Kind.QUESTION),
        ("POST", "/v1/events", {"events": rows(1)}, Kind.LIGHT),
        ("POST", "/v1/events", {"events": rows(51)}, Kind.BULK),
        ("POST", "/v1/items", {"items": rows(50)}, Kind.CATALOGUE),
        ("POST", "/v1/items", {"items": rows(51)}, Kind.IMPORT),
        ("GET", "/v1/items/a", None, Kind.LIGHT),
        ("PATCH", "/v1/items/a", {}, Kind.CATALOGUE),
        ("POST", "/v1/models/v1/activate", {}, Kind.CATALOGUE),
        ("PUT", "/v1/scenarios/home", {}, Kind.LIGHT),
        ("POST", "/v1/models/train", {}, Kind.LIGHT),
        ("DELETE", "/v1/items/a", None, Kind.CATALOGUE),
        ("GET", "/nothing/here", None, Kind.LIGHT),
        ("GET", "/v1/models/v1/activate", None, Kind.LIGHT),
        ("POST", "/v1/models/v1/more/activate", {}, Kind.LIGHT),
    ],
)
def test_questions_and_single_events_come_before_imports(
    method: str, path: str, body: Any, kind: Kind
) -> None:
    """The kind of a request is that of its route and of the number of rows in its body."""
    held = b"" if body is None else orjson.dumps(body)
    row = create_app(Settings()).state.route_table.of(method, path)
    assert kind_of({ROW: row, BODY: held}) is kind
    assert kind_of({ROW: row, BODY: held.replace(b"item_id", b"item\\u005fid")}) is kind
