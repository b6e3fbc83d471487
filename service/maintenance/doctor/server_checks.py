"""Checks of what a PostgreSQL server promises: where an acknowledged event is, and who reads it."""

from __future__ import annotations

from collections.abc import Iterator

from service.domain.settings import is_loopback
from service.maintenance.doctor.findings import Finding
from service.stores.postgres.server_state import ServerState

OLDEST_SERVER = 130_000  # that has all functions that Heed calls
_CLOCK_SECONDS = 2.0
_CONFIRMS = {"sync", "quorum"}  # states of a standby that commits wait for


def check_version(server: ServerState) -> Iterator[Finding]:
    """Find a server that is too old."""
    if server.version < OLDEST_SERVER:
        yield Finding(
            "old-server",
            "error",
            f"PostgreSQL {server.version // 10_000} is older than Heed needs, which is "
            f"{OLDEST_SERVER // 10_000}.",
            "It lacks functions by which changes are numbered.",
            "Upgrade the server (pg_upgrade), best to the newest version.",
        )


def check_schema(server: ServerState) -> Iterator[Finding]:
    """Find a schema of another version, or none, and what an interrupted restore has left."""
    if not server.schema:
        yield Finding(
            "no-store",
            "error",
            f"There is nothing of Heed in the database {server.name}.",
            "A service that is started there is empty.",
            "Check HEED_STORE; restore a backup with heed restore, or start the service, which "
            "creates the schema.",
        )
    elif server.schema > server.known_schema:
        yield Finding(
            "newer-schema",
            "error",
            f"The database has version {server.schema} of Heed's schema; this Heed reads up to "
            f"{server.known_schema}.",
            "The service does not start.",
            "Install the version of Heed that migrated it, or a newer one.",
        )
    elif server.schema < server.known_schema:
        yield Finding(
            "older-schema",
            "warning",
            f"The database has version {server.schema} of Heed's schema; this Heed writes "
            f"{server.known_schema}.",
            "The next start migrates it.",
            "Back it up first, with the version of Heed that serves it, then start the service.",
        )
    if server.unfinished_restore is not None:
        yield Finding(
            "unfinished-restore",
            "error",
            f"The restore of the {server.unfinished_restore} was interrupted.",
            "The database holds a part of it, and no command will use it.",
            "Run heed restore with that backup again, which goes on; or create a new database.",
        )


def check_disks(server: ServerState) -> Iterator[Finding]:
    """Find settings by which what is acknowledged is not on a disk, or not whole on it."""
    settings = server.settings
    if settings["fsync"] == "off":
        yield Finding(
            "no-fsync",
            "error",
            "fsync is off.",
            "A loss of power loses acknowledged events, and can damage the whole database.",
            "ALTER SYSTEM SET fsync = on, and SELECT pg_reload_conf().",
        )
    if settings["full_page_writes"] == "off":
        yield Finding(
            "torn-pages",
            "error",
            "full_page_writes is off.",
            "A page that is half written when the power fails is not repaired.",
            "ALTER SYSTEM SET full_page_writes = on, and SELECT pg_reload_conf().",
        )
    if settings["synchronous_commit"] == "off":
        yield Finding(
            "asynchronous-commit",
            "error",
            "synchronous_commit is off.",
            "What is acknowledged is not on any disk yet: a crash of the server loses it.",
            "ALTER SYSTEM SET synchronous_commit = on (also ALTER ROLE … or ALTER DATABASE …, "
            "where it was set), and SELECT pg_reload_conf().",
        )
    if settings["data_checksums"] == "off":
        yield Finding(
            "no-checksums",
            "warning",
            "The server's pages have no checksums.",
            "Damage by a disk is served, and backed up, instead of found.",
            "Stop the server and run pg_checksums --enable, or move to one that was made by "
            "initdb --data-checksums.",
        )
    if server.checksum_failures:
        yield Finding(
            "damaged-pages",
            "error",
            f"PostgreSQL has read {server.checksum_failures:,} damaged pages "
            "(pg_stat_database.checksum_failures).",
            "Rows on them cannot be read, or are lost.",
            "Look for the file in the server's log, run heed check --full and pg_amcheck, restore "
            "a backup, and replace the disk.",
        )


def check_standbys(server: ServerState) -> Iterator[Finding]:
    """Find what a standby would not have if it took over, and commits that wait for one."""
    commit = server.settings["synchronous_commit"]
    names = server.settings["synchronous_standby_names"]
    if not names:
        if server.standbys and server.sees_statistics:
            yield Finding(
                "asynchronous-standbys",
                "warning",
                f"No commit waits for a standby, and there are {len(server.standbys)}.",
                "One that is promoted may lack events that were acknowledged.",
                "Set synchronous_standby_names, such as 'ANY 1 (*)', and reload.",
            )
        else:
            yield Finding(
                "one-disk",
                "note",
                "An acknowledged event is on the disk of one server (synchronous_standby_names is "
                "empty).",
                "Where that disk is lost, what came since the last backup is.",
                "Add a standby, and set synchronous_standby_names = 'ANY 1 (*)'.",
            )
    elif commit in {"local", "remote_write"}:
        yield Finding(
            "unconfirmed-standby",
            "warning",
            f"synchronous_commit is {commit}, so that commits do not wait until a standby has "
            "them on its disk.",
            "A standby that is promoted may lack events that were acknowledged.",
            "ALTER SYSTEM SET synchronous_commit = on, and SELECT pg_reload_conf().",
        )
    elif server.sees_statistics and not any(
        each.sync_state in _CONFIRMS for each in server.standbys
    ):
        yield Finding(
            "missing-standby",
            "error",
            f"Commits wait for a standby ({names}), and none of these is connected.",
            "Writes are refused with 503 until one is.",
            "Start the standby, or take its name out of synchronous_standby_names and reload: then "
            "what is acknowledged is on one disk.",
        )


def check_access(server: ServerState) -> Iterator[Finding]:
    """Find a connection that others can read, and a role that may do too much or see too little."""
    is_local = not server.host or server.host.startswith("/") or is_loopback(server.host)
    if not is_local and not server.has_tls:
        yield Finding(
            "no-tls",
            "warning",
            f"The connection to {server.host} is not encrypted.",
            "Whoever is on the network can read histories and keys' digests, and change them.",
            "Turn ssl on at the server, and put sslmode=verify-full and sslrootcert into "
            "HEED_STORE.",
        )
    if server.is_superuser:
        yield Finding(
            "superuser",
            "warning",
            f"Heed connects as {server.user}, a superuser.",
            "Whoever takes over Heed takes over the server, its files and all other databases.",
            "CREATE ROLE heed LOGIN, let it own the database and the schema heed, and name it in "
            "HEED_STORE.",
        )
    if not server.sees_statistics:
        yield Finding(
            "unseen-statistics",
            "note",
            f"The role {server.user} does not see standbys and sessions of others.",
            "Replication and long transactions were not checked.",
            f"GRANT pg_read_all_stats TO {server.user}, or run heed doctor with a URL of another "
            "role.",
        )


def check_server_clock(server: ServerState) -> Iterator[Finding]:
    """Find clocks of the server and of this machine that differ."""
    if abs(server.clock_ahead) > _CLOCK_SECONDS:
        relation = "ahead of" if server.clock_ahead > 0 else "behind"
        yield Finding(
            "clocks-differ",
            "warning",
            f"The server's clock is {abs(server.clock_ahead):,.0f} s {relation} this machine's.",
            "Machines give new events times that contradict one another, and leases of trainings "
            "go by the server's.",
            "Keep both clocks by NTP (timedatectl).",
        )


SERVER_CHECKS = (
    check_version,
    check_schema,
    check_disks,
    check_standbys,
    check_access,
    check_server_clock,
)
