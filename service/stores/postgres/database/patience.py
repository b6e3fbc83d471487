"""Connections that are cut off when the server does not answer.

Timeouts of the server do not help where it hangs itself, and those of TCP do not where its machine
still confirms packets: whoever waits would do so for as long as the server hangs.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection

PATIENCE = 15.0  # seconds that a thread waits for one answer


class PatientConnection(Connection[tuple[Any, ...]]):
    """Connection whose every answer must come within `PATIENCE` seconds; else it is lost."""

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait for the server as psycopg does, and no longer than that."""
        with cut_after(PATIENCE, self):
            return super().wait(*args, **options)


def cut_off(connection: Connection | AsyncConnection) -> None:
    """Shut a connection's socket down, which wakes whoever waits for it."""
    with (
        suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as own,
    ):
        own.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_after(seconds: float, connection: Connection) -> Iterator[None]:
    """Cut a thread's connection where the block takes longer, so that it fails."""
    lock, is_over = threading.Lock(), False

    def cut_now() -> None:
        with lock:
            if not is_over:  # else the socket may be closed, and its number another file's
                cut_off(connection)

    timer = threading.Timer(seconds, cut_now)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()
