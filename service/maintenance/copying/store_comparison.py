"""Comparison of two stores by the digests of their records."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from service.stores.base import Store
from service.stores.store_digest import TableDigest, digest_store


class ComparedTable(NamedTuple):
    """One table of two stores."""

    name: str
    source: TableDigest
    target: TableDigest

    @property
    def is_same(self) -> bool:
        """Report whether both have the same records."""
        return self.source == self.target


async def compare_stores(source: Store, target: Store) -> list[ComparedTable]:
    """Return the digests of all tables of both stores, each read whole.

    The counts that the target keeps must be those of its records; where they are not, the table
    differs too.
    """
    ours, theirs = await asyncio.gather(digest_store(source), digest_store(target))
    counts = await target.counts()
    return [
        ComparedTable(
            name,
            digest,
            theirs[name]._replace(records=counts.get(name, theirs[name].records)),
        )
        for name, digest in ours.items()
    ]
