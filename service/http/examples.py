"""Requests to try: made of users and items that are really there."""

from __future__ import annotations

import json
import shlex

from service.engine.engine import Engine
from service.engine.recommend import recommend_items
from service.questions.asked import RecommendIn


async def suggest(engine: Engine) -> list[str]:
    """Curl commands against `BASE`, each after a line that says what it asks."""
    user = await engine.typical_user()
    lines: list[str] = []
    if user is not None:
        lines += [
            f"\nWhat should user {user} see, and which events made it so?",
            _curl("/v1/recommend", {"user_id": user, "limit": 3, "explain": 2}),
        ]
        best = await engine.ask(recommend_items, RecommendIn(user_id=user, limit=1))
        if best["items"]:
            target = best["items"][0]["item_id"]
            lines += [
                "\nHow does one item score, part by part?",
                _curl("/v1/score", {"user_id": user, "item_ids": [target], "explain": 3}),
                "\nTell it something new, and ask again:",
                _curl("/v1/events", {"events": [{"user_id": user, "item_id": target}]}),
            ]
    lines += [
        "\nSearch by text:",
        _curl("/v1/search", {"query": "space adventure", "limit": 3}),
    ]
    return lines


def _curl(path: str, body: object) -> str:
    text = shlex.quote(json.dumps(body))
    return f"  curl -s BASE{path} -H 'content-type: application/json' -d {text}"
