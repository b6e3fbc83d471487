"""The parameters that searches are served with: those fitted on judgments, where there are some."""

from __future__ import annotations

from pathlib import Path

import orjson

from models.search_parameters import DEFAULTS, SearchParameters
from service.errors import Corrupt


def parameters(path: Path) -> SearchParameters:
    """What `heed tune-search` kept in a file, or the defaults where there is none.

    Raises:
        Corrupt: naming the file, where it is not what that wrote.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return DEFAULTS
    try:
        return SearchParameters(**orjson.loads(content))
    except (TypeError, ValueError, AttributeError) as error:
        problem = "delete it, or fit them again with heed tune-search"
        raise Corrupt(f"{path}: is no set of search parameters ({error}); {problem}") from error
