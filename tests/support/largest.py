"""The largest questions that the service takes, and a catalogue of 20,000 items to ask them of."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from service.domain.records import Event, Item
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.stores import run_on
from tests.support.untrained import publish_untrained

ITEMS = 20_000
LENGTHS = {"long": 30_000, "heavy": 3_000, "light": 60}  # events of users in questions
_OTHERS = 300  # users of 40 events each
_DAY = 86_400_000_000  # microseconds
_START = 1_700_000_000_000_000  # in November 2023
_WORDS = (
    *("river", "stone", "garden", "winter", "letter", "music", "shadow", "engine", "harbour"),
    *("mirror", "summer", "island", "paper", "copper", "window", "forest", "market", "silver"),
)


class Largest(NamedTuple):
    """One of the largest questions."""

    name: str
    method: str
    path: str
    body: Mapping[str, Any] | None = None


def make_data(target: Path) -> Path:
    """Fill a data directory with items, events and a model without training."""
    rng = random.Random(0)
    catalogue = [
        Item(
            f"item-{number}",
            title=" ".join([*rng.sample(_WORDS, 3), str(number)]),
            description=" ".join(rng.choices(_WORDS, k=30)),
            categories=tuple(rng.sample(_WORDS, 3)),
            tags=(f"tag {number % 500}",),
            attributes={
                "price": rng.random() * 100,
                "brand": f"brand {number % 1_000}",
                "text": " ".join(rng.choices(_WORDS, k=8)) + f" {number}",
                "place": {"lat": rng.uniform(-80, 80), "lon": rng.uniform(-170, 170)},
            },
        )
        for number in range(ITEMS)
    ]
    lengths = {**LENGTHS, **{f"user-{number}": 40 for number in range(_OTHERS)}}
    log = [
        Event(user, f"item-{int(ITEMS * rng.random() ** 2)}", timestamp=_START + step * _DAY // 24)
        for user, length in lengths.items()
        for step in range(length)
    ]

    target.mkdir(parents=True, exist_ok=True)
    run_on(
        SQLiteStore(target / STORE_FILE),
        lambda store: store.put_items(catalogue),
        lambda store: store.append(log),
    )
    publish_untrained(target, [item.item_id for item in catalogue], seed=0)
    return target


def questions() -> list[Largest]:
    """Each question at the bounds of its fields, in several forms if fields exclude one another."""
    parts = [{"field": "title", "contains": f"no such part {n}"} for n in range(199)]
    wide: dict[str, Any] = {"any": parts}
    places = [
        {"field": "attributes.place", "within_km": {"lat": n / 4, "lon": n / 4, "km": 1.0}}
        for n in range(199)
    ]
    near: dict[str, Any] = {"any": places}
    one_in = {"field": "attributes.text", "in": [f"{n} {'x' * 200}" for n in range(1_000)]}
    rules = [
        {"name": f"rule {n}", "when": {"any": parts[3 * n : 3 * n + 3]}, "boost": 0.1 * n}
        for n in range(50)
    ]
    facets = [
        {"field": field, "limit": 1_000}
        for field in (
            *("categories", "tags", "attributes.brand", "attributes.text", "attributes.price"),
            *("published_at", "attributes.place"),
        )
    ]
    fields = ["categories", "tags", "description", *(f"attributes.{n}" for n in range(40))]
    at_most = [
        {"field": field, "count": 1_000}
        for field in ("categories", "tags", "attributes.brand", "attributes.text")
    ]
    pins = [{"item_id": f"item-{n}", "position": n + 1} for n in range(100)]
    session = [{"item_id": f"item-{n * 7 % ITEMS}"} for n in range(10_000)]
    targets = [f"item-{n}" for n in range(1_000)]
    excluded = [f"item-{n}" for n in range(10_000)]
    words = " ".join(f"{_WORDS[n % len(_WORDS)]}x{n}" for n in range(2_500))[:20_000]
    vectors = [[0.5, 0.25]] * 60_000
    steered = {"rules": rules, "at_most": at_most, "facets": facets, "fields": fields}
    every = {"filter": {"field": "attributes.price", "gte": 0}, "limit": 1_000, **steered}
    recommend = {"user_id": "heavy", **every, "pin": pins, "exclude": excluded, "diversity": 1.0}
    history = {"memory": "history", "query": words, "limit": 1_000, "highlight": True}
    asked: dict[str, dict[str, dict[str, Any]]] = {
        "score": {
            "of a filter in 50 rules": {"item_ids": targets, "user_id": "heavy", "rules": rules},
            "long history": {"item_ids": targets, "user_id": "long", "explain": 50},
            "effects": {
                "item_ids": targets[:100],
                "user_id": "heavy",
                "explain": 50,
                "explain_effects": True,
            },
            "exact": {
                "item_ids": targets[:2],
                "user_id": "heavy",
                "explain": 50,
                "explain_exact": True,
            },
            "session": {"item_ids": targets, "history": session},
        },
        "recommend": {
            "contains": {"user_id": "heavy", "filter": wide},
            "distances": {"user_id": "heavy", "filter": near},
            "values": {"user_id": "heavy", "filter": {"all": [one_in] * 4}},
            "every field": recommend,
            "explained": {"user_id": "long", "limit": 1_000, "explain": 50, "exclude_seen": False},
            "explored": {"user_id": "heavy", "limit": 1_000, "explore": 1.0, "diversity": 1.0},
            "session": {"history": session, "limit": 1_000},
        },
        "search": {
            "words": {"query": words, "limit": 1_000, "highlight": True, **steered},
            "for a user": {"query": words, "limit": 1_000, "user_id": "long", "explain": 50},
            "contains": {"query": "river", "filter": wide, "limit": 1_000},
            "list": {
                "sort": [{"field": f"attributes.{n}"} for n in ("text", "price", "brand")],
                "limit": 1_000,
                "offset": 10_000,
                **{name: steered[name] for name in ("at_most", "facets", "fields")},
            },
            "history": {**history, "user_id": "long", "filter": wide, "fields": fields},
        },
        "popular": {
            **{by: {"by": by, **every} for by in ("popular", "trending", "newest", "rated")},
            "contains": {"filter": wide, "limit": 1_000},
        },
        "rows": {
            "page": {
                "user_id": "long",
                "rows": 20,
                "limit": 50,
                "exclude": excluded,
                **steered,
                "filter": every["filter"],
            },
        },
        "attend": {
            "vectors": {
                "memory": {"keys": vectors, "values": [[1.0]] * 60_000},
                "query": {"vector": [1.0, 0.5]},
                "limit": 1_000,
            },
            "catalogue": {
                "memory": {"catalogue": True},
                "query": {"text": words[:4_096]},
                "limit": 1_000,
            },
            "history": {
                "memory": {"user_id": "long"},
                "query": {"item_id": "item-1"},
                "limit": 1_000,
            },
        },
        "items/item-1/similar": {
            "every field": {**every, "pin": pins},
            "contains": {"filter": wide},
        },
        "items/item-1/together": {
            "after": {**every, "pin": pins},
            "basket": {"relation": "basket", **every},
        },
        "batch": {
            "contains": {
                "requests": [
                    {"path": "/v1/recommend", "body": {"user_id": "heavy", "filter": wide}}
                ]
                * 100
            },
            "scores": {
                "requests": [
                    {"path": "/v1/score", "body": {"user_id": "light", "item_ids": targets[:400]}}
                ]
                * 100
            },
            "lists": {
                "requests": [{"path": "/v1/search", "body": {"limit": 1_000, "fields": fields}}]
                * 100
            },
        },
    }
    gets = {
        "audience": "/v1/items/item-1/audience?limit=1000&explain=50",
        "events": "/v1/items/item-1/events?limit=1000",
        "affinities": "/v1/users/long/affinities?limit=1000&field=attributes.text",
        "similar": "/v1/items/item-1/similar?limit=1000",
        "history": "/v1/users/long/history?limit=1000",
        "items": "/v1/items?limit=1000",
        "users": "/v1/users?limit=1000",
    }
    return [
        *(
            Largest(f"{path}: {name}", "POST", f"/v1/{path}", body)
            for path, ways in asked.items()
            for name, body in ways.items()
        ),
        *(Largest(f"GET {name}", "GET", path) for name, path in gets.items()),
    ]
