"""RecTools' SASRec behind FastAPI, in the peers' environment: fitted once and kept.

python -m tests.benchmarks.peers.sasrec '{"arrays": …, "model": …, "options": …, "epochs": 100}'
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel, load_model

from tests.benchmarks.peers.served_app import TOP, Answer, Question, mean_ndcg, serve

_PATIENCE = 3  # judgments without a better one, after which training ends


def fit(spec: dict[str, Any]) -> None:
    """Train, judging by the validation cases every few epochs; the best weights are kept."""
    arrays = np.load(spec["arrays"])
    train = Dataset.construct(_frame(arrays, "train"))
    users, targets = arrays["chosen_users"], arrays["chosen_targets"]
    every = max(1, spec["epochs"] // 20)
    torch.manual_seed(0)
    model = SASRecModel(**spec["options"], epochs=spec["epochs"], verbose=0)
    best, chosen, weights = -1.0, 0, {}
    for epoch in range(every, spec["epochs"] + 1, every):
        model.fit_partial(train, min_epochs=every, max_epochs=every)
        lists = model.recommend(users, train, k=TOP, filter_viewed=True)
        ndcg = mean_ndcg(_lists(lists, users), targets)
        if ndcg > best:
            best, chosen = ndcg, epoch
            state = model.torch_model.state_dict()
            weights = {name: weight.clone() for name, weight in state.items()}
        elif epoch - chosen >= _PATIENCE * every:
            break
    model.torch_model.load_state_dict(weights)
    path = Path(spec["model"])
    part = path.with_suffix(".part")
    model.save(part)
    os.replace(part, path)


def run(spec: dict[str, Any]) -> None:
    """Serve the model that was fitted."""
    torch.set_num_threads(1)
    arrays = np.load(spec["arrays"])
    model = load_model(spec["model"])
    seen = _frame(arrays, "history")
    # Of a data set of all users RecTools filters every event in each request; what one user needs
    # of it is their own events, which are kept by user.
    own = {user: Dataset.construct(events) for user, events in seen.groupby(Columns.User)}

    def answer(asked: Question) -> Answer:
        targets = asked.targets
        found = model.recommend(
            [asked.user],
            own[asked.user],
            k=asked.limit if targets is None else len(targets),
            filter_viewed=targets is None,
            items_to_recommend=targets,
            add_rank_col=False,
        )
        return found[Columns.Item].tolist(), found[Columns.Score].tolist()

    serve(answer)


def _frame(arrays: Any, name: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            Columns.User: arrays[f"{name}_users"],
            Columns.Item: arrays[f"{name}_items"],
            Columns.Weight: 1.0,
            Columns.Datetime: pd.to_datetime(arrays[f"{name}_timestamps"], unit="us"),
        }
    )


def _lists(recommended: pd.DataFrame, users: Sequence[int]) -> list[list[int]]:
    found = {user: rows[Columns.Item].tolist() for user, rows in recommended.groupby(Columns.User)}
    return [found.get(user, []) for user in users]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    given = json.loads(sys.argv[1])
    if not Path(given["model"]).exists():
        fit(given)
    run(given)
