"""`Snapshot`: everything one answer needs, frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models import coarse, target_attention
from models.catalogue import Catalogue
from models.coarse import CoarseIndex
from models.data import DISLIKE
from models.kinds import IGNORED, UNKNOWN
from models.recommender import Recommender, identity
from models.stepping import Stepper
from models.target_attention import ItemTables
from models.trained import Counts, Trained

# From this many items on, candidates come from FAISS: measured by `heed bench`, twice as fast as
# one matrix-vector product at 10,000 items and five times at 20,000.
INDEX_FROM = 10_000
UNTRAINED = "untrained"
_MOST = 0.25  # share of changed items from which projecting all of them is simpler


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One model version over one state of the catalogue. A request reads one and passes it down.

    Rows are the catalogue's, whatever the model: a model finds its own ids among them.
    """

    version: str
    model: Recommender
    trained: Trained | None  # None: the identity on content
    catalogue: Catalogue
    trained_rows: Tensor  # int64 [N] rows of the id embedding, -1 = not trained
    known: NDArray[np.bool_]  # [N] has a vector, from training or from text
    tables: ItemTables
    counts: Counts  # [N] popularity
    candidate_keys: Tensor  # [N, dim + H·d + 1]
    index: CoarseIndex | None  # over `candidate_keys` of the first `indexed` items
    indexed: int
    key_index: CoarseIndex | None  # over the first `indexed_keys` field keys
    indexed_keys: int
    stepper: Stepper | None  # one more event through the encoder, where there is one

    @classmethod
    def build(
        cls,
        version: str,
        trained: Trained | None,
        catalogue: Catalogue,
        counts: Counts,
        *,
        index_from: int = INDEX_FROM,
    ) -> Snapshot:
        """Project the whole catalogue and index it where it is large.

        Args:
            version: what answers call this model.
            trained: a trained model, or None for the identity on content.
            catalogue: the items.
            counts: live popularity [≤ N].
            index_from: how many rows make an index worth it.

        Raises:
            ValueError: when the model reads vectors of another dimension.
        """
        if trained and trained.model.config.content != catalogue.dimension:
            raise ValueError(
                f"the model reads text vectors of dimension {trained.model.config.content}, "
                f"the catalogue's have {catalogue.dimension}"
            )
        catalogue = catalogue.covering(trained.item_ids if trained else ())
        model = trained.model if trained else identity(catalogue.dimension)
        rows = _trained_rows(trained, catalogue)
        counts = _padded(counts, len(catalogue))
        tables = _tables(model, trained, rows, catalogue, counts)
        candidate_keys = _candidate_keys(tables)
        index = key_index = None
        if len(catalogue) >= index_from:
            index = coarse.build("ivf", candidate_keys.numpy())
        if len(catalogue.keys) >= index_from:
            key_index = coarse.build("ivf", catalogue.keys)
        return cls(
            version,
            model,
            trained,
            catalogue,
            rows,
            catalogue.described | (rows >= 0).numpy(),
            tables,
            counts,
            candidate_keys,
            index,
            len(catalogue) if index else 0,
            key_index,
            len(catalogue.keys) if key_index else 0,
            Stepper(model.encoder) if model.encoder is not None else None,
        )

    def refreshed(self, catalogue: Catalogue, counts: Counts) -> Snapshot:
        """This version over a later state of its catalogue, or with later popularity.

        The index stays: items that it does not hold are searched exactly beside it. Where earlier
        field keys changed, so that its rows no longer mean the same, the key index is dropped.
        """
        counts = _padded(counts, len(catalogue))
        if catalogue is self.catalogue:
            if self.trained is not None:
                return replace(self, counts=counts)
            tables = self.tables._replace(prior=_popular(counts))
            keys = _candidate_keys(tables)
            return replace(self, counts=counts, tables=tables, candidate_keys=keys)
        rows = _trained_rows(self.trained, catalogue)
        kept, old = self.indexed_keys, self.catalogue
        same = (
            kept <= len(catalogue.keys)
            and np.array_equal(catalogue.owners[:kept], old.owners[:kept])
            and np.array_equal(catalogue.keys[:kept], old.keys[:kept])
        )
        tables = self._tables_of(rows, catalogue, counts)
        return replace(
            self,
            catalogue=catalogue,
            trained_rows=rows,
            known=catalogue.described | (rows >= 0).numpy(),
            counts=counts,
            tables=tables,
            candidate_keys=_candidate_keys(tables),
            key_index=self.key_index if same else None,
            indexed_keys=kept if same else 0,
        )

    def _tables_of(self, rows: Tensor, catalogue: Catalogue, counts: Counts) -> ItemTables:
        """The tables of a later catalogue; only what changed is projected anew."""
        old = len(self.catalogue)
        changed = np.ones(len(catalogue), dtype=np.bool_)
        changed[:old] = np.any(catalogue.content[:old] != self.catalogue.content, axis=1)
        if changed.mean() > _MOST:
            return _tables(self.model, self.trained, rows, catalogue, counts)
        at = torch.from_numpy(np.flatnonzero(changed))
        with torch.inference_mode():
            fresh = self.model.tables(rows[at], torch.from_numpy(catalogue.content[changed]))
            more = len(catalogue) - old
            pairs = zip(self.tables, fresh, strict=True)
            tables = ItemTables(*(_patched(table, new, at, more) for table, new in pairs))
        return tables if self.trained else tables._replace(prior=_popular(counts))

    @torch.inference_mode()
    def projected(self, content: NDArray[np.float32]) -> ItemTables:
        """The tables of things that are no items, from their content vectors [D] or [p, D]."""
        vectors = torch.from_numpy(np.atleast_2d(content).astype(np.float32))
        return self.model.tables(torch.full((len(vectors),), -1), vectors)

    def type_rows(self, names: Iterable[str]) -> NDArray[np.int32]:
        """The model's own numbers of types of events [n].

        `UNKNOWN` for a type it does not know; for dislikes then `IGNORED`, which are not attended.
        """
        known = {DISLIKE: IGNORED}
        if self.trained is not None:
            known |= {name: row for row, name in enumerate(self.trained.types)}
        return np.array([known.get(name, UNKNOWN) for name in names], dtype=np.int32)

    def answerable(self, row: int) -> bool:
        """Whether an item can be asked for: it has a vector and was not removed."""
        return row >= 0 and bool(self.known[row]) and not self.catalogue.gone[row]

    @property
    def personal(self) -> str:
        """The reason an answer from someone's memory gives."""
        return "personal" if self.trained else "content"


def popular_first(snapshot: Snapshot, rows: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """The rows by falling popularity, ties by row."""
    rows = np.asarray(rows, dtype=np.int64)
    return rows[np.argsort(-snapshot.counts[rows], kind="stable")]


def _trained_rows(trained: Trained | None, catalogue: Catalogue) -> Tensor:
    if trained is None:
        return torch.full((len(catalogue),), -1)
    # The vocabulary may have grown past this view of the catalogue; its rows are a prefix.
    rows = np.full(len(catalogue.vocabulary), -1, dtype=np.int64)
    rows[catalogue.vocabulary.rows(trained.item_ids)] = np.arange(len(trained.item_ids))
    return torch.from_numpy(rows[: len(catalogue)].copy())


def _padded(counts: Counts, size: int) -> Counts:
    return np.concatenate([counts[:size], np.zeros(max(0, size - len(counts)), np.int64)])


def _tables(
    model: Recommender,
    trained: Trained | None,
    rows: Tensor,
    catalogue: Catalogue,
    counts: Counts,
) -> ItemTables:
    with torch.inference_mode():
        content = torch.from_numpy(catalogue.content)
        if trained is not None:
            return model.tables(rows, content)
        return model.tables(rows, content)._replace(prior=_popular(counts))


def _patched(table: Tensor, fresh: Tensor, at: Tensor, more: int) -> Tensor:
    """A copy of a table ([N], [N, d] or [H, N, d]) with `more` items, and `fresh` at the rows."""
    by_head = table.dim() == 3  # items come first in memory all the same
    old, new = (table.transpose(0, 1), fresh.transpose(0, 1)) if by_head else (table, fresh)
    grown = torch.cat([old, old.new_zeros(more, *old.shape[1:])]).index_copy_(0, at, new)
    return grown.transpose(0, 1) if by_head else grown


def _candidate_keys(tables: ItemTables) -> Tensor:
    with torch.inference_mode():
        return target_attention.candidate_keys(tables).contiguous()


def _popular(counts: Counts) -> Tensor:
    """The prior before any training: it decides only among items that content cannot tell apart."""
    share = np.log1p(counts) / max(1.0, float(np.log1p(counts.max(initial=0))))
    return torch.from_numpy(0.05 * share).float()
