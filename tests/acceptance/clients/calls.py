"""Calls by the client that openapi-python-client generates, as a user writes them."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from heed_client import AuthenticatedClient
from heed_client.api.ask import recommend, score, search
from heed_client.api.events import append_events
from heed_client.api.items import get_item, patch_item, put_items
from heed_client.models import (
    AnswerOut,
    AppendedOut,
    Attributes,
    EventIn,
    EventsIn,
    FilterIn,
    ItemIn,
    ItemOut,
    ItemPatchIn,
    ItemsIn,
    Problem,
    RecommendIn,
    RuleIn,
    ScoreIn,
    SearchIn,
    StoredUpdates,
)

client = AuthenticatedClient(token="none", base_url=sys.argv[1])
ids = ["red", "green", "blue"]
items = [
    ItemIn(item_id, title=f"{item_id} lamp", attributes=Attributes.from_dict({"price": n}))
    for n, item_id in enumerate(ids)
]
stored = put_items.sync(client=client, body=ItemsIn([*items, ItemIn("bare")], update=True))
assert isinstance(stored, StoredUpdates)
assert stored.created == [*ids, "bare"]

patch = ItemPatchIn(attributes=Attributes.from_dict({"sold": True}), title=None)
patched = patch_item.sync("blue", client=client, body=patch)
assert isinstance(patched, ItemOut)
assert patched.title == ""
assert patched.attributes.to_dict() == {"price": 2, "sold": True}
assert patched.published_at is None

events = [EventIn("ada", "red", timestamp=datetime.now(UTC)), EventIn("ada", "green", type_="buy")]
appended = append_events.sync(client=client, body=EventsIn(events))
assert isinstance(appended, AppendedOut)
assert appended.stored == 2

lamps = FilterIn(
    all_=[
        FilterIn(field="attributes.price", in_=[1, 2, None, "dear", True]),
        FilterIn(
            any_=[FilterIn(field="attributes.price", gte=1, lt=9), FilterIn(field="title", gt="z")]
        ),
        FilterIn(none=[FilterIn(field="attributes.sold", exists=True)]),
    ]
)
found = search.sync(client=client, body=SearchIn(query="lamp", filter_=lamps, user_id="ada"))
assert isinstance(found, AnswerOut)
assert [item.item_id for item in found.items] == ["green"]

rules = [RuleIn("cheap", when=FilterIn(field="attributes.price", eq=0), boost=1)]
asked = RecommendIn(user_id="ada", limit=1, rules=rules, exclude_seen=False)
answer = recommend.sync(client=client, body=asked)
assert isinstance(answer, AnswerOut)
assert len(answer.items) == 1

scored = score.sync(client=client, body=ScoreIn(["green"], user_id="ada", explain=2))
assert isinstance(scored, AnswerOut)
reasons = scored.items[0].explanation
assert reasons
assert sum(reason.weight for reason in reasons) > 0

refused = get_item.sync("none", client=client)
assert isinstance(refused, Problem)
assert refused.status == 404
