"""The query table of a catalogue, in a file of the data directory."""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models.text.query_table import QueryTable, TokenizingEncoder
from service.runtime import durable_files

_log = logging.getLogger(__name__)


def save_query_table(path: Path, table: QueryTable, encoder: str) -> None:
    """Save a table that was fitted for the text encoder of this name, atomically.

    Raises:
        StoreFull: the disk is full.
    """
    with durable_files.open_replacement(path) as file:
        file.write(save({"rows": table.rows}, {"encoder": encoder, "name": table.name}))


def load_query_table(path: Path, encoder: TokenizingEncoder) -> QueryTable | None:
    """Load the table of a text encoder; None where there is none that can be used.

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
