"""Search parameters fitted on judgments, one set for each text encoder, in a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import orjson

from models.ranking.search_parameters import DEFAULTS, SearchParameters
from service.domain.errors import Corrupt
from service.runtime import durable_files

_log = logging.getLogger(__name__)


def load_search_parameters(path: Path, encoder: str) -> SearchParameters:
    """Load the parameters that `heed tune-search` fitted for a text encoder, or the defaults.

    What was fitted to the cosines of one encoder says nothing of another's: each has its own.

    Raises:
        Corrupt: naming the file, where it is not what `save_search_parameters` wrote.
    """
    kept = _read_parameters(path)
    if kept and encoder not in kept:
        _log.warning(
            "%s holds search parameters fitted for the text encoder %s, which are not used: %s is "
            "searched with by the defaults, until heed tune-search fits others",
            path,
            " and ".join(sorted(kept)),
            encoder,
        )
    return kept.get(encoder, DEFAULTS)


def save_search_parameters(path: Path, encoder: str, fitted: SearchParameters) -> None:
    """Save the parameters of a text encoder; those of other encoders stay as they are.

    Raises:
        Corrupt: as `load_search_parameters`.
        StoreFull: the disk is full.
    """
    every = {**_read_parameters(path), encoder: fitted}
    with durable_files.open_replacement(path) as file:
        file.write(orjson.dumps(every, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _read_parameters(path: Path) -> Mapping[str, SearchParameters]:
    """Read the parameters by encoder name; none where the file is missing."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {name: SearchParameters(**each) for name, each in orjson.loads(content).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"{path}: is no set of search parameters for each text encoder ({error}); delete it, "
            "and fit them again with heed tune-search"
        ) from error
