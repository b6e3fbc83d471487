"""`heed train` and `heed evaluate` on a log of baskets whose customers buy items again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from tests.support.command_line import Heed

CUSTOMERS, WEEKS = 30, 7
Basket = list[str]


def baskets() -> dict[str, list[Basket]]:
    """Two staples of each customer every week, and items of which some are bought twice."""
    rng = np.random.default_rng(1)
    return {
        f"c{customer}": [
            [f"s{customer % 5}", f"s{customer % 5 + 1}", *(f"p{item}" for item in drawn)]
            for drawn in (rng.permutation(20)[:2].tolist() for _ in range(WEEKS))
        ]
        for customer in range(CUSTOMERS)
    }


@pytest.fixture
def data(heed: Heed, tmp_path: Path) -> Path:
    with (tmp_path / "orders.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "item_id", "timestamp"])
        for customer, (name, bought) in enumerate(baskets().items()):
            for week, basket in enumerate(bought):
                time = 1_700_000_000 + week * 7 * 86_400 + customer * 60
                rows.writerows((name, item, time) for item in basket)
    said = heed("import", "events", tmp_path / "orders.csv", "--data", tmp_path / "data")
    assert said.code == 0, said.err
    return tmp_path / "data"


def new_in_last() -> int:
    """Count the items of the last baskets that their customers did not buy before."""
    return sum(len(set(last).difference(*past)) for *past, last in baskets().values())


def test_both_questions_are_reported_by_both_commands(heed: Heed, data: Path) -> None:
    """Metrics of the next and of the new item are printed, published and in the JSON, by cases."""
    said = heed("train", "--data", data, "--epochs", 2)
    assert said.code == 0, said.err
    printed = " ".join(said.out.split())
    assert "(64 dimensions, 2 blocks, 2 epochs at most)" in printed
    assert "epoch 2/2" in printed
    (version,) = Registry(data / MODELS_FOLDER).versions()
    assert version.metadata is not None
    new = version.metadata["new_items"]
    assert version.metadata["metrics"]["cases"] == CUSTOMERS * 4
    assert 0 < new["metrics"]["cases"] == new_in_last() < CUSTOMERS * 2
    asked = version.metadata["verdict"]["users"]
    words = "something of the next basket that is new to the user for "
    assert f"{words}{new['metrics']['user_hr'] * asked:.0f} of {asked} users." in printed
    assert version.metadata["sentence"] in printed

    out = data.parent / "found.json"
    said = heed("evaluate", "--data", data, "--epochs", 2, "--json", out)
    assert said.code == 0, said.err
    printed = " ".join(said.out.split())
    assert 'That is with "exclude_seen": false. By default, what a customer had' in printed
    assert f"last basket, new items, {new_in_last()} cases" in printed
    found = json.loads(out.read_text())
    assert (found["cases"], found["new_items"]["cases"]) == (CUSTOMERS * 4, new_in_last())
    assert list(found["new_items"]["models"]) == list(found["models"])
    heed_row = found["new_items"]["models"]["heed"]
    assert [len(heed_row[part]) for part in ("test", "test_with_time", "validation")] == [1, 1, 1]
    assert heed_row["served"] == found["models"]["heed"]["served"]
    assert heed_row["test"] != found["models"]["heed"]["test"]
    popular = found["new_items"]["models"]["popularity"]["test"]
    assert found["new_items"]["models"]["bought before"]["test"] == popular
    assert found["new_items"]["heed_over"].keys() == found["heed_over"].keys()
