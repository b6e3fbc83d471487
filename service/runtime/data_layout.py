"""Where things are in the data directory."""

STORE_FILE = "heed.db"
MODELS_FOLDER = "models"
CACHE_FOLDER = "cache"  # downloads; may be deleted
EMBEDDINGS_FILE = "embeddings.bin"  # derived; may be deleted
CHECKPOINT_FILE = "training.checkpoint"  # of a training under way; may be deleted
SEARCH_FILE = "search.json"  # parameters fitted on judgments; without it the defaults
INDEXING_LOCK = "indexing.lock"  # held by the worker that indexes anew; may be deleted
