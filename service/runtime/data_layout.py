"""Files and folders of the data directory, those of its namespaces, and paths in messages.

    <data>/                    the namespace `default`
    <data>/namespaces/<name>/  any other, laid out like the data directory
    <data>/namespaces/.lock    held while one is created, opened or removed

A folder is filled under a hidden name and renamed into place; it is renamed back to a hidden name
before its files are deleted. A process that is killed in between leaves a hidden folder, which the
next creation or removal deletes.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from service.domain.errors import Conflict, Corrupt, Invalid, NotFound, Unavailable
from service.domain.names import DEFAULT_NAMESPACE, NAME_RULE, is_name
from service.runtime import durable_files

STORE_FILE = "heed.db"
MODELS_FOLDER = "models"
JOBS_FOLDER = "jobs"
RUNNER_LOCK = "runner.lock"  # in the folder of jobs; held by the process that runs one
CACHE_FOLDER = "cache"  # downloads and derived data; may be deleted
INDEXES_FOLDER = "cache/indexes"  # derived: indexes by what they were made of; may be deleted
CATALOGUE_FOLDER = "cache/catalogue"  # derived: the catalogue as it was read; may be deleted
EMBEDDINGS_FILE = "embeddings.bin"  # derived; may be deleted
CHECKPOINT_FILE = "training.checkpoint"  # of an unfinished training; may be deleted
SEARCH_FILE = "search.json"  # fitted parameters; defaults apply without it
QUERY_TABLE_FILE = "queries.safetensors"  # derived; the text encoder encodes queries without it
INDEXING_LOCK = "indexing.lock"  # held by the worker that rebuilds the index; may be deleted
FIRST_KEY_FILE = "admin.key"  # the token of the first API key; may be deleted once it is noted
NAMESPACES_FOLDER = "namespaces"  # each folder in it is laid out as the data directory
NAMESPACE_ID_FILE = "namespace.id"  # of a namespace but `default`; earlier versions made none
NAMESPACES_LOCK = ".lock"  # in the folder of namespaces; held while one is created or removed
LAST_BACKUP_FILE = "last_backup.json"  # when, and where to; for heed doctor
UNFINISHED_RESTORE = "restore.unfinished"  # present while a restore fills the directory

# Files that a backup contains, besides the store, the models and the records of trainings. It
# leaves out locks, temporary files and files that are cheap to derive again.
BACKED_UP_FILES = (SEARCH_FILE, QUERY_TABLE_FILE, EMBEDDINGS_FILE)


def namespace_folder(data: Path, name: str) -> Path:
    """Return the data directory of a namespace: `default` is the directory `data` itself.

    The caller must have checked the name (`service.domain.names.is_name`).
    """
    return data if name == DEFAULT_NAMESPACE else data / NAMESPACES_FOLDER / name


def namespace_of(folder: Path) -> str:
    """Return the name of the namespace whose data directory a folder is."""
    root = folder.absolute().parent
    is_namespace = root.name == NAMESPACES_FOLDER and (root / NAMESPACES_LOCK).exists()
    return folder.name if is_namespace and is_name(folder.name) else DEFAULT_NAMESPACE


def check_restored(data: Path) -> None:
    """Check that no restore into this data directory was interrupted.

    Raises:
        Corrupt: one was.
    """
    if (data / UNFINISHED_RESTORE).exists():
        raise Corrupt(
            f"{data} holds part of a backup: its restore was interrupted. Empty the directory and "
            "run heed restore again"
        )


# Identity of a store among all that ever had its namespace's name: device and inode of its file, or
# number and creation time of the namespace in a database; and the namespace's id.
StoreToken = tuple[int, int, str]
ID_BYTES = 16  # random bytes of a namespace's id, written as hexadecimal digits

_NEW, _REMOVED = ".new-", ".removed-"  # no names, since these begin with a letter or a digit
_TIMEOUT = 10.0  # seconds to wait for another process that creates, opens or removes a namespace


def namespace_names(data: Path) -> list[str]:
    """Return the names of all namespaces but `default`, sorted, damaged ones among them."""
    try:
        entries = sorted((data / NAMESPACES_FOLDER).iterdir())
    except FileNotFoundError:
        return []
    return [each.name for each in entries if is_name(each.name) and each.is_dir()]


def find_namespace(data: Path, name: str) -> Path:
    """Return the folder of a namespace that exists. `default` always does.

    Raises:
        NotFound: there is none of this name.
    """
    folder = _folder(data, name)
    if name != DEFAULT_NAMESPACE and not folder.is_dir():
        raise NotFound(f"there is no namespace {name!r}: heed namespaces create {name} creates it")
    return folder


def store_token(folder: Path) -> StoreToken | None:
    """Return the identity of a namespace's store, None where its file is missing.

    No other store has the same identity for as long as a process holds this one open.
    """
    try:
        found = (folder / STORE_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, namespace_id(folder)


def namespace_id(folder: Path) -> str:
    """Return the id of the namespace in a folder, empty if an earlier version made it."""
    try:  # each request calls this: `Path.read_text` takes four times as long
        descriptor = os.open(f"{folder}/{NAMESPACE_ID_FILE}", os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    try:
        return os.read(descriptor, 2 * ID_BYTES).decode("ascii", "replace")
    finally:
        os.close(descriptor)


@contextmanager
def namespaces_locked(data: Path) -> Iterator[None]:
    """Keep namespaces from being created and removed until the block ends.

    Raises:
        Unavailable: another process has kept them locked for too long.
    """
    root = data / NAMESPACES_FOLDER
    durable_files.make_directory(root)
    try:
        with durable_files.locked(root / NAMESPACES_LOCK, _TIMEOUT):
            yield
    except TimeoutError as error:
        raise Unavailable(str(error)) from None


def create_namespace(
    data: Path, name: str, fill: Callable[[Path], None], own_id: str | None = None
) -> Path:
    """Create a namespace whose folder `fill` makes the content of; return the folder.

    `own_id` is the id of the namespace that it copies; a new one by default.

    Raises:
        Invalid: the name is not allowed.
        Conflict: there is a namespace of this name.
    """
    folder = _folder(data, name)
    with namespaces_locked(data):
        _clean(data)
        if name == DEFAULT_NAMESPACE or folder.exists():
            raise Conflict(f"there is a namespace {name!r} already")
        new = folder.with_name(_NEW + name)
        new.mkdir()
        fill(new)
        own_id = secrets.token_hex(ID_BYTES) if own_id is None else own_id
        durable_files.replace(new / NAMESPACE_ID_FILE, own_id.encode())
        durable_files.sync_directory(new)
        new.rename(folder)
        durable_files.sync_directory(folder.parent)
    return folder


def remove_namespace(data: Path, name: str, before: Callable[[], None] = lambda: None) -> None:
    """Remove a namespace with all that it has stored. A service that has it open notices.

    `before` is called once the removal is certain, while no namespace is created or opened.

    Raises:
        Invalid: the name is not allowed, or it is `default`.
        NotFound: there is none of this name.
        Conflict: a training runs in it.
    """
    if name == DEFAULT_NAMESPACE:
        raise Invalid("", f"{name} is the data directory itself, and cannot be removed")
    with namespaces_locked(data), ExitStack() as held:
        _clean(data)
        folder = find_namespace(data, name)
        if (folder / JOBS_FOLDER).is_dir():
            lock = durable_files.try_lock(folder / JOBS_FOLDER / RUNNER_LOCK)
            if lock is None:
                raise Conflict(f"a training runs in the namespace {name!r}: cancel it first")
            held.callback(os.close, lock)
        before()
        gone = folder.with_name(f"{_REMOVED}{name}-{secrets.token_hex(4)}")
        folder.rename(gone)
        durable_files.sync_directory(gone.parent)
    # Without the lock, since openings wait for it; `_clean` may delete the same files meanwhile.
    shutil.rmtree(gone, ignore_errors=True)
    if gone.exists():
        shutil.rmtree(gone)  # raises what stands in the way
    durable_files.sync_directory(gone.parent)


def folder_size(folder: Path) -> int:
    """Return the bytes of all files in a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


def check_namespace(name: str) -> str:
    """Return the name of a namespace; raise `Invalid` unless it is one."""
    if not is_name(name):
        raise Invalid("", f"{name[:80]!r} is no name of a namespace: {NAME_RULE}")
    return name


def _folder(data: Path, name: str) -> Path:
    return namespace_folder(data, check_namespace(name))


def _clean(data: Path) -> None:
    """Delete what killed processes left. The caller must hold the lock."""
    for each in (data / NAMESPACES_FOLDER).iterdir():
        if each.name.startswith((_NEW, _REMOVED)):
            shutil.rmtree(each, ignore_errors=each.name.startswith(_REMOVED))


# ------------------------------------------------------------------- paths in messages

# An absolute path of two parts or more, or one of them relative to the working directory. It must
# not begin within a word, a URL or a path already matched.
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[^\s/:;,'\"()]+/)*(?=[^\s/:;,'\"()]+)")


def without_folders(text: str, data: Path | None = None) -> str:
    """Return a message with the folders of its paths left out: `/data/heed.db` becomes `heed.db`.

    `data` is a directory whose name may also have spaces.

    Names of files say enough to act on; where they lie is nobody's business but the operator's,
    whose log has the whole path.
    """
    for folder in () if data is None else (data.resolve(), data.absolute(), data):
        text = text.replace(f"{folder}/", "")
    return _FOLDERS.sub("", text)


def is_denied(path: Path) -> bool:
    """Report whether the permissions of a file keep this process from changing it."""
    return path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def denied(path: Path) -> str:
    """Return what to do about a file that this process has no permission for."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            owner = _user(place.stat().st_uid)
            return (
                f"the user {_user(os.geteuid())} has no permission for {path}; {place} belongs to "
                f"{owner}: run heed as the user who owns the data directory and may write to it, "
                "or give it to this user (chown -R, chmod -R u+rwX)"
            )
    raise AssertionError(path)  # the root is there


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
