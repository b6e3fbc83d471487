"""A training that makes steps on command: Heed's, or RecTools' SASRec's.

Run as a process of its own, for RecTools by the interpreter of an environment that has it, so that
nothing is imported here beyond the standard library. It reads commands on stdin, a line each: so
many seconds of processor time are to be spent on training; and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any


class Turns:
    """Says when to train, and tells what was done in each turn."""

    def __init__(self) -> None:
        # Libraries print to stderr: stdout is for answers.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._left = 0.0
        self._steps = self._targets = 0
        self._started = (0.0, 0.0)

    def begin(self, **described: Any) -> None:
        """Say that all is ready, and wait for the first turn."""
        self._answer(**described)
        self._wait()

    def stepped(self, targets: int) -> None:
        """Called after each step, of so many target positions; waits where the turn is over."""
        self._steps += 1
        self._targets += targets
        processor, wall = (now - then for now, then in zip(_now(), self._started, strict=True))
        if processor >= self._left:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._answer(
                targets=self._targets,
                steps=self._steps,
                processor=processor,
                wall=wall,
                memory=memory * (1 if sys.platform == "darwin" else 1024),
            )
            self._wait()

    def _answer(self, **what: Any) -> None:
        self._answers.write(json.dumps(what) + "\n")

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:  # no more turns; nothing here needs to be put in order
            os._exit(0)
        self._left = float(line)
        self._steps = self._targets = 0
        self._started = _now()


def heed(spec: dict[str, Any]) -> None:
    """The stage of Heed's training that takes most of the time, over and over."""
    import numpy as np
    import torch

    from models.compute.device import product_dtype
    from models.data.interactions import Interactions
    from models.recommender.co_occurrence import count_transitions
    from models.recommender.recommender import MAX_REQUEST_GAP, Recommender, RecommenderConfig
    from models.training.fit import Stage, StageTrainer
    from models.training.losses import TrainingLosses
    from models.training.presets import TrainConfig

    torch.set_num_threads(1)
    data = np.load(spec["data"])
    content, config = data["content"], TrainConfig(**spec["config"])
    log = Interactions.from_columns(
        data["users"],
        data["items"],
        data["timestamps"],
        n_users=int(data["users"].max()) + 1,
        n_items=len(content),
    )
    torch.manual_seed(0)
    model = Recommender(RecommenderConfig(**spec["shape"]))
    model.statistics.load(
        count_transitions(log, model.config.transitions_per_item), MAX_REQUEST_GAP
    )
    losses = TrainingLosses(model, log, content, config)
    stage = Stage("full", log, config.epochs, config.batch_tokens, [model], True, is_exact=True)
    trainer = StageTrainer(model, stage, config, (0,))
    targets = 0

    def loss_of(spans: Any) -> Any:
        nonlocal targets
        targets = int((spans[:, 1] - spans[:, 0] - 1).sum())
        return losses.full_softmax(spans)

    dtype = product_dtype(torch.device("cpu"))
    turns = Turns()
    turns.begin(torch=torch.__version__, products=str(dtype).removeprefix("torch."))
    number = 0
    while True:
        number += 1
        for _ in trainer.epoch(number, loss_of):
            turns.stepped(targets)


def rectools(spec: dict[str, Any]) -> None:
    """RecTools' SASRec with the options of `spec`, over and over."""
    import logging
    import warnings

    import numpy as np
    import pandas as pd
    import pytorch_lightning as lightning
    import rectools
    import torch
    from rectools.dataset import Dataset
    from rectools.models import SASRecModel

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data = np.load(spec["data"])
    rows = {
        "user_id": data["users"],
        "item_id": data["items"],
        "weight": 1.0,
        "datetime": pd.to_datetime(data["timestamps"], unit="us"),
    }

    turns: list[Turns] = []

    def begin(*_: Any) -> None:
        if not turns:
            turns.append(Turns())
            products = "bfloat16" if "bf16" in spec["precision"] else "float32"
            turns[0].begin(torch=torch.__version__, products=products, rectools=rectools.VERSION)

    def end(_: Any, __: Any, ___: Any, batch: Any, ____: int) -> None:
        turns[0].stepped(int((batch["y"] != 0).sum()))

    def trainer() -> Any:
        return lightning.Trainer(
            max_epochs=10**6,
            accelerator="cpu",
            devices=1,
            precision=spec["precision"],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                lightning.callbacks.LambdaCallback(
                    on_train_batch_start=begin, on_train_batch_end=end
                )
            ],
        )

    torch.manual_seed(0)
    model = SASRecModel(get_trainer_func=trainer, **spec["options"])
    model.fit(Dataset.construct(pd.DataFrame(rows)))


def _now() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


if __name__ == "__main__":
    {"heed": heed, "rectools": rectools}[sys.argv[1]](json.loads(sys.argv[2]))
