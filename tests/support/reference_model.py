"""The recommender once more, in float64 and plain loops over its weights.

Nothing here is shared with the code under test, and nothing is fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tests.support.reference import softmax

Array = NDArray[np.float64]

MICROSECONDS = 1_000_000


def position_bucket(distance: int) -> int:
    """Itself below 16, then three an octave, at most 31."""
    if distance < 16:
        return max(0, distance)
    return min(31, 16 + math.floor(3 * math.log2(distance / 16)))


def age_bucket(age: int) -> int:
    """0 for no age, else 1.4 an octave of seconds, at most 39."""
    if age <= 0:
        return 0
    return min(39, math.floor(1 + 1.4 * math.log2(1 + age / MICROSECONDS)))


def window_start(length: int, window: int) -> int:
    """The first event that is read: quarters of the window are dropped until the rest fits."""
    start = 0
    while length - start > window:
        start += max(1, window // 4)
    return start


def sigmoid(x: Array) -> Array:
    return np.array([1 / (1 + math.exp(-v)) for v in x])


class ReferenceModel:
    """The results of a `Recommender`, read off its weights."""

    def __init__(
        self,
        model: nn.Module,
        heads: int,
        window: int = 200,
        *,
        dislike: int = -1,
        dislike_heads: int = 0,
        baskets: bool = False,
    ) -> None:
        state = model.state_dict()
        self.state: dict[str, Array] = {k: v.double().numpy() for k, v in state.items()}
        self.heads = heads  # of the encoder
        self.attention_heads = len(self.state["recency.age"])
        self.window = window
        self.dislike, self.dislike_heads = dislike, dislike_heads
        # What an event counts for each one after it, and how many do.
        self.decay, self.depth = (1.0, 180) if baskets else (0.3, 8)
        self._projected: dict[bytes, dict[str, Array]] = {}

    # ------------------------------------------------------------------ items

    def vector(self, row: int, content: NDArray[np.floating]) -> Array:
        """The item tower: the id's embedding, where there is one, and the projected text."""
        vector = self.state["content_projection.weight"] @ content.astype(np.float64)
        return vector + self.state["id_embedding.weight"][row] if row >= 0 else vector

    def project(self, vector: Array) -> dict[str, Array]:
        """Query, key, value and output of one item vector, [H, d] each."""
        known = self._projected.get(vector.tobytes())
        if known is not None:
            return known
        normed = self._norm("item_norm", vector)
        w = {name: self.state[f"cross_attention.w_{name}.weight"] for name in ("q", "k", "o")}
        w["v"] = self.state.get("cross_attention.w_v.weight", w["k"])
        parts = {
            "query": (w["q"] @ normed).reshape(self.attention_heads, -1),
            "key": (w["k"] @ normed).reshape(self.attention_heads, -1),
            "value": (w["v"] @ normed).reshape(self.attention_heads, -1),
            "output": (w["o"].T @ vector).reshape(self.attention_heads, -1),
        }
        self._projected[vector.tobytes()] = parts
        return parts

    # ------------------------------------------------------------------ the three parts

    def read(self, vector: Array, kind: int, weight: float) -> Array:
        """What the encoder reads of an event on an item; a type below 0 is not known."""
        if "event_embedding.log_weight_embedding" not in self.state:
            return vector
        read: Array = vector + math.log(weight) * self.state["event_embedding.log_weight_embedding"]
        if kind >= 0 and "event_embedding.type_embedding" in self.state:
            read = read + self.state["event_embedding.type_embedding"][kind]
        return read

    def may_see(self, head: int, kind: int) -> bool:
        """The last heads see dislikes, the others everything else."""
        if self.dislike < 0:
            return True
        return (head >= self.attention_heads - self.dislike_heads) == (kind == self.dislike)

    def states(
        self,
        vectors: Sequence[Array],
        times: Sequence[int],
        gates: Sequence[float] | None = None,
    ) -> list[Array]:
        """The encoder's state of every event; those of gate 0 are missing for the others."""
        gates = [1.0] * len(vectors) if gates is None else gates
        state = self.state
        x = []
        for j, vector in enumerate(vectors):
            gap = times[j] - times[j - 1] if j else 0
            wider = times[j] - times[j - 2] if j > 1 else 0
            starts = [
                self._norm("encoder.norm_in", vector + 0.2 * state["encoder.gap.weight"][bucket])
                for bucket in (age_bucket(gap), age_bucket(wider))
            ]
            previous = gates[j - 1] if j else 1.0
            x.append(previous * starts[0] + (1 - previous) * starts[1])
        block = 0
        while f"encoder.blocks.{block}.out.weight" in state:
            x = [self._block(block, x[t], x[: t + 1], times[: t + 1], [*gates[:t], 1.0])
                 for t in range(len(x))]  # fmt: skip
            block += 1
        return [self._norm("encoder.norm_out", each) for each in x]

    def at_request(self, state: Array, newest: int, at: int | None) -> Array:
        """The user state: the newest event's state, and when the request came; None = unknown."""
        bucket = 40 if at is None else age_bucket(at - newest)
        requested: Array = state + self.state["encoder.request_gap.weight"][bucket]
        return requested

    def encode(
        self,
        vectors: Sequence[Array],
        times: Sequence[int],
        at: int | None = None,
        start: int | None = None,
    ) -> tuple[list[Array | None], Array]:
        """The state of each event of a history, None before the window, and the user state.

        A request is no later than the model's largest gap allows. The user state is zero without
        an encoder and without events in the window, which begins at `start` where that is given.
        """
        nothing = np.zeros(self.state["content_projection.weight"].shape[0])
        start = window_start(len(vectors), self.window) if start is None else start
        if "encoder.gap.weight" not in self.state or len(vectors) <= start:
            return [None] * len(vectors), nothing
        if at is not None:
            at = min(at, times[-1] + int(self.state["statistics.max_request_gap"]))
        states = self.states(vectors[start:], times[start:])
        return [*[None] * start, *states], self.at_request(states[-1], times[-1], at)

    def follows(self, item: int, target: int) -> float:
        """How often one item followed another, by rows of the id embedding; -1 is no row."""
        if item < 0 or target < 0:
            return 0.0
        columns = self.state["statistics.transition_items"][item]
        counts = self.state["statistics.transition_sums"][item]
        return sum(
            float(count)
            for column, count in zip(columns.tolist(), counts.tolist(), strict=True)
            if column == target
        )

    def similarity(self, item: int, target: int) -> float:
        """The similarity weight of one item to another, by rows of the id embedding."""
        if min(item, target) < 0 or "statistics.similar_items" not in self.state:
            return 0.0
        columns = self.state["statistics.similar_items"][item]
        weights = self.state["statistics.similarity_weights"][item]
        return math.fsum(weights[columns == target].tolist())

    def shares(self, recent: Sequence[int], target: int) -> list[float]:
        """What each of the last items, newest first, adds to F(target)."""
        newest = enumerate(recent[: self.depth])
        return [self.decay**k * self.follows(item, target) for k, item in newest]

    def transitions(self, user_state: Array, recent: Sequence[int], target: int) -> float:
        """λ(m) log(1 + 2F) after these items, newest first; 0 where nothing came before."""
        if "encoder.gap.weight" not in self.state or not len(recent):
            return 0.0
        return self._scale(0, user_state) * math.log(1 + 2 * math.fsum(self.shares(recent, target)))

    def again(self, user_state: Array, same: Sequence[bool]) -> float:
        """λ(m) log(1 + n) of an item that n of the newest events, newest first, were on."""
        return self._scale(1, user_state) * math.log(1 + sum(same[: self.depth]))

    def _scale(self, count: int, user_state: Array) -> float:
        weight, bias = (
            self.state["transition_scale.weight"][count],
            self.state["transition_scale.bias"][count],
        )
        return float(weight @ user_state + bias)

    def attention(
        self,
        target: Array,
        keys: Sequence[Array],
        values: Sequence[Array],
        *,
        user: Array | None = None,
        states: Sequence[Array | None] = (),
        distances: Sequence[int],
        ages: Sequence[int],
        weights: Sequence[float],
        types: Sequence[int] | None = None,
        visible: Sequence[bool] | None = None,
        temperature: float = 1.0,
        hard: bool = False,
        target_in_query: float = 1.0,
    ) -> tuple[Array, Array]:
        """Weights [H, n] and gains [H, n] of rows; `keys` and `values` are item vectors.

        `states` are those that the encoder has of the first rows, and `user` the user state;
        `target_in_query` is a factor of the target's part of the query.
        """
        target_parts, heads = self.project(target), self.attention_heads
        alpha, gain = np.zeros((heads, len(keys))), np.zeros((heads, len(keys)))
        query, row_keys, row_values = (
            target_parts["query"] * target_in_query,
            [self.project(key)["key"].copy() for key in keys],
            [self.project(value)["value"].copy() for value in values],
        )
        if user is not None and "state_attention.query.weight" in self.state:
            query += self._of_state("query", user)
            query += self.state["state_attention.query.bias"].reshape(heads, -1)
        for j, state in enumerate(states):
            if state is not None:
                row_keys[j] += self._of_state("key", state)
                row_values[j] += self._of_state("value", state)
        for head in range(heads):
            scores: list[float] = []
            for j in range(len(keys)):
                key = row_keys[j][head]
                score = query[head] @ key / math.sqrt(len(key))
                score += self._recency("recency", head, distances[j], ages[j])
                score += math.log(weights[j])
                kind = -1 if types is None else types[j]
                if kind >= 0 and "type_bias.bias" in self.state:
                    score += self.state["type_bias.bias"][head, kind]
                seen = (visible is None or visible[j]) and self.may_see(head, kind)
                scores.append(score if seen else -math.inf)
                gain[head, j] = row_values[j][head] @ target_parts["output"][head]
            alpha[head] = softmax(scores, temperature, hard)
        return alpha, gain

    # ------------------------------------------------------------------ the parts

    def _of_state(self, name: str, state: Array) -> Array:
        """A state's query, key or value, [H, d]."""
        projected = self.state[f"state_attention.{name}.weight"] @ state
        return projected.reshape(self.attention_heads, -1)

    def _block(
        self,
        number: int,
        x: Array,
        past: Sequence[Array],
        times: Sequence[int],
        gates: Sequence[float],
    ) -> Array:
        """The newest event's stream `x` after a block over its past, itself included."""
        state, dim, name = self.state, len(x), f"encoder.blocks.{number}"
        asking = state[f"{name}.query_gate.weight"] @ self._norm(f"{name}.norm_attention", x)
        asking = asking + state[f"{name}.query_gate.bias"]
        query, gate = asking[:dim], asking[dim:]
        normed = [self._norm(f"{name}.norm_attention", each) for each in past]
        both = [state[f"{name}.key_value.weight"] @ each for each in normed]
        size = dim // self.heads
        mixed = np.zeros(dim)
        for head in range(self.heads):
            part = slice(head * size, (head + 1) * size)
            scores: list[float] = []
            for j in range(len(past)):
                score = float(query[part] @ both[j][:dim][part]) / math.sqrt(size)
                distance = len(past) - 1 - j
                bias, nearer = (
                    self._recency(f"{name}.recency", head, max(0, places), times[-1] - times[j])
                    for places in (distance, distance - 1)
                )
                missing = sum(1 - gates[between] for between in range(j + 1, len(past)))
                hidden = math.log(gates[j]) if gates[j] else -math.inf
                scores.append(score + bias + missing * (nearer - bias) + hidden)
            for j, weight in enumerate(softmax(scores)):
                mixed[part] += weight * both[j][dim:][part]
        x = x + sigmoid(gate) * (state[f"{name}.out.weight"] @ mixed)
        fed = state[f"{name}.feed.weight"] @ self._norm(f"{name}.norm_feed", x)
        fed = fed + state[f"{name}.feed.bias"]
        hidden = state[f"{name}.down.weight"].shape[1]
        left, right, gate = fed[:hidden], fed[hidden : 2 * hidden], fed[2 * hidden :]
        swish = left * sigmoid(left)
        passed: Array = x + sigmoid(gate) * (state[f"{name}.down.weight"] @ (swish * right))
        return passed

    def _recency(self, name: str, head: int, distance: int, age: int) -> float:
        place, when = position_bucket(distance), age_bucket(age)
        bias = self.state[f"{name}.position"][head, place] + self.state[f"{name}.age"][head, when]
        return float(bias + self.state[f"{name}.joint"][head, 40 * place + when])

    def _norm(self, name: str, x: Array) -> Array:
        spread = np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        scaled: Array = (x - x.mean()) / spread
        return scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]


def contributions(
    alpha: Array, gain: Array, lost: Array, counted: float, newest: Mapping[int, float]
) -> tuple[Array, float]:
    """Compute what rows contribute, [m], and the distance to where another row would share.

    Without a row each head loses its part, and transitions and similarity what they lose. Of the
    newest events, the whole of it is known. What all rows together lack is shared by those of its
    sign, or else by all that are attended.

    Args:
        alpha: weights [H, m].
        gain: [H, m].
        lost: [m] of transitions and similarity.
        counted: these parts of the score.
        newest: the score without each of the newest events and without the prior, by row.
    """
    total = float((alpha * gain).sum()) + counted
    each, margins = np.where(abs(lost) < 1e-5, 0.0, lost), [1.0]
    margins += [abs(abs(one) - 1e-5) for one in lost if one]
    for weights, gains in zip(alpha, gain, strict=True):
        whole = float(weights @ gains)
        for j, weight in enumerate(weights):
            margins.append(abs(1 - weight - 1e-3))
            if 1 - weight <= 1e-3:
                each[j] += weight * gains[j]
            else:
                left = [i for i in range(len(weights)) if i != j]
                each[j] += whole - float(weights[left] @ gains[left]) / (1 - weight)
    for row, without in newest.items():
        each[row] = total - without if abs(total - without) >= 1e-5 else 0.0
        margins += [abs(abs(total - without) - 1e-5)] if each[row] else []
    rest = total - each.sum()
    sharing = np.clip(each * np.sign(rest) / 1e-8, 0, 1)
    margins += [abs(one) for one in each if one] + [abs(rest)]
    if not sharing.any():
        sharing = (alpha.sum(0) > 0).astype(float)
    if sharing.any():
        each += rest * sharing / sharing.sum()
    return each, min(margins)
