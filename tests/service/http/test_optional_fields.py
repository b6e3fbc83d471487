"""Every optional field of a question changes its answer, or is refused by its name.

The fields are those of the OpenAPI document, nested ones too. Each is changed to a value that must
matter in the small world: `CHANGES` has one for each field, and a field without one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import httpx
import pytest
from pydantic import ValidationError

from service.domain.settings import Settings
from service.http.app import create_app
from service.http.routes.record_bodies import ItemDetails
from service.questions.scalars import Body
from tests.support import tiny
from tests.support.namespaced import NamespacedService

Fields = Mapping[str, Any]
DOCUMENT = create_app(Settings()).openapi()
SCHEMAS = DOCUMENT["components"]["schemas"]
EARLIER = "2025-11-26T00:00:00Z"  # in the middle of the histories
PLACED = ("space-00", "space-01", "space-02", "music-00")  # items with a place
VECTOR = [(-1) ** n / 16 for n in range(Settings().embedding_dim)]
ODD = {"field": "categories", "eq": "odd"}
RULE = {"name": "odd", "when": ODD, "boost": 3}
NEXT = "the cursor of the answer before"


class Question(NamedTuple):
    """A question: its route in the document, the path that is asked, and what is asked there."""

    method: str
    route: str
    path: str
    body: Fields  # of a GET its query parameters
    saved_as: str | None = None  # in a scenario

    def __call__(self, service: NamespacedService, body: Fields) -> httpx.Response:
        if self.method == "get":
            return service.ask("GET", f"{self.path}?{httpx.QueryParams(dict(body))}")
        return service.ask("POST", self.path, body)


def about(kind: str, id_: str, name: str, method: str, body: Fields, saved: str = "") -> Question:
    route = f"/v1/{kind}s/{{{kind}_id}}/{name}"
    return Question(method, route, f"/v1/{kind}s/{id_}/{name}", body, saved or None)


def post(path: str, body: Fields, saved: str = "") -> Question:
    return Question("post", path, path, body, saved or None)


ADA = {"user_id": "u0", "at": tiny.AT}
VECTORS = {
    "keys": [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0]],
    "values": [[row, -row] for row in range(6)],
}
QUESTIONS = {
    "score": post("/v1/score", ADA | {"item_ids": [f"space-{n:02}" for n in range(9)]}),
    "recommend": post("/v1/recommend", ADA | {"limit": 10}, "recommend"),
    "search of a user": post("/v1/search", ADA | {"query": "rocket moon", "limit": 10}, "search"),
    "search": post("/v1/search", {"query": "rocket moon", "limit": 10}),
    "search of a history": post(
        "/v1/search",
        ADA | {"query": "rocket moon", "memory": "history", "limit": 50, "fill": True},
        "search",
    ),
    "list": post("/v1/search", {"sort": [{"field": "attributes.number"}], "limit": 10}),
    "list of matches": post(
        "/v1/search",
        {"query": "rocket moon", "sort": [{"field": "attributes.number"}], "limit": 10},
    ),
    "similar": about("item", "space-03", "similar", "post", {"limit": 10}, "similar"),
    "similar by address": about("item", "space-03", "similar", "get", {"limit": 10}),
    "attend vectors": post("/v1/attend", {"memory": VECTORS, "query": {"vector": [3, 2, 1, 0]}}),
    "attend a user": post(
        "/v1/attend",
        {"memory": {"user_id": "u0"}, "query": {"item_id": "space-03"}, "at": tiny.AT},
    ),
    "attend the catalogue": post(
        "/v1/attend", {"memory": {"catalogue": True}, "query": {"item_id": "space-03"}}
    ),
    "popular": post("/v1/popular", {"at": tiny.AT}, "popular"),
    "rows": post("/v1/rows", ADA | {"rows": 4, "limit": 5}, "rows"),
    "together": about("item", "space-03", "together", "post", {"at": tiny.AT}, "together"),
    "together by address": about("item", "space-03", "together", "get", {"at": tiny.AT}),
    "audience": about("item", "space-03", "audience", "get", {"at": tiny.AT}),
    "affinities": about("user", "u0", "affinities", "get", {"at": tiny.AT}),
}
# Routes that carry questions, which have tests of their own below.
CARRIERS = {("post", "/v1/batch"), ("post", "/v1/scenarios/{name}")}


class Change(NamedTuple):
    """The fields of an object before and after a change of one of them."""

    before: Fields
    after: Fields


def to(**fields: Any) -> Callable[[str, Fields], Change]:
    """Change the field to the value of its name here; the others stand in both objects."""
    # `in` and the like are no names of arguments.
    named = {name.rstrip("_"): value for name, value in fields.items()}

    def change(field: str, own: Fields) -> Change:
        beside = {name: value for name, value in named.items() if name != field}
        return Change({**own, **beside}, {**own, **named})

    return change


def pair(before: Fields, after: Fields) -> Callable[[str, Fields], Change]:
    """Change the whole object, or these of its fields."""
    return lambda _, own: Change({**own, **before}, {**own, **after})


def only(before: Fields, after: Fields) -> Callable[[str, Fields], Change]:
    return lambda *_: Change(before, after)


def condition(**fields: Any) -> Callable[[str, Fields], Change]:
    """A filter instead of none."""
    return only({}, {name.rstrip("_"): value for name, value in fields.items()})


def number(**fields: Any) -> Callable[[str, Fields], Change]:
    return condition(field="attributes.number", **fields)


# Values by question and field, by the schema of an object and its field, or by the field only; the
# first of these that is here holds.
CHANGES: dict[str, Callable[[str, Fields], Change]] = {
    # the requester
    "user_id": to(user_id="u1"),
    "popular: user_id": pair({"exclude_seen": True, "user_id": "u1"}, {"user_id": "u0"}),
    "history": to(history=[{"item_id": "music-03"}]),
    "InlineEventIn.type": to(type="dislike"),
    "InlineEventIn.weight": to(weight=9),
    "InlineEventIn.timestamp": to(timestamp="2025-11-20T00:00:00Z"),
    "VisibleIn.since": to(since=EARLIER),
    "VisibleIn.until": to(until=EARLIER),
    "VisibleIn.types": to(types=["like"]),
    "VisibleIn.categories": to(categories=["odd"]),
    "at": to(at=EARLIER),
    # attention
    "RetrievalIn.mode": to(mode="coarse"),
    "RetrievalIn.k": to(k=1, mode="coarse"),
    "RetrievalIn.probes": to(probes=1, mode="coarse", k=40),
    **{
        f"{name}: RetrievalIn.probes": to(probes=1, mode="coarse", k=200)
        for name in ("search", "search of a user", "list of matches")
    },
    "RetrievalIn.max_error": to(max_error=1),
    "retrieval": to(retrieval="coarse"),
    "k": to(k=1, retrieval="coarse"),
    "probes": to(probes=1, k=40, retrieval="coarse"),
    "max_error": to(max_error=1),
    "temperature": to(temperature=0.2),
    "hard": to(hard=True),
    "exclude_self": to(exclude_self=True),
    "recommend: exclude_self": to(exclude_self=True, exclude_seen=False, limit=60),
    "explain": to(explain=2),
    "audience: explain": to(explain=1),
    "explain_effects": to(explain_effects=True, explain=2, limit=3),
    "score: explain_effects": to(explain_effects=False, explain=2),
    "explain_exact": to(explain_exact=True, explain=2, limit=3),
    "score: explain_exact": to(explain_exact=True, explain=2, explain_effects=False),
    # items
    "limit": to(limit=2),
    "exclude_seen": to(exclude_seen=False),
    "popular: exclude_seen": to(exclude_seen=True, user_id="u0"),
    "exclude": to(exclude=[item.item_id for item in tiny.items()[:30]]),
    "diversity": to(diversity=1),
    "rules": to(rules=[RULE]),
    "RuleIn.boost": to(boost=50),
    "RuleIn.bury": only(RULE, {"name": "odd", "when": RULE["when"], "bury": True}),
    "RuleIn.from": only(RULE, {**RULE, "from": "2100-01-01T00:00:00Z"}),
    "RuleIn.until": only(RULE, {**RULE, "until": "2000-01-01T00:00:00Z"}),
    "pin": to(pin=[{"item_id": "space-11", "position": 1}]),
    "at_most": to(at_most=[{"field": "categories", "count": 1}]),
    "explore": to(explore=0.5, seed=1),
    "seed": pair({"explore": 0.5, "seed": 1}, {"explore": 0.5, "seed": 2}),
    "facets": to(facets=[{"field": "categories"}]),
    "FacetIn.limit": to(limit=1),
    "fields": to(fields=["categories"]),
    "categories_any": to(categories_any=["odd"]),
    "categories_all": to(categories_all=["odd"]),
    "categories_none": to(categories_none=["odd"]),
    # filters
    "FilterIn.all": condition(all=[ODD]),
    "FilterIn.any": condition(any=[ODD]),
    "FilterIn.none": condition(none=[ODD]),
    "FilterIn.field": condition(**ODD),
    "FilterIn.eq": number(eq=3),
    "FilterIn.in": number(in_=[3, 4]),
    "FilterIn.gt": number(gt=3),
    "FilterIn.gte": number(gte=3),
    "FilterIn.lt": number(lt=4),
    "FilterIn.lte": number(lte=4),
    "FilterIn.exists": condition(field="attributes.place", exists=True),
    "FilterIn.contains": condition(field="title", contains="moon"),
    "FilterIn.within_km": condition(
        field="attributes.place", within_km={"lat": 52.5, "lon": 13.4, "km": 30}
    ),
    "FilterIn.attributes": condition(attributes={"language": "en"}),
    "CategoriesIn.any": to(any=["odd"]),
    "CategoriesIn.all": to(all=["odd"]),
    "CategoriesIn.none": to(none=["odd"]),
    "PublishedIn.since": to(since="2025-12-24T00:00:00Z"),
    "PublishedIn.until": to(until="2025-12-24T00:00:00Z"),
    # search
    "query": to(query="soup"),
    "personal_weight": to(personal_weight=0),
    "highlight": to(highlight=True),
    "memory": to(memory="history", query="rocket moon", **ADA),
    "search of a history: memory": to(memory="catalogue"),
    "sort": to(sort=[{"field": "title"}]),
    "SortIn.order": to(order="desc"),
    "offset": to(offset=3),
    "cursor": to(cursor=NEXT, limit=2),
    "fill": to(fill=True, limit=60),
    "min_score": to(min_score=1_000),
    "search of a history: fill": to(fill=False),
    "search of a history: min_score": pair({"fill": False}, {"fill": False, "min_score": 1_000}),
    # ready questions
    "space": to(space="content"),
    "by": to(by="newest"),
    "window": to(window="33d"),
    "half_life": to(half_life="1d"),
    "type": to(type="buy"),
    "relation": to(relation="basket"),
    "rows": to(rows=2),
    "field": to(field="tags"),
    # attend
    "MemoryIn.bias": to(bias=[3, 0, 0, 0, 0, 0]),
    "MemoryIn.visible": to(visible=[False, True, True, True, True, True]),
    "MemoryIn.keys": to(keys=VECTORS["keys"][::-1]),
    "MemoryIn.values": to(values=[[1]] * 6),
    "MemoryIn.user_id": to(user_id="u1"),
    "MemoryIn.catalogue": to(catalogue=True),
    "AttendQueryIn.vector": only({"item_id": "space-03"}, {"vector": VECTOR}),
    "AttendQueryIn.item_id": to(item_id="music-03"),
    "AttendQueryIn.text": only({"item_id": "space-03"}, {"text": "bread"}),
    "attend the catalogue: MemoryIn.catalogue": only({"catalogue": True}, {"user_id": "u0"}),
    "attend vectors: AttendQueryIn.vector": to(vector=[0, 1, 2, 3]),
    "attend vectors: AttendQueryIn.item_id": only(
        {"vector": [3, 2, 1, 0]}, {"item_id": "space-03"}
    ),
    "attend vectors: AttendQueryIn.text": only({"vector": [3, 2, 1, 0]}, {"text": "bread"}),
    "scorer": to(scorer="cosine"),
    "heads": to(heads=2),
    "state": to(state=False),
}
# Objects with what they must have, where a question does not give them.
OBJECTS: dict[str, Fields] = {
    "InlineEventIn": {"item_id": "music-03"},
    "RuleIn": RULE,
    "FacetIn": {"field": "categories"},
    "SortIn": {"field": "attributes.number"},
}
# Objects that stand beside another one in a list: the weight of a single event is no matter.
LISTED: dict[str, list[Fields]] = {"InlineEventIn": [{"item_id": "cooking-05"}]}

# Fields that questions refuse by their names, beside what else they ask for; of an object with all
# of its fields.
EVENTS = {"visible", "at", "exclude_self", "explain", "explain_effects", "explain_exact"}
REFUSED: dict[str, set[str]] = {
    # A list attends nobody, so that its `sort` is refused beside a user.
    "search of a user": {"sort"},
    "search of a history": {
        *(*EVENTS - {"visible", "at"}, "personal_weight", "facets"),
        *("retrieval.max_error", "retrieval.probes"),
        *("sort", "offset", "cursor", "rules", "pin", "at_most"),
    },
    "search": {*EVENTS, "personal_weight", "retrieval.max_error"},
    "list": {
        *("memory", *EVENTS, "personal_weight", "user_id", "history", "retrieval", "highlight"),
        *("temperature", "hard", "rules", "pin", "fill", "min_score"),
    },
    "list of matches": {
        *("memory", *EVENTS, "personal_weight", "user_id", "history", "retrieval.max_error"),
        *("temperature", "hard", "rules", "pin", "fill", "min_score"),
    },
    "similar": {"retrieval.max_error"},
    "similar by address": {"max_error"},
    "affinities": {"max_error"},
    # Another kind of memory, or of query, stands in place of the one that is given, not beside it.
    "attend vectors": {
        *("memory.user_id", "memory.catalogue", "query.item_id", "query.text", "visible", "at"),
        *("exclude_self", "retrieval.max_error", "state"),
    },
    "attend a user": {
        *("memory.keys", "memory.values", "memory.bias", "memory.visible", "memory.catalogue"),
        *("heads", "retrieval.max_error"),
    },
    "attend the catalogue": {
        *("memory.keys", "memory.values", "memory.bias", "memory.visible", "memory.user_id"),
        *("visible", "at", "retrieval.max_error", "state"),
    },
}
# Fields that do nothing in so small a world, and why.
IDLE: dict[tuple[str, str], str] = dict.fromkeys(
    [
        *((name, "retrieval.max_error") for name in ("score", "recommend", "rows")),
        ("search of a user", "retrieval.max_error"),
        ("audience", "max_error"),
    ],
    "every exact answer meets it, and short memories are attended exactly",
) | {("search of a history", "history.weight"): "a text matches an event whatever its weight"}


class Case(NamedTuple):
    """A question with and without one change."""

    question: str
    field: str  # with the names of the objects that it is in
    change: Change | None  # None: `CHANGES` has none


def resolved(schema: Fields) -> tuple[str, bool] | None:
    """The name of the object that a schema is, or is a list of; and whether it is a list."""
    for part in [schema, *schema.get("anyOf", [])]:
        is_list = part.get("type") == "array"
        name = (part["items"] if is_list else part).get("$ref", "").rpartition("/")[2]
        if "properties" in SCHEMAS.get(name, {}):
            return name, is_list
    return None


def cases(name: str, schema: str, own: Fields, seen: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the changes of the optional fields of an object, and of the objects in it."""
    document = SCHEMAS[schema]
    for field, kind in document["properties"].items():
        inner = resolved(kind)
        parts: list[Case] = []
        if inner is not None and inner[0] not in {schema, *seen}:
            of_kind, is_list = inner
            given: Any = own.get(field) or {}
            base = {**OBJECTS.get(of_kind, {}), **(given[0] if given and is_list else given)}
            # A rule's filter is another one, not the same with more conditions.
            base = {} if of_kind == "FilterIn" else base
            parts = list(cases(name, of_kind, base, (*seen, schema)))
        for _, path, change in parts:
            held = None
            if change is not None and inner is not None:
                more = LISTED.get(inner[0], [])
                before, after = ([each, *more] if inner[1] else each for each in change)
                held = Change({**own, field: before}, {**own, field: after})
            yield Case(name, f"{field}.{path}", held)
        is_leaf = not parts or (inner is not None and inner[1])
        if is_leaf and field not in document.get("required", []):
            yield Case(name, field, changed(name, schema, field, own))


def changed(name: str, schema: str, field: str, own: Fields) -> Change | None:
    for key in (f"{name}: {schema}.{field}", f"{name}: {field}", f"{schema}.{field}", field):
        if key in CHANGES:
            return CHANGES[key](field, own)
    return None


def all_cases() -> Iterator[Case]:
    for name, question in QUESTIONS.items():
        operation = DOCUMENT["paths"][question.route][question.method]
        if question.method == "get":
            for each in operation["parameters"]:
                if each["in"] == "query":
                    yield Case(name, each["name"], changed(name, "", each["name"], question.body))
        else:
            content = operation["requestBody"]["content"]["application/json"]["schema"]
            yield from cases(name, content["$ref"].rpartition("/")[2], question.body)


CASES = list(all_cases())


@pytest.fixture(scope="module")
def services(
    world: tiny.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[bool, NamespacedService]]:
    """The small world with its model and without, and with places of some items."""
    place = {"place": {"lat": 52.5, "lon": 13.4}}
    items = [{"item_id": each, "attributes": place} for each in PLACED]
    with asyncio.Runner() as runner, ExitStack() as stack:
        made = {}
        for trained in (True, False):
            data = world.copy(tmp_path_factory.mktemp("fields") / "data", trained=trained)
            made[trained] = stack.enter_context(closing(NamespacedService(runner, data)))
            stored = made[trained].ask("POST", "/v1/items", {"items": items, "update": True})
            assert stored.is_success
        yield made


@pytest.fixture
def service(services: dict[bool, NamespacedService], case: Case) -> NamespacedService:
    # The queries of so little a training are all alike.
    return services[case.question != "attend a user"]


def changed_names(question: Question, sent: Fields) -> set[str]:
    """The fields of a body that are not as the question has them."""
    return {name for name, value in sent.items() if question.body.get(name) != value}


def sent_after(change: Change, before: httpx.Response) -> Fields:
    if change.after.get("cursor") != NEXT:
        return change.after
    return {**change.after, "cursor": before.json().get("cursor", "none")}


def is_listed(fields: Collection[str], field: str) -> bool:
    """Whether a field is among others, or in an object that is."""
    steps = field.split(".")
    return any(".".join(steps[: count + 1]) in fields for count in range(len(steps)))


def test_every_question_is_asked() -> None:
    """The walk goes through all routes that ask."""
    asked = {(each.method, each.route) for each in QUESTIONS.values()}
    documented = {
        (method, route)
        for route, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
        if {"ask", "attend"} & {*operation["tags"]}
        or route.endswith("/similar")
        or (method, route) in CARRIERS
    }
    assert documented == asked | CARRIERS


def test_exceptions_are_of_fields() -> None:
    listed = {(name, field) for name, fields in REFUSED.items() for field in fields}
    for name, field in (*listed, *IDLE):
        assert any(case.question == name and is_listed({field}, case.field) for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.question}: {case.field}")
def test_a_field_matters_or_is_refused(service: NamespacedService, case: Case) -> None:
    """The answer with a field is another one, or a 422 that points at the field."""
    question, place = QUESTIONS[case.question], (case.question, case.field)
    assert case.change is not None, f"CHANGES has no value that matters for {case.field}"
    before = question(service, case.change.before)
    sent = sent_after(case.change, before)
    after = question(service, sent)
    refusals = [answer for answer in (before, after) if answer.status_code == 422]
    if is_listed(REFUSED.get(case.question, ()), case.field):
        pointer = refusals[0].json()["errors"][0]["pointer"]
        names = changed_names(question, sent)
        assert pointer.split("/")[1] in names | ({*ADA} if "sort" in names else set())
        return
    assert not refusals, refusals[0].text
    assert before.status_code == after.status_code == 200
    assert (before.json() == after.json()) is (place in IDLE)
    assert question(service, case.change.before).json() == before.json()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.question}: {case.field}")
def test_a_batch_and_a_scenario_carry_every_field(service: NamespacedService, case: Case) -> None:
    """Within a batch, and saved in a scenario, a question has the answer that it has alone."""
    question, change = QUESTIONS[case.question], case.change
    if change is None or change.after.get("cursor") == NEXT:
        return
    alone = question(service, change.after)
    batched = {"path": question.path, "body": change.after}
    (carried,) = service.ask("POST", "/v1/batch", {"requests": [batched]}).json()["responses"]
    assert carried["status"] == alone.status_code
    if alone.is_success:
        assert carried["body"] == alone.json()
    if question.saved_as is None:
        return
    fields = {**change.after, "question": question.saved_as}
    if "/items/" in question.path:
        fields["item_id"] = question.path.split("/")[3]
    saved = service.ask("PUT", "/v1/scenarios/walk", fields)
    assert saved.status_code == alone.status_code, saved.text
    if alone.is_success:
        answer = service.ask("POST", "/v1/scenarios/walk", {}).json()
        named = {"scenario": "walk", "scenario_version": saved.json()["version"]}
        assert answer == alone.json() | named


# ---------------------------------------------------------------------------- null

# What each body needs; those that are not here need nothing.
NEEDED: dict[str, Fields] = {
    "AtMostIn": {"field": "tags", "count": 1},
    "AttendIn": {"memory": {"user_id": "u"}, "query": {"item_id": "a"}},
    "AttendQueryIn": {"item_id": "a"},
    "BatchIn": {"requests": []},
    "BatchedIn": {"path": "/v1/score"},
    "EventIn": {"user_id": "u", "item_id": "i"},
    "EventsIn": {"events": []},
    "FacetIn": {"field": "tags"},
    "FilterIn": {"field": "attributes.price", "lte": 5},
    "InlineEventIn": {"item_id": "i"},
    "ItemIn": {"item_id": "i"},
    "ItemsIn": {"items": []},
    "MemoryIn": {"user_id": "u"},
    "MergeIn": {"from": "u"},
    "PinIn": {"item_id": "i", "position": 1},
    "RuleIn": {"name": "r", "when": ODD, "boost": 1},
    "ScenarioIn": {"question": "popular"},
    "ScoreIn": {"item_ids": ["i"]},
    "SortIn": {"field": "title"},
    "WithinIn": {"lat": 1, "lon": 1, "km": 1},
}


def bodies(base: type[Body] = Body) -> Iterator[type[Body]]:
    """Yield every class of a body, and of the objects in one."""
    for own in base.__subclasses__():
        yield own
        yield from bodies(own)


OTHERS = [own for own in bodies() if not issubclass(own, ItemDetails)]  # of which null removes


@pytest.mark.parametrize("body", OTHERS, ids=lambda own: str(own.__name__))
def test_null_stands_for_a_member_that_is_left_out(body: type[Body]) -> None:
    """Clients that write every member may send null for what they do not set."""
    needed = NEEDED.get(body.__name__, {})
    for name, field in body.model_fields.items():
        member = field.alias or name
        if member in needed or (body.__name__, member) == ("FilterIn", "eq"):  # a value there
            continue
        left_out = body.model_validate(dict(needed))
        assert body.model_validate({**needed, member: None}) == left_out, member
    for member in needed.keys() - {"field", "lte", "boost", "user_id", "item_id"}:
        with pytest.raises(ValidationError):
            body.model_validate({**needed, member: None})
