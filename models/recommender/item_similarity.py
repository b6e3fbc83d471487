"""EASE, the item-to-item weights that best predict each item from the others a user has.

EASE is the embarrassingly shallow autoencoder of Steck 2019: a ridge regression with zero diagonal.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from models.data.interactions import Interactions
from models.data.row_sets import user_item_keys

MAX_EASE_ITEMS = 20_000
RIDGE = 200.0  # the penalty on squared weights


def ease_weights(log: Interactions, *, ridge: float = RIDGE) -> Tensor:
    """Regress each item on the others: B, float32 [n_items, n_items], of source and target.

    With G = X'X of the binary user-item matrix X and P = (G + ridge I)^-1, B = I - P / diag(P).
    A user scores X_u B. Dislikes are left out, and the order of events is ignored. Time grows with
    n_items**3; memory is about 20 * n_items**2 bytes (8 GB at 20,000 items).

    Raises:
        ValueError: for a catalogue of more than `MAX_EASE_ITEMS`.
    """
    if log.n_items > MAX_EASE_ITEMS:
        need = 20 * log.n_items**2 / 1e9
        raise ValueError(
            f"EASE inverts an n_items x n_items matrix: {log.n_items} items need about "
            f"{need:.0f} GB, and {MAX_EASE_ITEMS} are allowed"
        )
    gram = _gram(log.liked())
    gram.diagonal().add_(ridge)
    torch.linalg.cholesky(gram, out=gram)
    torch.cholesky_inverse(gram, out=gram)
    gram /= -gram.diagonal().clone()
    gram.fill_diagonal_(0.0)
    return gram.float()


def _gram(log: Interactions) -> Tensor:
    """Count the users of both items, float64 [n_items, n_items]."""
    held = np.unique(user_item_keys(log.users, log.items, max(log.n_items, 1)))
    users, items = (torch.from_numpy(part) for part in np.divmod(held, max(log.n_items, 1)))
    shape = (log.n_items, log.n_users)
    taken_by = torch.sparse_coo_tensor(
        torch.stack((items, users)), torch.ones(len(held)), shape, check_invariants=True
    ).coalesce()
    gram = torch.zeros(log.n_items, log.n_items, dtype=torch.float64)
    width = max(1, (1 << 26) // max(log.n_users, 1))  # dense columns held at once: 256 MB
    for start in range(0, log.n_items, width):
        inside = (items >= start) & (items < start + width)
        block = torch.zeros(log.n_users, min(width, log.n_items - start))
        block[users[inside], items[inside] - start] = 1.0
        gram[:, start : start + width] = torch.sparse.mm(taken_by, block)
    return gram
