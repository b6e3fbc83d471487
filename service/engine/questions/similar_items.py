"""The answer to a request for similar items."""

from __future__ import annotations

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.ranking.lineup import SteeredRows
from models.ranking.similar_items import comparable, similar, spaces_of
from service.domain.errors import Invalid
from service.domain.item_selection import FilterWarning
from service.domain.queries import Answer, AnswerItem, SimilarQuery, Space
from service.engine.questions.score import item_row
from service.engine.selection.item_selection import count_items, select_items
from service.engine.selection.steering import steer_items

_LACKS: dict[Space, str] = {
    "content": "has neither a text nor an embedding",
    "trained": "was not in the training of the served model",
}


def similar_items(query: SimilarQuery, snapshot: Snapshot) -> Answer:
    """Find the items most similar to one, in the requested space or wherever it has a key.

    Nothing is similar to an item without any key, and a warning says so.

    Raises:
        NotFound: where there is no such item.
        Invalid: where it has no key in the requested space, but has one in another.
    """
    catalogue, row = snapshot.catalogue, item_row(snapshot, query.item_id)
    spaces = spaces_of(snapshot, row)
    if query.space is not None and spaces:
        if query.space not in spaces:
            lacks = _LACKS[query.space]
            raise Invalid(
                "/space", f"must be {spaces[0]!r} or 'both' here: item {query.item_id!r} {lacks}"
            )
        spaces = (query.space,)
    selection = select_items(snapshot, query.filter, query.facets)
    others = None
    if query.facets or query.steering.pins:
        others = comparable(snapshot, row, selection.allowed, spaces)
    steered = steer_items(
        snapshot,
        query.steering,
        allowed=selection.allowed,
        limit=query.limit,
        comparable=others,
    )
    selection = selection.with_warnings(steered.warnings)
    if not spaces:
        lacks = " and ".join(_LACKS.values())
        selection = selection.with_warnings(
            (FilterWarning("/item_id", f"nothing is compared: item {query.item_id!r} {lacks}"),)
        )
    retrieval = query.retrieval
    found = similar(
        snapshot,
        row,
        limit=query.limit,
        allowed=selection.allowed,
        spaces=spaces,
        steering=steered.steering,
        options=AttentionOptions(mode=retrieval.mode, k=retrieval.k, probes=retrieval.probes),
    )
    items: list[AnswerItem] = [
        {
            "item_id": catalogue.vocabulary.id(row),
            "score": float(found.scores[at]),
            "title": catalogue.titles[row],
            "parts": {"similarity": float(found.scores[at])},
            "weight": float(found.weights[at]),
            "spaces": {
                space: {"cosine": near.cosine, "share": near.share}
                for space, near in found.spaces[at].items()
            },
        }
        for at, row in enumerate(found.rows.tolist())
    ]
    if found.boosts is not None:
        for item, added in zip(items, found.boosts.tolist(), strict=True):
            item["score"] += added
            item["parts"]["rules"] = added
    answer = Answer(
        items,
        snapshot.version,
        "coarse" if retrieval.mode == "coarse" else "exact",
        keys_attended=found.keys,
        mass=found.mass,
        spaces=spaces,
    )
    answer = steered.describe(answer, SteeredRows(found.rows, found.moved))
    counted = None if others is None else count_items(snapshot, others, query.facets)
    return selection.described(answer, counted)
