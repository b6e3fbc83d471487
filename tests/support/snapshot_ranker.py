"""A snapshot as a ranker of the evaluation: score for score what the service answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.interactions import Interactions
from models.encoder.history_encoder import NO_REQUEST_TIME
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.scoring import score
from tests.support.small import UserEvents, events_of


class SnapshotRanker:
    """Scores a whole catalogue for one user after the other, trained items and new ones alike.

    `ModelRanker` does the same many times faster, where every item was trained.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._rows = np.arange(len(snapshot.catalogue))

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """[B, n_items], histories and scores by the catalogue's rows; -inf where nothing is known.

        Types of events are rows of the model's.

        Raises ValueError for histories over another number of items.
        """
        if history.n_items != len(self._rows):
            raise ValueError(
                f"the catalogue has {len(self._rows)} items, the log has {history.n_items}"
            )
        out = np.empty((len(users), len(self._rows)), dtype=np.float32)
        for at, user in enumerate(users.tolist()):
            asked = None if request_times is None else int(request_times[at])
            out[at] = self._one(events_of(history, user), asked)
        out[:, ~self._snapshot.has_vector] = -np.inf
        return out

    def _one(self, events: UserEvents, asked: int | None) -> NDArray[np.float32]:
        user = requester(self._snapshot, events, asked)
        totals: NDArray[np.float32] = score(self._snapshot, user, self._rows).total.numpy()
        return totals


def requester(snapshot: Snapshot, events: UserEvents, asked: int | None = None) -> UserMemory:
    """The memory of a user of a log.

    Args:
        snapshot: whose rows the events' items are, and whose model's rows their types.
        events: what the user did.
        asked: when they ask, in microseconds; None where that is not told.
    """
    types = events.types.astype(np.int32)
    past = UserHistory(events.items, events.timestamps, events.weights, types=types)
    if asked is None and len(events.items):
        return at_no_time(snapshot, build_memory(snapshot, past, int(events.timestamps[-1])))
    return build_memory(snapshot, past, asked or 0)


@torch.inference_mode()
def at_no_time(snapshot: Snapshot, user: UserMemory) -> UserMemory:
    """The memory as a request has it whose time is unknown."""
    model, read = snapshot.model, user.encoded
    if read is None or not len(read.cache):
        return user
    never = torch.tensor(NO_REQUEST_TIME)
    state = model.user_states(read.cache.states[-1], read.cache.timestamps[-1], never)
    # What the memory keeps of its transitions is of its own user state.
    return replace(user, user_state=state, query=model.user_query(state), transitions=None)
