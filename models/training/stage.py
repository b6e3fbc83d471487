"""One stage of training: its optimiser, the running mean of the weights, and its batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.data.interactions import Interactions
from models.data.windows import batch_windows, tile_windows
from models.encoder.dropout import PooledDropout
from models.recommender.recommender import Recommender

LossFunction = Callable[[NDArray[np.int64]], tuple[Tensor, float]]
"""Windows (first event, end) [n, 2] to their mean loss and what its targets count together."""


@dataclass(frozen=True, slots=True)
class StageSchedule:
    """How fast a stage learns."""

    learning_rate: float
    warmup_steps: int  # steps
    ema_decay: float  # decay of the running mean of the weights


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of training with its own loss and its own parameters."""

    name: str
    epochs: int
    batch_tokens: int  # padded positions of a batch
    modules: list[nn.Module]
    trains_prior: bool  # whether the prior learns too


class StageTrainer:
    """Trains what requires a gradient, as one member of a team.

    What chance decides follows from the seed, the epoch and the rank alone, so that a training can
    go on from any epoch's end.
    """

    def __init__(
        self,
        model: Recommender,
        log: Interactions,
        stage: Stage,
        schedule: StageSchedule,
        seed: tuple[int, ...],
        group: DataParallelGroup = SINGLE_PROCESS,
    ) -> None:
        self._model, self._log, self._stage, self._pace = model, log, stage, schedule
        self._seed, self._team = seed, group
        self._learning: list[Tensor] = [part for part in model.parameters() if part.requires_grad]
        self._optimiser = torch.optim.AdamW(
            self._learning, schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.ema = copy.deepcopy(model).eval()  # the running mean of the weights
        self._means: list[Tensor] = [
            mean
            for mean, part in zip(self.ema.parameters(), model.parameters(), strict=True)
            if part.requires_grad
        ]
        self._step = 0
        self._steps = stage.epochs * max(1, len(self._batches(0)))

    def epoch(self, number: int, loss_of: LossFunction) -> Iterator[tuple[int, int, float]]:
        """Train one pass, the `number`th; yields (step, steps, mean loss so far)."""
        parts = self._batches(number)
        torch.manual_seed(self._drawn(number, 1 + self._team.rank))
        for module in self._model.children():  # what is held still drops nothing
            module.train(any(part.requires_grad for part in module.parameters()))
        for module in self._model.modules():
            if isinstance(module, PooledDropout):
                module.redraw()
        total = weight = 0.0
        for step, spans in enumerate(parts, 1):
            loss, worth = self._descend(spans, loss_of)
            total, weight = total + loss * worth, weight + worth
            yield step, len(parts), total / weight if weight else 0.0

    def _descend(self, spans: NDArray[np.int64], loss_of: LossFunction) -> tuple[float, float]:
        """One step; the loss of the whole batch and what its targets count together."""
        self._optimiser.zero_grad(set_to_none=True)
        own = self._team.shard(spans)
        told, worth = torch.zeros(()), 0.0
        if len(own):
            loss, worth = loss_of(own)
            loss.backward()  # type: ignore[no-untyped-call]
            told = loss.detach().float()
        if self._team.world_size > 1:
            for part in self._learning:  # all members must send the same tensors
                if part.grad is None:
                    part.grad = torch.zeros_like(part)
        gradients = [part.grad for part in self._learning if part.grad is not None]
        everything = self._team.all_reduce_mean([*gradients, told], worth)
        nn.utils.clip_grad_norm_(self._learning, 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = self._pace.learning_rate * self._schedule()
        self._optimiser.step()
        self._step += 1
        kept = min(self._pace.ema_decay, self._step / (9 + self._step))
        with torch.no_grad():
            torch._foreach_lerp_(self._means, self._learning, 1 - kept)
        return float(told), everything

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {"step": self._step, "optimiser": self._optimiser.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._step = state["step"]
        self._optimiser.load_state_dict(state["optimiser"])

    def _schedule(self) -> float:
        """Linear warm-up, then a cosine to 5 %."""
        warmup = min(self._pace.warmup_steps, max(1, self._steps // 10))
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, self._step / self._steps)))
        return min(1.0, (self._step + 1) / warmup) * (0.05 + 0.95 * decay)

    def _batches(self, number: int) -> list[NDArray[np.int64]]:
        """Of an epoch, the same for all members."""
        generator = np.random.default_rng(self._drawn(number, 0))
        spans = tile_windows(self._log, self._model.config.window + 1, generator)
        return batch_windows(spans, self._stage.batch_tokens, generator)

    def _drawn(self, number: int, stream: int) -> int:
        """A seed for what is drawn in an epoch."""
        drawn = np.random.SeedSequence((*self._seed, number, stream)).generate_state(1, np.uint64)
        return int(drawn[0])
