"""The losses in float64 and plain loops over histories, prefixes and items."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.recommender.recommender import Recommender
from tests.support.reference_model import ReferenceModel
from tests.support.small import events_of

Array = NDArray[np.float64]


class PlainLosses:
    """The scores at every target of a window, and their cross-entropies."""

    def __init__(
        self,
        model: Recommender,
        log: Interactions,
        content: NDArray[np.float32],
        *,
        told: bool,
        new: Collection[int] = (),
    ) -> None:
        """`new` items have no id, the prior of new ones, and follow nothing."""
        self.log, self.told = log, told
        shape = model.config
        self.reference = ReferenceModel(
            model, shape.heads, dislike=shape.dislike_type, dislike_heads=shape.dislike_heads
        )
        items = range(log.n_items)
        self.vectors = [
            self.reference.vector(-1 if row in new else row, content[row]) for row in items
        ]
        prior = model.prior.tolist()
        self.prior = [model.new_prior.item() if row in new else prior[row] for row in items]
        self.encoder = model.encoder is not None
        self.counted = self.encoder and model.config.transitions_per_item > 0
        self.new = new
        self.shape = shape
        # decay, depth and power: see models.recommender.co_occurrence
        self.reach = (1.0, 180, 1) if shape.next_basket else (0.3, 8, 2)
        self.trend = (
            []
            if model.recent_popularity_weight is None
            else model.recent_popularity_weight.tolist()
        )

    def at(
        self, begin: int, end: int, *, stateless: int | None = 0
    ) -> list[tuple[Array, Array, int, set[int]]]:
        """Of each target that something is known before: the score without the target in the
        queries, and the whole score, [N] each; the target and what the window saw before it, or
        before its basket.

        So many of the oldest events have no state; None: all, and the user has none either.
        """
        log = self.log
        rows, times = log.items[begin:end].tolist(), log.timestamps[begin:end].tolist()
        own = self._own(int(log.users[begin]))
        weights, types = log.weights[begin:end].tolist(), log.types[begin:end].tolist()
        vectors = [self.vectors[row] for row in rows]
        read = [self.reference.read(*each) for each in zip(vectors, types, weights, strict=True)]
        asked = times[1:] if self.told else [None] * (len(rows) - 1)
        states: list[Array | None] = [None] * (len(rows) - 1)
        user_states = [np.zeros(len(vectors[0]))] * (len(rows) - 1)
        if self.encoder:
            encoded = self.reference.states(read[:-1], times[:-1])
            user_states = [
                self.reference.at_request(*each)
                for each in zip(encoded, times[:-1], asked, strict=True)
            ]
            states = [*encoded]
            cut = len(states) if stateless is None else min(stateless, len(states))
            states[:cut] = [None] * cut
            if stateless is None:
                user_states = [np.zeros_like(user_state) for user_state in user_states]
        out = []
        for t in range(1, len(rows)):
            seen = t  # how many events
            while self.shape.next_basket and seen and times[seen - 1] == times[t]:
                seen -= 1
            if not seen:
                continue
            recent = rows[:seen][::-1]
            liked = [type_ != self.shape.dislike_type for type_ in types[:seen]][::-1]
            at = times[t] if self.told else times[seen - 1]
            trends = self._trends(times[t])
            first, whole = np.zeros(log.n_items), np.zeros(log.n_items)
            for item in range(log.n_items):
                user_state = user_states[seen - 1]
                first[item] = self.prior[item]
                first[item] += trends[-1 if item in self.new else item]
                if self.counted:
                    known = () if item in self.new else recent
                    first[item] += self._transitions(user_state, known, item, own)
                if self.counted and self.shape.next_basket and self.shape.repeat_consumption:
                    first[item] += self._again(user_state, recent[:180], liked, item)
                rest = first[item]
                for scores, target_in_query in ((first, False), (whole, True)):
                    alpha, gain = self.reference.attention(
                        self.vectors[item],
                        vectors[:seen],
                        vectors[:seen],
                        user=user_state if self.encoder else None,
                        states=states[:seen],
                        distances=list(range(seen - 1, -1, -1)),
                        ages=[at - time for time in times[:seen]],
                        weights=weights[:seen],
                        types=types[:seen],
                        target_in_query=target_in_query,
                    )
                    scores[item] = rest + float((alpha * gain).sum())
            out.append((first, whole, rows[t], set(rows[:seen])))
        return out

    def _trends(self, time: int) -> list[float]:
        """What the popularity of late adds to each item at a time, and to one never taken."""
        log = self.log
        if not self.trend:
            return [0.0] * (log.n_items + 1)
        start, day = int(log.timestamps.min()), 86_400_000_000
        today = (time - start) // day
        added = np.zeros(log.n_items + 1)
        for weight, half_life in zip(self.trend, (7, 30), strict=True):
            counts = np.zeros(log.n_items + 1)
            for item, when, type_ in zip(log.items, log.timestamps, log.types, strict=True):
                past = today - (when - start) // day
                if past > 0 and (log.dislike_type < 0 or type_ != log.dislike_type):
                    counts[item] += 0.5 ** (past / half_life)
            added += weight * np.log((counts + 1) / (counts[:-1].mean() + 1))
        return list(added)

    def _again(
        self, user_state: Array, recent: Sequence[int], liked: Sequence[bool], item: int
    ) -> float:
        """How often the user took it themselves."""
        times = sum(good for row, good in zip(recent, liked, strict=False) if row == item)
        state = self.reference.state
        scale = float(
            state["transition_scale.weight"][1] @ user_state + state["transition_scale.bias"][1]
        )
        return scale * math.log(1 + times)

    def _transitions(
        self,
        user_state: Array,
        recent: Sequence[int],
        item: int,
        own: Mapping[tuple[int, int], float],
    ) -> float:
        """Without what this user put into the counts."""
        total = 0.0
        decay, depth, _ = self.reach
        for k, row in enumerate(recent[:depth]):
            there = self.reference.follows(row, item)
            total += decay**k * max(0.0, there - own.get((row, item), 0.0))
        state = self.reference.state
        scale = float(
            state["transition_scale.weight"][0] @ user_state + state["transition_scale.bias"][0]
        )
        return scale * math.log(1 + 2 * total)

    def _own(self, user: int) -> dict[tuple[int, int], float]:
        mine = events_of(self.log, user)
        items, types = mine.items.tolist(), mine.types.tolist()
        pairs: dict[tuple[int, int], float] = defaultdict(float)
        for late in range(len(items)):
            if self.log.dislike_type >= 0 and types[late] == self.log.dislike_type:
                continue
            for early in range(max(0, late - 20), late):
                pairs[items[early], items[late]] += 1 / (late - early) ** self.reach[2]
        return pairs


def worths(
    log: Interactions, begin: int, end: int, *, baskets: bool = False, new: bool = False
) -> list[float]:
    """What each target of a window counts: its weight over the median of what was liked.

    baskets: leaves out what is of the window's first basket; new: what the user had counts nothing.
    """
    liked = [float(weight) for weight, type_ in zip(log.weights, log.types, strict=True)
             if type_ != log.dislike_type]  # fmt: skip
    middle = statistics.median(liked)
    before = int(log.offsets[log.users[begin]])
    return [
        0.0
        if log.types[at] == log.dislike_type or (new and log.items[at] in log.items[before:at])
        else min(10.0, max(0.1, log.weights[at] / middle))
        for at in range(begin + 1, end)
        if not baskets or log.timestamps[at] > log.timestamps[begin]
    ]


def cross_entropy(
    scores: Sequence[float] | Array,
    target: int,
    seen: set[int],
    worth: Mapping[int, float] | None = None,
) -> float:
    """-log softmax of the target among itself and what was not seen; each item counts `worth`."""
    open_ = {
        item: score
        for item, score in enumerate(scores)
        if (item == target or item not in seen) and (worth is None or item in worth)
    }
    peak = max(open_.values())
    parts = [math.exp(s - peak) * (1.0 if worth is None else worth[i]) for i, s in open_.items()]
    return float(peak + math.log(math.fsum(parts)) - scores[target])


def probabilities(scores: Array, target: int, seen: set[int]) -> Array:
    """The softmax over the target and what was not seen."""
    hidden = [item for item in seen if item != target]
    masked = scores.copy()
    masked[hidden] = -np.inf
    shares = np.exp(masked - masked.max())
    normed: Array = shares / shares.sum()
    return normed
