"""Pasts to attend over, as they may come, and their scores in float64 and plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.data.windows import window_start
from models.encoder.history_encoder import EncoderCache
from models.history.user_history import UserHistory
from models.history.user_memory import NEWEST_LEFT_OUT, UserMemory, build_memory
from models.ranking.contributions import contributions
from models.ranking.explanation import Reason, closed_form, explain
from tests.support import reference_model
from tests.support.reference_model import ReferenceModel
from tests.support.small import DAY, TOLD, encode, random_model, random_past
from tests.support.small import snapshot as small_snapshot

ITEMS, TRAINED, HEADS, WINDOW = 15, 12, 3, 5
ATTENTION_HEADS = 4
AT = 6 * DAY
FOREVER = 2**62
EVERY = np.arange(ITEMS)


def drawn_snapshot() -> Snapshot:
    """Every weight of its model is drawn, and its window is shorter than many pasts."""
    return small_snapshot(ITEMS, random_model(11, window=WINDOW))


def told_snapshot() -> Snapshot:
    """The same, of a model that knows three types of events, dislikes among them."""
    return small_snapshot(ITEMS, random_model(11, window=WINDOW, **TOLD))


def basket_snapshot() -> Snapshot:
    """The same once more, of baskets that people come back to."""
    model = random_model(11, window=WINDOW, next_basket=True, repeat_consumption=True)
    return small_snapshot(ITEMS, model)


def similar_snapshot() -> Snapshot:
    """The same as the first, with item similarities."""
    return small_snapshot(ITEMS, random_model(11, window=WINDOW, similar_items=5))


@contextmanager
def appends(snapshot: Snapshot) -> Iterator[list[int]]:
    """How many events the encoder read at once, each time."""
    encoder, stepper = snapshot.model.encoder, snapshot.stepper
    assert encoder is not None
    assert stepper is not None
    counts: list[int] = []
    many, one = encoder.append, stepper.append

    def several(state: EncoderCache, events: Tensor, timestamps: Tensor) -> EncoderCache:
        counts.append(len(events))
        return many(state, events, timestamps)

    def single(state: EncoderCache, event: Tensor, timestamp: int) -> EncoderCache:
        counts.append(1)
        return one(state, event, timestamp)

    with patch.object(encoder, "append", several), patch.object(stepper, "append", single):
        yield counts


def long_user(snapshot: Snapshot) -> UserMemory:
    """A memory of more events than `pasts` draws."""
    return build_memory(snapshot, random_past(7, 300, ITEMS), AT)


def without_event(whole: UserHistory, event: int) -> UserHistory:
    """The past as if that event had never been."""
    left = [at for at in range(len(whole.rows)) if at != event]
    return replace(
        whole,
        rows=whole.rows[left],
        timestamps=whole.timestamps[left],
        weights=whole.weights[left],
        visible=None if whole.visible is None else whole.visible[left],
        types=whole.types[left],
        vectors={left.index(at): pair for at, pair in whole.vectors.items() if at != event},
    )


@st.composite
def pasts(draw: st.DrawFn, least: int = 0) -> UserHistory:
    """Events on items trained, described and unknown, of types known and unknown; vectors of their
    own; masks; profiles.
    """
    events = draw(st.integers(least, 9))
    made = random_past(draw(st.integers(0, 10_000)), events, ITEMS)
    rows = made.rows.copy()
    vectors: dict[int, tuple[Any, Any]] = {}
    for event in range(events):
        kind = draw(st.sampled_from(["", "", "", "unknown", "own", "own unknown"]))
        if "unknown" in kind:
            rows[event] = draw(st.sampled_from([-1, ITEMS, ITEMS + 7]))
        if "own" in kind.split():
            key, value = encode([f"key {event}", f"value {event}"])
            vectors[event] = draw(st.sampled_from([(key, value), (key, None), (None, value)]))
    visible = None
    if draw(st.booleans()):
        visible = np.array(draw(st.lists(st.booleans(), min_size=events, max_size=events)), bool)
    types = made.types
    if draw(st.booleans()):
        drawn = st.lists(st.integers(-2, 2), min_size=events, max_size=events)
        types = np.array(draw(drawn), np.int32)
    profile = np.array(draw(st.lists(st.integers(-1, ITEMS - 1), max_size=3)), np.int32)
    words = (
        encode([f"interest {at}" for at in range(len(profile))]) if (profile < 0).any() else None
    )
    return replace(made, rows=rows, vectors=vectors, visible=visible, profile_rows=profile,
                   profile_content=words, types=types)  # fmt: skip


ways = st.builds(
    AttentionOptions,
    temperature=st.sampled_from([1.0, 0.3, 5.0]),
    hard=st.booleans(),
    exclude_self=st.booleans(),
    mode=st.sampled_from(["auto", "exact", "coarse"]),
    k=st.sampled_from([2, 4, 50]),
)


def reasons_of(
    snapshot: Snapshot,
    user: UserMemory,
    target: int,
    top: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> list[Reason]:
    """The reasons of one target's score, without effects."""
    (reasons,) = explain(snapshot, user, np.array([target]), top, options)
    return reasons


@torch.inference_mode()
def parts_without(
    snapshot: Snapshot,
    user: UserMemory,
    target: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> dict[int, float]:
    """Attention and transitions of a target without each row, by source, by the closed form."""
    found = contributions(snapshot, user, torch.tensor([target]), options)
    lost = closed_form(snapshot, found, 0, np.arange(len(user.source)), options)
    left = float(found.each.sum()) - lost
    return dict(zip(user.source.tolist(), left.tolist(), strict=True))


class Loop:
    """The score of one target by one past, in float64 and plain loops."""

    def __init__(self, snapshot: Snapshot, made: UserHistory, at: int) -> None:
        shape = snapshot.model.config
        self.reference = ReferenceModel(
            snapshot.model,
            HEADS,
            WINDOW,
            dislike=shape.dislike_type,
            dislike_heads=shape.dislike_heads,
            baskets=shape.next_basket,
        )
        self.shape = shape
        content = snapshot.catalogue.content.astype(np.float64)
        self.items = [self.reference.vector(row if row < TRAINED else -1, content[row])
                      for row in range(ITEMS)]  # fmt: skip
        keys, values, rows, times, weights, known = [], [], [], [], [], []
        types: list[int] = []
        self.snapshot, self.made, self.at = snapshot, made, at
        self.sources: list[int] = []  # the event of each memory row, -1 - i for profile entry i
        for event, row in enumerate(made.rows.tolist()):
            kind = int(made.types[event])
            if kind == -2 or (made.visible is not None and not made.visible[event]):
                continue
            is_item = 0 <= row < ITEMS
            key, value = made.vectors.get(event, (None, None))
            if not is_item and key is None and value is None:
                continue
            own_key = None if key is None else self.reference.vector(-1, key)
            own_value = None if value is None else self.reference.vector(-1, value)
            item = self.items[row] if is_item else None
            keys.append(first(own_key, item, own_value))
            values.append(first(own_value, item, own_key))
            rows.append(row if is_item else -1)
            times.append(int(made.timestamps[event]))
            weights.append(float(made.weights[event]))
            types.append(kind)
            known.append(is_item)
            self.sources.append(event)
        seen = [j for j in range(len(rows)) if known[j]]
        self._read = [self.reference.read(self.items[rows[j]], types[j], weights[j]) for j in seen]
        self._read_times = [times[j] for j in seen]
        self.states: list[NDArray[np.float64] | None] = [None] * len(rows)
        self.encode(seen)
        # Memory rows of the events on items, newest first, and their rows of the id embedding.
        self.recent = seen[::-1]
        self.trained = [rows[j] if rows[j] < TRAINED else -1 for j in self.recent]
        distances = list(range(len(rows) - 1, -1, -1))
        ages = [max(0, at - time) for time in times]
        for entry, row in enumerate(made.profile_rows.tolist()):
            if row >= 0:
                vector = self.items[row]
            else:
                assert made.profile_content is not None
                vector = self.reference.vector(-1, made.profile_content[entry])
            keys.append(vector)
            values.append(vector)
            rows.append(row)
            distances.append(FOREVER)
            ages.append(FOREVER)
            weights.append(1.0)
            types.append(-1)
            self.sources.append(-1 - entry)
        self.rows, self.types = rows, types
        self.distances, self.ages, self.weights = distances, ages, weights
        self.keys, self.values = keys, values

    def encode(self, seen: list[int], start: int | None = None) -> None:
        """Compute the states of the memory rows on items, oldest first, and the user state."""
        encoded, self.user_state = self.reference.encode(
            self._read, self._read_times, self.at, start
        )
        for j, state in zip(seen, encoded, strict=True):
            self.states[j] = state

    def use_states_of(self, whole: Loop, source: int) -> None:
        """Take all states, the user's among them, from the past that also has this source."""
        rows = zip(whole.sources, whole.states, strict=False)  # profile entries have no state
        self.states = [state for other, state in rows if other != source]
        self.user_state = whole.user_state

    def transitions(
        self,
        target: int,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> float:
        part = self.reference.transitions(self.user_state, self.trained, target_row(target))
        return part if options.exclude_self else part + self._again(target)

    def _again(self, target: int) -> float:
        """What it adds that the user took the target before."""
        if not (self.shape.next_basket and self.shape.repeat_consumption):
            return 0.0
        return self.reference.again(self.user_state, self._same(target))

    def _same(self, target: int) -> list[bool]:
        """Which of the newest events are on the target, and no dislike of it."""
        return [self.rows[row] == target and not 0 <= self.shape.dislike_type == self.types[row]
                for row in self.recent]  # fmt: skip

    def similarity(self, target: int) -> float:
        return math.fsum(self._similarity_shares(target))

    def _similarity_shares(self, target: int) -> NDArray[np.float64]:
        """What each memory row adds to the similarity part, [m]: an item counts once."""
        out = np.zeros(len(self.rows))
        liked = [
            (row, trained)
            for row, trained in zip(self.recent, self.trained, strict=True)
            if trained >= 0 and not 0 <= self.shape.dislike_type == self.types[row]
        ]
        every = [trained for _, trained in liked]
        for row, trained in liked:
            weight = self.reference.similarity(trained, target_row(target))
            out[row] = weight / every.count(trained)
        return out

    def lost(self, target: int, options: AttentionOptions = DEFAULT_OPTIONS) -> NDArray[np.float64]:
        """What transitions and similarity lose without each memory row, [m], by deleting it."""
        return np.array([
            self._counted(target, options) - self._without(source)._counted(target, options)
            for source in self.sources
        ])  # fmt: skip

    def _counted(self, target: int, options: AttentionOptions) -> float:
        """The score but attention and prior."""
        return self.transitions(target, options) + self.similarity(target)

    def _without(self, source: int) -> Loop:
        """The loop over the past without one event or profile entry, in the states of this one."""
        if source < 0:
            return self
        less = Loop(self.snapshot, without_event(self.made, source), self.at)
        less.use_states_of(self, source)
        return less

    def contributions(
        self, target: int, options: AttentionOptions = DEFAULT_OPTIONS
    ) -> tuple[NDArray[np.float64], float]:
        """`reference_model.contributions` of the memory rows to a target."""
        alpha, gain = self.attention(target, options)
        seen = self.recent[::-1]
        start = window_start(len(seen), WINDOW)  # moves in steps, and stays where it is
        newest = {}
        for row in self.recent[:NEWEST_LEFT_OUT]:
            if self.states[row] is None:
                continue
            less = Loop(self.snapshot, without_event(self.made, self.sources[row]), self.at)
            less.encode(less.recent[::-1], start)
            weights, gains = less.attention(target, options)
            newest[row] = float((weights * gains).sum()) + less._counted(target, options)
        return reference_model.contributions(
            alpha, gain, self.lost(target, options), self._counted(target, options), newest
        )

    def attention(
        self, target: int, options: AttentionOptions, *, target_in_query: float = 1.0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Weights [H, m] and gains [H, m] of the attention part."""
        visible = [not options.exclude_self or row != target for row in self.rows]

        def attended(temperature: float, hard: bool) -> tuple[Any, Any]:
            return self.reference.attention(
                self.items[target], self.keys, self.values, user=self.user_state,
                states=self.states, distances=self.distances, ages=self.ages,
                weights=self.weights, types=self.types, visible=visible, temperature=temperature,
                hard=hard, target_in_query=target_in_query,
            )  # fmt: skip

        alpha, gain = attended(options.temperature, options.hard)
        if options.mode == "coarse":  # of each head the k rows of most weight share what all had
            order = np.argsort(-attended(1.0, hard=False)[0], axis=1, kind="stable")
            kept = np.zeros(alpha.shape)
            np.put_along_axis(kept, order[:, : options.k], 1.0, axis=1)
            alpha = alpha * kept
            alpha /= np.maximum(alpha.sum(1, keepdims=True), 1e-300)
        return alpha, gain


def target_row(target: int) -> int:
    """A target's row of the id embedding, -1 where it was not trained."""
    return target if target < TRAINED else -1


def first(*options: NDArray[np.float64] | None) -> NDArray[np.float64]:
    return next(option for option in options if option is not None)
