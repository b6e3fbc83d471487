"""`implicit`'s alternating least squares behind FastAPI, in the environment of peers.

    python -m tests.benchmarks.peers.implicit_server ARRAYS

Its factors, regularisation and confidence are chosen on the validation cases, then fitted on all
that may be seen. A fresh answer computes the user's factors anew from the history, as it must to
know of events since the fit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from implicit.cpu.als import AlternatingLeastSquares
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from models.evaluation.full_ranking import ndcg_gains
from tests.benchmarks.peers.quality import ranks
from tests.benchmarks.peers.served import Lists, Question, serve

FACTORS = (32, 64, 128)
REGULARIZATION = (0.01, 0.1)
ALPHA = (1.0, 5.0, 20.0)
ITERATIONS = 15  # its default


def main(path: str) -> None:
    """Choose, fit and serve."""
    arrays = np.load(path)
    size = (int(arrays["history_users"].max()) + 1, len(arrays["content"]))
    train, history = (_matrix(arrays, name, size) for name in ("train", "history"))
    users, targets = arrays["chosen_users"], arrays["chosen_targets"]
    best, chosen = -1.0, (FACTORS[0], REGULARIZATION[0], ALPHA[0])
    for options in product(FACTORS, REGULARIZATION, ALPHA):
        model = _fitted(options, train)
        lists = model.recommend(users, train[users], N=10)[0]
        ndcg = float(ndcg_gains(ranks(lists, targets)).mean())
        if ndcg > best:
            best, chosen = ndcg, options
    model = _fitted(chosen, history)

    def answer(asked: Question) -> tuple[Sequence[int], Sequence[float]]:
        targets = asked.targets
        items, scores = model.recommend(
            asked.user,
            history[asked.user],
            N=asked.limit if targets is None else len(targets),
            items=targets,
            filter_already_liked_items=targets is None,
            recalculate_user=asked.fresh,
        )
        kept = items >= 0
        return items[kept].tolist(), scores[kept].tolist()

    def everyone(limit: int) -> int:
        return len(model.recommend(np.arange(size[0]), history, N=limit)[0])

    factors, regularization, alpha = chosen
    serve(
        Lists(
            answer,
            everyone,
            f"ALS, {factors} factors, regularization {regularization:g}, alpha {alpha:g}, "
            f"{ITERATIONS} iterations; chosen of {len(FACTORS) * len(REGULARIZATION) * len(ALPHA)} "
            f"by validation (NDCG@10 {best:.3f})",
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
    main(sys.argv[1])
