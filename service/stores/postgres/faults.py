"""Errors of PostgreSQL as errors of the domain."""

from __future__ import annotations

import psycopg
import psycopg_pool
from psycopg import errors

from service.domain.errors import (
    Corrupt,
    DatabaseOverloaded,
    HeedError,
    StoreFull,
    StoreReadOnly,
    StoreUnreachable,
    Unavailable,
)

_RETRIED = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
_DAMAGED = (errors.DataCorrupted, errors.IndexCorrupted)
_BUSY = (errors.TooManyConnections, errors.OutOfMemory, errors.ConfigurationLimitExceeded)


def explain(error: psycopg.Error) -> HeedError:
    """Translate an error of PostgreSQL, or of a connection to it."""
    reason = _first_line(error)
    match error:
        case errors.DiskFull():
            return StoreFull(f"PostgreSQL's disk is full: {reason}")
        case errors.ReadOnlySqlTransaction():
            return StoreReadOnly(f"PostgreSQL takes no writes: {reason}")
        case psycopg_pool.PoolTimeout():
            return StoreUnreachable("no connection to PostgreSQL became free in time")
        case psycopg_pool.PoolClosed():
            return Unavailable("the store is closed")
    if isinstance(error, _DAMAGED):
        return Corrupt(f"PostgreSQL has found damage: {reason}")
    if isinstance(error, _BUSY):
        return DatabaseOverloaded(f"PostgreSQL is at its limits: {reason}")
    if isinstance(error, errors.QueryCanceled):
        return StoreUnreachable("PostgreSQL did not answer in time")
    if is_disconnected(error):
        return StoreUnreachable(f"PostgreSQL does not answer: {reason}")
    return Unavailable(f"PostgreSQL refuses: {reason}")


def is_retried(error: psycopg.Error) -> bool:
    """True if the same transaction may succeed at once, since another one was only faster."""
    # Citus passes on a worker's message about copied rows, but not its code.
    return isinstance(error, _RETRIED) or (
        isinstance(error, errors.InternalError_) and "event_ids_pkey" in str(error)
    )


def is_disconnected(error: psycopg.Error) -> bool:
    """True if the connection is lost, or that of a distributed database to one of its workers."""
    return is_lost(error) or (
        isinstance(error, psycopg.OperationalError) and str(error.sqlstate).startswith("08")
    )


def is_lost(error: psycopg.Error) -> bool:
    """Report whether the connection is lost, so that another one may succeed."""
    return isinstance(error, psycopg.OperationalError) and (
        error.sqlstate is None or error.sqlstate.startswith("57P")
    )


def _first_line(error: psycopg.Error) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
