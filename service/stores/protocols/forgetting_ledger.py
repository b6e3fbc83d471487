"""Ledger of forgotten users: proof that they were forgotten, without saying who they were.

An entry holds a salted digest of the user's id. Whoever knows an id can look it up; nobody can list
the ids. After an older backup was restored, the ledger of the lost store tells which of the stored
users are to be forgotten again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ForgottenUser(NamedTuple):
    """Entry of the ledger: one user was forgotten, with so many events."""

    digest: bytes  # 32 bytes, of `user_digest`
    salt: bytes  # 16 bytes, in general the same for all entries of a store
    forgotten: int  # microseconds UTC
    events: int


class ForgottenAgain(NamedTuple):
    """Counts of `forget_again`."""

    users: int  # that were stored, and are forgotten
    events: int  # of these users
    entries: int  # that the ledger did not have


class ForgettingLedger(Protocol):
    """Forgotten users of a store. `Store.forget` adds the entries."""

    async def page_forgotten(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[ForgottenUser], str | None]:
        """Return up to `limit` entries, oldest first, and the cursor of the next page or None."""
        ...

    async def find_forgotten(self, user_id: str) -> list[ForgottenUser]:
        """Return the entries of a user, oldest first."""
        ...

    async def count_forgotten(self, since: int) -> int:
        """Return the number of entries at `since` (microseconds UTC) or later."""
        ...

    async def forget_again(self, entries: Sequence[ForgottenUser]) -> ForgottenAgain:
        """Forget stored users whom entries of another ledger name, and add these entries.

        Entries that this ledger has already are left out: what is stored of their users is newer.
        When the call is interrupted, it can be repeated.
        """
        ...

    async def clean_up(self) -> bool:
        """Delete what forgotten users have left behind, such as names that nothing else uses.

        Call it now and then; it reads the whole log, but only after a user was forgotten. Returns
        whether anything was left.
        """
        ...


def user_digest(salt: bytes, user_id: str) -> bytes:
    """Return the SHA-256 of the salt and the user's id in UTF-8."""
    return hashlib.sha256(salt + user_id.encode()).digest()
