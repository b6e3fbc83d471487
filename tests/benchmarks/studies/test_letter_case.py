"""Searches find the same whatever the letter case of their queries and texts."""

from pathlib import Path

import pytest

from service.datasets.public.collections import open_collection
from tests.benchmarks.studies.letter_case import CASES, measure
from tests.support.judged import beir

DOCUMENTS = {
    "aids": ("AIDS therapy", "Antiretroviral drugs keep the HIV virus from multiplying."),
    "dna": ("DNA repair", "Enzymes mend breaks in the double helix of chromosomes."),
    "it": ("IT support", "Helpdesk staff fix laptops, printers and passwords."),
    "nasa": ("NASA rockets", "Liquid hydrogen engines lift satellites into orbit."),
    "bread": ("Sourdough", "Flour, water and wild yeast rise overnight before baking."),
    "violin": ("Stradivari", "Old Italian string instruments and their varnish."),
    "road": ("Straßenbau", "Wie Asphalt auf der Straße verlegt wird."),
    "city": ("Città d'arte", "Musei, chiese e palazzi dell'età moderna."),
}
QUERIES = {
    "1": ("Treatment of HIV patients", "aids"),
    "2": ("How do cells fix damaged genes?", "dna"),
    "3": ("My PC does not start", "it"),
    "4": ("US space agency launches", "nasa"),
    "5": ("Home-made loaf", "bread"),
    "6": ("Famous Violins", "violin"),
    "7": ("Straße", "road"),
    "8": ("arte dell'età moderna", "city"),
}


def test_queries_in_capitals_and_in_lower_case_find_the_same(tmp_path: Path) -> None:
    """For texts as they are and in capitals, by terms, by embeddings and by both."""
    folder = beir(
        tmp_path / "cases",
        DOCUMENTS,
        {name: text for name, (text, _) in QUERIES.items()},
        [(name, document, 1) for name, (_, document) in QUERIES.items()],
        split="train",
    )
    found = list(measure(open_collection(folder, "train")))
    assert len(found) == 3 * 2 * len(CASES)
    plain = {each.way: each.ndcg for each in found if each.texts == each.queries == "as is"}
    assert plain["meaning alone"] > 0.8
    for each in found:
        assert each.ndcg == pytest.approx(plain[each.way], abs=0.005), each
