"""Files of a version directory as chunks, and chunks as files: a chunk at a time is in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from service.domain.errors import Corrupt
from service.runtime import durable_files
from service.snapshots.versions.manifest import WRITE_ONCE, Manifest
from service.stores.postgres.shared_files import CHUNK_BYTES, FileChunk


def send_files(directory: Path, manifest: Manifest) -> Iterator[FileChunk]:
    """Yield the files of a version directory in chunks, verified by the end of each file.

    Raises:
        Corrupt: naming the file that is missing, or not what was published.
    """
    for name, (_, digest) in manifest.files.items():
        path = f"{manifest.version}/{name}"
        hasher = hashlib.sha256()
        try:
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise Corrupt(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            is_first = True
            while (data := file.read(CHUNK_BYTES)) or is_first:  # an empty file is one chunk
                hasher.update(data)
                is_first = False
                yield name, data
        if hasher.hexdigest() != digest:
            raise Corrupt(f"{path}: its SHA-256 does not match the manifest")


def receive_files(directory: Path, manifest: Manifest, chunks: Iterable[FileChunk]) -> None:
    """Write the files of a version from chunks, durable but for their directory entries.

    Raises:
        Corrupt: naming the file whose bytes are not those of the manifest.
    """
    for name, parts in groupby(check_chunks(manifest, chunks), key=itemgetter(0)):
        with durable_files.create(directory / name, mode=WRITE_ONCE) as file:
            for _, data in parts:
                file.write(data)


def check_chunks(manifest: Manifest, chunks: Iterable[FileChunk]) -> Iterator[FileChunk]:
    """Yield the chunks of a version's files; a file is verified by the end of its last one.

    Raises:
        Corrupt: naming the file whose bytes are not those of the manifest.
    """
    missing = dict(manifest.files)
    for name, parts in groupby(chunks, key=itemgetter(0)):
        if name not in missing:
            raise Corrupt(f"{manifest.version}/{name[:80]!r}: the file is not in the manifest")
        left, digest = missing.pop(name)
        hasher = hashlib.sha256()
        for _, data in parts:
            left -= len(data)
            if left < 0:
                break
            hasher.update(data)
            yield name, data
        if left or hasher.hexdigest() != digest:
            raise Corrupt(
                f"{manifest.version}/{name}: what was fetched does not match the manifest"
            )
    for name in missing:
        raise Corrupt(f"{manifest.version}/{name}: it was not fetched, for it is missing")
