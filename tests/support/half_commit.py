"""An append that a distributed database is committing: one worker has prepared it, no more."""

from __future__ import annotations

import itertools
from typing import Any, Literal, Self
from uuid import UUID

import psycopg

from service.domain.records import Event
from service.stores.encoding import body_digest, event_key, user_key
from service.stores.postgres.ticks import TICKS
from tests.support.citus_databases import CitusDatabases

_numbers = itertools.count(1)
_PUT = {
    "users": """\
UPDATE {} SET version = greatest(version + 1, %(tick)s), next_seq = %(seq)s + 1
 WHERE namespace_no = %(no)s AND user_key = %(user)s""",
    "events": """\
INSERT INTO {} (namespace_no, user_key, timestamp, seq, item_no, type_no, weight, event_key,
                event_id, import_no)
VALUES (%(no)s, %(user)s, %(time)s, %(seq)s, %(item)s, %(type)s, %(weight)s, %(id)s,
        %(event_id)s, %(import_no)s)""",
    "event_ids": """\
INSERT INTO {} (namespace_no, event_key, user_key, timestamp, seq, digest)
VALUES (%(no)s, %(id)s, %(user)s, %(time)s, %(seq)s, %(digest)s)""",
}


class HalfCommit:
    """One more event of a user, committed by the coordinator, while a worker has prepared a part.

    So it is between the two phases of a commit, or for as long as a worker is lost in between.
    Citus does not settle it before `finish`.

    The event has an id and a timestamp; it is of a user who has events, on an item that one is on.
    `held` is the part that is only prepared: the user with the event, or the event's id.
    """

    def __init__(
        self,
        cluster: CitusDatabases,
        url: str,
        namespace: str,
        event: Event,
        held: Literal["events", "id"] = "events",
        import_no: int | None = None,
    ) -> None:
        assert event.event_id is not None
        self._event, self._held, self._import_no = event, held, import_no
        self._id, self._user = UUID(bytes=event_key(event.event_id)), user_key(event.user_id)
        self._coordinator = psycopg.connect(url)
        self._gid = f"citus_0_1_{next(_numbers):09d}_1"
        # Its lock, until the end of the transaction, keeps others from settling anything. With all
        # settled before, the transaction writes nothing, and does not hold the horizon back.
        self._keeper = psycopg.connect(url)
        self._keeper.execute("SELECT recover_prepared_transactions()")
        self._keeper.commit()
        self._keeper.execute("SELECT recover_prepared_transactions()")
        read = self._coordinator.execute(
            "SELECT namespace_no, tick_base + %s * pg_current_xact_id()::text::bigint"
            " FROM heed.namespaces, heed.installation WHERE name = %s",
            (TICKS, namespace),
        ).fetchone()
        assert read is not None
        self.tick: int
        self._namespace, self.tick = read
        group, shards = self._place()
        self._worker = psycopg.connect(cluster.worker_url(url, group), autocommit=True)
        self._worker.execute("SET citus.enable_manual_changes_to_shards = on")
        self._worker.execute("BEGIN")
        values = self._values()
        for name, statement in _PUT.items():
            is_held = (name == "event_ids") == (held == "id")
            connection = self._worker if is_held else self._coordinator
            table = f"heed.{name}_{shards[name]}" if is_held else f"heed.{name}"
            connection.execute(statement.format(table).encode(), values)
        self._worker.execute(f"PREPARE TRANSACTION '{self._gid}'".encode())
        self._coordinator.execute(
            "INSERT INTO pg_dist_transaction (groupid, gid, outer_xid) VALUES (%s, %s, '0')",
            (group, self._gid),
        )
        self._coordinator.commit()
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        for connection in (self._worker, self._coordinator):
            connection.close()

    def finish(self) -> None:
        if not self._is_finished:
            self._worker.execute(f"COMMIT PREPARED '{self._gid}'".encode())
            self._keeper.close()
            self._is_finished = True

    def _place(self) -> tuple[int, dict[str, int]]:
        """Return the worker of what is held, and the shard of each table."""
        values: dict[str, tuple[str, int | UUID]] = {
            "users": ("bigint", self._user),
            "events": ("bigint", self._user),
            "event_ids": ("uuid", self._id),
        }
        shards: dict[str, int] = {}
        for table, (type_, value) in values.items():
            query = f"SELECT get_shard_id_for_distribution_column('heed.{table}', %s::{type_})"
            shards[table] = self._one(query, value)
        held = "event_ids" if self._held == "id" else "events"
        group = self._one("SELECT groupid FROM pg_dist_placement WHERE shardid = %s", shards[held])
        return group, shards

    def _values(self) -> dict[str, Any]:
        event, no = self._event, self._namespace
        user = "SELECT next_seq FROM heed.users WHERE namespace_no = %s AND user_key = %s"
        item = "SELECT item_no FROM heed.items WHERE namespace_no = %s AND item_id = %s"
        type_ = "SELECT type_no FROM heed.types WHERE namespace_no = %s AND type = %s"
        return {
            "no": no,
            "tick": self.tick,
            "user": self._user,
            "id": self._id,
            "seq": self._one(user, no, self._user),
            "item": self._one(item, no, event.item_id),
            "type": self._one(type_, no, event.type),
            "time": event.timestamp,
            "weight": event.weight,
            "event_id": event.event_id,
            "import_no": self._import_no,
            "digest": body_digest(event),
        }

    def _one(self, query: str, *values: object) -> int:
        row = self._coordinator.execute(query.encode(), values).fetchone()
        assert row is not None, query
        return int(row[0])
