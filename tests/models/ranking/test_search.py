"""Search as attention, compared with a float64 softmax over every key of every item."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import models.ranking.matches
import models.ranking.search
from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, Mode
from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import INDEX_FROM, Snapshot
from models.history.user_memory import build_memory
from models.index import ann_index
from models.ranking.matches import DEFAULTS, SearchParameters, SearchResults, match_fields
from models.ranking.scoring import Scores, score
from models.ranking.search import nearest, personal_bias
from models.text.bm25 import Hits
from tests.support import reference
from tests.support.small import DIMENSION, catalogue, encode, entries, past
from tests.support.small import snapshot as small_snapshot

WORDS = ["jazz", "piano", "blues", "opera", "drum", "choir"]


def serve(made: Catalogue, index_from: int = INDEX_FROM) -> Snapshot:
    return Snapshot.build("v", None, made, np.zeros(len(made), np.int64), index_from=index_from)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    """Forty items of which many share words, some are hidden and some say nothing."""
    rng = np.random.default_rng(0)
    made = []
    for n in range(40):
        fields = {"title": f"title {n}"}
        fields["tags"] = str(rng.choice(WORDS))
        if n % 3 == 0:
            fields["description"] = str(rng.choice(WORDS))
        if n % 4 == 0:
            fields["categories"] = "music"
        embedding = rng.normal(size=DIMENSION).astype(np.float32) if n % 7 == 0 else None
        if n % 10 == 9:
            fields = {}
        categories = ["even"] if n % 2 == 0 else []
        hidden = n % 11 == 5
        item = ItemEntry(f"i{n}", "", fields, categories, embedding=embedding, hidden=hidden)
        made.append(item)
    return serve(Catalogue.empty(DIMENSION).updated(made, [], encode))


def search(
    snapshot: Snapshot,
    query: NDArray[np.float32],
    *,
    limit: int,
    allowed: NDArray[np.bool_],
    options: AttentionOptions = DEFAULT_OPTIONS,
    personal: NDArray[np.float32] | None = None,
    hits: Hits | None = None,
    parameters: SearchParameters = DEFAULTS,
) -> SearchResults:
    """Match the fields and rank the results."""
    matches = match_fields(
        snapshot,
        query,
        allowed=allowed,
        options=options,
        hits=None if hits is None else lambda: hits,
        parameters=parameters,
    )
    return models.ranking.search.search(matches, limit=limit, personal=personal)


def unit(seed: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).normal(size=DIMENSION)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


class Loop:
    """What the softmax over keys gives each item, in float64 and plain loops.

    With `k`, over the keys of the items that the k keys of largest cosine belong to.
    """

    def __init__(
        self,
        made: Catalogue,
        query: NDArray[np.float32],
        allowed: NDArray[np.bool_],
        *,
        options: AttentionOptions = DEFAULT_OPTIONS,
        personal: NDArray[np.float32] | None = None,
        k: int | None = None,
        hits: Hits | None = None,
        parameters: SearchParameters = DEFAULTS,
    ) -> None:
        bm25 = dict(zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)) if hits else {}
        places = [p for p in range(len(made.keys)) if allowed[made.keys.owners[p]]]
        equal = {
            p: sum(np.array_equal(made.keys.vectors[p], other) for other in made.keys.vectors)
            for p in places
        }
        cosines, logits = [], []
        for place in places:
            cosines.append(reference.cosine(query.tolist(), made.keys.vectors[place].tolist()))
            shared = bm25.get(int(made.keys.owners[place]), 0.0) / max(bm25.values(), default=1.0)
            name = made.keys.names[made.keys.codes[place]]
            own = parameters.temperatures.get(name, parameters.temperature)
            logit = parameters.meaning * cosines[-1] / own
            logit += parameters.lexical * shared / parameters.temperature
            logit = logit / options.temperature + parameters.fields.get(name, 0.0)
            logit -= math.log(equal[place])
            owner = made.keys.owners[place]
            logits.append(logit + (0.0 if personal is None else float(personal[owner])))
        ranked = sorted(range(len(places)), key=lambda at: -cosines[at])[:k]
        # Which of two equal cosines is the k-th is anybody's choice, and so is which of two equal
        # keys is the best.
        self.tied = k is not None and any(
            abs(cosines[ranked[-1]] - cosines[at]) < 1e-6
            for at in range(len(places)) if at not in ranked
        )  # fmt: skip
        named = {int(made.keys.owners[places[at]]) for at in ranked}
        named |= set(bm25) if parameters.lexical else set()
        kept = [at for at in range(len(places)) if made.keys.owners[places[at]] in named]
        best = sorted(logits[at] for at in kept)[-2:]
        self.tied |= options.hard and len(best) == 2 and 0 < best[1] - best[0] < 1e-4
        full = reference.softmax(logits, 1.0, options.hard)
        self.mass = math.fsum(full[at] for at in kept)
        self.keys = len(kept)
        self.weight: dict[int, float] = {}
        self.share: dict[int, dict[str, float]] = {}
        self.score: dict[int, float] = {}
        weights = reference.softmax([logits[at] for at in kept], 1.0, options.hard)
        for at, weight in zip(kept, weights, strict=True):
            place, logit = places[at], logits[at]
            row, name = int(made.keys.owners[place]), made.keys.names[made.keys.codes[place]]
            self.weight[row] = self.weight.get(row, 0.0) + weight
            fields = self.share.setdefault(row, {})
            fields[name] = fields.get(name, 0.0) + weight
            self.score[row] = np.logaddexp(self.score.get(row, -math.inf), logit)

    def order(self) -> list[int]:
        return sorted((r for r in self.weight if self.weight[r] > 0),
                      key=lambda row: (-self.weight[row], row))  # fmt: skip


# ---------------------------------------------------------------------------- the softmax


def check(found: SearchResults, loop: Loop, *, hard: bool) -> None:
    """Assert that weights, scores and field shares equal the loop and sum to 1."""
    assert set(found.rows.tolist()) <= set(loop.order())
    assert all(loop.weight[row] < 1e-30 for row in set(loop.order()) - set(found.rows.tolist()))
    if loop.weight:
        assert sum(found.weights.tolist()) == pytest.approx(1, abs=1e-5)
    assert found.weights.tolist() == sorted(found.weights.tolist(), reverse=True)
    for place, row in enumerate(found.rows.tolist()):
        assert found.weights[place] == pytest.approx(loop.weight[row], rel=1e-4, abs=1e-7)
        shares = {k: v / loop.weight[row] for k, v in loop.share[row].items() if v > 0}
        assert sum(found.matched[place].values()) == pytest.approx(1, abs=1e-5)
        named = [*found.matched[place].values()]
        assert named == sorted(named, reverse=True)
        for name, share in found.matched[place].items():
            assert share == pytest.approx(shares.get(name, 0.0), abs=1e-4)
        if not hard:
            assert found.scores[place] == pytest.approx(loop.score[row], abs=1e-4)
    assert found.keys == loop.keys


def some_hits(rng: np.random.Generator, allowed: NDArray[np.bool_]) -> Hits | None:
    """Return random BM25 hits among the allowed items, or none."""
    rows = rng.permutation(np.flatnonzero(allowed))[: rng.integers(0, 7)]
    scores = np.sort(rng.gamma(2.0, 3.0, len(rows)))[::-1].astype(np.float32)
    return Hits(rows, scores) if rng.random() < 0.8 else None


drawn = {
    "seed": st.integers(0, 1000),
    "temperature": st.sampled_from([0.5, 1.0, 4.0, 100.0]),
    "hard": st.booleans(),
    "biased": st.booleans(),
    "barred": st.sets(st.integers(0, 39), max_size=38),
    "parameters": st.sampled_from(
        [
            DEFAULTS,
            SearchParameters(0.2, 0.1, {"title": 0.5, "nobody's": 3.0}, {"tags": 0.1}),
            SearchParameters(0.05, 0.0, {}, {"title": 0.08, "description": 0.5}),
            SearchParameters(0.1, 0.5, {}, {"tags": 0.2}, meaning=0.4),
        ]
    ),
}


@settings(max_examples=140, deadline=None, derandomize=True)
@given(
    **drawn,
    mode=st.sampled_from(["exact", "auto", "coarse"]),
    k=st.integers(1, 90),
    indexed=st.booleans(),
)
def test_weights_equal_the_loop(
    snapshot: Snapshot,
    seed: int,
    temperature: float,
    hard: bool,
    biased: bool,
    barred: set[int],
    parameters: SearchParameters,
    mode: Mode,
    k: int,
    indexed: bool,
) -> None:
    """Search equals the softmax over every key of the allowed items, with words and a memory.

    Coarse search equals it over all keys of the items found by key or by words. So few keys are
    scanned exactly, with an index or without one.
    """
    made = snapshot.catalogue
    allowed = made.visible.copy()
    allowed[list(barred)] = False
    rng = np.random.default_rng(seed)
    personal = rng.normal(size=40).astype(np.float32) if biased else None
    hits, query = some_hits(rng, allowed), unit(seed)
    options = AttentionOptions(temperature, hard, mode=mode, k=k)
    kept = k if mode == "coarse" else None
    loop = Loop(
        made, query, allowed, options=options, personal=personal, k=kept, hits=hits,
        parameters=parameters,
    )  # fmt: skip
    assume(not loop.tied)
    served = serve(made, index_from=1) if indexed and kept else snapshot
    found = search(
        served, query, limit=100, allowed=allowed, options=options, personal=personal, hits=hits,
        parameters=parameters,
    )  # fmt: skip
    check(found, loop, hard=hard)
    assert found.mode == ("coarse" if kept else "exact")
    assert found.mass == (pytest.approx(loop.mass, abs=1e-5) if kept else 1)


def test_the_limit_cuts_the_list_and_nothing_else(snapshot: Snapshot) -> None:
    query, allowed = unit(1), snapshot.catalogue.visible
    whole = search(snapshot, query, limit=100, allowed=allowed)
    few = search(snapshot, query, limit=3, allowed=allowed)
    np.testing.assert_array_equal(few.rows, whole.rows[:3])
    np.testing.assert_array_equal(few.weights, whole.weights[:3])
    np.testing.assert_array_equal(few.scores, whole.scores[:3])
    assert few.matched == whole.matched[:3]


def test_words_alone_rank_by_bm25_whatever_the_fields() -> None:
    """At meaning 0, items weigh as a softmax of BM25 alone, however many fields they have."""
    fields = [{"title": "jazz"}, {"title": "blues", "description": "jazz", "tags": "piano"},
              {"description": "opera"}, {"title": "jazz", "categories": "music"}]  # fmt: skip
    made = Catalogue.empty(DIMENSION).updated(
        [ItemEntry(str(at), fields=each) for at, each in enumerate(fields)], [], encode
    )
    hits = Hits(np.array([1, 3, 0]), np.array([4.0, 3.0, 2.9], np.float32))
    words = SearchParameters(temperature=0.2, lexical=0.8, meaning=0.0)
    found = search(serve(made), encode(["jazz"])[0], limit=4, allowed=made.visible, hits=hits,
                   parameters=words)  # fmt: skip
    assert found.rows.tolist() == [1, 3, 0]
    expected = reference.softmax([0.8 * score / 4.0 for score in (4.0, 3.0, 2.9)], 0.2, False)
    np.testing.assert_allclose(found.weights, expected, rtol=1e-5)


def test_the_length_of_a_query_does_not_count(snapshot: Snapshot) -> None:
    """Results do not depend on the length of the query vector."""
    query, allowed = unit(3), snapshot.catalogue.visible
    found, longer = (search(snapshot, q, limit=9, allowed=allowed) for q in (query, 9 * query))
    np.testing.assert_array_equal(found.rows, longer.rows)
    np.testing.assert_allclose(found.weights, longer.weights, atol=1e-6)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_query_without_words_matches_nothing(snapshot: Snapshot, indexed: bool) -> None:
    """A zero query vector matches no item."""
    served = serve(snapshot.catalogue, index_from=1) if indexed else snapshot
    options = AttentionOptions(mode="coarse" if indexed else "exact")
    found = search(served, np.zeros(DIMENSION, np.float32), limit=5,
                   allowed=snapshot.catalogue.visible, options=options)  # fmt: skip
    assert found.rows.tolist() == []
    assert found.matched == ()
    assert (found.mode, found.keys, found.mass) == (options.mode, 0, 1)


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_extreme_temperatures_give_numbers(snapshot: Snapshot, temperature: float) -> None:
    """Temperatures of 1e-6 and 1e6 give finite weights that sum to 1."""
    query, allowed = encode(["title 12"])[0], snapshot.catalogue.visible
    options = AttentionOptions(temperature)
    found = search(snapshot, query, limit=100, allowed=allowed, options=options)
    assert np.isfinite(found.weights).all()
    assert np.isfinite(found.scores).all()
    assert found.weights.sum() == pytest.approx(1, abs=1e-5)
    if temperature < 1:
        assert found.rows[0] == 12
        assert found.weights[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "options", [DEFAULT_OPTIONS, AttentionOptions(hard=True), AttentionOptions(mode="coarse")]
)
def test_nothing_allowed_is_nothing_found(snapshot: Snapshot, options: AttentionOptions) -> None:
    """With no item allowed, or no text, nothing is found and the mass is 1."""
    nothing = np.zeros(40, dtype=np.bool_)
    bare = serve(Catalogue.empty(DIMENSION).updated([ItemEntry("a")], [], encode))
    for served, allowed in (
        (snapshot, nothing),
        (serve(snapshot.catalogue, index_from=1), nothing),
        (bare, bare.catalogue.visible),
    ):
        found = search(served, unit(5), limit=5, allowed=allowed, options=options)
        assert found.rows.tolist() == []
        assert (found.keys, found.mass) == (0, 1)
        assert (
            nearest(match_fields(served, unit(5), allowed=allowed, options=options), 5).tolist()
            == []
        )


# ---------------------------------------------------------------------------- coarse


@pytest.fixture(scope="module")
def large() -> Snapshot:
    """Six hundred items, whose twelve hundred keys are indexed."""
    return serve(catalogue(600), index_from=100)


COARSE = AttentionOptions(mode="coarse")


def test_coarse_search_is_close_to_exact(large: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred keys from the index give the best items nearly the weights of all keys."""
    monkeypatch.setattr(models.ranking.matches, "COARSE_KEYS", 150)
    allowed = large.catalogue.visible
    for seed in range(10):
        found = search(large, unit(seed), limit=1000, allowed=allowed, options=COARSE)
        true = search(large, unit(seed), limit=1000, allowed=allowed)
        assert (found.mode, true.mode) == ("coarse", "exact")
        assert len(set(found.rows[:10].tolist()) & set(true.rows[:10].tolist())) >= 9
        weight = dict(zip(found.rows.tolist(), found.weights.tolist(), strict=True))
        for row, expected in zip(true.rows[:5].tolist(), true.weights[:5], strict=True):
            assert weight[row] == pytest.approx(expected, rel=0.15)
        # Weights are shares of what was attended, and the mass says of how much of it all.
        held = [w for row, w in zip(true.rows, true.weights.tolist(), strict=True) if row in weight]
        assert found.mass == pytest.approx(sum(held), abs=1e-4)
        assert found.keys == 2 * len(weight) < true.keys == 1200


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("k", [1200, 100_000])
def test_coarse_search_over_everything_is_exact(large: Snapshot, indexed: bool, k: int) -> None:
    """With room for every key, finding keys first changes nothing."""
    allowed = large.catalogue.visible
    served = large if indexed else serve(large.catalogue)
    options = AttentionOptions(mode="coarse", k=k)
    found = search(served, unit(3), limit=50, allowed=allowed, options=options)
    true = search(large, unit(3), limit=50, allowed=allowed)
    np.testing.assert_array_equal(found.rows, true.rows)
    np.testing.assert_array_equal(found.weights, true.weights)
    np.testing.assert_array_equal(found.scores, true.scores)
    assert (found.matched, found.keys, found.mass) == (true.matched, true.keys, true.mass)
    assert (found.mode, true.mode) == ("coarse", "exact")


@pytest.mark.parametrize("indexed", [False, True])
def test_more_probes_find_more_mass(
    large: Snapshot, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    """One probe finds less mass than all probes, which find as much as a scan."""
    monkeypatch.setattr(ann_index, "_NARROW_ROWS", 0)
    served = large if indexed else serve(large.catalogue)
    masses = {}
    for probes in (1, 1000):
        options = AttentionOptions(mode="coarse", k=200, probes=probes)
        masses[probes] = [
            search(
                served, unit(seed), limit=9, allowed=large.catalogue.visible, options=options
            ).mass
            for seed in range(5)
        ]
    assert sum(masses[1]) < sum(masses[1000])
    scanned = AttentionOptions(mode="coarse", k=200)
    for seed, mass in enumerate(masses[1000]):
        every = serve(large.catalogue)
        found = search(every, unit(seed), limit=9, allowed=every.catalogue.visible, options=scanned)
        assert mass == pytest.approx(found.mass, abs=1e-5)


def test_auto_counts_the_keys_of_allowed_items(large: Snapshot) -> None:
    few = np.zeros(600, dtype=np.bool_)
    few[[3, 77, 500]] = True
    for allowed, keys in ((large.catalogue.visible, 1200), (few, 6)):
        for limit, mode in ((keys, "exact"), (keys - 1, "coarse")):
            options = AttentionOptions(exact_up_to=limit, k=2)
            found = search(large, unit(6), limit=9, allowed=allowed, options=options)
            assert found.mode == mode
            assert (found.keys == keys) is (mode == "exact")


def test_items_newer_than_the_index_are_found(large: Snapshot) -> None:
    """Coarse search finds items added after the index was built."""
    options = AttentionOptions(mode="coarse", k=20)
    later = large.catalogue.updated(entries(3, first=600), [], encode)
    now = large.refreshed(later, large.counts)
    assert now.key_index is not None
    found = search(now, encode(["title 601"])[0], limit=1, allowed=later.visible, options=options)
    assert found.rows.tolist() == [601]
    assert found.mode == "coarse"
    hidden = later.allowed()
    hidden[601] = False
    other = search(now, encode(["title 601"])[0], limit=5, allowed=hidden, options=options)
    assert 601 not in other.rows


# ---------------------------------------------------------------------------- personal


@pytest.mark.parametrize(
    "options", [DEFAULT_OPTIONS, AttentionOptions(50.0), AttentionOptions(hard=True)]
)
def test_nearest_ignores_the_softmax_options(snapshot: Snapshot, options: AttentionOptions) -> None:
    """`nearest` orders items as the default search does, whatever the softmax options."""
    allowed = snapshot.catalogue.visible
    plain = Loop(snapshot.catalogue, unit(9), allowed).order()
    matches = match_fields(snapshot, unit(9), allowed=allowed, options=options)
    assert nearest(matches, 7).tolist() == plain[:7]
    assert nearest(matches, 100).tolist() == plain


def test_a_query_is_compared_with_the_keys_once(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches from one set of matches compute the cosines of the keys once."""
    compared = []
    product = models.ranking.matches.unit_cosines

    def counting(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        compared.append(len(keys))
        return product(query, keys)

    monkeypatch.setattr(models.ranking.matches, "unit_cosines", counting)
    matches = match_fields(snapshot, unit(9), allowed=snapshot.catalogue.visible)
    nearest(matches, 7)
    models.ranking.search.search(matches, limit=9, personal=np.ones(40, np.float32))
    models.ranking.search.search(matches, limit=9)
    assert compared == [len(snapshot.catalogue.keys)]


def test_the_personal_bias_is_a_standardised_score() -> None:
    """Mean 0 and spread 1 over the items scored, in their order; 0 elsewhere."""
    snapshot = small_snapshot(15)
    rows = np.array([2, 14, 7, 9])
    user = build_memory(snapshot, past([1, 3], [0, 5]), 9)
    scores = score(snapshot, user, rows)
    bias = personal_bias(snapshot, scores, rows, 1.0)
    assert bias.shape == (15,)
    assert bias.dtype == np.float32
    assert bias[rows].mean() == pytest.approx(0, abs=1e-6)
    assert bias[rows].std() == pytest.approx(1, abs=1e-5)
    order = scores.total.numpy().argsort().tolist()
    assert bias[rows].argsort().tolist() == order
    assert not bias[[row for row in range(15) if row not in rows]].any()


@pytest.mark.parametrize("values", [[], [3.0], [2.0, 2.0, 2.0]])
def test_scores_that_do_not_differ_are_no_bias(values: list[float]) -> None:
    """No score, one score, or equal scores give a personal bias of zeros."""
    snapshot = small_snapshot(15)
    total = torch.tensor(values)
    scores = Scores(total, total, total, total, total, "exact", 1)
    assert not personal_bias(snapshot, scores, np.arange(len(values)), 1.0).any()
