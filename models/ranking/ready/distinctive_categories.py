"""Categories by which some items differ most from the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import log

import numpy as np

from models.catalogue.catalogue import Catalogue
from models.catalogue.facets import values_of_rows


def distinctive_categories(catalogue: Catalogue, rows: Iterable[int], limit: int) -> list[str]:
    """Return the categories that are more frequent among some items than in the catalogue.

    They are ordered by p log (p / q), their terms of the Kullback-Leibler divergence, p being the
    share of these items that have the category and q that of all items; ties by name.

    Args:
        catalogue: with all items.
        rows: of the items, each as often as it counts.
        limit: the most categories.
    """
    counts = Counter(rows)
    own, total = np.array(sorted(counts), np.int64), sum(counts.values())
    column = catalogue.fields.columns_of("categories").keywords
    if column is None:
        return []
    weights: Counter[str] = Counter()
    for place, value in values_of_rows(catalogue.fields, "categories", own):
        if isinstance(value, str):
            weights[value] += counts[int(own[place])]
    items = max(1, int(np.count_nonzero(catalogue.present)))
    terms = {}
    for value, count in weights.items():
        share, of_all = count / total, column.counts.array[column.code(value)] / items
        if share > of_all:
            terms[value] = share * log(share / of_all)
    return sorted(terms, key=lambda value: (-terms[value], value))[:limit]
