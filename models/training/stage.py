"""One stage of training: its optimiser, the moving average of the weights, and its batches."""

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
from models.data.windows import batch_shard, batch_windows, tile_windows
from models.encoder.history_encoder import PooledDropout
from models.recommender.recommender import Recommender
from models.training.train_config import TrainConfig

LossFunction = Callable[[NDArray[np.int64]], tuple[Tensor, float]]
"""Maps windows (first event, end) [n, 2] to their mean loss and the sum of the target weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of training with its own events, loss and parameters."""

    name: str
    log: Interactions
    epochs: int
    batch_tokens: int  # padded positions of a batch
    modules: list[nn.Module]  # that are trained
    trains_prior: bool
    is_exact: bool  # by the softmax without the target in the queries


class StageTrainer:
    """Trains the parameters that require a gradient, on one rank.

    All random draws follow from the seed, the epoch and the rank alone, so that a training can
    resume from the end of any epoch.
    """

    def __init__(
        self,
        model: Recommender,
        stage: Stage,
        config: TrainConfig,
        seed: tuple[int, ...],
        group: DataParallelGroup = SINGLE_PROCESS,
    ) -> None:
        self._model, self._stage, self._config = model, stage, config
        self._seed, self._group = seed, group
        self._trained: list[Tensor] = [part for part in model.parameters() if part.requires_grad]
        self._optimiser = torch.optim.AdamW(
            self._trained, config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.ema = copy.deepcopy(model).eval()  # exponential moving average of the weights
        self._averages: list[Tensor] = [
            average
            for average, part in zip(self.ema.parameters(), model.parameters(), strict=True)
            if part.requires_grad
        ]
        self._step = 0
        self._steps = stage.epochs * max(1, len(self._batches(0)))

    def epoch(self, number: int, loss: LossFunction) -> Iterator[tuple[int, int, float]]:
        """Train epoch `number`, yielding (step, steps, mean loss so far) after every step."""
        batches = self._batches(number)
        torch.manual_seed(self._derive_seed(number, 1 + self._group.rank))
        for module in self._model.children():  # frozen modules run without dropout
            module.train(any(part.requires_grad for part in module.parameters()))
        for module in self._model.modules():
            if isinstance(module, PooledDropout):
                module.redraw()
        total = weight = 0.0
        for step, windows in enumerate(batches, 1):
            step_loss, step_weight = self._descend(windows, loss)
            total, weight = total + step_loss * step_weight, weight + step_weight
            yield step, len(batches), total / weight if weight else 0.0

    def _descend(self, windows: NDArray[np.int64], loss: LossFunction) -> tuple[float, float]:
        """Take one step; returns the loss over all ranks and the sum of their target weights."""
        self._optimiser.zero_grad(set_to_none=True)
        # Of a log in several shards the windows are this rank's share already.
        is_shared = self._stage.log.shards.count == 1
        shard = self._group.shard(windows) if is_shared else windows
        reported, weight = torch.zeros(()), 0.0
        if len(shard):
            own_loss, weight = loss(shard)
            own_loss.backward()  # type: ignore[no-untyped-call]
            reported = own_loss.detach().float()
        if self._group.world_size > 1:
            for part in self._trained:  # all ranks must reduce the same tensors
                if part.grad is None:
                    part.grad = torch.zeros_like(part)
        gradients = [part.grad for part in self._trained if part.grad is not None]
        total = self._group.all_reduce_mean([*gradients, reported], weight)
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = self._config.learning_rate * self._schedule()
        self._optimiser.step()
        self._step += 1
        decay = min(self._config.ema_decay, self._step / (9 + self._step))
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._trained, 1 - decay)
        return float(reported), total

    def state(self) -> dict[str, Any]:
        """Return the optimiser's state, for `restore`."""
        return {"step": self._step, "optimiser": self._optimiser.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._step = state["step"]
        self._optimiser.load_state_dict(state["optimiser"])

    def _schedule(self) -> float:
        """Return the learning rate's factor: linear warm-up, then a cosine to 5 %."""
        warmup = min(self._config.warmup_steps, max(1, self._steps // 10))
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, self._step / self._steps)))
        return min(1.0, (self._step + 1) / warmup) * (0.05 + 0.95 * decay)

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Draw the batches of an epoch: the same on all ranks, or as many of their own shards."""
        log, longest = self._stage.log, self._model.config.window + 1
        tokens, shards = self._stage.batch_tokens, log.shards
        common = np.random.default_rng(self._derive_seed(epoch, 0))
        if shards.count == 1:
            return batch_windows(tile_windows(log, longest, common), tokens, common)
        stream = 1 + shards.count + shards.index  # after those of the ranks' steps
        own = np.random.default_rng(self._derive_seed(epoch, stream))
        return batch_shard(tile_windows(log, longest, own), tokens, shards, own, common)

    def _derive_seed(self, epoch: int, stream: int) -> int:
        """Derive the seed of a random stream of an epoch."""
        sequence = np.random.SeedSequence((*self._seed, epoch, stream))
        return int(sequence.generate_state(1, np.uint64)[0])
