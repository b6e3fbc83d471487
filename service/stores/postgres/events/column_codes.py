"""Dense codes of names and users in columns that are read from a PostgreSQL store."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from psycopg import Connection

_FIND: dict[Literal["users", "items", "types"], str] = {
    "users": "SELECT user_key, user_id FROM heed.users WHERE namespace_no = %s"
    " AND user_key = ANY(%s::bigint[])",
    "items": "SELECT item_no, item_id FROM heed.items WHERE namespace_no = %s"
    " AND item_no = ANY(%s::integer[])",
    "types": "SELECT type_no, type FROM heed.types WHERE namespace_no = %s"
    " AND type_no = ANY(%s::integer[])",
}


class ColumnCodes:
    """Codes of numbers: indexes into `names`, which grows with new numbers.

    InternedNames are read in the transaction of the connection.
    """

    def __init__(
        self, connection: Connection, namespace_no: int, table: Literal["users", "items", "types"]
    ) -> None:
        self.names: list[str] = []
        self._connection = connection
        self._namespace_no = namespace_no
        self._find = _FIND[table].encode()
        self._codes: dict[int, int] = {}

    def codes(self, numbers: NDArray[Any]) -> NDArray[np.int32]:
        """Return the code of each number [n]."""
        distinct, inverse = np.unique(numbers, return_inverse=True)
        keys: list[int] = distinct.tolist()
        new = [key for key in keys if key not in self._codes]
        if new:
            found: dict[int, str] = dict(
                self._connection.execute(self._find, (self._namespace_no, new)).fetchall()
            )
            for key in new:
                self._codes[key] = len(self.names)
                self.names.append(found[key])
        codes = np.fromiter(map(self._codes.__getitem__, keys), np.int32, len(keys))
        return codes[inverse]
