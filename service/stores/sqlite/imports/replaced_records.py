"""Documents that imports have replaced in a SQLite store, kept for undoing them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from service.stores.encoding import Document, document_digest
from service.stores.sqlite.writer import SQLiteTransaction

Replacement = tuple[int, Document, Document]
"""The number of a row, what is there, and what replaces it."""


def keep_replaced(
    transaction: SQLiteTransaction,
    import_no: int,
    kind: Literal["item", "user"],
    replaced: Iterable[Replacement],
) -> None:
    """Keep what an import replaces, unless it wrote that itself."""
    transaction.connection.executemany(
        "INSERT INTO replaced VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET written = excluded.written",
        ((kind, row_no, import_no, document_digest(new), *old) for row_no, old, new in replaced),
    )
