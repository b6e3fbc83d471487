"""Files of SQLite stores as a whole: copies of them, and reading them without changing them."""
