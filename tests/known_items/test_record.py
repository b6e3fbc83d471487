"""What is recorded of known items holds for the search that is served, and finds them.

Whether a search still finds them is told by test_pyvideo.py, which needs the data.
"""

import math

from models.ranking.search_parameters import DEFAULTS
from models.text.bm25 import TITLE_WEIGHT
from models.text.static_encoder import StaticEncoder
from tests.known_items.known import known, record


def test_list_has_thirty_queries() -> None:
    """Each once, by a query of its own."""
    items = [item_id for judged in known() for item_id in judged.gains]
    assert len(known()) == len(set(items)) == len(items) == 30


def test_the_record_is_of_this_list_and_of_the_search_that_is_served() -> None:
    """Whoever changes the encoder or what a match is worth records anew: make known PYVIDEO=DIR."""
    recorded = record()
    assert [found["query"] for found in recorded["ranks"]] == [judged.query for judged in known()]
    assert recorded["encoder"] == StaticEncoder.name
    assert recorded["parameters"] == DEFAULTS.as_dict()
    assert recorded["title_counts"] == TITLE_WEIGHT


def test_all_were_found_among_the_first_three() -> None:
    """And the means that are recorded are those of the ranks."""
    recorded = record()
    ranks = [found["rank"] for found in recorded["ranks"]]
    assert sum(rank is not None and rank <= 3 for rank in ranks) == 30
    both = recorded["ways"]["both"]
    assert both["success"] == 1
    assert abs(both["ndcg"] - sum(1 / math.log2(1 + rank) for rank in ranks) / 30) < 1e-9
