"""Names of the files and folders in the data directory, and the data directories of namespaces."""

from pathlib import Path

from service.domain.errors import Corrupt
from service.domain.names import DEFAULT_NAMESPACE, is_name

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

# Files that a backup contains, besides the store, the models and the records of trainings. What is
# derived and cheap to derive again, temporary, or a lock is left out.
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
