"""The encoder of queries and the search parameters in use, which follow their files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.ranking.matching import SearchParameters
from models.text.query_table import QueryTable, TokenizingEncoder
from service.domain.errors import HeedError
from service.runtime.data_layout import QUERY_TABLE_FILE, SEARCH_FILE
from service.snapshots.query_tables import load_query_table
from service.snapshots.search_parameters import has_search_parameters, load_search_parameters
from service.snapshots.text_embeddings import EmbeddingCache

_log = logging.getLogger(__name__)

_Token = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SearchSetup:
    """An encoder of queries, and the parameters that were fitted with it.

    Attributes:
        parameters: weights of the kinds of match.
        encode: maps a query to its vector [D].
        encoder: name of the encoder of queries.
        quick: whether a query is encoded in less time than it takes to wake another thread.
    """

    parameters: SearchParameters
    encode: Callable[[str], NDArray[np.float32]]
    encoder: str
    quick: bool

    @classmethod
    def load(cls, embeddings: EmbeddingCache, data: Path) -> SearchSetup:
        """Load the setup of a data directory: its query table is used if parameters are fitted
        with it, as `heed tune-search` does where the table serves well enough.

        Raises:
            Corrupt: naming the file of the search parameters that fails its checks.
        """
        encoder, fitted = embeddings.encoder, data / SEARCH_FILE
        if isinstance(encoder, TokenizingEncoder):
            table = load_query_table(data / QUERY_TABLE_FILE, encoder)
            if table is not None and has_search_parameters(fitted, table.name):
                return cls.by_table(table, load_search_parameters(fitted, table.name))
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
