"""Histories of a small catalogue, of any user and length, for what is kept of them."""

from __future__ import annotations

import numpy as np

from models.history.user_history import UserHistory
from service.histories.request_history import HistoryVersion, RequestHistory
from tests.support.small import random_past

ITEMS = 15


def asked(user_id: str, length: int, *, stored: bool = True) -> RequestHistory:
    """The first events of a user's history, as stored or as laid over it."""
    whole = random_past(sum(user_id.encode()), 30, ITEMS)
    past = UserHistory(whole.rows[:length], whole.timestamps[:length], whole.weights[:length])
    seqs = np.arange(1, length + 1)
    kept = HistoryVersion(user_id, length, 1) if stored else None
    return RequestHistory(past, past.rows, seqs, np.zeros(length, np.int32), ["view"], (), kept)
