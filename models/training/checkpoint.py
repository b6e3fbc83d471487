"""Checkpoints of a training as bytes: resuming gives the same model as an uninterrupted run."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics
from models.evaluation.splits import Holdout

HEADER = b"heed training 4\n"  # the number changes with the fields of a checkpoint
_DIGEST = hashlib.sha256().digest_size


class CheckpointError(ValueError):
    """Raised for a checkpoint that is damaged or of another training."""


@dataclass(frozen=True, slots=True)
class BestEpoch:
    weights: dict[str, Tensor] = field(default_factory=dict)  # parameters by name
    epoch: int = 0
    metrics: RankingMetrics | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    run: str  # the `fingerprint` of its data and settings
    stage: str
    epoch: int  # epochs of the stage that are done
    validations_since_best: int
    weights: dict[str, Tensor]  # parameters by name
    ema: dict[str, Tensor]
    optimiser: dict[str, Any]  # the optimiser and its step
    best: BestEpoch
    latest: RankingMetrics | None
    history: list[dict[str, float]]

    def to_bytes(self) -> bytes:
        """Serialise to tensors and plain values, which run no code when read, with a digest."""
        out = io.BytesIO()
        torch.save(
            {
                **{name: getattr(self, name) for name in self.__slots__},
                "best": {
                    "weights": self.best.weights,
                    "epoch": self.best.epoch,
                    "metrics": _plain(self.best.metrics),
                },
                "latest": _plain(self.latest),
            },
            out,
        )
        body = out.getvalue()
        return b"".join((HEADER, hashlib.sha256(body).digest(), body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """Read what `to_bytes` wrote; raises `CheckpointError` for anything else."""
        start = len(HEADER) + _DIGEST
        if not data.startswith(HEADER):
            raise CheckpointError("this is no checkpoint, or one of another version")
        # torch.load does not verify the archive's own checksums.
        if hashlib.sha256(data[start:]).digest() != data[len(HEADER) : start]:
            raise CheckpointError("the checkpoint is damaged")
        try:
            read = torch.load(io.BytesIO(data[start:]), map_location="cpu", weights_only=True)
            best = read.pop("best")
            latest = _metrics(read.pop("latest"))
            best_epoch = BestEpoch(best["weights"], best["epoch"], _metrics(best["metrics"]))
            return cls(best=best_epoch, latest=latest, **read)
        except Exception as error:
            raise CheckpointError(f"the checkpoint cannot be read: {error}") from error


def fingerprint(
    logs: Sequence[Interactions],
    content: NDArray[np.float32],
    cases: Holdout | None,
    *settings: object,
) -> str:
    """Hash the data and settings of a training, identically in every process.

    Collective over the shards of the logs: another division of the users is another training.
    """
    digest = hashlib.sha256(repr(settings).encode())
    columns: list[NDArray[Any]] = [content, *(each for log in logs for each in _columns(log))]
    if cases is not None:
        columns += [cases.users, cases.targets, cases.timestamps, *_columns(cases.history)]
    for column in columns:
        digest.update(repr(column.shape).encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    own, *others = logs[0].shards.gather_objects(digest.hexdigest())
    return hashlib.sha256("".join((own, *others)).encode()).hexdigest() if others else own


def _columns(log: Interactions) -> list[NDArray[Any]]:
    return [log.items, log.timestamps, log.weights, log.types, log.offsets]


def _plain(metrics: RankingMetrics | None) -> dict[str, Any] | None:
    if metrics is None:
        return None
    values = {name: getattr(metrics, name) for name in metrics.__slots__}
    return values | {"ranks": torch.from_numpy(metrics.ranks)}


def _metrics(values: dict[str, Any] | None) -> RankingMetrics | None:
    return None if values is None else RankingMetrics(**values | {"ranks": values["ranks"].numpy()})
