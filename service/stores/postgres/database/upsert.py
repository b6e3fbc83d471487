"""Insertion of rows of which some may be there already, in the form that is fastest.

PostgreSQL is sent one array for each column, so that a statement is no longer for many rows than
for one. A distributed database would first write such rows to a file for each shard, which takes
five to ten times as long as a list of VALUES. It sends these to the shards one after another, in
the order of their numbers: so two transactions lock the rows that they share in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.stores.postgres.database.transaction import NamespaceTransaction, Rows

_MOST_VALUES = 65_535  # of one statement, in PostgreSQL's protocol


class Upsert:
    """Statement that inserts rows and says what becomes of those that are there already.

    Args:
        table: name of the table, and an alias where `conflict` uses one.
        constants: columns that have one value in all rows, beside the namespace's number.
        columns: types of the other columns, by their names.
        conflict: ON CONFLICT and what follows.
    """

    def __init__(
        self, table: str, constants: Sequence[str], columns: Mapping[str, str], conflict: str
    ) -> None:
        names = ("namespace_no", *constants, *columns)
        self._into = f"INSERT INTO {table} ({', '.join(names)})"
        self._fixed = "".join(f"%(fixed{place})s, " for place in range(len(constants) + 1))
        arrays = ", ".join(f"%(column{n})s::{type_}[]" for n, type_ in enumerate(columns.values()))
        self._unnested = f"{self._into} SELECT {self._fixed} * FROM unnest({arrays}) {conflict}"  # noqa: S608
        self._conflict = conflict

    async def execute(
        self, transaction: NamespaceTransaction, constants: Sequence[Any], rows: Rows
    ) -> Rows:
        """Insert rows, of which there is at least one; return what RETURNING says."""
        values = {
            f"fixed{n}": each for n, each in enumerate((transaction.namespace_no, *constants))
        }
        if not transaction.is_distributed:
            values |= {f"column{n}": list(each) for n, each in enumerate(zip(*rows, strict=True))}
            return await _run(transaction, self._unnested, values)
        found: Rows = []
        most = (_MOST_VALUES - len(values)) // len(rows[0])
        for start in range(0, len(rows), most):
            found += await self._list(transaction, values, rows[start : start + most])
        return found

    async def _list(
        self, transaction: NamespaceTransaction, fixed: Mapping[str, Any], rows: Rows
    ) -> Rows:
        width = len(rows[0])
        listed = ", ".join(
            f"({self._fixed}{', '.join(f'%(v{n + k})s' for k in range(width))})"
            for n in range(0, width * len(rows), width)
        )
        flat = (value for row in rows for value in row)
        values = {**fixed, **{f"v{n}": value for n, value in enumerate(flat)}}
        return await _run(transaction, f"{self._into} VALUES {listed} {self._conflict}", values)


async def _run(transaction: NamespaceTransaction, query: str, values: Mapping[str, Any]) -> Rows:
    cursor = await transaction.connection.execute(query.encode(), values, binary=True)
    return await cursor.fetchall() if "RETURNING" in query else []
