"""Fitted search parameters, one set for each encoder of queries, in a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import orjson

from models.ranking.matching import DEFAULTS, SearchParameters
from service.domain.errors import Corrupt
from service.runtime import durable_files

_log = logging.getLogger(__name__)

_GROWTH = 2  # times the items of a calibration, from which on another is worth its seconds

Evidence = Literal["judgments", "catalogue"]


class FittedParameters(NamedTuple):
    """Search parameters, and what they were fitted to."""

    parameters: SearchParameters
    fitted_to: Evidence = "judgments"
    items: int = 0  # in the catalogue they were fitted to


def load_search_parameters(path: Path, encoder: str) -> SearchParameters:
    """Load the parameters that were fitted for an encoder of queries, or the defaults.

    What was fitted to the cosines of one encoder says nothing of another's: each has its own, and
    so has a query table.

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
    return kept[encoder].parameters if encoder in kept else DEFAULTS


def has_search_parameters(path: Path, encoder: str) -> bool:
    """Report whether parameters were fitted for an encoder of queries.

    Raises:
        Corrupt: as `load_search_parameters`.
    """
    return encoder in _read_parameters(path)


def save_search_parameters(
    path: Path, encoder: str, fitted: FittedParameters, *, replaces: str | None = None
) -> None:
    """Save the parameters of an encoder of queries; those of other encoders stay as they are.

    With `replaces`, those of all encoders whose names begin with it are removed.

    Raises:
        Corrupt: as `load_search_parameters`.
        StoreFull: the disk is full.
    """
    kept = {
        name: each
        for name, each in _read_parameters(path).items()
        if replaces is None or not name.startswith(replaces)
    }
    every = {
        name: {
            **each.parameters.as_dict(),
            "fitted_to": each.fitted_to,
            "items": each.items,
        }
        for name, each in {**kept, encoder: fitted}.items()
    }
    with durable_files.open_replacement(path) as file:
        file.write(orjson.dumps(every, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def is_calibration_due(path: Path, encoder: str, items: int) -> bool:
    """Report whether a catalogue has grown enough to be calibrated on, since it last was.

    Parameters fitted to judgments are never due.

    Raises:
        Corrupt: as `load_search_parameters`.
    """
    kept = _read_parameters(path).get(encoder)
    if kept is None:
        return items > 0
    return kept.fitted_to == "catalogue" and items >= _GROWTH * kept.items


def _read_parameters(path: Path) -> Mapping[str, FittedParameters]:
    """Read the parameters by encoder name; none where the file is missing."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {name: _parse(each) for name, each in orjson.loads(content).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"{path}: is no set of search parameters for each text encoder ({error}); delete it, "
            "and fit them again with heed tune-search"
        ) from error


def _parse(values: dict[str, object]) -> FittedParameters:
    """Parse an entry of the file. Raises TypeError or ValueError where it is none."""
    # Files of 0.2 say nothing of judgments, to which all were fitted.
    fitted_to, items = values.pop("fitted_to", "judgments"), values.pop("items", 0)
    if fitted_to not in get_args(Evidence):
        raise ValueError(f"fitted_to must be one of {get_args(Evidence)}, not {fitted_to!r}")
    if not isinstance(items, int) or items < 0:
        raise ValueError(f"items must be a number of items, not {items!r}")
    return FittedParameters(SearchParameters(**values), fitted_to, items)  # type: ignore[arg-type]
