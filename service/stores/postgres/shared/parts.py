"""Everything that machines share in one namespace of a PostgreSQL database, beside the records."""

from __future__ import annotations

from service.stores.postgres.database.connections import Connections
from service.stores.postgres.shared.files import PostgresFiles
from service.stores.postgres.shared.jobs import PostgresJobs
from service.stores.protocols.shared_parts import SharedParts


class PostgresSharedParts(SharedParts):
    """Hands out the shared parts of a namespace, over the connections of its store."""

    def __init__(self, connections: Connections, namespace_no: int) -> None:
        self._connections = connections
        self._namespace_no = namespace_no

    def files(self, kind: str) -> PostgresFiles:
        """`SharedParts.files`."""
        return PostgresFiles(self._connections, self._namespace_no, kind)

    @property
    def jobs(self) -> PostgresJobs:
        """`SharedParts.jobs`."""
        return PostgresJobs(self._connections, self._namespace_no)
