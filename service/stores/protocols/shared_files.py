"""Files that the machines of an installation fetch from its database: sets of them, in chunks.

A set is written once, and never changes: whoever has fetched it may keep it for good. One set at a
time is the active one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

CHUNK_BYTES = 2 << 20  # of a chunk, at most

FileChunk = tuple[str, bytes]
"""The name of a file, and the next bytes of it."""


class FileSet(NamedTuple):
    """A complete set: its name, what its writer said of it, and the bytes of all its files."""

    name: str
    description: bytes
    size: int


class Activation(NamedTuple):
    """The active set, and counters that only grow."""

    number: int  # of activations so far
    name: str | None  # None: there was none
    removals: int  # of sets so far


class SharedFiles(Protocol):
    """Sets of files of one kind.

    All methods but `active` wait for the database, for a bounded time: call them off the event
    loop. All but `making` raise `Unavailable` where it does not answer.
    """

    def put(self, name: str, description: bytes, chunks: Iterable[FileChunk]) -> None:
        """Store a set, which is complete, and durable, when this returns.

        What a writer leaves that was interrupted is no set, and is deleted later.

        Args:
            name: 1 to 200 bytes of UTF-8.
            description: any bytes.
            chunks: of the files, one after the other; CHUNK_BYTES each at most.

        Raises `Conflict` where there is, or once was, a set of this name, and what `chunks` raises.
        """
        ...

    def find(self, name: str) -> FileSet | None:
        """Return the set of a name; None where there is none, or it was removed."""
        ...

    def sets(self) -> list[FileSet]:
        """Return all sets, in the order in which they were completed."""
        ...

    def read(self, name: str) -> Generator[FileChunk, None, None]:
        """Yield the chunks of a set as they were put, each verified.

        Close the generator where it is not exhausted.

        Raises:
            NotFound: there is no such set, or it was removed meanwhile.
            Corrupt: naming the chunk that is missing, or not what was put.
        """
        ...

    def activate(self, name: str) -> Activation:
        """Make a set the active one, again if it is already. Raises `NotFound`."""
        ...

    def last_activation(self) -> Activation:
        """Return the last activation, with number 0 where there was none."""
        ...

    async def active(self) -> Activation:
        """Return what `last_activation` does, without blocking the event loop. Cheap."""
        ...

    def remove(self, name: str) -> bool:
        """Remove a set unless it is active; False where it is, or where there is no such set.

        Its name is never used again, since machines may still hold files under it.
        """
        ...

    def removed(self) -> set[str]:
        """Return the names of all sets that were removed."""
        ...

    def drop(self, name: str) -> None:
        """Delete a set. Other than after `remove`, its name may be used again."""
        ...

    def trim(self, most_bytes: int) -> None:
        """Drop the sets that were completed first until the others have so many bytes at most."""
        ...

    def making(self, name: str, patience: float) -> AbstractContextManager[None]:
        """Exclude other machines that would make the same set, until the block ends.

        Another one that makes it is waited for, for so many seconds at most. It ends with its
        process. Raises nothing: without the database, each machine makes its own.
        """
        ...
