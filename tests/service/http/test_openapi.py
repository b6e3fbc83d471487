"""The OpenAPI document: complete, and true of the service it describes."""

from __future__ import annotations

import inspect
from typing import Any, cast

import orjson
import pytest
import schemathesis
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, settings

from service.domain.settings import Settings
from service.engine.engine import Engine
from service.http.app import ROUTERS, create_app
from service.http.problems import Problem
from tests.support.http_fake import FakeEngine, serving

# Its limits are wide: what is under test here is the document.
APP = create_app(
    Settings(embedding_dim=4, deadline=10, max_body_bytes=2**26, allowed_hosts="testserver"),
    engine=cast(Engine, FakeEngine()),
)
DOCUMENT = APP.openapi()
OPERATIONS = [
    pytest.param(path, method, operation, id=f"{method} {path}")
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_every_operation_is_documented(path: str, method: str, operation: dict[str, Any]) -> None:
    """Each has a name of its own, a text, a described success and its problems."""
    assert operation["description"]
    assert operation["summary"].endswith((".", "`"))  # a sentence
    assert operation["operationId"].isidentifier()
    statuses = set(operation["responses"])
    assert {"421", "429", "500", "503"} <= statuses
    needs_key = not path.startswith("/health/")
    assert ("401" in statuses) == needs_key
    assert ("403" in statuses) == (needs_key or method != "get")
    if "requestBody" in operation:
        assert {"408", "413", "415", "422"} <= statuses
    (success,) = (status for status in statuses if status < "300")
    if success != "204":
        (content,) = operation["responses"][success]["content"].values()
        assert content["schema"]


def test_each_problem_shows_its_own_body() -> None:
    """The example of a problem has the status that it is of, and all that `Problem` requires."""
    responses = DOCUMENT["components"]["responses"]
    assert {"401", "404", "413", "422", "503"} <= responses.keys()
    details = set()
    for status, response in responses.items():
        (content,) = response["content"].values()
        example = Problem.model_validate(content["example"])
        assert str(example.status) == status
        assert (example.errors is not None) == (status == "422")
        details.add(example.detail)
    assert len(details) == len(responses)


def test_bounds_are_documented() -> None:
    """Numbers have their bounds in the words of JSON Schema, and vectors say what they hold."""

    def nodes(node: Any) -> list[dict[str, Any]]:
        own = [node] if isinstance(node, dict) else []
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        return own + [found for value in inner for found in nodes(value)]

    # pydantic writes these where a bound is no part of the number's own type.
    unknown = {"ge", "le", "gt", "lt", "multiple_of", "min_length", "max_length"}
    assert not [node for node in nodes(DOCUMENT) if "type" in node and unknown & node.keys()]
    limits = [
        parameter["schema"]
        for node in nodes(DOCUMENT["paths"])
        for parameter in node.get("parameters", [])
        if parameter["name"] == "limit"
    ]
    assert len(limits) >= 9
    for schema in limits:
        assert schema["minimum"] == 1
        assert schema["maximum"] in (100, 1000)  # of jobs, and of everything else
    vector = DOCUMENT["components"]["schemas"]["EventIn"]["properties"]["key"]["anyOf"][0]
    assert vector["minItems"] == 1
    assert vector["items"] == {"type": "number", "minimum": -1e12, "maximum": 1e12}


def test_null_is_documented_where_it_is_accepted() -> None:
    """In a body, null stands for what is left out; answers have none. A memory is no `false`."""
    schemas = DOCUMENT["components"]["schemas"]
    filters, memory = schemas["FilterIn"]["properties"], schemas["MemoryIn"]["properties"]
    null = {"type": "null"}
    within = {"$ref": "#/components/schemas/WithinIn"}
    assert filters["field"]["anyOf"][1:] == filters["within_km"]["anyOf"][1:] == [null]
    assert within in filters["within_km"]["anyOf"]
    assert memory["catalogue"]["anyOf"] == [{"const": True}, null]
    assert null not in schemas["AnswerOut"]["properties"]["total"].get("anyOf", ())
    event = schemas["EventIn"]
    for name, own in event["properties"].items():
        assert (null in own.get("anyOf", ())) == (name not in event["required"])


def test_examples_are_accepted() -> None:
    """Every example body in the document is accepted."""
    shown = 0
    with serving(embedding_dim=4) as client:
        client.post("/v1/items", json={"items": [{"item_id": "talk-7"}]})
        for path, operations in DOCUMENT["paths"].items():
            for method, operation in operations.items():
                for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                    for body in _examples(content):
                        url = path.replace("{user_id}", "ada").replace("{item_id}", "talk-7")
                        url = url.replace("{name}", "home")
                        sent = body if isinstance(body, str) else orjson.dumps(body)
                        headers = {"content-type": kind}
                        answer = client.request(method, url, content=sent, headers=headers)
                        assert answer.is_success, (path, answer.text)
                        shown += 1
    assert shown >= 9


def _examples(content: dict[str, Any]) -> list[Any]:
    if "example" in content:
        return [content["example"]]
    name = content["schema"].get("$ref", "").rpartition("/")[2]
    examples: list[Any] = DOCUMENT["components"]["schemas"].get(name, {}).get("examples", [])
    return examples


def test_nothing_runs_in_a_thread_pool() -> None:
    """Every route handler and dependency is a coroutine function."""

    def calls(dependant: Dependant) -> list[Any]:
        own = [dependant.call] if dependant.call else []
        return own + [call for inner in dependant.dependencies for call in calls(inner)]

    routes = [route for router in ROUTERS for route in router.routes]
    assert len(routes) >= 20
    for route in routes:
        assert isinstance(route, APIRoute)
        for call in calls(route.dependant):
            assert inspect.iscoroutinefunction(call), call


def _has_null(body: Any) -> bool:
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return any(each is None or _has_null(each) for each in inner)


@schemathesis.openapi.from_asgi("/openapi.json", APP).parametrize()
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_responses_conform_to_the_document(case: schemathesis.Case[Any]) -> None:
    """Any request gets a documented status, media type and body, never a 5xx."""
    # Some rules have no words in JSON Schema: bytes of UTF-8, lengths that must agree.
    excluded = [schemathesis.checks.positive_data_acceptance]
    if _has_null(case.body):  # null may stand for any member that is left out
        excluded.append(schemathesis.checks.negative_data_rejection)
    case.call_and_validate(excluded_checks=excluded)
