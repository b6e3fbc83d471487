"""Documents that imports have replaced in a PostgreSQL store, kept for undoing them."""

from __future__ import annotations

from collections.abc import Sequence

from service.stores.encoding import Document, document_digest
from service.stores.postgres.database.transaction import PostgresTransaction

_KEEP_ITEMS = """\
INSERT INTO heed.replaced_items (namespace_no, import_no, item_no, written, document, embedding)
SELECT %s, %s, * FROM unnest(%s::integer[], %s::bigint[], %s::bytea[], %s::bytea[])
ON CONFLICT (namespace_no, item_no, import_no) DO UPDATE SET written = excluded.written"""
_KEEP_PROFILE = """\
INSERT INTO heed.replaced_profiles (namespace_no, import_no, user_key, written, document)
VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (namespace_no, user_key, import_no) DO UPDATE SET written = excluded.written"""


async def keep_replaced_items(
    transaction: PostgresTransaction,
    import_no: int,
    replaced: Sequence[tuple[int, Document, Document]],
) -> None:
    """Keep the items that an import replaces, unless it wrote them itself.

    Args:
        transaction: in which they are replaced.
        import_no: the import.
        replaced: the number of each item, what is there, and what replaces it.
    """
    rows = [(item_no, document_digest(new), *old) for item_no, old, new in replaced]
    await transaction.execute(_KEEP_ITEMS, import_no, *map(list, zip(*rows, strict=True)))


async def keep_replaced_profile(
    transaction: PostgresTransaction, import_no: int, key: int, old: bytes | None, new: bytes
) -> None:
    """Keep the profile that an import replaces, unless it wrote it itself."""
    written = document_digest((new, None))
    await transaction.execute(_KEEP_PROFILE, import_no, key, written, old)
