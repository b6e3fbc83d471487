"""The contract of every ranker, as tests to inherit: define `fit` in a subclass."""

from typing import ClassVar

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation.full_ranking import Ranker, evaluate
from models.evaluation.splits import Holdout
from tests.support.small import events_of

SIDE = 16
SECOND = 1_000_000


def checkerboard(side: int = SIDE) -> Interactions:
    """Even users take every even item, odd users every odd one, except that user u skips item u.

    From benfred/implicit's contract tests: the one right recommendation for user u is item u.
    User u starts at item u + 2 and goes round, so item u is also what comes next.
    """
    users, items = [], []
    for user in range(side):
        for step in range(1, side // 2):
            users.append(user)
            items.append((user + 2 * step) % side)
    times = np.arange(len(users)) * SECOND
    return Interactions.from_columns(users, items, times, n_users=side, n_items=side)


def diagonal(log: Interactions) -> Holdout:
    """User u is about to take item u."""
    rows = np.arange(log.n_users, dtype=np.int32)
    ends = np.array([events_of(log, u).timestamps[-1] for u in range(log.n_users)], dtype=np.int64)
    return Holdout(rows, rows, ends + SECOND, log)


class RankerContract:
    """Inherit, override `fit`; a ranker that shows everyone the same list says personal = False."""

    personal: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        """Fit the ranker under test, with the settings this small data set wants."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def log(cls) -> Interactions:
        return checkerboard()

    @pytest.fixture(scope="class")
    @classmethod
    def ranker(cls, log: Interactions) -> Ranker:
        return cls.fit(log)

    def test_scores_are_a_float32_for_every_user_and_item(
        self, ranker: Ranker, log: Interactions
    ) -> None:
        scores = ranker.scores(log, np.array([3, 0, 3], dtype=np.int32), None)
        assert scores.shape == (3, log.n_items)
        assert scores.dtype == np.float32
        assert not np.isnan(scores).any()
        assert (scores[0] == scores[2]).all()

    def test_an_empty_batch_has_no_rows(self, ranker: Ranker, log: Interactions) -> None:
        assert ranker.scores(log, np.empty(0, dtype=np.int32), None).shape == (0, log.n_items)

    def test_scores_accept_request_times(self, ranker: Ranker, log: Interactions) -> None:
        users = np.arange(2, dtype=np.int32)
        times = log.timestamps[log.offsets[users + 1] - 1] + SECOND
        assert ranker.scores(log, users, times).shape == (2, log.n_items)

    def test_the_batch_does_not_matter(self, ranker: Ranker, log: Interactions) -> None:
        users = np.arange(log.n_users, dtype=np.int32)
        together = ranker.scores(log, users, None)
        alone = np.concatenate([ranker.scores(log, users[u : u + 1], None) for u in users])
        np.testing.assert_allclose(alone, together, atol=self.tolerance)

    def test_only_the_users_own_history_matters(self, ranker: Ranker, log: Interactions) -> None:
        mine = events_of(log, 3)
        other = Interactions.from_columns(
            np.r_[np.full(len(mine.items), 1), 0, 0],
            np.r_[mine.items, 5, 4],
            np.r_[mine.timestamps, 1, 2],
            n_users=2,
            n_items=log.n_items,
        )
        before = ranker.scores(log, np.array([3], dtype=np.int32), None)
        after = ranker.scores(other, np.array([1], dtype=np.int32), None)
        np.testing.assert_allclose(after, before, atol=self.tolerance)

    def test_a_user_without_history_is_scored(self, ranker: Ranker, log: Interactions) -> None:
        nobody = log.where(log.users > 0)
        scores = ranker.scores(nobody, np.array([0, 1], dtype=np.int32), None)
        assert not np.isnan(scores).any()
        assert ranker.scores(nobody, np.array([0], dtype=np.int32), None).shape == (1, log.n_items)

    def test_another_catalogue_is_refused(self, ranker: Ranker) -> None:
        with pytest.raises(ValueError, match="items"):
            ranker.scores(checkerboard(SIDE + 2), np.array([0], dtype=np.int32), None)

    def test_fitting_repeats_and_leaves_the_log_alone(
        self, ranker: Ranker, log: Interactions
    ) -> None:
        before = [c.copy() for c in (log.items, log.timestamps, log.weights, log.offsets)]
        again = self.fit(log)
        users = np.arange(log.n_users, dtype=np.int32)
        np.testing.assert_allclose(
            again.scores(log, users, None), ranker.scores(log, users, None), atol=self.tolerance
        )
        for old, new in zip(
            before, (log.items, log.timestamps, log.weights, log.offsets), strict=True
        ):
            assert (old == new).all()

    def test_the_checkerboard_has_one_answer(self, ranker: Ranker, log: Interactions) -> None:
        metrics = evaluate(ranker, diagonal(log), k=1)
        assert metrics.hr == 1.0 if self.personal else metrics.hr < 0.5
