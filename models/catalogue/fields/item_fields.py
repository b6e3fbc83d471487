"""`ItemFields`: all fields of one version of the catalogue, for filters, facets and sorting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.catalogue.fields.field_columns import FieldColumns, ItemColumns
from models.catalogue.fields.string_order import Ranks, StringOrder
from models.catalogue.fields.value_column import ValueColumn
from models.data.vocabulary import Vocabulary

NEVER = np.iinfo(np.int64).min  # published_at of items without one


@dataclass(frozen=True, slots=True, eq=False)
class ItemFields:
    """Fields by name: `item_id`, `published_at`, and those that have columns."""

    size: int  # N
    vocabulary: Vocabulary  # of ids; may have grown past N
    id_order: StringOrder  # of the vocabulary
    published: NDArray[np.int64]  # [N] microseconds UTC, or `NEVER`
    columns: ItemColumns

    def columns_of(self, name: str) -> FieldColumns:
        """Return the columns of a field other than `item_id`; without any where no item has it."""
        if name == "published_at":
            return FieldColumns(numbers=ValueColumn.of(self.published, NEVER))
        return self.columns.fields.get(name, FieldColumns())

    def id_ranks(self) -> Ranks:
        """Return the ranks of all ids in the order of their code points."""
        return self.id_order.ranks(self.size)
