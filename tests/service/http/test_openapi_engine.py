"""The OpenAPI document against a real service, with a catalogue, histories and a trained model.

Requests are drawn from the document, with the ids and fields of that catalogue: `test_openapi.py`
draws wrong requests too, and from all strings, which a small fake answers faster.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from service.domain.settings import Settings
from service.http.app import create_app
from tests.support import tiny
from tests.support.server import Server

ITEMS = [item.item_id for item in tiny.items()]
FIELDS = ["title", "categories", "tags", "published_at", "attributes.number", "attributes.none"]
SCENARIOS = ["recommend", "search", "similar", "popular", "together", "rows"]
KNOWN: dict[str, list[Any]] = {
    "user_id": ["u0", "u1", "u2", "u3", "nobody"],
    "from": ["u8", "u9", "nobody"],
    "item_id": [*ITEMS, "no-item"],
    "item_ids": ITEMS,
    "exclude": [*ITEMS, "no-item"],
    "event_id": [f"e{user}-{number}" for user in range(2) for number in range(12)],
    "categories": [*tiny.GENRES, "even", "odd"],
    "tags": tiny.WORDS["space"].split(),
    "type": ["view", "buy", "dislike"],
    "query": ["rocket", "bread ov*", "gitar", "space-01"],
    "name": SCENARIOS,
    "fallback": SCENARIOS,
    "at": [tiny.AT, "2025-12-01T00:00:00+02:00"],
    "field": FIELDS,
    "fields": [*FIELDS[1:], "description", "attributes"],
}
VECTOR = [(-1) ** n / 16 for n in range(Settings().embedding_dim)]
# Objects whose fields depend on each other in ways that the document has no words for.
WHOLE: dict[str, list[Any]] = {
    "FilterIn": [
        {},
        {"field": "categories", "in": ["space", "nothing"]},
        {"field": "attributes.number", "gte": 3, "lt": 9},
        {"any": [{"field": "title", "contains": "o"}, {"none": [{"field": "tags", "eq": "moon"}]}]},
        {"field": "attributes.place", "within_km": {"lat": 52.5, "lon": 13.4, "km": 30}},
        {"categories": {"any": ["music"]}, "attributes": {"language": ["en", "nl"]}},
        {"published": {"until": "2025-12-24T00:00:00Z"}},
    ],
    "RuleIn": [
        {"name": "new", "when": {"field": "categories", "eq": "even"}, "boost": 0.5},
        {"name": "out", "when": {"field": "attributes.number", "lte": 2}, "bury": True},
    ],
    "RetrievalIn": [
        {},
        {"mode": "exact"},
        {"mode": "coarse", "k": 3},
        {"mode": "coarse", "k": 20, "probes": 2},
        {"max_error": 0.1},
    ],
    "AtMostIn": [{"field": "categories", "count": 2}],
    "MemoryIn": [
        {"user_id": "u1"},
        {"user_id": "nobody"},
        {"catalogue": True},
        {"keys": [VECTOR, VECTOR[::-1]], "values": [[1.0], [2.0]], "bias": [0.0, -1.0]},
    ],
    "ScenarioQuestion": [
        {},
        {"user_id": "u2", "limit": 3},
        {"item_id": "music-03", "limit": 2, "filter": {"field": "categories", "eq": "music"}},
        {"query": "soup", "at": tiny.AT},
        {"filter": {"field": "attributes.number", "gt": 4}, "fields": ["tags"]},
    ],
    "AttendQueryIn": [
        {"item_id": "space-01"},
        {"item_id": "no-item"},
        {"text": "bread"},
        {"vector": VECTOR},
    ],
}


def known(schema: Any, values: list[Any]) -> None:
    """Let a schema of strings, or of a list of them, take these values alone."""
    if isinstance(schema, dict):
        if schema.get("type") == "string" and "enum" not in schema:
            schema.clear()
            schema |= {"type": "string", "enum": values}
        for part in [*schema.get("anyOf", []), schema.get("items")]:
            known(part, values)


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with requests of which most name what the service has."""
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    for name, values in WHOLE.items():
        schemas[name] = {"enum": values}
    for name, schema in schemas.items():
        fields = schema.get("properties", {}) if name.endswith("In") else {}
        for field, values in KNOWN.items():
            known(fields.get(field), values)
        for field in {"key", "value", "embedding"} & fields.keys():
            fields[field] = {"enum": [None, VECTOR]}
        for field in {"rules", "at_most"} & fields.keys():
            fields[field]["maxItems"] = 1  # several may not repeat each other
    # Other events than the stored ones, which have other bodies.
    schemas["EventIn"]["properties"]["event_id"] = {"enum": [None, "new-1", "new-2"]}
    questions = {
        name: copy.deepcopy(schemas["TogetherIn" if name == "together" else f"{name.title()}In"])
        for name in SCENARIOS
    }
    for name, saved in questions.items():
        if name in ("similar", "together"):
            saved["properties"]["item_id"] = {"enum": ITEMS}
    for name, saved in questions.items():
        saved["properties"]["question"] = {"enum": [name]}
        saved["properties"]["fallback"] = schemas["ScenarioIn"]["properties"]["fallback"]
        saved["required"] = [*saved.get("required", []), "question"]
    schemas["ScenarioIn"] = {"anyOf": list(questions.values())}
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                known(parameter["schema"], KNOWN.get(parameter["name"], []))
    # Events are deleted before their users.
    document["paths"]["/v1/users/{user_id}"] = document["paths"].pop("/v1/users/{user_id}")
    return document


DOCUMENT = create_app(Settings()).openapi()
SCHEMA = schemathesis.openapi.from_dict(narrowed(DOCUMENT)).exclude(
    path_regex="^/v1/(models|jobs)|^/health|^/metrics"
)
SCHEMA.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE])


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """Serve with a scenario of each question; yields the address."""
    with Server(data) as server:
        with server.client() as client:
            for name in SCENARIOS:
                client.put(f"/v1/scenarios/{name}", json={"question": name}).raise_for_status()
        yield server.url
    assert "Traceback" not in server.log()


@pytest.fixture(scope="module")
def url(world: tiny.World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with the small world and without keys."""
    with serving(world.copy(tmp_path_factory.mktemp("openapi") / "data")) as url:
        yield url


# Requests drawn for each operation; `make fuzz` draws more, and other ones each time.
EXAMPLES = int(os.environ.get("HEED_SCHEMATHESIS_EXAMPLES", "0"))


def drawn(examples: int) -> settings:
    """Draw so many requests of each operation, or as many as the environment says."""
    return settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def conform(case: schemathesis.Case[Any], url: str) -> None:
    """Send a request, and assert that the document has its answer."""
    # Some rules have no words in JSON Schema: fields that go together, bytes of UTF-8.
    excluded = [schemathesis.checks.positive_data_acceptance]
    case.headers.pop("Authorization", None)  # which is drawn, and of no key
    case.call_and_validate(base_url=url, excluded_checks=excluded)


@SCHEMA.exclude(method="DELETE").parametrize()
@drawn(20)
def test_real_answers_conform_to_the_document(case: schemathesis.Case[Any], url: str) -> None:
    """Any well-formed request gets a documented status, media type and body, never a 5xx."""
    conform(case, url)


@SCHEMA.include(method="DELETE").parametrize()
@drawn(20)
def test_real_deletions_conform_to_the_document(case: schemathesis.Case[Any], url: str) -> None:
    """So does any deletion; these come last, since the other requests name what they delete."""
    conform(case, url)
