"""The encoder of queries and the search parameters in use, which follow their files.

A data directory has the query table of its catalogue in one file, and fitted parameters, one set
for each encoder of queries, in another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models.ranking.matches import DEFAULTS, SearchParameters
from models.text.query_table import QueryTable, TokenizingEncoder
from service.domain.errors import Corrupt, HeedError
from service.runtime import durable_files
from service.runtime.data_layout import QUERY_TABLE_FILE, SEARCH_FILE
from service.snapshots.text_embeddings import EmbeddingCache

_log = logging.getLogger(__name__)


def save_query_table(path: Path, table: QueryTable, encoder: str) -> None:
    """Save a table that was fitted for the text encoder of this name, atomically.

    Raises `StoreFull`: the disk is full.
    """
    with durable_files.open_replacement(path) as file:
        file.write(save({"rows": table.rows}, {"encoder": encoder, "name": table.name}))


def load_query_table(path: Path, encoder: TokenizingEncoder) -> QueryTable | None:
    """Load the table of a text encoder; None if no table can be used.

    The log says why a file is not used.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            said = file.metadata() or {}
            of = said.get("encoder")
            if of == encoder.name:
                table = QueryTable(encoder, file.get_tensor("rows"))
                if table.name == said.get("name"):  # which has a digest of the rows
                    return table
                raise ValueError("its digest is of other rows")
    except (OSError, SafetensorError, ValueError) as error:
        _log.warning(
            "%s is not used, for it is damaged (%s): queries are encoded by %s, until "
            "heed tune-search fits another",
            path,
            error,
            encoder.name,
        )
    else:
        _log.warning(
            "%s is not used, for it was fitted for the text encoder %s: queries are encoded by %s, "
            "until heed tune-search fits another",
            path,
            of,
            encoder.name,
        )
    return None


_GROWTH = 2  # times the items of a calibration, from which on another is worth its seconds

Evidence = Literal["judgments", "catalogue"]


class FittedParameters(NamedTuple):
    """Search parameters, and what they were fitted to."""

    parameters: SearchParameters
    fitted_to: Evidence = "judgments"
    items: int = 0  # in the catalogue they were fitted to


def load_search_parameters(path: Path, encoder: str) -> SearchParameters:
    """Load the parameters that were fitted for an encoder of queries, or the defaults.

    Parameters fitted to the cosines of one encoder say nothing of another's: each has its own, and
    so has a query table.

    Raises `Corrupt`: naming the file, where it is not what `save_search_parameters` wrote.
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
        name: each.parameters.as_dict() | {"fitted_to": each.fitted_to, "items": each.items}
        for name, each in {**kept, encoder: fitted}.items()
    }
    with durable_files.open_replacement(path) as file:
        file.write(orjson.dumps(every, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def is_calibration_due(path: Path, encoder: str, items: int) -> bool:
    """Report whether a catalogue has grown enough to be calibrated on, since it last was.

    Parameters fitted to judgments are never due.

    Raises `Corrupt`: as `load_search_parameters`.
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


_Token = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SearchSetup:
    """An encoder of queries, and the parameters that were fitted with it."""

    parameters: SearchParameters  # weights of the kinds of match
    encode: Callable[[str], NDArray[np.float32]]  # maps a query to its vector [D]
    encoder: str  # its name
    quick: bool  # a query is encoded in less time than it takes to wake another thread

    @classmethod
    def load(cls, embeddings: EmbeddingCache, data: Path) -> SearchSetup:
        """Load the setup of a data directory: its query table is used if parameters are fitted
        with it, as `heed tune-search` does where the table serves well enough.

        Raises `Corrupt`: naming the file of the search parameters that fails its checks.
        """
        encoder, fitted = embeddings.encoder, data / SEARCH_FILE
        if isinstance(encoder, TokenizingEncoder):
            table = load_query_table(data / QUERY_TABLE_FILE, encoder)
            kept = {} if table is None else _read_parameters(fitted)
            if table is not None and table.name in kept:
                return cls.by_table(table, kept[table.name].parameters)
        parameters = load_search_parameters(fitted, encoder.name)
        return cls(parameters, embeddings.query, encoder.name, encoder.quick)

    @classmethod
    def by_table(cls, table: QueryTable, parameters: SearchParameters) -> SearchSetup:
        """Return the setup that encodes queries by a table."""
        return cls(parameters, lambda text: table.encode([text])[0], table.name, table.quick)


class LiveSearch:
    """Serves the setup of a data directory, and replaces it when its files are.

    Raises what `SearchSetup.load` raises.
    """

    def __init__(self, embeddings: EmbeddingCache, data: Path) -> None:
        self._embeddings, self._data = embeddings, data
        self._token = self._read_token()
        self.setup = SearchSetup.load(embeddings, data)
        if self.setup.encoder != embeddings.encoder.name:
            _log.info("queries are encoded by %s", self.setup.encoder)

    async def follow(self) -> None:
        """Use what another process fitted. Call it now and then.

        Files that cannot be used are logged, once, and the old setup goes on.
        """
        token = self._read_token()
        if token == self._token:
            return
        self._token = token
        try:
            self.setup = await asyncio.to_thread(SearchSetup.load, self._embeddings, self._data)
        except HeedError as error:
            _log.error("the new parameters of search are not used: %s", error.detail)
        else:
            _log.info("queries are encoded by %s", self.setup.encoder)

    def _read_token(self) -> _Token:
        return tuple(_stat(self._data / name) for name in (QUERY_TABLE_FILE, SEARCH_FILE))


def _stat(path: Path) -> tuple[int, int, int] | None:
    """Return the identity of a file, which each replacement changes; None without one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
