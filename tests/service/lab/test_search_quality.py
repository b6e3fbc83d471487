"""Search quality: metrics compared with plain loops, and fitting of search parameters."""

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest

from models.ranking.matches import DEFAULTS, SearchParameters
from models.text.bm25 import TITLE_WEIGHT
from models.text.encoders import StaticEncoder
from service.datasets.base import JudgedQuery
from service.domain.errors import Corrupt, Invalid
from service.domain.records import Item
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.lab import search_quality
from service.lab.search_quality import SEARCH_MODES, evaluate_search, tune_parameters
from service.maintenance.search_calibration import build_snapshot
from service.runtime.data_layout import SEARCH_FILE
from service.snapshots.live_search import (
    FittedParameters,
    is_calibration_due,
    load_search_parameters,
    save_search_parameters,
)
from service.snapshots.text_embeddings import EmbeddingCache
from tests.support import asking
from tests.support.command_line import Heed
from tests.support.judged import beir
from tests.support.reference import bm25, cosine
from tests.support.tiny import World

TEXTS = [
    ("violin", "a wooden instrument with four strings and a bow"),
    ("cello", "a large wooden instrument between the knees"),
    ("trumpet", "brass and valves and breath"),
    ("submarine", "a boat that goes below the sea"),
    ("whale", "the largest animal of the sea"),
    ("bread", "flour and water and heat"),
    ("", "strings of a harp"),
    ("sea", ""),
]
QUERIES = [
    JudgedQuery("wooden strings", {"0": 2.0, "6": 1.0, "1": 1.0}),
    JudgedQuery("sea", {"7": 3.0, "4": 1.0, "5": -1.0}),
    JudgedQuery("orchestra", {"2": 1.0, "9": 1.0}),
]
ITEMS = [Item(str(n), title=title, description=text) for n, (title, text) in enumerate(TEXTS)]
EMBEDDINGS = EmbeddingCache(StaticEncoder())


def ideal(gains: list[float]) -> float:
    return sum(gain / math.log2(2 + at) for at, gain in enumerate(gains))


def ndcg(ranking: list[int], gains: dict[str, float]) -> float:
    """The formula in a loop, with what is worth nothing or less left out."""
    found = [max(gains.get(str(row), 0.0), 0.0) for row in ranking[:10]]
    return ideal(found) / ideal(sorted((g for g in gains.values() if g > 0), reverse=True)[:10])


def scores(query: str) -> tuple[list[float], list[float]]:
    """BM25 of each text, and its best cosine."""
    words = [(f"{title} " * TITLE_WEIGHT + text).split() for title, text in TEXTS]
    asked = EMBEDDINGS.query(query).tolist()
    near = [
        max(cosine(asked, EMBEDDINGS.encode([text])[0].tolist()) for text in each if text)
        for each in TEXTS
    ]
    return bm25(words, query.split()), near


def test_words_alone_rank_by_bm25() -> None:
    found = evaluate_search(
        build_snapshot(ITEMS, EMBEDDINGS), EMBEDDINGS.query, QUERIES, "BM25 alone"
    )
    for at, (query, gains) in enumerate(QUERIES):
        worth, _ = scores(query)
        ranking = sorted((n for n in range(8) if worth[n] > 0), key=lambda n: -worth[n])
        assert found.ndcg[at] == pytest.approx(ndcg(ranking, dict(gains)))
        relevant = {name for name, gain in gains.items() if gain > 0}
        share = len(relevant & {str(n) for n in ranking}) / len(relevant)
        assert found.recall[at] == pytest.approx(share)
        first = [place for place, n in enumerate(ranking) if str(n) in relevant]
        assert found.ranks[at] == (first[0] if first else 100)
        assert found.success[at] == (bool(first) and first[0] < 3)
    assert found.ndcg[0] > 0


def test_meaning_alone_ranks_by_cosines() -> None:
    sharp = SearchParameters(temperature=0.012, fields={})
    snapshot = build_snapshot(ITEMS, EMBEDDINGS)
    found = evaluate_search(snapshot, EMBEDDINGS.query, QUERIES, "meaning alone", sharp)
    for at, (query, gains) in enumerate(QUERIES):
        _, near = scores(query)
        ranking = sorted(range(8), key=lambda n: -near[n])
        assert found.ndcg[at] == pytest.approx(ndcg(ranking, dict(gains)))


def lying(count: int) -> tuple[list[Item], list[JudgedQuery]]:
    """Items with misleading titles, whose descriptions paraphrase the query."""
    rng = np.random.default_rng(0)
    pairs = [("car", "automobile"), ("film", "movie"), ("doctor", "physician"), ("sea", "ocean")]
    items, judged = [], []
    for n in range(count):
        word, other = pairs[n % len(pairs)]
        lie = pairs[(n + 1 + int(rng.integers(3))) % len(pairs)][0]
        items.append(Item(str(n), title=f"{lie} {n}", description=f"{other} number {n}"))
        judged.append(JudgedQuery(f"{word} {n}", {str(n): 1.0}))
    return items, judged


def test_tuning_improves_held_out_queries() -> None:
    items, judged = lying(60)
    bad = SearchParameters(lexical=0.0, temperature=0.14, fields={"description": -4.0})
    told: list[tuple[int, int]] = []
    tuned = tune_parameters(
        build_snapshot(items, EMBEDDINGS),
        EMBEDDINGS.query,
        judged,
        start=bad,
        progress=lambda _stage, done, total, _: told.append((done, total)),
    )
    assert tuned.is_better
    assert tuned.after.ndcg.mean() > tuned.before.ndcg.mean() + 0.2
    assert tuned.parameters.lexical > 0
    assert len(tuned.after.ndcg) == 30
    assert told[-1][0] == told[-1][1] == len(told)


def test_nothing_is_fitted_on_a_few_queries() -> None:
    with pytest.raises(Invalid, match="3 judged queries are too few: 20 are needed"):
        tune_parameters(build_snapshot(ITEMS, EMBEDDINGS), EMBEDDINGS.query, QUERIES)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"temperature": 0.07}', '{"a": {"heat": 1}}', '{"a": {"temperature": 0}}',
     '{"a": {"lexical": "a"}}', '{"a": {"fields": 3}}', '{"a": {"fields": {"title": null}}}',
     '{"a": {"temperatures": {"title": -1}}}', '{"a": {"meaning": -1}}',
     '{"a": {"fitted_to": "luck"}}', '{"a": {"items": "many"}}'],
)  # fmt: skip
def test_damaged_parameters_are_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    path = tmp_path / SEARCH_FILE
    assert load_search_parameters(path, "a") == DEFAULTS
    path.write_text(content)
    for use in (
        lambda: load_search_parameters(path, "b"),
        lambda: save_search_parameters(path, "b", FittedParameters(DEFAULTS)),
    ):
        with pytest.raises(Corrupt, match=r"search.json: .*delete it, .*heed tune-search"):
            use()
    assert path.read_text() == content


def test_search_parameters_survive_a_round_trip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / SEARCH_FILE
    kept = SearchParameters(0.05, 0.3, {"title": 1.0}, {"tags": 0.2})
    save_search_parameters(path, "first", FittedParameters(kept))
    assert load_search_parameters(path, "first") == kept
    assert caplog.text == ""
    assert load_search_parameters(path, "second") == DEFAULTS
    for text in ("search.json", "fitted for the text encoder first", "second", "tune-search"):
        assert text in caplog.text
    save_search_parameters(path, "second", FittedParameters(SearchParameters(0.1)))
    assert load_search_parameters(path, "first") == kept
    assert load_search_parameters(path, "second") == SearchParameters(0.1)


def test_calibration_is_due_when_the_catalogue_has_doubled(tmp_path: Path) -> None:
    path = tmp_path / SEARCH_FILE
    assert [is_calibration_due(path, "a", items) for items in (0, 1)] == [False, True]
    save_search_parameters(path, "a", FittedParameters(DEFAULTS, "catalogue", 50))
    assert [is_calibration_due(path, "a", items) for items in (99, 100)] == [False, True]
    assert is_calibration_due(path, "b", 1)
    save_search_parameters(path, "a", FittedParameters(DEFAULTS, "judgments", 50))
    assert not is_calibration_due(path, "a", 1_000)


def test_parameters_of_0_2_count_as_fitted_to_judgments(tmp_path: Path) -> None:
    """A file without the evidence of its parameters, as 0.2 wrote it, is read and kept."""
    path = tmp_path / SEARCH_FILE
    path.write_text(
        '{"a": {"temperature": 0.05, "lexical": 0.4, "fields": {}, "temperatures": {}}}'
    )
    assert load_search_parameters(path, "a") == SearchParameters(0.05, 0.4, {})
    assert not is_calibration_due(path, "a", 1_000)


# ---------------------------------------------------------------------------- the commands


def test_evaluate_search_prints_all_three(heed: Heed, tmp_path: Path) -> None:
    documents = {item.item_id: (item.title, item.description) for item in ITEMS}
    queries = {str(n): judged.query for n, judged in enumerate(QUERIES)}
    grades = [
        (str(n), id_, int(gain))
        for n, judged in enumerate(QUERIES) for id_, gain in judged.gains.items()
    ]  # fmt: skip
    folder = beir(tmp_path / "orchestra", documents, queries, grades)
    report = tmp_path / "report.json"
    said = heed("evaluate-search", folder, "--json", report)
    assert said.code == 0, said.err
    for text in ("orchestra: 8 items, 3 queries", *SEARCH_MODES, "both over BM25 alone"):
        assert text in said.out
    found = json.loads(report.read_text())
    both = evaluate_search(build_snapshot(ITEMS, EMBEDDINGS), EMBEDDINGS.query, QUERIES)
    assert found["ways"]["both"]["ndcg"] == pytest.approx(float(both.ndcg.mean()), abs=1e-6)
    ranks = [None if rank == 100 else rank + 1 for rank in both.ranks.tolist()]
    assert found["ranks"] == [
        {"query": judged.query, "rank": rank} for judged, rank in zip(QUERIES, ranks, strict=True)
    ]
    hits = sum(rank is not None and rank <= 3 for rank in ranks)
    assert f"found in the first 3 by both: {hits} of 3" in said.out
    assert found["encoder"] == StaticEncoder.name


def test_judgments_option_replaces_those_of_the_folder(heed: Heed, tmp_path: Path) -> None:
    digests = set()
    for name, text in (("one", "x"), ("two", "y")):
        documents = {"a": ("violin", text), "b": ("bread", "flour")}
        folder = beir(tmp_path / name, documents, {"1": "violin"}, [("1", "a", 1)])
        judgments = tmp_path / "own.csv"
        judgments.write_text("query,item_id\nflour,b\nviolin,b\n")
        report = tmp_path / "report.json"
        said = heed("evaluate-search", folder, "--judgments", judgments, "--json", report)
        assert said.code == 0, said.err
        found = json.loads(report.read_text())
        assert (found["collection"], found["queries"]) == (name, 2)
        assert found["ranks"] == [{"query": "flour", "rank": 1}, {"query": "violin", "rank": 2}]
        digests.add(found["digest"])
    assert len(digests) == 2


def test_what_to_search_must_be_said(heed: Heed, tmp_path: Path) -> None:
    said = heed("evaluate-search")
    assert (said.code, "name a folder with a collection" in said.err) == (1, True)
    folder = beir(tmp_path / "b", {"a": ("A", "x")}, {"1": "one"}, [("1", "a", 0)])
    said = heed("evaluate-search", folder)
    assert (said.code, "no query has a relevant item" in said.err) == (1, True)


def test_fitted_parameters_are_stored_and_served(
    heed: Heed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, judged = lying(60)
    rows = [{"item_id": i.item_id, "title": i.title, "description": i.description} for i in stored]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judged.jsonl").write_text(
        "".join(
            json.dumps({"query": query, "item_id": id_}) + "\n"
            for query, gains in judged for id_ in gains
        )
    )  # fmt: skip
    data = tmp_path / "data"
    assert heed("import", "items", tmp_path / "items.jsonl").code == 0
    bad = SearchParameters(lexical=0.0, temperature=0.14, fields={"description": -4.0})
    save_search_parameters(data / SEARCH_FILE, StaticEncoder.name, FittedParameters(bad))
    before = _found(data)
    said = heed("tune-search", "--judgments", tmp_path / "judged.jsonl")
    assert said.code == 0, said.err
    assert "Saved in" in said.out
    kept = load_search_parameters(data / SEARCH_FILE, StaticEncoder.name)
    assert kept != bad
    after = _found(data)
    expected = search_quality.evaluate_search(
        build_snapshot(stored, EMBEDDINGS), EMBEDDINGS.query, [judged[5]], "both", kept
    )
    assert before != after
    assert (after[0] == "5") == (expected.ndcg[0] == 1)
    again = heed("tune-search", "--judgments", tmp_path / "judged.jsonl")
    assert "Nothing was saved" in again.out
    assert load_search_parameters(data / SEARCH_FILE, StaticEncoder.name) == kept


def _found(data: Path) -> list[str]:
    """Ids that the service finds after a start on this data directory."""

    async def main() -> list[str]:
        engine = await open_engine(Settings(data=data))
        try:
            query = asking.search(asking.who(), "film 5", limit=5)
            answer = await asking.ask(engine, query)
        finally:
            await engine.close()
        return [item["item_id"] for item in answer.items]

    return asyncio.run(main())


def test_a_server_refuses_to_start_with_damaged_parameters(
    heed: Heed, world: World, tmp_path: Path
) -> None:
    data = world.copy(tmp_path / "data")
    (data / SEARCH_FILE).write_text("{")
    said = heed("serve", "--port", 0)
    assert said.code == 1
    assert "search.json" in said.err
