"""Questions as tests write them, and answers by attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from models.catalogue.item_filter import ItemFilter
from service.domain.timestamps import from_rfc3339
from service.engine.engine import Engine
from service.http.routes.questions import QUESTIONS
from service.questions.asked import InlineEventIn, RecommendIn, ScoreIn, SearchIn, SimilarIn
from service.questions.attend import AttendIn, AttendQueryIn, MemoryIn
from service.questions.parts import AtMostIn, FacetIn, PinIn, RetrievalIn, RuleIn, SortIn, VisibleIn
from service.questions.ready import AffinitiesParams, AudienceParams, PopularIn, RowsIn, TogetherIn
from service.runtime.tracing import StageClock

_ROW = ("event_id", "item_id", "title", "type", "timestamp")

Who = Mapping[str, Any]


class About(NamedTuple):
    """A question, and the item or user that it is about."""

    question: Any
    about: str


class Told(dict[str, Any]):
    """An answer whose members are attributes too, None if left out; times are microseconds."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__({name: _told(value) for name, value in answer.items()})
        if isinstance(self.get("timestamp"), str):
            self["timestamp"] = from_rfc3339(self["timestamp"])
        self.__dict__.update(self)  # before the methods of dictionaries, such as `items`

    @property
    def row(self) -> Told:
        """The event that a contribution is of."""
        return Told({name: self[name] for name in _ROW})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


def _told(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() >= {"values", "other"}:  # a facet
        values = tuple((each["value"], each["count"]) for each in value["values"])
        return Told(value | {"values": values})
    if isinstance(value, dict):
        return Told(value)
    return [_told(each) for each in value] if isinstance(value, list) else value


async def ask(engine: Engine, question: Any, stages: StageClock | None = None) -> Any:
    question, about = question if isinstance(question, About) else (question, "")
    (row,) = [row for row in QUESTIONS if row.schema is type(question)]
    return Told(await engine.ask(row.ask, question, stages, about=about))


def made(kind: Any, **members: Any) -> Any:
    """Return a question whose members are given as they are after validation."""
    steered = members.pop("steering", {})
    members |= {name: value for name, value in steered.items() if value}
    if "types" in members and "type" in kind.model_fields:
        members["type"] = [*members.pop("types")]
    return kind.model_construct({*members}, **members)


# ------------------------------------------------------------------------------ questions


def who(user_id: str | None = None, history: Sequence[Any] | None = None, **members: Any) -> Who:
    """Return the members of a question that say whose memory is attended, and how."""
    given = {"user_id": user_id, "history": history, **members}
    return {name: value for name, value in given.items() if value is not None}


NOBODY = who()


def score(asker: Who, item_ids: Sequence[str], **members: Any) -> Any:
    return made(ScoreIn, **asker, item_ids=list(item_ids), **members)


def recommend(asker: Who = NOBODY, limit: int = 20, **members: Any) -> Any:
    return made(RecommendIn, **asker, limit=limit, **members)


def search(asker: Who = NOBODY, query: str = "", limit: int = 20, **members: Any) -> Any:
    return made(SearchIn, **asker, query=query, limit=limit, **members)


def popular(asker: Who = NOBODY, by: str = "popular", **members: Any) -> Any:
    return made(PopularIn, **asker, by=by, **members)


def rows(asker: Who = NOBODY, **members: Any) -> Any:
    return made(RowsIn, **asker, **members)


def similar(item_id: str, **members: Any) -> About:
    return About(made(SimilarIn, **members), item_id)


def together(item_id: str, relation: str = "after", **members: Any) -> About:
    return About(made(TogetherIn, relation=relation, **members), item_id)


def audience(item_id: str, **members: Any) -> About:
    return About(made(AudienceParams, **members), item_id)


def affinities(user_id: str, field: str = "categories", limit: int = 20, **members: Any) -> About:
    return About(made(AffinitiesParams, field=field, limit=limit, **members), user_id)


def attend(memory: Mapping[str, Any], **members: Any) -> Any:
    """Return a question for the bare operator, by a `vector`, an `item_id` or a `text`."""
    query = {name: members.pop(name) for name in ("vector", "item_id", "text") if name in members}
    return made(
        AttendIn, memory=made(MemoryIn, **memory), query=made(AttendQueryIn, **query), **members
    )


# ---------------------------------------------------------------------------------- parts


def inline(item_id: str, type_: str = "view", **members: Any) -> Any:
    return made(InlineEventIn, item_id=item_id, type=type_, weight=1.0, **members)


def visible(**members: Any) -> Any:
    return made(VisibleIn, **members)


def retrieval(mode: str = "auto", **members: Any) -> Any:
    return made(RetrievalIn, mode=mode, **members)


def rule(name: str, when: ItemFilter, boost: float | None = None) -> Any:
    """Return a rule, which buries without a boost."""
    return made(RuleIn, name=name, when=when, boost=boost, bury=boost is None)


def steering(
    rules: Sequence[Any] = (),
    pins: Sequence[Any] = (),
    at_most: Sequence[Any] = (),
) -> Any:
    """Return the members of a question that steer its ranking."""
    return {"rules": rules, "pin": pins, "at_most": at_most}


def pin(item_id: str, position: int) -> PinIn:
    return PinIn(item_id=item_id, position=position)


def quota(field: str, count: int) -> AtMostIn:
    return AtMostIn(field=field, count=count)


def facet(field: str, limit: int = 10) -> FacetIn:
    return FacetIn(field=field, limit=limit)


def order(field: str, *, descending: bool = False) -> SortIn:
    return SortIn(field=field, order="desc" if descending else "asc")
