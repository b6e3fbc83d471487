"""The schema of a SQLite store, and the migrations from earlier versions of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import apsw

from service.domain.records import Event
from service.stores.encoding import IS_NEGATIVE, content_digest, content_id, vectors_from

SCHEMA_VERSION = 7
MIGRATION_TIMEOUT_MS = 3_600_000  # for another process that migrates

IMPORTS = """
CREATE TABLE imports (
  import_no INTEGER PRIMARY KEY,
  started   INTEGER NOT NULL, -- microseconds UTC
  source    TEXT NOT NULL,
  undone    INTEGER NOT NULL -- 1: all that it stored has been taken back
) STRICT;

CREATE TABLE replaced ( -- what imports have replaced, for undoing them
  kind      TEXT NOT NULL CHECK (kind IN ('item', 'user')),
  row_no    INTEGER NOT NULL, -- item_no or user_no
  import_no INTEGER NOT NULL,
  written   INTEGER NOT NULL, -- digest of what the import wrote
  document  BLOB,             -- what was there before, the profile of a user; NULL: nothing
  embedding BLOB,
  PRIMARY KEY (kind, row_no, import_no)
) STRICT, WITHOUT ROWID;
"""

LOG_CHANGES = """
CREATE INDEX users_by_version ON users (version);

CREATE TABLE gone_users ( -- numbers without a user, or with another one than before
  user_no INTEGER PRIMARY KEY,
  change  INTEGER NOT NULL -- the tick at which the user was forgotten
) STRICT;
CREATE INDEX gone_users_by_change ON gone_users (change);
"""

SCENARIOS = """
CREATE TABLE scenarios (
  name     TEXT NOT NULL,
  version  INTEGER NOT NULL, -- from 1; the last one is in use
  written  INTEGER NOT NULL, -- microseconds UTC
  document BLOB,             -- JSON; NULL: deleted
  fallback TEXT,
  PRIMARY KEY (name, version)
) STRICT, WITHOUT ROWID;
CREATE INDEX scenarios_by_fallback ON scenarios (fallback) WHERE fallback IS NOT NULL;
"""

CLAIMS = """
CREATE TABLE claims ( -- of imports on events that were stored before; see records/imports.py
  user_no   INTEGER NOT NULL,
  import_no INTEGER NOT NULL,
  first_seq INTEGER NOT NULL,
  last_seq  INTEGER NOT NULL,
  PRIMARY KEY (user_no, import_no, first_seq)
) STRICT, WITHOUT ROWID;
"""

KEYS = """
CREATE TABLE keys ( -- rows are never deleted, so that a version of 0 means that there was no key
  key_id    TEXT PRIMARY KEY,
  name      TEXT NOT NULL,
  namespace TEXT NOT NULL,
  scopes    TEXT NOT NULL, -- separated by commas
  digest    BLOB NOT NULL, -- SHA-256 of the secret
  created   INTEGER NOT NULL, -- microseconds UTC, as the next two
  expires   INTEGER,
  revoked   INTEGER,
  rate      TEXT,
  change    INTEGER NOT NULL -- the tick of the last change
) STRICT, WITHOUT ROWID;
CREATE INDEX keys_by_change ON keys (change);
"""

FORGETTING = """
CREATE TABLE forgotten ( -- ledger of forgotten users; see records/forgetting.py
  digest    BLOB NOT NULL, -- SHA-256 of the salt and the user_id
  forgotten INTEGER NOT NULL, -- microseconds UTC
  salt      BLOB NOT NULL,
  events    INTEGER NOT NULL,
  PRIMARY KEY (digest, forgotten)
) STRICT, WITHOUT ROWID;
CREATE INDEX forgotten_by_time ON forgotten (forgotten);

CREATE TABLE unused_names ( -- that deleted events used, and maybe no other event does
  kind   TEXT NOT NULL CHECK (kind IN ('items', 'types')),
  number INTEGER NOT NULL,
  noted  INTEGER NOT NULL, -- tick
  PRIMARY KEY (kind, number)
) STRICT, WITHOUT ROWID;

-- The tick of the last deletion of personal data, until the log has been emptied since; 0: none.
ALTER TABLE state ADD COLUMN scrub INTEGER NOT NULL DEFAULT 0;
-- The tick of the last deletion of names, and the highest numbers that they had.
ALTER TABLE state ADD COLUMN names INTEGER NOT NULL DEFAULT 0;
ALTER TABLE state ADD COLUMN last_item INTEGER NOT NULL DEFAULT 0;
ALTER TABLE state ADD COLUMN last_type INTEGER NOT NULL DEFAULT 0;
"""

# Earlier namespaces and their keys have no id.
NAMESPACES_OF_KEYS = """
ALTER TABLE keys ADD COLUMN namespace_id TEXT NOT NULL DEFAULT '';
"""

POPULARITY = """
CREATE TABLE popularity ( -- events by item, since counting them would read the whole log
  item_no  INTEGER PRIMARY KEY,
  events   INTEGER NOT NULL,
  dislikes INTEGER NOT NULL -- and returns, among them
) STRICT;
"""

COUNT_STORED_EVENTS = f"""
INSERT INTO popularity
SELECT item_no, count(*),
  count(*) FILTER (WHERE type_no IN (SELECT type_no FROM types WHERE {IS_NEGATIVE}))
FROM events GROUP BY item_no
"""

# Names are interned: an event row holds small integers, ~60 bytes less than the strings. Rows of
# `items` and `types` are deleted only with the last event of them (a deleted item only loses its
# document), and their numbers are not used again, so that readers may cache them; writers cache
# them until `state.names` changes. Rows of `users` are deleted, so that no process may cache them.
#
# `state` has one row. Its clock issues all versions, one tick for each transaction with a change,
# so that no version is issued twice.
SCHEMA = """
CREATE TABLE state (
  only      INTEGER PRIMARY KEY CHECK (only = 1),
  clock     INTEGER NOT NULL,
  catalogue INTEGER NOT NULL, -- the tick of the catalogue's last change
  users     INTEGER NOT NULL, -- counts, because counting rows takes long
  items     INTEGER NOT NULL,
  events    INTEGER NOT NULL
) STRICT;
INSERT INTO state VALUES (1, 0, 0, 0, 0, 0);

CREATE TABLE users (
  user_no    INTEGER PRIMARY KEY,
  user_id    TEXT NOT NULL UNIQUE,
  version    INTEGER NOT NULL,
  generation INTEGER NOT NULL,
  next_seq   INTEGER NOT NULL,
  profile    BLOB
) STRICT;

CREATE TABLE items (
  item_no   INTEGER PRIMARY KEY,
  item_id   TEXT NOT NULL UNIQUE,
  change    INTEGER, -- the tick of the last put or delete; NULL: only ever seen in events
  document  BLOB,    -- NULL: not in the catalogue
  embedding BLOB
) STRICT;
CREATE INDEX items_by_change ON items (change) WHERE change IS NOT NULL;

CREATE TABLE types (
  type_no INTEGER PRIMARY KEY,
  type    TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE events ( -- clustered, so that a history is one short range
  user_no   INTEGER NOT NULL,
  timestamp INTEGER NOT NULL,
  seq       INTEGER NOT NULL,
  item_no   INTEGER NOT NULL,
  type_no   INTEGER NOT NULL,
  weight    REAL NOT NULL,
  event_id  TEXT NOT NULL,
  digest    INTEGER NOT NULL,
  import_no INTEGER, -- that it goes with: the one that stored it, until that is undone
  PRIMARY KEY (user_no, timestamp, seq)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX events_by_id ON events (event_id);

CREATE TABLE vectors ( -- apart, so that rows without any stay small
  user_no INTEGER NOT NULL,
  seq     INTEGER NOT NULL,
  key     BLOB,
  value   BLOB,
  PRIMARY KEY (user_no, seq)
) STRICT, WITHOUT ROWID;
"""
SCHEMA += IMPORTS + LOG_CHANGES + SCENARIOS + CLAIMS + KEYS + FORGETTING + POPULARITY
SCHEMA += NAMESPACES_OF_KEYS


def migrate(connection: apsw.Connection, before: Callable[[int], None]) -> int:
    """Bring a store of an earlier version to this one, in one transaction.

    Args:
        connection: that may write.
        before: called with the earlier version, while no other process can write; where it raises,
            nothing is migrated.

    Returns: the earlier version; this one where another process was faster.
    """
    connection.set_busy_timeout(MIGRATION_TIMEOUT_MS)
    connection.execute("BEGIN IMMEDIATE")
    try:
        earlier: int = connection.pragma("user_version")
        if earlier < SCHEMA_VERSION:
            before(earlier)
        if connection.pragma("user_version") == 1:  # another process may have been faster
            connection.execute(IMPORTS)
            connection.execute("ALTER TABLE events ADD COLUMN import_no INTEGER")
            _rename_imported_events(connection)
            connection.pragma("user_version", 2)
        if connection.pragma("user_version") == 2:
            connection.execute(LOG_CHANGES)
            connection.pragma("user_version", 3)
        if connection.pragma("user_version") == 3:
            connection.execute(SCENARIOS)
            connection.pragma("user_version", 4)
        if connection.pragma("user_version") == 4:  # nothing tells what earlier imports share
            connection.execute(CLAIMS)
            connection.pragma("user_version", 5)
        if connection.pragma("user_version") == 5:  # reads the log, once
            connection.execute(KEYS)
            connection.execute(FORGETTING)
            connection.execute(POPULARITY)
            connection.execute(COUNT_STORED_EVENTS)
            connection.pragma("user_version", 6)
        if connection.pragma("user_version") == 6:
            connection.execute(NAMESPACES_OF_KEYS)
            connection.pragma("user_version", 7)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    return earlier


def _rename_imported_events(connection: apsw.Connection) -> None:
    """Give events of imports the ids of their content.

    In version 1 these ids were of the file's name and the line, so that the same event in another
    export was stored again.
    """
    execute = connection.execute
    # Events whose file had no times were stored with the time of their arrival, which all events of
    # a batch share to the microsecond; the same file gives them no time again.
    arrivals = {
        timestamp
        for (timestamp,) in execute(
            "SELECT timestamp FROM events WHERE event_id >= 'import:' AND event_id < 'import;'"
            " AND timestamp % 1000 <> 0 GROUP BY timestamp HAVING count(*) > 1"
        )
    }
    users = execute(
        "SELECT DISTINCT user_no FROM events WHERE event_id >= 'import:' AND event_id < 'import;'"
    ).fetchall()
    for (user_no,) in users:
        seen: Counter[bytes] = Counter()
        renamed = []
        rows: list[tuple[Any, ...]] = execute(
            "SELECT user_id, item_id, type, weight, timestamp, seq, key, value FROM events"
            " JOIN users USING (user_no) JOIN items USING (item_no) JOIN types USING (type_no)"
            " LEFT JOIN vectors USING (user_no, seq)"
            " WHERE user_no = ? AND event_id >= 'import:' AND event_id < 'import;'"
            " ORDER BY timestamp, seq",
            (user_no,),
        ).fetchall()
        for user_id, item_id, kind, weight, timestamp, seq, key, value in rows:
            given = None if timestamp in arrivals else timestamp
            vectors = vectors_from(key, value)
            event = Event(user_id, item_id, None, kind, weight, given, *vectors)
            digest = content_digest(event)
            renamed.append((content_id(digest, seen[digest]), user_no, timestamp, seq))
            seen[digest] += 1
        connection.executemany(
            "UPDATE events SET event_id = ? WHERE user_no = ? AND timestamp = ? AND seq = ?",
            renamed,
        )
