"""Documents that imports have replaced in a SQLite store, kept for undoing them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

from service.stores.sqlite.writer import Transaction

Document = tuple[bytes | None, bytes | None]
"""The document and the embedding of an item, or the profile of a user and None."""

Replacement = tuple[int, Document, Document]
"""The number of a row, what is there, and what replaces it."""


def keep_replaced(
    transaction: Transaction,
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


def document_digest(document: Document) -> int:
    """Return a signed 64-bit digest (BLAKE2b) of a document."""
    digest = hashlib.blake2b(digest_size=8, usedforsecurity=False)
    for part in document:
        digest.update(b"-" if part is None else b"%d:%s" % (len(part), part))
    return int.from_bytes(digest.digest(), "little", signed=True)
