"""Copying of users with their events, by comparing both stores in the order of the users' ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from service.stores.records.copying import BulkAccess
from service.stores.values import StoredUser

EVENTS = 20_000  # that are read at once, and about so many that are written in one transaction
_USERS = 5_000  # in one transaction, however few events they have
_COMPARED = 5 * EVENTS  # events after which the position is recorded, also without a difference


class CopiedUsers(NamedTuple):
    """Counts of a pass over the users: what was written, and what was the same already."""

    users: int
    events: int  # of these users
    dropped: int  # users whom the source does not have
    same: int  # users


async def copy_users(
    source: BulkAccess, target: BulkAccess, position: str, progress: Callable[[int], None]
) -> CopiedUsers:
    """Bring the users of the target after `position` to the state of the source.

    Args:
        source: access to the store that is copied.
        target: access to the store that is copied to.
        position: id of a user up to whom an interrupted pass came; "" for all.
        progress: called with the number of events that are compared or copied.
    """
    batch = _Batch(target, progress)
    async with (
        aclosing(_users(source, position)) as ours,
        aclosing(_users(target, position)) as theirs,
    ):
        other = await anext(theirs, None)
        async for user in ours:
            # Ids compare by code points, which is the order of their bytes.
            while other is not None and other.user_id < user.user_id:
                await batch.drop(other.user_id)
                other = await anext(theirs, None)
            is_known = other is not None and other.user_id == user.user_id
            await batch.take(user, is_same=is_known and other == user)
            if is_known:
                other = await anext(theirs, None)
        while other is not None:
            await batch.drop(other.user_id)
            other = await anext(theirs, None)
    await batch.write()
    return batch.done


class _Batch:
    """Users to be written in one transaction, and counts of all before them."""

    def __init__(self, target: BulkAccess, progress: Callable[[int], None]) -> None:
        self._target = target
        self._progress = progress
        self._users: list[StoredUser] = []
        self._absent: list[str] = []
        self._events = self._compared = self._seen = 0
        self._position = ""
        self.done = CopiedUsers(0, 0, 0, 0)

    async def take(self, user: StoredUser, *, is_same: bool) -> None:
        """Write the user, unless the target has the same, and move the position."""
        self._position = user.user_id
        self._compared += len(user.events)
        if is_same:
            self.done = self.done._replace(same=self.done.same + 1)
        else:
            self._users.append(user)
            self._events += len(user.events)
        if self._events >= EVENTS or len(self._users) >= _USERS or self._compared >= _COMPARED:
            await self.write()

    async def drop(self, user_id: str) -> None:
        """Drop a user of the target, and move the position."""
        self._position = user_id
        self._absent.append(user_id)
        if len(self._absent) >= _USERS:
            await self.write()

    async def write(self) -> None:
        """Write what is left, and the position."""
        if self._position:
            await self._target.put_users(self._users, self._absent, self._position)
        users, events, dropped, same = self.done
        self.done = CopiedUsers(
            users + len(self._users), events + self._events, dropped + len(self._absent), same
        )
        self._seen += self._compared
        self._users, self._absent = [], []
        self._events = self._compared = 0
        self._progress(self._seen)


async def _users(store: BulkAccess, after: str) -> AsyncGenerator[StoredUser, None]:
    """Iterate over users; the next page is read meanwhile."""
    page = asyncio.ensure_future(store.users(after, EVENTS))
    try:
        while found := await page:
            page = asyncio.ensure_future(store.users(found[-1].user_id, EVENTS))
            for user in found:
                yield user
    finally:
        await asyncio.gather(page, return_exceptions=True)
