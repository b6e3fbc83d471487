"""Quotas: how much one store may hold, checked inside the transaction that would exceed them."""

from __future__ import annotations

from typing import NamedTuple

from service.domain.errors import QuotaExceeded


class StoreUsage(NamedTuple):
    """Contents of a store: events, items in the catalogue, and bytes in use."""

    events: int
    items: int
    bytes: int


class StoreQuota(NamedTuple):
    """Bounds of a store's contents; 0 = none.

    A quota bounds only growth: a change that does not add to the store succeeds, also in a store
    that holds more than its quota, so that duplicates are harmless and deletions possible.
    """

    events: int = 0
    items: int = 0
    bytes: int = 0

    def check(self, before: StoreUsage, after: StoreUsage) -> None:
        """Check that a change keeps to the bounds. Raises `QuotaExceeded`, naming the bound."""
        for bound, old, new, unit in zip(self, before, after, StoreQuota._fields, strict=True):
            if bound and new > bound and new > old:
                variable = f"HEED_MAX_{'STORE_BYTES' if unit == 'bytes' else unit.upper()}"
                raise QuotaExceeded(
                    f"the store holds {old} {unit} and may hold {bound} ({variable}), but would "
                    f"hold {new}; delete some, or raise the limit"
                )
