"""A published model version over a catalogue, refused unless it can answer."""

from __future__ import annotations

import numpy as np

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import UNTRAINED, Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from models.recommender.artifact import ItemCounts, TrainedModel
from service.domain.errors import ModelRejected
from service.snapshots.registry import Registry


def load_snapshot(
    registry: Registry,
    version: str | None,
    catalogue: Catalogue,
    counts: ItemCounts,
    *,
    encoder: str,
    index_from: int,
) -> Snapshot:
    """Load a model version and build its snapshot.

    Args:
        registry: holds the version.
        version: its name, or None for the untrained model.
        catalogue: the items that the snapshot is of.
        counts: popularity by item row [≤ N].
        encoder: name of the text encoder whose vectors the catalogue has.
        index_from: number of rows from which on an index is built.

    Raises:
        NotFound: when there is no such version.
        Corrupt: naming the file that fails its checks.
        ModelRejected: when the model does not fit this service, or its scores are not finite.
    """
    if version is None:
        return Snapshot.build(UNTRAINED, None, catalogue, counts, index_from=index_from)
    files = registry.load(version)
    try:
        trained = TrainedModel.from_files(files)
        if trained.text_encoder != encoder:
            raise ValueError(
                f"it reads vectors of {trained.text_encoder}, not of {encoder}: "
                "train again with heed train, or set HEED_ENCODER to what it was trained with"
            )
        snapshot = Snapshot.build(version, trained, catalogue, counts, index_from=index_from)
        _warm_up(snapshot)
    except ValueError as error:
        raise ModelRejected(f"model {version}: {error}") from error
    return snapshot


def _warm_up(snapshot: Snapshot) -> None:
    """Score once. Raises ValueError where the scores are not finite."""
    rows = np.flatnonzero(snapshot.has_vector)[:50].astype(np.int32)
    if not len(rows):
        return
    times = np.zeros(len(rows), dtype=np.int64)
    history = UserHistory(rows, times, np.ones(len(rows), dtype=np.float32))
    totals = score(snapshot, build_memory(snapshot, history, 0), rows).total
    if not np.isfinite(totals.numpy()).all():
        raise ValueError("its scores are not finite")
