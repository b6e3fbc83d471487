"""One of several disjoint shards of the users of a store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from service.domain.errors import Invalid
from service.stores.event_identity import user_key

_FORM = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class ListShard:
    """Shard `number` (from 1) of `count`: the users whose `user_key` modulo `count` is number - 1.

    Each user is in exactly one of the shards, the same on every machine and in every store.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> ListShard:
        """Parse NUMBER/COUNT, such as 2/4.

        Raises:
            Invalid: the text has another form, or the number is not from 1 to the count.
        """
        found = _FORM.fullmatch(text)
        shard = cls(*map(int, found.groups())) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise Invalid(
                "", f"{text}: must be NUMBER/COUNT, such as 2/4, with NUMBER from 1 to COUNT"
            )
        return shard

    def has(self, user_id: str) -> bool:
        """Report whether a user is in the shard."""
        return self.count == 1 or user_key(user_id) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"
