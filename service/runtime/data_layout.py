"""Names of the files and folders in the data directory."""

STORE_FILE = "heed.db"
MODELS_FOLDER = "models"
CACHE_FOLDER = "cache"  # downloads and derived data; may be deleted
INDEXES_FOLDER = "cache/indexes"  # derived: indexes by what they were made of; may be deleted
EMBEDDINGS_FILE = "embeddings.bin"  # derived; may be deleted
CHECKPOINT_FILE = "training.checkpoint"  # of an unfinished training; may be deleted
SEARCH_FILE = "search.json"  # fitted parameters; defaults apply without it
QUERY_TABLE_FILE = "queries.safetensors"  # derived; the text encoder encodes queries without it
INDEXING_LOCK = "indexing.lock"  # held by the worker that rebuilds the index; may be deleted
