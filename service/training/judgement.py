"""Judgement of a trained model on its validation cases, and the decision whether it is served.

If users take items again, a service is asked two questions: what comes next, and, with seen items
excluded as they are by default, which of the next are new to the user. The best ranker of the cases
is served: the model, or a baseline that is better at one question beyond the noise, and worse at
none. The mean of both, which chooses the weights of a model's parts, is not the rule here: the NDCG
of what comes next is usually by far the higher one, so that a baseline that repeats a user's
history well would be served though it has nothing new to recommend.

A trained model replaces the served one if its NDCG@10 is better over the cases that were held out
of both. A model that is served has learned from events that were its own cases, in its final
epochs: what it had ranked before these is kept beside it, as a digest of each case and a rank.
Cases that have come since are new to it, and it ranks them now.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.vocabulary import Vocabulary
from models.encoder.event_bias import UNKNOWN
from models.evaluation.baselines import POPULARITY, WEEK, baseline_makers
from models.evaluation.full_ranking import (
    CaseValues,
    Ranker,
    RankingMetrics,
    Ranks,
    evaluate,
    mean,
    ndcg_gains,
    share_of_users,
    standard_error,
)
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.recommender.artifact import TrainedModel
from models.recommender.recommender import Recommender, baseline_model
from models.training.fit import TrainingResult
from service.domain.errors import HeedError
from service.snapshots.registry import Registry, Version
from service.training.training_corpus import StageProgressCallback, TrainingCorpus


@dataclass(frozen=True, slots=True, eq=False)
class QuestionMetrics:
    cases: Holdout
    heed: RankingMetrics  # of what is served
    baselines: Mapping[str, RankingMetrics]  # by name

    @property
    def best(self) -> str:
        return max(self.baselines, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular(self) -> str:
        """The popularity with the higher NDCG, which is served without a model."""
        names = [name for name in (POPULARITY, WEEK) if name in self.baselines]
        return max(names, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular_is_best(self) -> bool:
        best = self.baselines[self.best]
        return self.best in {POPULARITY, WEEK} and self.heed.ndcg <= best.ndcg

    @property
    def is_basket(self) -> bool:
        """True if a user has several cases, the items of a basket; collective over the shards."""
        several = len(np.unique(self.cases.users)) < len(self.cases)
        return self.cases.history.shards.any(several)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: the model's `metrics`, and those of each of the `baselines`.

        Collective over the shards of the log.
        """
        found, popularity = self.heed, self.baselines[POPULARITY]
        return {
            "metrics": {
                "hr": found.hr,
                "ndcg": found.ndcg,
                "mrr": found.mrr,
                "coverage": found.coverage,
                "cases": float(found.n_cases),
                "user_hr": self._share(found),
                "popularity_ndcg": popularity.ndcg,
                "popularity_hr": popularity.hr,
            },
            "baselines": {
                name: {"hr": row.hr, "ndcg": row.ndcg, "user_hr": self._share(row)}
                for name, row in self.baselines.items()
            },
            "best_baseline": self.best,
        }

    def _share(self, found: RankingMetrics) -> float:
        """The share of customers with a target among the first ten."""
        shards = self.cases.history.shards
        return share_of_users(self.cases.users, found.ranks, shards=shards)


HEED = "heed"


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """The model to serve, with its metrics and those of each baseline, for each question."""

    served: str  # `HEED`, or the name of the baseline that is served in its place
    model: Recommender  # to be published, trained on all events
    validated: Recommender  # the same without its final epochs, whose metrics these are
    next: QuestionMetrics
    new: QuestionMetrics | None  # of items that are new to the user; None if all cases are

    @property
    def popular_is_best(self) -> bool:
        """True if no ranker beats popularity, which is served without a model too."""
        return self.next.popular_is_best and (self.new is None or self.new.popular_is_best)

    def as_dict(self) -> dict[str, Any]:
        new = {} if self.new is None else {"new_items": self.new.as_dict()}
        return {
            **self.next.as_dict(),
            "served": self.served,
            "next_basket": self.next.is_basket,
            **new,
        }


def judge(
    fitted: TrainingResult, *, exclude_seen: bool, progress: StageProgressCallback = lambda *_: None
) -> Judgement:
    """Evaluate a model and all baselines, and choose what to serve.

    A baseline is served in the model's place if it replaces the model by `is_replacement`, and the
    model has parts for it. The one with the highest NDCG, or mean of both, is tried. Baselines are
    fitted on the model's training events. Without `exclude_seen` the cases whose target is new to
    its user are ranked once more without the items of the user's history.

    Collective over the shards of the logs. Raises ValueError for a model that was trained without
    validation cases.
    """
    plan = fitted.plan
    history, every_event, cases = plan.log, plan.every_event, plan.validation
    if cases is None or every_event is None:
        raise ValueError("fitted: has no validation cases")
    asked, shards = [(cases, exclude_seen)], history.shards
    if not exclude_seen and shards.any(len(new := cases.new_to_user()) > 0):
        asked.append((new, True))

    def evaluated(ranker: Ranker) -> list[RankingMetrics]:
        return [evaluate(ranker, each, exclude_seen=new_only) for each, new_only in asked]

    def judgement(
        served: str, model: Recommender, validated: Recommender, metrics: list[RankingMetrics]
    ) -> Judgement:
        questions = [
            QuestionMetrics(each, metrics[at], {name: row[at] for name, row in baselines.items()})
            for at, (each, _) in enumerate(asked)
        ]
        return Judgement(
            served, model, validated, questions[0], questions[1] if len(asked) > 1 else None
        )

    makers = baseline_makers(every_event, exclude_seen=exclude_seen)
    baselines: dict[str, list[RankingMetrics]] = {}
    for at, (name, make) in enumerate(makers.items()):
        progress(f"baseline: {name}", at, len(makers), None)
        baselines[name] = evaluated(make(history))
    heed = evaluated(ModelRanker(fitted.validated, plan.content, two_stage=True))
    found = judgement(HEED, fitted.model, fitted.validated, heed)
    rival = best_replacement(baselines, heed, shards)
    if rival is None:
        return found
    validated = baseline_model(fitted.validated, rival, history)
    if validated is None:
        return found
    metrics = evaluated(ModelRanker(validated, plan.content, two_stage=True))
    model = baseline_model(fitted.model, rival, every_event)
    if model is None or not is_replacement(metrics, heed, shards):
        return found
    return judgement(rival, model, validated, metrics)


def best_replacement(
    baselines: Mapping[str, Sequence[RankingMetrics]],
    heed: Sequence[RankingMetrics],
    shards: Processes = SINGLE_PROCESS,
) -> str | None:
    """Choose the best of the baselines that are not worse than a model; None if it is not better.

    Metrics are of each question, of the same cases. Collective over the shards of their log.
    """
    kept = {
        name: float(np.mean([metrics.ndcg for metrics in row]))
        for name, row in baselines.items()
        if not any(_is_better(ours, theirs, shards) for ours, theirs in zip(heed, row, strict=True))
    }
    best = max(kept, key=kept.__getitem__, default=None)
    return best if best is not None and is_replacement(baselines[best], heed, shards) else None


def is_replacement(
    row: Sequence[RankingMetrics],
    heed: Sequence[RankingMetrics],
    shards: Processes = SINGLE_PROCESS,
) -> bool:
    """True if a baseline is better than a model at one question beyond the noise, worse at none."""
    pairs = list(zip(row, heed, strict=True))
    return any(_is_better(theirs, ours, shards) for theirs, ours in pairs) and not any(
        _is_better(ours, theirs, shards) for theirs, ours in pairs
    )


def _is_better(one: RankingMetrics, other: RankingMetrics, shards: Processes) -> bool:
    more = ndcg_gains(one.ranks) - ndcg_gains(other.ranks)
    return mean(more, shards) > standard_error(more, shards)


_log = logging.getLogger(__name__)

JUDGED_FILE = "judged_cases.npy"  # of a model version: the digests of its cases, and their ranks
MIN_USERS = 20  # with held-out events, below which a mean says nothing
_DEVIATIONS = 1.96  # of a 95 % interval
_ROW = np.dtype([("case", "<u8"), ("rank", "<i4")])

Outcome = Literal["better", "no better", "worse", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome  # unknown if too few users have cases
    against: str  # the version that is served, or a baseline
    against_model: bool  # the former
    new_items: bool  # the cases are those of items that are new to their user
    cases: int
    users: int
    ndcg: float
    other: float
    low: float  # of the 95 % interval of the difference
    high: float
    is_served: bool = False  # what was trained is served

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; what has no value is None."""
        return {
            name: None if isinstance(value, float) and np.isnan(value) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True, eq=False)
class CurrentModel:
    """The version that is served, and what it had ranked before it learned from its cases."""

    version: str
    created: int  # microseconds UTC
    trained: TrainedModel
    judged: Mapping[int, int] | None  # rank by digest; None in versions of earlier programs
    metadata: Mapping[str, Any]

    @classmethod
    def read(cls, registry: Registry, encoder: str, shards: Processes) -> CurrentModel | None:
        """Read the current version; None without one that this text encoder can serve.

        Collective over the shards, of which the first reads.
        """

        def load() -> tuple[Version, dict[str, bytearray]] | None:
            try:
                name = registry.current()
                found = [each for each in registry.versions() if each.version == name]
                return (found[0], registry.load(found[0].version)) if found else None
            except HeedError as error:
                _log.warning("the served model is not compared with: %s", error.detail)
                return None

        read = shards.broadcast(load)
        if read is None:
            return None
        version, files = read
        try:
            trained, judged = TrainedModel.from_files(files), None
            if JUDGED_FILE in files:
                rows = np.load(io.BytesIO(files[JUDGED_FILE]), allow_pickle=False)
                judged = dict(zip(rows["case"].tolist(), rows["rank"].tolist(), strict=True))
        except (ValueError, LookupError) as error:
            _log.warning("the served model is not compared with: %s", error)
            return None
        if trained.text_encoder != encoder:
            return None
        return cls(version.version, version.created or 0, trained, judged, version.metadata or {})

    def compare(
        self, question: QuestionMetrics, corpus: TrainingCorpus, *, exclude_seen: bool, is_new: bool
    ) -> Verdict:
        how: dict[str, Any] = {"against": self.version, "against_model": True, "new_items": is_new}
        found = self.metadata.get("new_items") if is_new else self.metadata
        if self.judged is None and found and self.metadata.get("events") == corpus.events:
            # The same events, so that their mean is known, if not the rank of each.
            every = np.ones(len(question.cases), np.bool_)
            mean = np.full(len(every), float(found["metrics"]["ndcg"]))
            return _compare(question, mean, every, **how, is_paired=False)
        ranks, fair = self.ranks(question.cases, corpus, exclude_seen=exclude_seen)
        return _compare(question, ndcg_gains(ranks), fair, **how)

    def ranks(
        self, cases: Holdout, corpus: TrainingCorpus, *, exclude_seen: bool
    ) -> tuple[Ranks, NDArray[np.bool_]]:
        """Rank the cases [M]; also returns which of them, [M], it can be judged by."""
        if self.judged is None:
            ranks = np.zeros(len(cases), np.int64)
            is_new = cases.timestamps > self.created
            is_new &= corpus.has_times
            fair = is_new.copy()
        else:
            keys = _digests(cases, corpus, exclude_seen=exclude_seen)
            ranks = np.array([self.judged.get(key, -1) for key in keys.tolist()], np.int64)
            is_new, fair = ranks < 0, np.ones(len(cases), np.bool_)
        if corpus.log.shards.any(bool(is_new.any())):
            rows = Vocabulary(self.trained.item_ids).rows(corpus.item_ids).astype(np.int64)
            ranker = ModelRanker(self.trained.model, corpus.content, two_stage=True, rows=rows)
            chosen = cases.where(is_new)
            chosen = replace(chosen, history=self._as_read(chosen, corpus))
            ranks[is_new] = evaluate(ranker, chosen, exclude_seen=exclude_seen).ranks
        return ranks, fair

    def _as_read(self, cases: Holdout, corpus: TrainingCorpus) -> Any:
        config, known = self.trained.model.config, list(self.trained.event_types)
        history = cases.history if config.dislike_type >= 0 else cases.history.liked()
        lookup = [known.index(name) if name in known else UNKNOWN for name in corpus.types]
        types = np.array([*lookup, UNKNOWN], np.int16)[history.types]  # the last is that of -1
        return replace(history, types=types, dislike_type=config.dislike_type)


def decide(
    found: Judgement, corpus: TrainingCorpus, served: CurrentModel | None, *, exclude_seen: bool
) -> Verdict:
    """Compare what is to be published with what is served, and decide whether it is served.

    That is the served model, or popularity. A model that is served is replaced by a better one:
    better at one question beyond the noise, and worse at none. So is popularity replaced; the
    verdict is then about the best baseline. Collective over the shards of the log.
    """
    asked = _questions(found, exclude_seen=exclude_seen)
    if served is not None:
        rows = [
            served.compare(each, corpus, exclude_seen=seen, is_new=at > 0)
            for at, (each, seen) in enumerate(asked)
        ]
        verdict = _of_all(rows)
        return replace(verdict, is_served=verdict.outcome == "better")

    def against(name: str) -> Verdict:
        rows = []
        for at, (each, _) in enumerate(asked):
            gains, every = (
                ndcg_gains(each.baselines[name].ranks),
                np.ones(len(each.cases), np.bool_),
            )
            how: dict[str, Any] = {"against": name, "against_model": False, "new_items": at > 0}
            rows.append(_compare(each, gains, every, **how))
        return _of_all(rows)

    default = asked[-1][0]
    best = default.best if found.served == HEED else default.popular
    return replace(against(best), is_served=against(default.popular).outcome == "better")


def _questions(found: Judgement, *, exclude_seen: bool) -> list[tuple[QuestionMetrics, bool]]:
    """The questions of a judgement, and whether each leaves out the items of the user's history."""
    return [(found.next, exclude_seen)] + ([(found.new, True)] if found.new is not None else [])


def judged_file(found: Judgement, corpus: TrainingCorpus, *, exclude_seen: bool) -> bytes:
    """The ranks of the cases of a judgement, for `CurrentModel`. Collective."""
    shards = corpus.log.shards
    parts = []
    for question, seen in _questions(found, exclude_seen=exclude_seen):
        rows = np.empty(len(question.cases), _ROW)
        rows["case"] = _digests(question.cases, corpus, exclude_seen=seen)
        rows["rank"] = question.heed.ranks
        parts.append(shards.gather(rows))
    out = io.BytesIO()
    np.save(out, np.concatenate(parts), allow_pickle=False)
    return out.getvalue()


def _digests(cases: Holdout, corpus: TrainingCorpus, *, exclude_seen: bool) -> NDArray[np.uint64]:
    return corpus.case_keys(cases) ^ np.uint64(exclude_seen)


def _compare(
    question: QuestionMetrics,
    gains: CaseValues,
    fair: NDArray[np.bool_],
    *,
    against: str,
    against_model: bool,
    new_items: bool,
    is_paired: bool = True,
) -> Verdict:
    """Compare with the NDCG of another ranker, by the cases that are fair [M].

    `gains` [M] are of each case, or the mean of all: the difference then has the errors of both.
    """
    shards, of_user = question.cases.history.shards, question.cases.users[fair]
    ours, theirs = ndcg_gains(question.heed.ranks[fair]), gains[fair]
    users, place = np.unique(of_user, return_inverse=True)
    sums = shards.sum(np.array([ours.sum(), theirs.sum(), len(ours), len(users)], np.float64))
    n, n_users = int(sums[2]), int(sums[3])
    ndcg = other = error = np.nan
    if n:
        ndcg, other = (sums[:2] / n).tolist()
        # The items of a user's basket are no independent cases: the error is that of users.
        of_users = np.bincount(place, ours - theirs - (ndcg - other), minlength=len(users))
        squares = float(shards.sum(np.array([np.square(of_users).sum()]))[0])
        error = np.sqrt(squares * n_users / max(1, n_users - 1) * (1 if is_paired else 2)) / n
    low, high = ndcg - other - _DEVIATIONS * error, ndcg - other + _DEVIATIONS * error
    outcome: Outcome = "better" if low > 0 else "worse" if high < 0 else "no better"
    return Verdict(
        outcome="unknown" if n_users < MIN_USERS else outcome,
        against=against,
        against_model=against_model,
        new_items=new_items,
        cases=n,
        users=n_users,
        ndcg=ndcg,
        other=other,
        low=float(low),
        high=float(high),
    )


def _of_all(rows: Sequence[Verdict]) -> Verdict:
    """The verdict that decides: a worse one, else a better one, else the default question's.

    The last question is the default one.
    """
    known = [row for row in rows if row.outcome != "unknown"] or list(rows)
    for outcome in ("worse", "better"):
        for row in reversed(known):
            if row.outcome == outcome:
                return row
    return known[-1]
