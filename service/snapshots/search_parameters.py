"""The parameters that searches are served with: those fitted on judgments, where there are some."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import orjson

from models.ranking.search_parameters import DEFAULTS, SearchParameters
from service.domain.errors import Corrupt
from service.runtime import durable_files

_log = logging.getLogger(__name__)


def load_search_parameters(path: Path, encoder: str) -> SearchParameters:
    """What `heed tune-search` kept for a text encoder, or the defaults where there is nothing.

    What was fitted to the cosines of one encoder says nothing of another's: each has its own.

    Args:
        path: where they are kept.
        encoder: the name of the encoder that searches are read with.

    Raises:
        Corrupt: naming the file, where it is not what `keep` wrote.
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
    """Keep the parameters of a text encoder, and those of others as they are.

    Raises:
        Corrupt: as `parameters`.
        StoreFull: the disk is full.
    """
    every = {
        name: each.as_dict() for name, each in {**_read_parameters(path), encoder: fitted}.items()
    }
    with durable_files.open_replacement(path) as file:
        file.write(json.dumps(every, indent=1).encode() + b"\n")


def _read_parameters(path: Path) -> Mapping[str, SearchParameters]:
    """By the name of their encoder."""
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
