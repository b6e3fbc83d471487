"""`implicit`'s alternating least squares behind FastAPI, in the peers' environment.

    python -m tests.benchmarks.peers.als ARRAYS

Its factors, regularisation and confidence are chosen on the validation cases, then fitted on all
that may be seen.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
from implicit.cpu.als import AlternatingLeastSquares
from scipy.sparse import csr_matrix

from tests.benchmarks.peers.served_app import TOP, Answer, Question, mean_ndcg, serve

FACTORS = (32, 64, 128)
REGULARIZATION = (0.01, 0.1)
ALPHA = (1.0, 5.0, 20.0)


def main(path: str) -> None:
    """Choose, fit and serve."""
    arrays = np.load(path)
    size = (int(arrays["history_users"].max()) + 1, int(arrays["items"]))
    train, history = (_matrix(arrays, name, size) for name in ("train", "history"))
    users, targets = arrays["chosen_users"], arrays["chosen_targets"]

    def judged(options: tuple[int, float, float]) -> float:
        lists = _fitted(options, train).recommend(users, train[users], N=TOP)[0]
        return mean_ndcg(lists.tolist(), targets)

    model = _fitted(max(product(FACTORS, REGULARIZATION, ALPHA), key=judged), history)

    def answer(asked: Question) -> Answer:
        targets = asked.targets
        items, scores = model.recommend(
            asked.user,
            history[asked.user],
            N=asked.limit if targets is None else len(targets),
            items=targets,
            filter_already_liked_items=targets is None,
        )
        kept = items >= 0
        return items[kept].tolist(), scores[kept].tolist()

    serve(answer)


def _fitted(options: tuple[int, float, float], matrix: Any) -> Any:
    factors, regularization, alpha = options
    model = AlternatingLeastSquares(
        factors=factors,
        regularization=regularization,
        alpha=alpha,
        num_threads=1,
        random_state=0,
    )
    model.fit(matrix, show_progress=False)
    return model


def _matrix(arrays: Any, name: str, size: tuple[int, int]) -> Any:
    users = arrays[f"{name}_users"]
    ones = np.ones(len(users), dtype=np.float32)
    return csr_matrix((ones, (users, arrays[f"{name}_items"])), shape=size)


if __name__ == "__main__":
    main(sys.argv[1])
