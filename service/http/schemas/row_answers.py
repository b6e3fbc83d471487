"""Rows of a home page: their documented shape, and their values for JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from service.domain.ready_queries import RowKind, RowReason, RowsAnswer
from service.http.schemas.answers import (
    AnsweredItemOut,
    FacetOut,
    MemoryRows,
    RetrievalOut,
    RowsScanned,
    WarningOut,
    facets_out,
    items_out,
)
from service.http.schemas.rendering import fields_out, present_fields


class RowReasonOut(BaseModel):
    """Why a row is on the page."""

    kind: RowKind = Field(
        description="`because`: one item of the history, or an interest, raises the scores of "
        "these items most; `trending`; `newest`; `again`: the user took them at several times; "
        "`recommended`; `popular`."
    )
    text: str = Field(examples=["Because you watched Alien"], description="A sentence to show.")
    item_id: str | None = Field(None, description="Of `because`: that item.")
    event_ids: list[str] | None = Field(
        None, description="Of `because`: the stored events on it that add most to the scores."
    )
    categories: list[str] | None = Field(
        None, description="Of `newest`: the user's categories, from which these items are."
    )


class RowOut(BaseModel):
    """One row of a page, best items first."""

    reason: RowReasonOut
    items: list[AnsweredItemOut]


class RowsOut(BaseModel):
    """Rows of a page, from one model version; no item is in two of them."""

    rows: list[RowOut]
    model_version: str
    retrieval: RetrievalOut
    rows_scanned: RowsScanned = None
    memory_rows: MemoryRows = None
    degraded: bool
    warnings: list[WarningOut] | None = Field(
        None, description="Left out where there is nothing to say."
    )
    total: int | None = Field(
        None, description="With facets: the number of items that may stand in a row."
    )
    facets: list[FacetOut] | None = Field(None, description="In the order of the request.")
    scenario: str | None = Field(None, description="The scenario that was asked.")
    scenario_version: int | None = None


def rows_out(answer: RowsAnswer) -> dict[str, Any]:
    """Return the values of a `RowsOut`. Raises `ArithmeticError` for a score of NaN."""
    rows = [{"reason": _reason(row.reason), "items": items_out(row.items)} for row in answer.rows]
    facets = None if answer.facets is None else facets_out(answer.facets)
    return present_fields(answer, rows=rows, facets=facets)


def _reason(reason: RowReason) -> dict[str, Any]:
    """Write a reason without what its kind does not have."""
    return {name: value for name, value in fields_out(reason).items() if value}
