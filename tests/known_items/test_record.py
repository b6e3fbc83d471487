"""The recorded known-item ranks match the query list and the current search parameters.

Whether a search still finds them is told by test_pyvideo.py, which needs the data.
"""

import math

from models.ranking.matches import DEFAULTS
from models.text.bm25 import TITLE_WEIGHT
from models.text.encoders import StaticEncoder
from tests.known_items.known import known, record


def test_list_has_thirty_queries() -> None:
    items = [item_id for judged in known() for item_id in judged.gains]
    assert len(known()) == len(set(items)) == len(items) == 30


def test_record_matches_the_current_search() -> None:
    """The record was made with the current queries, text encoder and search parameters."""
    recorded = record()
    assert [found["query"] for found in recorded["ranks"]] == [judged.query for judged in known()]
    assert recorded["encoder"] == StaticEncoder.name
    assert recorded["parameters"] == DEFAULTS.as_dict()
    assert recorded["title_counts"] == TITLE_WEIGHT


def test_all_were_found_among_the_first_three() -> None:
    """Every recorded rank is at most 3, and the recorded nDCG is that of the ranks."""
    recorded = record()
    ranks = [found["rank"] for found in recorded["ranks"]]
    assert sum(rank is not None and rank <= 3 for rank in ranks) == 30
    both = recorded["ways"]["both"]
    assert both["success"] == 1
    assert abs(both["ndcg"] - sum(1 / math.log2(1 + rank) for rank in ranks) / 30) < 1e-9
