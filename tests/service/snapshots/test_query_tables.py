"""The file of a query table, and the setup of search that follows it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from models.ranking.matches import DEFAULTS, SearchParameters
from models.text.encoders import StaticEncoder
from models.text.query_table import QueryTable
from service.runtime.data_layout import QUERY_TABLE_FILE, SEARCH_FILE
from service.snapshots.live_search import (
    FittedParameters,
    LiveSearch,
    SearchSetup,
    load_query_table,
    save_query_table,
    save_search_parameters,
)
from service.snapshots.text_embeddings import EmbeddingCache
from tests.support.token_encoder import WIDTH, TokenEncoder

FITTED = SearchParameters(meaning=2.0)


def table_for(encoder: TokenEncoder, seed: int = 0) -> QueryTable:
    size = len(encoder.vocabulary), WIDTH
    return QueryTable(encoder, np.random.default_rng(seed).normal(size=size))


def save_both(data: Path, table: QueryTable, parameters: SearchParameters = FITTED) -> None:
    """Save a table and parameters that were fitted with it, as `heed tune-search` does."""
    save_query_table(data / QUERY_TABLE_FILE, table, TokenEncoder().name)
    save_search_parameters(data / SEARCH_FILE, table.name, FittedParameters(parameters))


# ---------------------------------------------------------------------------- the file


def test_a_table_survives_a_round_trip(tmp_path: Path) -> None:
    """A loaded table has the name and the vectors of the saved one, and no other file is left."""
    path, encoder = tmp_path / QUERY_TABLE_FILE, TokenEncoder()
    table = table_for(encoder)
    save_query_table(path, table, encoder.name)
    loaded = load_query_table(path, encoder)
    assert loaded is not None
    assert loaded.name == table.name
    np.testing.assert_array_equal(loaded.encode(["w1 w7"]), table.encode(["w1 w7"]))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_table_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """A file cut short or with a changed byte is not used, and the log names it and the remedy."""
    path, encoder = tmp_path / QUERY_TABLE_FILE, TokenEncoder()
    save_query_table(path, table_for(encoder), encoder.name)
    whole = path.read_bytes()
    place = int(np.random.default_rng(seed).integers(len(whole) - 2 * 61 * WIDTH, len(whole)))
    changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    path.write_bytes(whole[: place - seed * 100] if seed % 2 else changed)
    assert load_query_table(path, encoder) is None
    (said,) = caplog.messages
    assert f"{path} is not used, for it is damaged" in said
    assert f"queries are encoded by {encoder.name}, until heed tune-search" in said


def test_a_file_that_is_no_table_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another file of the same format, and an empty one, are not used."""
    path, encoder = tmp_path / QUERY_TABLE_FILE, TokenEncoder()
    said = {"encoder": encoder.name, "name": "other"}
    for content in (b"", b"{}", save({"weights": np.zeros((61, WIDTH))}, said)):
        path.write_bytes(content)
        assert load_query_table(path, encoder) is None
    assert len(caplog.messages) == 3


def test_the_table_of_another_encoder_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = TokenEncoder(), TokenEncoder(seed=1)
    path = tmp_path / QUERY_TABLE_FILE
    save_query_table(path, table_for(first), first.name)
    assert load_query_table(path, other) is None
    (said,) = caplog.messages
    assert f"fitted for the text encoder {first.name}: queries are encoded by {other.name}" in said


# ---------------------------------------------------------------------------- the setup


def test_a_table_is_used_with_the_parameters_fitted_with_it(tmp_path: Path) -> None:
    encoder = TokenEncoder()
    embeddings, table = EmbeddingCache(encoder), table_for(encoder)
    save_query_table(tmp_path / QUERY_TABLE_FILE, table, encoder.name)
    own = SearchParameters(meaning=0.5)
    save_search_parameters(tmp_path / SEARCH_FILE, encoder.name, FittedParameters(own))
    setup = SearchSetup.load(embeddings, tmp_path)
    assert (setup.encoder, setup.parameters, setup.quick) == (encoder.name, own, False)
    np.testing.assert_array_equal(setup.encode("w1"), encoder.encode(["w1"])[0])
    save_both(tmp_path, table)
    setup = SearchSetup.load(embeddings, tmp_path)
    assert (setup.encoder, setup.parameters, setup.quick) == (table.name, FITTED, True)
    np.testing.assert_array_equal(setup.encode("w1"), table.encode(["w1"])[0])
    # Another table's parameters are not this one's.
    save_query_table(tmp_path / QUERY_TABLE_FILE, table_for(encoder, seed=1), encoder.name)
    assert SearchSetup.load(embeddings, tmp_path).encoder == encoder.name


def test_a_quick_encoder_has_no_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Under the static encoder a table of a transformer is ignored."""
    save_query_table(tmp_path / QUERY_TABLE_FILE, table_for(TokenEncoder()), TokenEncoder().name)
    setup = SearchSetup.load(EmbeddingCache(StaticEncoder()), tmp_path)
    assert (setup.encoder, setup.parameters) == (StaticEncoder.name, DEFAULTS)
    assert caplog.records == []


async def test_new_files_are_used_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`follow` uses new parameters and tables; what cannot be used is logged once, not used."""
    caplog.set_level(logging.INFO)
    encoder = TokenEncoder()
    live, table = LiveSearch(EmbeddingCache(encoder), tmp_path), table_for(encoder)
    first = live.setup
    await live.follow()
    assert live.setup is first
    save_both(tmp_path, table)
    await live.follow()
    assert (live.setup.encoder, live.setup.parameters) == (table.name, FITTED)
    assert caplog.messages == [f"queries are encoded by {table.name}"]
    (tmp_path / SEARCH_FILE).write_text("[]")
    for _ in range(2):
        await live.follow()
    assert (live.setup.encoder, live.setup.parameters) == (table.name, FITTED)
    assert len(caplog.messages) == 2
    assert "search.json" in caplog.messages[1]
    (tmp_path / SEARCH_FILE).unlink()
    await live.follow()
    assert (live.setup.encoder, live.setup.parameters) == (encoder.name, DEFAULTS)


def test_parameters_of_former_tables_are_replaced(tmp_path: Path) -> None:
    """`replaces` removes what was fitted with an encoder and its tables, and nothing else."""
    path, fitted = tmp_path / SEARCH_FILE, FittedParameters(FITTED)
    for name in ("a", "a+table-1", "b"):
        save_search_parameters(path, name, fitted)
    save_search_parameters(path, "a", FittedParameters(DEFAULTS), replaces="a")
    kept = path.read_text()
    assert [f'"{name}"' in kept for name in ("a", "a+table-1", "b")] == [True, False, True]
