"""Names of the files and folders in the data directory."""

from pathlib import Path

from service.domain.errors import Corrupt

STORE_FILE = "heed.db"
MODELS_FOLDER = "models"
CACHE_FOLDER = "cache"  # downloads; may be deleted
EMBEDDINGS_FILE = "embeddings.bin"  # derived; may be deleted
CHECKPOINT_FILE = "training.checkpoint"  # of an unfinished training; may be deleted
SEARCH_FILE = "search.json"  # fitted parameters; defaults apply without it
QUERY_TABLE_FILE = "queries.safetensors"  # derived; the text encoder encodes queries without it
INDEXING_LOCK = "indexing.lock"  # held by the worker that rebuilds the index; may be deleted
JOBS_FOLDER = "jobs"  # records of trainings
NAMESPACES_FOLDER = "namespaces"  # each folder in it is laid out as the data directory
LAST_BACKUP_FILE = "last_backup.json"  # when, and where to; for heed doctor
UNFINISHED_RESTORE = "restore.unfinished"  # present while a restore fills the directory

# Files that a backup contains, besides the store, the models and the records of trainings. What is
# derived and cheap to derive again, temporary, or a lock is left out.
BACKED_UP_FILES = (SEARCH_FILE, QUERY_TABLE_FILE, EMBEDDINGS_FILE)


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
