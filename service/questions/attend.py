"""Body of the bare operator: a memory, a query, and the softmax between them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from service.domain.errors import Invalid
from service.domain.settings import Settings
from service.questions.parts import (
    ALL_EVENTS,
    AUTO,
    RequestTime,
    RetrievalIn,
    Temperature,
    VisibleIn,
)
from service.questions.scalars import INTEGRAL, Body, Id, Limit, Matrix, Numbers, Vector, example

ScorerName = Literal["scaled_dot", "cosine", "additive"]
INDEXED: tuple[ScorerName, ...] = ("scaled_dot", "cosine")  # FAISS finds the rows they score best
MAX_HEADS = 64


class MemoryIn(Body):
    """The attended memory: exactly one of keys with values, a user's memory, the catalogue."""

    keys: Matrix | None = Field(None, description="[n, d]: a key for each row.")
    values: Matrix | None = Field(None, description="[n, v]: a value for each row.")
    bias: Numbers | None = Field(None, description="[n]: added to each row's score.")
    visible: Annotated[list[bool], Field(fail_fast=True)] | None = Field(
        None, description="[n]: true where the row may be attended."
    )
    user_id: Id | None = None
    catalogue: bool | None = Field(
        None,
        description="`true` for the catalogue.",
        json_schema_extra={"anyOf": [{"const": True}, {"type": "null"}]},
    )

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if self.catalogue is False:
            raise Invalid("/catalogue", "must be true or left out")
        inline = [
            name
            for name in ("keys", "values", "bias", "visible")
            if getattr(self, name) is not None
        ]
        kinds = bool(inline) + (self.user_id is not None) + (self.catalogue is not None)
        if kinds != 1:
            raise PydanticCustomError(
                "one_of", "must have exactly one of: keys and values; user_id; catalogue"
            )
        if inline and not {"keys", "values"} <= set(inline):
            raise PydanticCustomError("one_of", "must have keys and values, both of them")
        return self

    @property
    def is_inline(self) -> bool:
        return self.user_id is None and self.keys is not None and self.values is not None

    def check_lengths(self) -> None:
        if self.keys is None:
            return
        n = len(self.keys)
        for name in ("values", "bias", "visible"):
            array = getattr(self, name)
            if array is not None and len(array) != n:
                raise Invalid(
                    f"/memory/{name}", f"has {len(array)} rows where keys has {n}; they must agree"
                )


class AttendQueryIn(Body):
    """The query: exactly one of a vector, an item, a text."""

    vector: Vector | None = None
    item_id: Id | None = None
    text: Annotated[str, Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.vector, self.item_id, self.text)) != 1:
            raise PydanticCustomError("one_of", "must have exactly one of: vector, item_id, text")
        return self


class AttendIn(Body):
    """A memory, a query, and the softmax between them."""

    model_config = example(
        memory={"keys": [[1, 0], [0, 1]], "values": [[1, 2], [3, 4]]},
        query={"vector": [1, 0]},
        temperature=0.5,
    )

    memory: MemoryIn
    query: AttendQueryIn
    scorer: ScorerName = "scaled_dot"
    heads: Annotated[int, Field(ge=1, le=MAX_HEADS), INTEGRAL] | None = Field(
        None,
        description="Number of heads that keys and values are split into; by default one for "
        "vectors of your own, the model's for its memories.",
    )
    temperature: Temperature = 1.0
    hard: bool = Field(False, description="Attend the one best row only: a lookup.")
    retrieval: RetrievalIn = AUTO
    visible: VisibleIn = Field(
        ALL_EVENTS, description="Events of a user's memory that may be attended."
    )
    exclude_self: bool = Field(False, description="Hide the query item's own rows from it.")
    state: bool = Field(
        True,
        description="For a user's memory: the query contains what the model knows of the user, and "
        "rows are biased by their recency, as for a recommendation. False leaves both out, so that "
        "the item, text or vector alone decides which events match.",
    )
    at: RequestTime = None
    limit: Limit = 100

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        """Raise `Invalid` where the arrays disagree, and for fields that would do nothing.

        These are fields about events beside a memory without any, and about the query's own rows
        where it has none.
        """
        self.memory.check_lengths()
        self.retrieval.check_no_history("must be left out: every row is attended, or `k` of them")
        if self.scorer not in INDEXED and self.retrieval.probes is not None:
            named = " or ".join(map(repr, INDEXED))
            why = f"needs the scorer {named}: FAISS has no index for {self.scorer!r}"
            raise Invalid("/retrieval/probes", why)
        if self.exclude_self and (self.query.item_id is None or self.memory.is_inline):
            raise Invalid(
                "/exclude_self", "needs an `item_id`, and a memory that has rows of items"
            )
        for name in ("visible", "at", "state"):
            if name in self.model_fields_set and self.memory.user_id is None:
                raise Invalid(
                    f"/{name}", "needs the memory of a `user_id`, which has events and a state"
                )
