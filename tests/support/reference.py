"""The mathematics once more, in float64 loops over plain numbers: what the fast paths must equal.

Nothing here is shared with the code under test, and nothing is fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Score = Callable[[Sequence[float], Sequence[float]], float]


def scaled_dot(q: Sequence[float], k: Sequence[float]) -> float:
    """Divide the inner product by the root of the dimension."""
    return sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))


def cosine(q: Sequence[float], k: Sequence[float]) -> float:
    """Take the inner product of directions; a zero vector has none."""
    length = math.hypot(*q) * math.hypot(*k)
    return sum(a * b for a, b in zip(q, k, strict=True)) / length if length else 0.0


def bm25(documents: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """Score documents by Robertson's formula, k1 = 1.2 and b = .75; a word twice counts twice."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        count, score = Counter(document), 0.0
        for word in query:
            having = sum(word in other for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            norm = 1.2 * (1 - 0.75 + 0.75 * len(document) / mean)
            score += rarity * count[word] * 2.2 / (count[word] + norm)
        scores.append(score)
    return scores


def additive(W: Array, U: Array, w: Array) -> Score:
    """Make the score wᵀ tanh(W q + U k)."""

    def score(q: Sequence[float], k: Sequence[float]) -> float:
        total = 0.0
        for i in range(len(w)):
            inner = sum(W[i, j] * q[j] for j in range(len(q)))
            inner += sum(U[i, j] * k[j] for j in range(len(k)))
            total += w[i] * math.tanh(inner)
        return float(total)

    return score


def logits(query: Array, keys: Array, bias: Array, visible: Array, score: Score) -> Array:
    """Score every pair; query [T, d], keys [n, d], bias and visible [T, n] -> [T, n]."""
    out = np.full((len(query), len(keys)), -math.inf)
    for t in range(len(query)):
        for j in range(len(keys)):
            if visible[t, j] and bias[t, j] > -math.inf:
                out[t, j] = score(query[t].tolist(), keys[j].tolist()) + bias[t, j]
    return out


def softmax(row: Sequence[float], temperature: float = 1.0, hard: bool = False) -> list[float]:
    """Normalise one row of logits; -inf is hidden, and hidden everywhere is zero everywhere."""
    peak = max(row, default=-math.inf)
    if peak == -math.inf:
        return [0.0] * len(row)
    if hard:
        first = min(j for j, s in enumerate(row) if s == peak)
        return [1.0 if j == first else 0.0 for j in range(len(row))]
    powers = [math.exp((s - peak) / temperature) if s > -math.inf else 0.0 for s in row]
    return [p / math.fsum(powers) for p in powers]


def attend(
    query: Array,
    keys: Array,
    values: Array,
    bias: Array,
    visible: Array,
    *,
    score: Score = scaled_dot,
    temperature: float = 1.0,
    hard: bool = False,
) -> tuple[Array, Array]:
    """Attend with one head: weights [T, n] and contexts [T, V]."""
    scores = logits(query, keys, bias, visible, score)
    weights = np.zeros(scores.shape)
    context = np.zeros((len(query), values.shape[1]))
    for t in range(len(query)):
        for j, weight in enumerate(softmax(scores[t].tolist(), temperature, hard)):
            weights[t, j] = weight
            for c in range(values.shape[1]):
                context[t, c] += weight * values[j, c]
    return weights, context


def recall(found: NDArray[np.int64], wanted: NDArray[np.int64]) -> float:
    """Recall@k: the share of wanted rows [Q, k] that are among found [Q, m]; -1 is no row.

    1 when nothing was wanted.
    """
    real = wanted >= 0
    if not real.any():
        return 1.0
    hits = (wanted[:, :, None] == found[:, None, :]).any(2) & real
    return float(hits.sum() / real.sum())
