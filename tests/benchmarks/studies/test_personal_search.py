"""Personal search: ranks worked out by hand, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from models.attention.attention_options import DEFAULT_OPTIONS
from models.data.interactions import Interactions
from models.evaluation.splits import Holdout
from models.text.static_encoder import StaticEncoder
from service.domain.errors import HeedError
from service.domain.queries import Requester, SearchQuery
from service.domain.records import Item
from service.engine.questions.search import search_items
from service.evaluation.search_quality import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache
from tests.benchmarks.__main__ import app
from tests.benchmarks.studies import personal_search
from tests.benchmarks.studies.personal_search import GRID, Cases, Ranked, cases_of, mrr, ranked
from tests.support.reference import cosine
from tests.support.small import events_of
from tests.support.snapshot_ranker import requester
from tests.support.tiny import World

ENVIRONMENT = {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
EMBEDDINGS = EmbeddingCache(StaticEncoder())
# Two kinds of films that are called alike, and one that nobody can ask for.
ITEMS = [
    *(Item(f"w{n}", title=f"war and battle {n}", categories=("Drama",)) for n in range(3)),
    *(Item(f"l{n}", title=f"love and romance {n}", categories=("Drama",)) for n in range(3)),
    Item("x", title="nothing"),
]
IDS = [item.item_id for item in ITEMS]
SNAPSHOT = build_snapshot(ITEMS, EMBEDDINGS)


def log(*histories: list[str]) -> Interactions:
    """Events of users, one after the other."""
    users = [user for user, each in enumerate(histories) for _ in each]
    items = [IDS.index(item) for each in histories for item in each]
    return Interactions.from_columns(
        users, items, np.arange(len(users)), n_users=len(histories), n_items=len(IDS)
    )


def held(history: Interactions, targets: list[str]) -> Holdout:
    """Each user's next item."""
    return Holdout(
        np.arange(len(targets), dtype=np.int32),
        np.array([IDS.index(target) for target in targets], dtype=np.int32),
        np.full(len(targets), 99),
        history,
    )


def cases() -> Cases:
    """One who likes war, one who likes love, and one whose next item has no categories."""
    history = log(["w0", "w1"], ["l0", "l1"], ["w0"])
    return cases_of(SNAPSHOT, held(history, ["w2", "l2", "x"]), IDS, ITEMS)


def answered(case: int, personal: float) -> list[int]:
    """Return the service's results for a case, without the items of the history."""
    holdout, queries, _ = cases()
    events = events_of(holdout.history, int(holdout.users[case]))
    found = search_items(
        SearchQuery(Requester(), queries[case], len(ITEMS), personal_weight=personal),
        SNAPSHOT,
        requester(SNAPSHOT, events),
        EMBEDDINGS.query,
        allowed=SNAPSHOT.catalogue.servable,
        options=DEFAULT_OPTIONS,
    )
    return [row for row in found.found.rows.tolist() if row not in events.items]


def test_a_case_asks_for_the_targets_categories() -> None:
    """The query of a case names the target's categories; a target without any is no case."""
    found = cases()
    assert (found.queries, found.without_words) == (("Drama", "Drama"), 1)
    rows = SNAPSHOT.catalogue.rows(["w2", "l2"])
    np.testing.assert_array_equal(found.holdout.targets, rows)
    assert found.holdout.history.n_items == len(SNAPSHOT.catalogue)


def test_a_memory_brings_its_own_kind_to_the_front() -> None:
    """A user's memory ranks items of the user's taste first, which titles alone do not."""
    found = ranked(SNAPSHOT, EMBEDDINGS.query, cases(), grid=[0.0, 20.0])
    asked = EMBEDDINGS.query("Drama").tolist()
    near = {
        item.item_id: cosine(asked, EMBEDDINGS.encode([item.title])[0].tolist())
        for item in ITEMS[:6]
    }
    ranks = [
        sum(near[other] > near[target] for other in near if other not in had)
        for target, had in (("w2", {"w0", "w1"}), ("l2", {"l0", "l1"}))
    ]
    assert found.nobody.tolist() == ranks
    assert mrr(found.nobody) == pytest.approx(sum(1 / (1 + rank) for rank in ranks) / 2)
    assert found.memory[20.0].tolist() == [0, 0]
    assert mrr(found.memory[20.0]) == 1.0 > mrr(found.nobody)


def test_personal_weight_zero_gives_the_impersonal_order() -> None:
    """Exactly, for every case; and so does popularity."""
    found = ranked(SNAPSHOT, EMBEDDINGS.query, cases(), grid=[0.0])
    np.testing.assert_array_equal(found.memory[0.0], found.nobody)
    np.testing.assert_array_equal(found.popularity[0.0], found.nobody)


@pytest.mark.parametrize("worth", [0.5, 1.0, 4.0])
def test_ranks_are_those_of_the_answers(worth: float) -> None:
    """To a request that asks for as many items as there are, with that `personal`."""
    found, holdout = ranked(SNAPSHOT, EMBEDDINGS.query, cases(), grid=[worth]), cases().holdout
    for case, target in enumerate(holdout.targets.tolist()):
        assert found.memory[worth][case] == answered(case, worth).index(target)


def test_what_the_history_does_not_show_changes_nothing() -> None:
    """Ranks do not depend on the time of the held-out event."""
    one = cases()
    holdout = one.holdout
    late = Holdout(holdout.users, holdout.targets, holdout.timestamps * 1_000_000, holdout.history)
    again = ranked(SNAPSHOT, EMBEDDINGS.query, one._replace(holdout=late))
    for worth, ranks in ranked(SNAPSHOT, EMBEDDINGS.query, one).memory.items():
        np.testing.assert_array_equal(again.memory[worth], ranks)


def test_tuning_chooses_the_smallest_of_equally_good_weights() -> None:
    """By MRR over all cases."""
    ranks = {0.5: np.array([3, 3]), 1.0: np.array([0, 1]), 2.0: np.array([1, 0])}
    assert Ranked(np.array([3, 3]), ranks, ranks).best(ranks) == 1.0


def test_the_command_prints_both_and_how_sure_the_difference_is(
    world: World, tmp_path: Path
) -> None:
    """On a world of walks through genres: the next step is found by who walks there."""
    world.copy(tmp_path / "data")
    report = tmp_path / "report.json"
    arguments = ["--data", str(tmp_path / "data"), "--epochs", "4", "--json", str(report)]
    ran = CliRunner().invoke(app, ["personal-search", *arguments], env=ENVIRONMENT)
    assert ran.exit_code == 0, ran.output
    found = json.loads(report.read_text())
    assert found["cases"] == 40
    chosen, default = found["with"]
    assert (
        default["personal"]
        == SearchQuery(Requester(), "").personal_weight
        == personal_search.DEFAULT
    )
    validation = found["validation"]["memory"]
    assert set(validation) == {f"{worth:g}" for worth in GRID}
    assert validation[f"{chosen['personal']:g}"] == max(validation.values())
    for each in (chosen, default):
        gained = each["gained"]
        assert gained["difference"] == pytest.approx(each["mrr"] - found["without"])
        assert gained["low"] <= gained["difference"] <= gained["high"]
        assert f"MRR {each['mrr']:.4f}, more by {gained['difference']:+.4f}" in ran.output
    assert f"MRR without the user {found['without']:.4f}" in ran.output
    assert chosen["gained"]["low"] > 0


def test_study_without_cases_is_refused(tmp_path: Path) -> None:
    """A store without events says how to get some."""
    ran = CliRunner().invoke(app, ["personal-search", "--data", str(tmp_path)])
    assert isinstance(ran.exception, HeedError)
    assert "heed import" in str(ran.exception)
