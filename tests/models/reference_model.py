"""The recommender once more, in float64 and plain loops over its weights.

Nothing here is shared with the code under test, and nothing is fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from tests.models.reference import softmax

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


class ReferenceModel:
    """What a `Recommender` computes, read off its weights."""

    def __init__(self, model: nn.Module, heads: int, window: int = 200) -> None:
        state = model.state_dict()
        self.state: dict[str, Array] = {k: v.double().numpy() for k, v in state.items()}
        self.heads = heads
        self.window = window
        self._projected: dict[bytes, dict[str, Array]] = {}

    # ------------------------------------------------------------------ items

    def vector(self, row: int, content: NDArray[np.floating]) -> Array:
        """The item tower: the id's embedding, where there is one, and the projected text."""
        vector = self.state["content.weight"] @ content.astype(np.float64)
        return vector + self.state["ids.weight"][row] if row >= 0 else vector

    def project(self, vector: Array) -> dict[str, Array]:
        """Query, key, value and output of one item vector, [H, d] each."""
        known = self._projected.get(vector.tobytes())
        if known is not None:
            return known
        normed = self._norm("norm", vector)
        w = {name: self.state[f"cross.w_{name}.weight"] for name in ("q", "k", "o")}
        w["v"] = self.state.get("cross.w_v.weight", w["k"])
        parts = {
            "query": (w["q"] @ normed).reshape(self.heads, -1),
            "key": (w["k"] @ normed).reshape(self.heads, -1),
            "value": (w["v"] @ normed).reshape(self.heads, -1),
            "output": (w["o"].T @ normed).reshape(self.heads, -1),
        }
        self._projected[vector.tobytes()] = parts
        return parts

    # ------------------------------------------------------------------ the two parts

    def summaries(self, vectors: Sequence[Array], times: Sequence[int]) -> list[Array]:
        """The encoder's summary of every prefix."""
        state, prefix = self.state, "encoder."
        x = []
        for j, vector in enumerate(vectors):
            gap = times[j] - times[j - 1] if j else 0
            start = vector + 0.2 * state[f"{prefix}gap.weight"][age_bucket(gap)]
            x.append(self._norm(f"{prefix}norm_in", start))
        block = 0
        while f"{prefix}blocks.{block}.qkv.weight" in state:
            x = self._block(f"{prefix}blocks.{block}", x, times)
            block += 1
        return [self._norm(f"{prefix}norm_out", each) for each in x]

    def summary(self, vectors: Sequence[Array], times: Sequence[int]) -> Array:
        """h_u: of the last `window` events; zero without an encoder or without events."""
        if "encoder.gap.weight" not in self.state or not len(vectors):
            return np.zeros(self.state["content.weight"].shape[0])
        return self.summaries(vectors[-self.window :], times[-self.window :])[-1]

    def attention(
        self,
        target: Array,
        keys: Sequence[Array],
        values: Sequence[Array],
        *,
        distances: Sequence[int],
        ages: Sequence[int],
        weights: Sequence[float],
        visible: Sequence[bool] | None = None,
        temperature: float = 1.0,
        hard: bool = False,
    ) -> tuple[Array, Array]:
        """Weights [H, n] and gains [H, n] of rows; `keys` and `values` are item vectors."""
        asked = self.project(target)
        alpha, gain = np.zeros((self.heads, len(keys))), np.zeros((self.heads, len(keys)))
        for head in range(self.heads):
            scores: list[float] = []
            for j in range(len(keys)):
                key = self.project(keys[j])["key"][head]
                score = asked["query"][head] @ key / math.sqrt(len(key))
                score += self._recency("recency", head, distances[j], ages[j])
                score += math.log(weights[j])
                seen = visible is None or visible[j]
                scores.append(score if seen else -math.inf)
                gain[head, j] = self.project(values[j])["value"][head] @ asked["output"][head]
            alpha[head] = softmax(scores, temperature, hard)
        return alpha, gain

    # ------------------------------------------------------------------ the parts

    def _block(self, name: str, x: list[Array], times: Sequence[int]) -> list[Array]:
        state, dim = self.state, len(x[0])
        normed = [self._norm(f"{name}.norm_attention", each) for each in x]
        projected = [state[f"{name}.qkv.weight"] @ each for each in normed]
        size = dim // self.heads
        out = []
        for t in range(len(x)):
            mixed = np.zeros(dim)
            for head in range(self.heads):
                part = slice(head * size, (head + 1) * size)
                scores: list[float] = []
                for j in range(t + 1):
                    score = projected[t][:dim][part] @ projected[j][dim : 2 * dim][part]
                    score /= math.sqrt(size)
                    age = times[t] - times[j]
                    scores.append(float(score) + self._recency(f"{name}.recency", head, t - j, age))
                for j, weight in enumerate(softmax(scores)):
                    mixed[part] += weight * projected[j][2 * dim :][part]
            after = x[t] + state[f"{name}.out.weight"] @ mixed
            fed = self._norm(f"{name}.norm_feed", after)
            fed = state[f"{name}.feed.0.weight"] @ fed + state[f"{name}.feed.0.bias"]
            fed = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in fed])
            out.append(after + state[f"{name}.feed.2.weight"] @ fed + state[f"{name}.feed.2.bias"])
        return out

    def _recency(self, name: str, head: int, distance: int, age: int) -> float:
        position = self.state[f"{name}.position"][position_bucket(distance), head]
        return float(position + self.state[f"{name}.age"][age_bucket(age), head])

    def _norm(self, name: str, x: Array) -> Array:
        spread = np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        scaled: Array = (x - x.mean()) / spread
        return scaled * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]
