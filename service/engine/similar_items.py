"""The answer to a request for similar items."""

from __future__ import annotations

from models.catalogue.snapshot import Snapshot
from models.ranking.similar_items import similar, spaces_of
from service.domain.errors import Invalid, NotFound
from service.domain.queries import Answer, AnswerItem, SimilarQuery, Space
from service.engine.recommend import allowed_items

_LACKS: dict[Space, str] = {
    "content": "has neither a text nor an embedding",
    "trained": "was not in the training of the served model",
}


def spaces_to_compare(query: SimilarQuery, snapshot: Snapshot) -> tuple[Space, ...]:
    """Choose where to compare the item: in the requested space, or wherever it has a key.

    Raises:
        NotFound: where there is no such item.
        Invalid: where it has no key in the requested space.
    """
    rows = snapshot.catalogue.rows([query.item_id])
    if not snapshot.is_scorable(rows).all():
        raise NotFound(f"no item {query.item_id!r} in the catalogue")
    row = int(rows[0])
    there = spaces_of(snapshot, row)
    if query.space is None:
        return there
    if query.space not in there:
        raise Invalid(
            "/space",
            f"must be {there[0]!r} or 'both' here: item {query.item_id!r} {_LACKS[query.space]}",
        )
    return (query.space,)


def similar_items(query: SimilarQuery, snapshot: Snapshot, spaces: tuple[Space, ...]) -> Answer:
    """Find the items most similar to one; `spaces` from `spaces_to_compare`."""
    catalogue = snapshot.catalogue
    found = similar(
        snapshot,
        catalogue.row(query.item_id),
        limit=query.limit,
        allowed=allowed_items(snapshot, query.filter),
        spaces=spaces,
    )
    items: list[AnswerItem] = [
        {
            "item_id": catalogue.vocabulary.id(row),
            "score": float(found.scores[at]),
            "title": catalogue.titles[row],
            "weight": float(found.weights[at]),
            "spaces": {
                space: {"cosine": near.cosine, "share": near.share}
                for space, near in found.spaces[at].items()
            },
        }
        for at, row in enumerate(found.rows.tolist())
    ]
    return Answer(items, snapshot.version, spaces=spaces)
