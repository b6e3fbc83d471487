"""Names of the files and folders in the data directory, and the data directories of namespaces."""

from pathlib import Path

from service.domain.names import DEFAULT_NAMESPACE

STORE_FILE = "heed.db"
MODELS_FOLDER = "models"
JOBS_FOLDER = "jobs"
RUNNER_LOCK = "runner.lock"  # in the folder of jobs; held by the process that runs one
CACHE_FOLDER = "cache"  # downloads; may be deleted
EMBEDDINGS_FILE = "embeddings.bin"  # derived; may be deleted
CHECKPOINT_FILE = "training.checkpoint"  # of an unfinished training; may be deleted
SEARCH_FILE = "search.json"  # fitted parameters; defaults apply without it
QUERY_TABLE_FILE = "queries.safetensors"  # derived; the text encoder encodes queries without it
INDEXING_LOCK = "indexing.lock"  # held by the worker that rebuilds the index; may be deleted
FIRST_KEY_FILE = "admin.key"  # the token of the first API key; may be deleted once it is noted
NAMESPACES_FOLDER = "namespaces"


def namespace_folder(data: Path, name: str) -> Path:
    """Return the data directory of a namespace: `default` is the directory `data` itself.

    The caller must have checked the name (`service.domain.names.is_name`).
    """
    return data if name == DEFAULT_NAMESPACE else data / NAMESPACES_FOLDER / name
