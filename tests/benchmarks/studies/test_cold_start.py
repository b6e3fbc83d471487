"""Cold start beside references: texts help with new items, few events with users."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from models.evaluation.protocols import EvaluationTask, leave_one_out_5_core
from models.text.static_encoder import StaticEncoder
from service.evaluation import compare_models
from service.runtime.data_layout import STORE_FILE
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import training_corpus
from service.training.judgement import HEED
from tests.benchmarks.studies import cold_start, cold_start_report
from tests.benchmarks.studies.cold_start import ColdStart
from tests.support.small import events_of, newest_events
from tests.support.tiny import QUICK, World

FAST = replace(QUICK, train_config=replace(QUICK.train_config, epochs=6, attention_epochs=1))


@pytest.fixture(scope="module")
def measured(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EvaluationTask, compare_models.Comparison, ColdStart]:
    """The small world, trained with all of its items and without some."""
    data = world.copy(tmp_path_factory.mktemp("cold") / "data", trained=False)
    store = SQLiteStore(data / STORE_FILE)
    try:
        corpus = training_corpus.read_store(store, EmbeddingCache(StaticEncoder()))
    finally:
        asyncio.run(store.close())
    task = leave_one_out_5_core(corpus.log)
    content = corpus.content[task.items]
    table = compare_models.compare(task, content, FAST)
    return task, table, cold_start.measure(task, content, FAST, table)


def test_all_models_rank_the_same_cases(
    measured: tuple[EvaluationTask, compare_models.Comparison, ColdStart],
) -> None:
    """Cases about new items are few, and those of users are the same however much is shown."""
    task, _, found = measured
    assert found.items.hidden == round(0.1 * task.train.n_items)
    names = ["random", "popularity", "likeness of texts", HEED, cold_start.KNOWN]
    for table in (found.items.everything, found.items.unseen):
        assert list(table) == names
        counts = {row.test[0].n_cases for row in table.values()}
        assert len(counts) == 1
        assert 0 < counts.pop() < len(task.test)
    assert list(found.users) == [1, 2, 3, 5, None]
    for table in found.users.values():
        assert list(table) == [
            "popularity", "popularity of 7 days", "EASE", "transition counts", HEED,
        ]  # fmt: skip
        assert {row.test[0].n_cases for row in table.values()} == {len(task.test)}


def test_new_items_are_ranked_by_their_texts(
    measured: tuple[EvaluationTask, compare_models.Comparison, ColdStart],
) -> None:
    """Popularity puts them last of all; among themselves texts tell the genre, and chance not."""
    items = measured[2].items
    popularity, heed = items.everything["popularity"].test[0], items.everything[HEED].test[0]
    assert popularity.hr == 0
    assert (popularity.ranks > heed.ranks).all()
    assert items.unseen[HEED].test[0].mrr > items.unseen["random"].test[0].mrr
    assert (items.unseen[HEED].test[0].ranks < items.hidden).all()


def test_what_is_known_of_popularity_needs_no_history(
    measured: tuple[EvaluationTask, compare_models.Comparison, ColdStart],
) -> None:
    """Popularity ranks alike at any history length; full histories give the main table's ranks."""
    task, table, found = measured
    ranks = [users["popularity"].test[0].ranks for users in found.users.values()]
    assert all((each == ranks[0]).all() for each in ranks)
    whole = task.test.history.lengths[task.test.users] >= 5
    for name, row in found.users[None].items():
        assert (row.test[0].ranks == table[name].test[0].ranks[whole]).all()


def test_one_event_shown_is_a_history_of_one(
    measured: tuple[EvaluationTask, compare_models.Comparison, ColdStart],
) -> None:
    """Heed's ranks are those over histories cut to one event, less what is left out of ranks."""
    task, table, found = measured
    ranker = table[HEED].ranker
    assert ranker is not None
    cut = replace(task.test, history=newest_events(task.test.history, 1))
    scores = ranker.scores(cut.history, cut.users, None)
    wanted = []
    for row, user, target in zip(scores, cut.users, cut.targets, strict=True):
        rivals = (
            set(range(task.train.n_items))
            - set(events_of(task.test.history, user).items)
            - {target}
        )
        wanted.append(sum(row[item] >= row[target] for item in rivals))
    assert found.users[1][HEED].test[0].ranks.tolist() == wanted


def test_no_case_about_new_items_is_said(
    measured: tuple[EvaluationTask, compare_models.Comparison, ColdStart],
) -> None:
    """A task without a case about a hidden item is refused."""
    task = measured[0]
    none = task._replace(test=task.test.where(np.zeros(len(task.test), dtype=np.bool_)))
    with pytest.raises(ValueError, match="no test case"):
        cold_start.new_items(none, np.zeros((task.train.n_items, 256), np.float32), FAST)


def test_every_figure_is_shown_and_written(
    measured: tuple[EvaluationTask, compare_models.Comparison, ColdStart],
) -> None:
    """Both tables name their models and intervals; the JSON is plain, and its figures the same."""
    task, _, found = measured
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(cold_start_report.shown(task, found))
    text = captured.get()
    plain = json.loads(json.dumps(cold_start_report.as_json(found)))
    for name, row in found.items.unseen.items():
        assert f"{row.test[0].hr:.4f}" in text
        written = plain["items_never_seen"]["ranking_them"]["models"][name]
        assert written["hr"] == row.test[0].hr
    assert plain["items_never_seen"]["hidden"] == found.items.hidden
    assert list(plain["newest_events_shown"]) == ["1", "2", "3", "5", "all"]
    over = plain["newest_events_shown"]["1"]["heed_over"]["popularity"]["ndcg"]
    assert over["low"] <= over["difference"] <= over["high"]
    assert f"{over['difference']:+.4f} [{over['low']:+.4f}, {over['high']:+.4f}]" in text
