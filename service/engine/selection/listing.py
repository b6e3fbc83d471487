"""Lists of items in the order of their fields, page by page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.catalogue.sorting import SortedValue, SortKey, SortPosition, position, sorted_rows
from models.ranking.lineup import QuotaChoice
from models.ranking.steering import Quota
from service.domain.errors import Invalid
from service.domain.item_selection import SortField
from service.domain.queries import Answer, AnswerItem, SearchQuery

NEWEST_FIRST = (SortField("published_at", descending=True),)  # without a `sort`


def list_items(
    query: SearchQuery,
    snapshot: Snapshot,
    mask: NDArray[np.bool_],
    quotas: Sequence[Quota] = (),
) -> Answer:
    """Return a page of the items of a mask [N], in the order of the query.

    Quotas hold for the whole list, so that each page goes on where the one before it ended.

    Raises `Invalid` for a cursor that is not of this order.
    """
    catalogue = snapshot.catalogue
    order = query.sort or NEWEST_FIRST
    keys = [SortKey(each.field, each.descending) for each in order]
    after = None if query.cursor is None else _position(query.cursor, order)
    rows = matched = np.flatnonzero(mask)
    if quotas:
        needed = len(rows) if after is not None else query.offset + query.limit + 1
        whole = sorted_rows(catalogue.fields, rows, keys, limit=len(rows))
        rows = whole[QuotaChoice(catalogue.fields, quotas, whole, needed)(np.arange(len(whole)))]
        rows = np.sort(rows)
    # One item more than the page tells whether there is another page.
    page = sorted_rows(
        catalogue.fields, rows, keys, limit=query.limit + 1, offset=query.offset, after=after
    )
    listed, cursor = page[: query.limit], None
    if len(page) > len(listed):
        cursor = _cursor(order, position(catalogue.fields, int(listed[-1]), keys))
    items: list[AnswerItem] = [
        {"item_id": item_id, "title": title}
        for item_id, title in zip(
            catalogue.vocabulary.ids_of(listed.tolist()), catalogue.titles.take(listed), strict=True
        )
    ]
    return Answer(items, snapshot.version, total=len(matched), cursor=cursor)


def page_cursor(offset: int) -> str:
    """Return the cursor of the page of a search that begins at an offset."""
    return base64.urlsafe_b64encode(orjson.dumps(offset)).decode()


def page_offset(cursor: str, most: int) -> int:
    """Return the offset [≤ most] that `page_cursor` wrote. Raises `Invalid`."""
    try:
        offset = orjson.loads(base64.urlsafe_b64decode(cursor))
    except (ValueError, TypeError, binascii.Error):
        offset = None
    if isinstance(offset, int) and not isinstance(offset, bool) and 0 <= offset <= most:
        return offset
    raise Invalid("/cursor", "is no cursor of a search")


def _cursor(order: Sequence[SortField], place: SortPosition) -> str:
    values = [[*value] for value in place.values]  # orjson takes no named tuples
    document = [[[each.field, each.descending] for each in order], values, place.item_id]
    return base64.urlsafe_b64encode(orjson.dumps(document)).decode()


def _position(cursor: str, order: Sequence[SortField]) -> SortPosition:
    """Return the position that `_cursor` wrote. Raises `Invalid`."""
    try:
        fields, values, item_id = orjson.loads(base64.urlsafe_b64decode(cursor))
        if fields == [[each.field, each.descending] for each in order] and len(values) == len(
            order
        ):
            return SortPosition(tuple(map(_sorted_value, values)), str(item_id))
    except (ValueError, TypeError, binascii.Error):
        pass
    raise Invalid("/cursor", "is no cursor of a list in this order")


def _sorted_value(pair: Sequence[object]) -> SortedValue:
    """Return what `SortedValue` holds. Raises `TypeError`, `ValueError`."""
    number, keyword = pair
    if not isinstance(number, float | int | None) or not isinstance(keyword, str | bool | None):
        raise TypeError
    return SortedValue(number, keyword)
