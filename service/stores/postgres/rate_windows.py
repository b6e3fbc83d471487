"""Windows of a PostgreSQL store that count requests of API keys, by the clock of the server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from psycopg import AsyncConnection

from service.domain.keys import Rate
from service.stores.values import Grant, RateWindows

# The requests of a known key in the window before and in this one, before this call.
_PREVIOUS = """\
CASE WHEN known.number = excluded.number THEN known.previous
     WHEN known.number = excluded.number - 1 THEN known.current ELSE 0 END"""
_CURRENT = "CASE WHEN known.number = excluded.number THEN known.current ELSE 0 END"
_GRANTED = f"""\
greatest(0, least(excluded.granted, %(amount)s
  - floor({_PREVIOUS} * (1 - excluded.spent / %(seconds)s))::bigint - {_CURRENT}))"""
_GRANT = f"""\
INSERT INTO heed.rate_windows AS known
       (namespace_no, key_id, seconds, number, spent, previous, current, granted)
SELECT %(no)s, %(key)s, %(seconds)s, floor(now / %(seconds)s)::bigint,
       now - %(seconds)s * floor(now / %(seconds)s), 0,
       least(%(wanted)s, %(amount)s), least(%(wanted)s, %(amount)s)
  FROM (SELECT extract(epoch FROM clock_timestamp())::double precision AS now) AS clock
ON CONFLICT (namespace_no, key_id, seconds) DO UPDATE
   SET number = excluded.number, spent = excluded.spent, previous = {_PREVIOUS},
       granted = {_GRANTED}, current = {_CURRENT} + {_GRANTED}
RETURNING granted, previous, current, spent"""


class PostgresRateWindows(RateWindows):
    """Windows in the table of one namespace.

    Args:
        connect: lends a connection.
        namespace_no: of the store that holds the keys.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        namespace_no: int,
    ) -> None:
        self._connect = connect
        self._namespace_no = namespace_no

    async def grant(self, key_id: str, rate: Rate, wanted: int) -> Grant:
        """`RateWindows.grant`."""
        values = {
            "no": self._namespace_no,
            "key": key_id,
            "amount": rate.amount,
            "seconds": rate.seconds,
            "wanted": wanted,
        }
        async with self._connect() as connection:
            cursor = await connection.execute(_GRANT.encode(), values)
            ((granted, previous, current, spent),) = await cursor.fetchall()
        return Grant(granted, 0.0 if granted else _wait(rate, previous, current, spent))


def _wait(rate: Rate, previous: int, current: int, spent: float) -> float:
    """Return the seconds until the weighted count lets one more request through."""
    left = rate.seconds - spent
    if current >= rate.amount or not previous:
        return left
    # Once so much of this window is spent, floor(previous · (1 - spent)) + current is below amount.
    fraction = 1 - (rate.amount - current) / previous
    return min(left, max(0.0, fraction * rate.seconds - spent))
