"""`implicit`'s alternating least squares behind FastAPI, in the environment of peers.

    python -m tests.benchmarks.peers.implicit_server ARRAYS [fresh]

Its factors, regularisation and confidence are chosen on the validation cases, then fitted on all
that may be seen. With `fresh` a user's factors are computed anew from the history in each request,
as they must be for an answer to know of events since the last fit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from implicit.cpu.als import AlternatingLeastSquares
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from models.metrics import gains
from tests.benchmarks.peers.quality import ranks
from tests.benchmarks.peers.served import Lists, serve

FACTORS = (32, 64, 128)
REGULARIZATION = (0.01, 0.1)
ALPHA = (1.0, 5.0, 20.0)
ITERATIONS = 15  # its default


def main(path: str, fresh: bool) -> None:
    """Choose, fit and serve."""
    arrays = np.load(path)
    size = (int(arrays["history_users"].max()) + 1, len(arrays["content"]))
    train, history = (_matrix(arrays, name, size) for name in ("train", "history"))
    users, targets = arrays["chosen_users"], arrays["chosen_targets"]
    best, chosen = -1.0, (FACTORS[0], REGULARIZATION[0], ALPHA[0])
    for options in product(FACTORS, REGULARIZATION, ALPHA):
        model = _fitted(options, train)
        lists = model.recommend(users, train[users], N=10)[0]
        ndcg = float(gains(ranks(lists, targets)).mean())
        if ndcg > best:
            best, chosen = ndcg, options
    model = _fitted(chosen, history)
    recommend = partial(model.recommend, recalculate_user=fresh)

    def one(user: int, **how: Any) -> tuple[Sequence[int], Sequence[float]]:
        items, scores = recommend(user, history[user], **how)
        kept = items >= 0
        return items[kept].tolist(), scores[kept].tolist()

    def score(user: int, targets: Sequence[int]) -> tuple[Sequence[int], Sequence[float]]:
        return one(user, N=len(targets), items=targets, filter_already_liked_items=False)

    def everyone(limit: int) -> int:
        rows = np.arange(size[0])
        return len(recommend(rows, history, N=limit)[0])

    factors, regularization, alpha = chosen
    serve(
        Lists(
            score,
            lambda user, limit: one(user, N=limit),
            everyone,
            f"ALS, {factors} factors, regularization {regularization:g}, alpha {alpha:g}, "
            f"{ITERATIONS} iterations; chosen of {len(FACTORS) * len(REGULARIZATION) * len(ALPHA)} "
            f"by validation (NDCG@10 {best:.3f})" + ("; recalculate_user=True" if fresh else ""),
        )
    )


def _fitted(options: tuple[int, float, float], matrix: Any) -> Any:
    factors, regularization, alpha = options
    model = AlternatingLeastSquares(
        factors=factors,
        regularization=regularization,
        alpha=alpha,
        iterations=ITERATIONS,
        num_threads=1,
        random_state=0,
    )
    model.fit(matrix, show_progress=False)
    return model


def _matrix(arrays: Any, name: str, size: tuple[int, int]) -> Any:
    users: NDArray[np.int32] = arrays[f"{name}_users"]
    ones = np.ones(len(users), dtype=np.float32)
    return csr_matrix((ones, (users, arrays[f"{name}_items"])), shape=size)


if __name__ == "__main__":
    main(sys.argv[1], "fresh" in sys.argv[2:])
