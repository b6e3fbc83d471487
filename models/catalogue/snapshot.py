"""`Snapshot`: a model version over one version of the catalogue, frozen, and its item tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as count_from
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import merge_heads, split_heads
from models.catalogue.catalogue import Catalogue
from models.catalogue.cow import CowArray
from models.data.interactions import DISLIKE, NEGATIVE
from models.encoder.event_bias import MASKED, UNKNOWN
from models.encoder.history_encoder import NumpyEncoder
from models.index import ann_index
from models.index.ann_index import CoarseIndex, IndexKind, StructureCache
from models.recommender.artifact import ItemCounts, TrainedModel
from models.recommender.recommender import Recommender, content_only_model
from models.recommender.target_attention import ItemTables

MakeTables = Callable[[NDArray[np.int64]], ItemTables]  # item rows -> their tables

_BLOCK = 32_768  # items whose tables are made at once: making takes several times their memory
_STEPS = count_from(1)  # shared by all tables of this process


@dataclass(frozen=True, slots=True, eq=False)
class CowItemTables:
    """Item tables packed into two arrays: vectors, which are compared, and rows read by item."""

    heads: int
    tied: bool  # values are keys
    _vectors: CowArray[np.float32]  # [N, dim]
    # [N, 3·H·d or 4·H·d] queries, outputs, keys, and values unless tied
    _attended_rows: CowArray[np.float32]
    prior: Tensor  # [N]
    step: int  # number of the last change; they ascend
    written: NDArray[np.int64]  # [N] the step that wrote each row

    @classmethod
    def build(cls, make: MakeTables, count: int, *, tied: bool) -> CowItemTables:
        first = make(np.arange(min(count, _BLOCK)))
        vectors, attended = _packed(first, tied=tied)
        step = next(_STEPS)
        pages = cls(
            first.queries.shape[0],
            tied,
            CowArray(vectors),
            CowArray(attended),
            first.prior.clone(),
            step,
            np.full(len(vectors), step),
        )
        for begin in range(_BLOCK, count, _BLOCK):
            pages = pages.updated(make, np.arange(begin, min(count, begin + _BLOCK)))
        return pages

    def updated(self, make: MakeTables, rows: NDArray[np.int64]) -> CowItemTables:
        """Return the tables after items changed or were added.

        `rows` are rising; new ones are all the next ones.
        """
        if not len(rows):
            return self
        old = len(self._vectors)
        made = make(rows)
        before = rows < old
        at = rows[before]
        vectors, attended = _packed(made, tied=self.tied)
        prior = torch.cat([self.prior, made.prior[torch.from_numpy(~before)]])
        prior[torch.from_numpy(at)] = made.prior[torch.from_numpy(before)]
        step = next(_STEPS)
        written = np.concatenate([self.written, np.zeros(len(rows) - len(at), np.int64)])
        written[rows] = step
        return CowItemTables(
            self.heads,
            self.tied,
            self._vectors.updated(at, vectors[before], vectors[~before]),
            self._attended_rows.updated(at, attended[before], attended[~before]),
            prior,
            step,
            written,
        )

    @property
    def tables(self) -> ItemTables:
        """The tables, as views that may not be written to."""
        vectors = torch.from_numpy(self._vectors.array)
        attended = torch.from_numpy(self._attended_rows.array)
        width = attended.shape[1] // (3 if self.tied else 4)
        parts = [attended[:, at : at + width] for at in range(0, attended.shape[1], width)]
        queries, outputs, keys, values = (
            split_heads(part, self.heads) for part in (*parts[:3], parts[-1])
        )
        return ItemTables(vectors, queries, keys, values, outputs, self.prior)


def _packed(tables: ItemTables, *, tied: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    heads = [tables.queries, tables.outputs, tables.keys]
    if not tied:
        heads.append(tables.values)
    attended = torch.cat([merge_heads(table) for table in heads], 1)
    return tables.vectors.detach().numpy(), attended.detach().numpy()


# Rows from which an index is built, of field keys, and of items for a model without an encoder: it
# is twice as fast as one matrix-vector product at 10,000 rows and five times at 20,000.
INDEX_FROM = 10_000
# With an encoder, items are indexed from this multiple: below it, comparing all items to first
# order takes no longer than comparing the items that an index finds.
ENCODER_TIMES = 2
UNTRAINED = "untrained"
# Share of the rows that may stand beside an index before there is a new one.
_UNINDEXED_SHARE = 1 / 50
_KEEPING = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One model version over one version of the catalogue. A request reads one and passes it down.

    Rows are the catalogue's, whatever the model: a model finds its own ids among them.
    """

    version: str
    model: Recommender
    trained: TrainedModel | None  # None: the identity on content
    catalogue: Catalogue
    trained_rows: Tensor  # int64 [N] rows of the id embedding, -1 = not trained
    item_rows: NDArray[np.int64]  # [items of the model] rows of the catalogue
    has_vector: NDArray[np.bool_]  # [N] has a vector, from training or from text
    cow_tables: CowItemTables
    tables: ItemTables  # of `cow_tables`
    counts: ItemCounts  # [N] popularity
    stepper: NumpyEncoder | None  # one more event through the encoder, where there is one
    index: CoarseIndex | None = None  # `item_index` over the first items
    key_index: CoarseIndex | None = None  # over the first field keys
    changed_indexed: int = 0  # number of indexed items that changed since
    # By name; later snapshots of the same model and catalogue share them.
    _numbers: dict[str, float] = field(default_factory=dict)
    # Indexes of other keys, filled by the first request that needs one; not of the next snapshot.
    _kept: dict[tuple[str, IndexKind], CoarseIndex] = field(default_factory=dict, init=False)
    _recommendable: list[NDArray[np.bool_]] = field(default_factory=list, init=False)  # once known

    @classmethod
    def build(
        cls,
        version: str,
        trained: TrainedModel | None,
        catalogue: Catalogue,
        counts: ItemCounts,
        *,
        index_from: int = INDEX_FROM,
        cache: StructureCache | None = None,
    ) -> Snapshot:
        """Compute the tables of the whole catalogue, and its indexes as in `reindexed`.

        `version` is the model's name in answers, `counts` [≤ N] are the live popularity. Raises
        ValueError when the model reads vectors of another dimension.
        """
        if trained and trained.model.config.content_dim != catalogue.dimension:
            raise ValueError(
                f"the model reads text vectors of dimension {trained.model.config.content_dim}, "
                f"the catalogue's have {catalogue.dimension}"
            )
        item_ids = trained.item_ids if trained else ()
        catalogue = catalogue.with_items(item_ids)
        model = trained.model if trained else content_only_model(catalogue.dimension)
        item_rows = catalogue.vocabulary.rows(item_ids).astype(np.int64)
        rows = _trained_rows(item_rows, len(catalogue))
        counts = _padded(counts, len(catalogue))
        pages = _with_prior(
            CowItemTables.build(
                _table_maker(model, rows, catalogue),
                len(catalogue),
                tied=model.cross_attention.tied,
            ),
            trained,
            counts,
        )
        bare = cls(
            version=version,
            model=model,
            trained=trained,
            catalogue=catalogue,
            trained_rows=rows,
            item_rows=item_rows,
            has_vector=catalogue.has_content | (rows >= 0).numpy(),
            cow_tables=pages,
            tables=pages.tables,
            counts=counts,
            stepper=NumpyEncoder(model.encoder) if model.encoder is not None else None,
        )
        return bare.reindexed(index_from=index_from, cache=cache)

    @property
    def indexed_items(self) -> int:
        return len(self.index or ())

    @property
    def indexed_keys(self) -> int:
        return len(self.key_index or ())

    def kept_index(
        self, name: str, probes: int | None, keys: Callable[[], NDArray[np.float32]]
    ) -> CoarseIndex:
        """Return the index of this snapshot's keys of a name, inverted lists where some are probed.

        The first request that needs it builds it; others wait, since each would take a core.
        """
        kind: IndexKind = "flat" if probes is None else "ivf"
        if (name, kind) not in self._kept:
            with _KEEPING:
                if (name, kind) not in self._kept:
                    self._kept[name, kind] = ann_index.build_index(kind, keys())
        return self._kept[name, kind]

    def kept_number(self, name: str, compute: Callable[[], float]) -> float:
        """Return a number of this model and catalogue, computed by the first request for it."""
        if name not in self._numbers:
            self._numbers[name] = compute()
        return self._numbers[name]

    def reindexed(
        self, *, index_from: int = INDEX_FROM, cache: StructureCache | None = None
    ) -> Snapshot:
        """Return this snapshot with new indexes of everything in it; `cache` has earlier ones.

        Field keys are indexed from `index_from` rows, items with an encoder from `ENCODER_TIMES` as
        many.
        """
        index = key_index = None
        fields = self.catalogue.keys
        wasted = fields.orphans > _UNINDEXED_SHARE * len(fields)
        catalogue = self.catalogue.with_keys(fields.compacted() if wasted else fields)
        keys = catalogue.keys.vectors
        if len(catalogue) >= self._index_items_from(index_from):
            index = item_index(self.tables, cache)
        if len(keys) >= index_from:
            key_index = ann_index.build_index(
                "ivf", keys, reuse_clusters=self.key_index, cache=cache
            )
        return replace(
            self,
            catalogue=catalogue,
            index=index,
            key_index=key_index,
            changed_indexed=0,
        )

    def needs_reindex(self, *, index_from: int = INDEX_FROM) -> bool:
        """Report whether too many rows are outside the indexes, or changed since."""
        fresh = len(self.catalogue) - self.indexed_items + self.changed_indexed
        keys = self.catalogue.keys
        fresh_keys = len(keys) - self.indexed_keys + keys.orphans
        return any(
            size >= least and beside > max(index_from, _UNINDEXED_SHARE * size)
            for size, beside, least in (
                (len(self.catalogue), fresh, self._index_items_from(index_from)),
                (len(keys), fresh_keys, index_from),
            )
        )

    def _index_items_from(self, index_from: int) -> int:
        return index_from * (1 if self.model.encoder is None else ENCODER_TIMES)

    def with_indexes(self, base: Snapshot, indexed: Snapshot) -> Snapshot:
        """Return this snapshot with indexes that were built meanwhile.

        `indexed` is `base`, an earlier snapshot of the same model, `reindexed`.
        """
        keys = self.catalogue.keys.rebased(base.catalogue.keys, indexed.catalogue.keys)
        return replace(
            self,
            catalogue=self.catalogue.with_keys(keys),
            index=indexed.index,
            key_index=indexed.key_index,
            changed_indexed=self.changed_indexed - base.changed_indexed,
        )

    def refreshed(self, catalogue: Catalogue, counts: ItemCounts) -> Snapshot:
        """Return this model over a later version of its catalogue, or with later popularity.

        The indexes stay: items and keys that they do not hold are searched exactly beside them.
        """
        counts = _padded(counts, len(catalogue))
        if catalogue is self.catalogue:
            pages = _with_prior(self.cow_tables, self.trained, counts)
            return replace(self, counts=counts, cow_tables=pages, tables=pages.tables)
        # All items of a model had a row when it was built.
        added = len(catalogue) - len(self.catalogue)
        rows = torch.cat([self.trained_rows, self.trained_rows.new_full((added,), -1)])
        changed = catalogue.changed_since(self.catalogue)
        if changed is None:
            changed = np.arange(len(catalogue))
        changed = changed[_other_content(self.catalogue, catalogue, changed)]
        pages = self.cow_tables.updated(_table_maker(self.model, rows, catalogue), changed)
        pages = _with_prior(pages, self.trained, counts)
        return replace(
            self,
            catalogue=catalogue,
            trained_rows=rows,
            has_vector=catalogue.has_content | (rows >= 0).numpy(),
            counts=counts,
            cow_tables=pages,
            tables=pages.tables,
            changed_indexed=self.changed_indexed
            + int(np.count_nonzero(changed < self.indexed_items)),
            _numbers={},
        )

    @torch.inference_mode()
    def projected(self, content: NDArray[np.float32]) -> ItemTables:
        """Compute the tables of content vectors [D] or [p, D] that belong to no item."""
        vectors = torch.from_numpy(np.atleast_2d(content).astype(np.float32))
        return self.model.item_tables(torch.full((len(vectors),), -1), vectors)

    def last_written(self, rows: NDArray[np.integer]) -> int:
        """Return the last step of the tables that wrote any of the rows [n]; 0 without rows.

        Snapshots of one model with the same step have equal tables for these rows.
        """
        written = self.cow_tables.written
        inside = rows[(rows >= 0) & (rows < len(written))]
        return int(written[inside].max(initial=0))

    def type_rows(self, names: Iterable[str]) -> NDArray[np.int32]:
        """Return the model's rows of event types [n], or `UNKNOWN`.

        Negative types are dislikes; if the model has none, they are `MASKED`: not attended.
        """
        trained = () if self.trained is None else self.trained.event_types
        row_of = {name: row for row, name in enumerate(trained)}
        row_of |= dict.fromkeys(NEGATIVE, row_of.get(DISLIKE, MASKED))
        return np.array([row_of.get(name, UNKNOWN) for name in names], dtype=np.int32)

    def is_known(self, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Report whether each of some items [n] can be asked about; row -1 is no item.

        These are the items of the catalogue, hidden or not, and those that the model was trained
        on, but not deleted ones.
        """
        if not len(self.catalogue):
            return np.zeros(len(rows), np.bool_)
        catalogue = self.catalogue
        listed = catalogue.present[rows] | catalogue.servable[rows] | self.has_vector[rows]
        is_known: NDArray[np.bool_] = (rows >= 0) & listed & ~catalogue.deleted[rows]
        return is_known

    @property
    def recommendable(self) -> NDArray[np.bool_]:
        """Items that are recommended unasked, bool [N]: with a text, an embedding or an event.

        If no item has any of these, all are.
        """
        if not self._recommendable:
            catalogue = self.catalogue
            worth = catalogue.is_named | catalogue.has_content | (self.counts > 0)
            has_any = (worth & catalogue.servable).any()
            self._recommendable.append(worth if has_any else np.ones_like(worth))
        return self._recommendable[0]

    @property
    def memory_reason(self) -> str:
        return "personal" if self.trained else "content"


def item_index(tables: ItemTables, cache: StructureCache | None = None) -> CoarseIndex:
    """Build an index of all items by ⟨vector, query⟩ + prior."""
    vectors, prior = tables.vectors.numpy(), tables.prior.numpy()
    return ann_index.build_index("pq", vectors, bias=prior, cache=cache)


def popular_first(snapshot: Snapshot, rows: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the rows by falling popularity, ties by row."""
    rows = np.asarray(rows, dtype=np.int64)
    return rows[np.argsort(-snapshot.counts[rows], kind="stable")]


def _trained_rows(item_rows: NDArray[np.int64], size: int) -> Tensor:
    rows = torch.full((size,), -1)
    rows[torch.from_numpy(item_rows)] = torch.arange(len(item_rows))
    return rows


def _other_content(before: Catalogue, now: Catalogue, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the rows [n] that are new or whose vectors changed, bool [n]: a price changes none."""
    other = rows >= len(before)
    old = rows[~other]
    other[~other] = (now.content[old] != before.content[old]).any(1) | (
        now.has_content[old] != before.has_content[old]
    )
    return other


def _padded(counts: ItemCounts, size: int) -> ItemCounts:
    return np.concatenate([counts[:size], np.zeros(max(0, size - len(counts)), np.int64)])


def _table_maker(model: Recommender, rows: Tensor, catalogue: Catalogue) -> MakeTables:
    @torch.inference_mode()
    def make(items: NDArray[np.int64]) -> ItemTables:
        return model.item_tables(
            rows[torch.from_numpy(items)], torch.from_numpy(catalogue.content[items])
        )

    return make


def _with_prior(
    pages: CowItemTables, trained: TrainedModel | None, counts: ItemCounts
) -> CowItemTables:
    """Return the tables with a popularity prior, if no prior was trained.

    It is small enough to decide only between equal content.
    """
    if trained:
        return pages
    share = np.log1p(counts) / max(1.0, float(np.log1p(counts.max(initial=0))))
    return replace(pages, prior=torch.from_numpy(0.05 * share).float())
