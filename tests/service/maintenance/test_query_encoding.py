"""The choice between a query table and the encoder it imitates, and the commands that make it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from models.ranking.matches import DEFAULTS
from models.text.encoders import StaticEncoder
from models.text.query_table import FittedTable, QueryTable
from service.domain.errors import Invalid
from service.domain.records import Item
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.maintenance.search_calibration import (
    SENTENCE_END,
    WEIGHTS,
    Calibration,
    QueryEncoding,
    fit_query_encoding,
    hold_out,
    plain_text,
)
from service.runtime.data_layout import QUERY_TABLE_FILE, SEARCH_FILE
from service.snapshots.live_search import SearchSetup
from service.snapshots.text_embeddings import EmbeddingCache
from tests.support import asking, tiny_bert
from tests.support.command_line import Heed
from tests.support.judged import beir
from tests.support.token_encoder import WORDS, TokenEncoder, sentences

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.make(tmp_path_factory.mktemp("models") / "tiny")


def catalogue(count: int) -> list[Item]:
    """Items of sentences of words; each item has some words more often than others."""
    rng = np.random.default_rng(0)
    items = []
    for number in range(count):
        words = [*rng.choice(WORDS, 12), *WORDS]
        texts = sentences(12, seed=number, words=words)
        items.append(Item(str(number), title=texts[0], description=". ".join(texts[1:]) + "."))
    return items


# ---------------------------------------------------------------------------- the choice


def calibration(words: float, chosen: NDArray[np.float64]) -> Calibration:
    """Return a calibration whose chosen weight has these gains beside those of words alone."""
    gains = np.full((len(chosen), len(WEIGHTS)), words)
    gains[:, WEIGHTS.index(DEFAULTS.meaning)] = chosen
    return Calibration(DEFAULTS, gains)


@pytest.mark.parametrize(
    ("words", "table", "encoder", "good"),
    [
        (0.5, 0.60, 0.60, True),
        (0.5, 0.60, 0.65, True),
        (0.5, 0.54, 0.60, False),  # less than half of what the encoder adds
        (0.5, 0.51, 0.515, False),  # within the noise of words alone
        (0.5, 0.50, 0.50, True),  # neither adds anything: the quick one
        (0.5, 0.60, 0.45, True),
    ],
)
def test_a_table_is_good_that_adds_half_of_what_its_encoder_adds(
    words: float, table: float, encoder: float, good: bool
) -> None:
    noise = np.random.default_rng(0).normal(scale=0.4, size=500)
    noise -= noise.mean()  # its standard error is .018
    by_table = calibration(words, table + noise if table != words else np.full(500, words))
    by_encoder = calibration(words, np.full(500, encoder))
    fitted = FittedTable(QueryTable(TokenEncoder(), TokenEncoder().hidden), 1.0, 1)
    assert QueryEncoding(fitted, by_table, by_encoder).is_table_good is good


def test_a_table_is_fitted_without_the_texts_it_is_compared_on() -> None:
    """Held-out texts are no texts of the fit, and the table finds about what the encoder finds."""
    items, encoder = catalogue(150), TokenEncoder(bend=0.2)
    found = fit_query_encoding(items, EmbeddingCache(encoder))
    held = {text for part in hold_out(items) for text, _ in part.queries}
    texts = {text for item in items for text in (item.title, *SENTENCE_END.split(item.description))}
    # These sentences are too short to be cut into pieces.
    assert found.fitted.texts == len({text for text in texts if plain_text(text) not in held})
    assert not held & set(encoder.encoded[: found.fitted.texts])
    assert found.by_table.gains.shape == found.by_encoder.gains.shape
    assert found.by_table.mean(0.0) == pytest.approx(found.by_encoder.mean(0.0), abs=1e-3)
    assert found.fitted.agreement > 0.9
    assert found.is_table_good


def test_every_other_long_sentence_is_cut_into_pieces() -> None:
    """Half of the long sentences are fitted whole and half in pieces of a query's length."""
    rng = np.random.default_rng(0)
    items = [
        Item(str(at), description=". ".join(" ".join(rng.choice(WORDS, 33)) for _ in "abc"))
        for at in range(120)
    ]
    encoder = TokenEncoder()
    found = fit_query_encoding(items, EmbeddingCache(encoder))
    whole = {text for item in items for text in SENTENCE_END.split(item.description)}
    texts = encoder.encoded[: found.fitted.texts]
    lengths = [len(text.split()) for text in texts]
    assert set(lengths) == {11, 33}
    assert all(text in whole for text, words in zip(texts, lengths, strict=True) if words == 33)
    assert all(any(text in each for each in whole) for text in texts)
    assert lengths.count(11) == pytest.approx(3 * lengths.count(33), abs=3)


def test_quick_encoders_and_few_texts_are_refused() -> None:
    """An encoder that is quick itself needs no table, and few texts make none."""
    with pytest.raises(Invalid, match=f"^{StaticEncoder.name} needs no query table"):
        fit_query_encoding(catalogue(5), EmbeddingCache(StaticEncoder()))
    with pytest.raises(Invalid, match="too few to calibrate search"):
        fit_query_encoding(catalogue(5), EmbeddingCache(TokenEncoder()))


# ---------------------------------------------------------------------------- the commands


def tiny_items(count: int) -> list[Item]:
    """Items of words of the tiny transformer."""
    words = [word for word in tiny_bert.WORDS if word.isalpha() and len(word) > 2]
    return [
        replace(item, item_id=f"i{number}", title=f"{item.title} {number}")
        for number, item in enumerate(
            Item("", title=texts[0], description=". ".join(texts[1:]) + ".")
            for texts in (sentences(8, seed=number, words=words) for number in range(count))
        )
    ]


def write(path: Path, items: list[Item]) -> Path:
    rows = [{"item_id": i.item_id, "title": i.title, "description": i.description} for i in items]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


async def test_searches_are_answered_by_the_table(heed: Heed, tmp_path: Path, folder: Path) -> None:
    """`tune-search --queries table` makes a table that a server answers searches with at once."""
    data = tmp_path / "data"
    await asyncio.to_thread(
        heed, "import", "items", write(tmp_path / "items.jsonl", tiny_items(120))
    )
    settings = Settings(data=data, encoder=str(folder), embedding_dim=tiny_bert.WIDTH)
    engine = await open_engine(settings)
    try:
        parts = engine.parts
        query = asking.search(asking.who(), "cat below the sea", 5)
        encoded = parts.search.setup.encoder
        tune = "tune-search", "--encoder", folder, "--queries"
        said = await asyncio.to_thread(heed, *tune, "table")
        assert said.code == 0, said.err
        assert "queries are encoded by the table" in " ".join(said.out.split())
        await parts.search.follow()
        setup = SearchSetup.load(parts.embeddings, data)
        assert parts.search.setup.encoder == setup.encoder != encoded
        assert setup.encoder.startswith(f"{encoded}+table-")

        class Silent:
            def encode(self, texts: object) -> None:
                raise AssertionError(texts)

        parts.embeddings.encoder.encode = Silent().encode  # type: ignore[assignment,method-assign]
        answer = await asking.ask(engine, query)
        assert len(answer.items) == 5
    finally:
        await engine.close()
    assert (data / QUERY_TABLE_FILE).exists()
    await asyncio.to_thread(heed, *tune, "encoder")
    assert not (data / QUERY_TABLE_FILE).exists()
    # The import calibrated the static encoder, whose parameters stay.
    assert set(json.loads((data / SEARCH_FILE).read_text())) == {encoded, StaticEncoder.name}


def test_search_is_judged_with_the_table(heed: Heed, tmp_path: Path, folder: Path) -> None:
    """`evaluate-search` reports by what queries were encoded, as asked for."""
    documents = {item.item_id: (item.title, item.description) for item in tiny_items(120)}
    collection = beir(tmp_path / "c", documents, {"1": "cat", "2": "sea boat"}, [
        ("1", "i1", 1), ("2", "i2", 1)
    ])  # fmt: skip
    found = {}
    for queries in ("table", "encoder"):
        said = heed(
            *("evaluate-search", collection, "--encoder", folder, "--queries", queries),
            *("--json", tmp_path / "report"),
        )
        assert said.code == 0, said.err
        report = json.loads((tmp_path / "report").read_text())
        assert f"Queries are encoded by {report['queries_encoded_by']}" in said.out
        found[queries] = report
    assert found["encoder"]["queries_encoded_by"] == found["encoder"]["encoder"]
    assert found["table"]["queries_encoded_by"].startswith(f"{found['table']['encoder']}+table-")
    assert found["table"]["ways"]["BM25 alone"] == found["encoder"]["ways"]["BM25 alone"]


def test_a_table_that_is_not_there_is_not_judged(heed: Heed, tmp_path: Path, folder: Path) -> None:
    """`evaluate-search --queries table` of stored items says what fits a table."""
    heed("import", "items", write(tmp_path / "items.jsonl", tiny_items(3)))
    judged = tmp_path / "judged.jsonl"
    judged.write_text('{"query": "cat", "item_id": "i1"}\n')
    said = heed(
        *("evaluate-search", "--judgments", judged, "--encoder", folder, "--queries", "table")
    )
    assert (said.code, "heed tune-search fits one" in said.err) == (1, True)


def test_an_import_says_what_fits_search_under_a_transformer(
    heed: Heed, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a transformer, an import of items embeds nothing and names the command that does."""
    monkeypatch.setenv("HEED_ENCODER", str(folder))
    monkeypatch.setenv("HEED_EMBEDDING_DIM", str(tiny_bert.WIDTH))
    said = heed("import", "items", write(tmp_path / "items.jsonl", tiny_items(3)))
    assert (said.code, "heed tune-search --encoder" in said.out) == (0, True), said.err
