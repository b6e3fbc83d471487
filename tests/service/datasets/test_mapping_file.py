"""Mapping files, written and read again."""

from pathlib import Path
from typing import Any

import pytest

from service.datasets.mapping_file import read_mapping, write_mapping
from service.domain.errors import Invalid

EVENTS: dict[str, Any] = {
    "map": {"user_id": "customer no", "item_id": ["sku", "alt"]},
    "constant": {"type": "purchase"},
    "timezone": "Europe/London",
    "dislikes_below": 3.0,
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mapping.toml"
    write_mapping(path, "events", EVENTS)
    items = {"map": {"attributes.price:number": "Preis €"}, "constant": {}, "encoding": None}
    write_mapping(path, "items", items)
    assert read_mapping(path, "events") == EVENTS
    assert read_mapping(path, "items") == {"map": {"attributes.price:number": "Preis €"}}
    assert read_mapping(path, "users") == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("map = {", "must be TOML"),
        ("[orders]\n", r"\[orders\] must be one of \[items\] \[events\] \[users\]"),
        ("[items]\nmap = 'a=b'\n", r"\[items\] map must be a table of texts"),
        ("[items.map]\nitem_id = 7\n", r"\[items\] map must be a table of texts"),
        ("[items]\nweight_from = 'x'\n", r"\[items\] weight_from is unknown; allowed are map, "),
        ("[events]\ndislikes_below = '3'\n", "dislikes_below must be a number"),
        ("[events]\ntimezone = 3\n", "timezone must be a text"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mapping.toml"
    path.write_text(text)
    with pytest.raises(Invalid, match=f"mapping.toml.*{problem}"):
        read_mapping(path, "events")
    with pytest.raises(Invalid, match=f"mapping.toml.*{problem}"):
        write_mapping(path, "users", {})
    assert path.read_text() == text
    with pytest.raises(Invalid, match=r"nowhere\.toml cannot be read"):
        read_mapping(tmp_path / "nowhere.toml", "events")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("#" * (300 << 10), "is larger than 262,144 bytes, the most that is allowed"),
        ("a." * 100_000 + "b = 1", "line 1: has 100,000 dots; at most 100 are allowed"),
        ("a = " + "[" * 100_000, "must be TOML: it is nested too deep"),
    ],
)
def test_files_that_would_take_memory_or_time_are_refused(
    tmp_path: Path, content: str, problem: str
) -> None:
    """The parser takes gigabytes for a key of very many parts."""
    path = tmp_path / "mapping.toml"
    path.write_text(content)
    with pytest.raises(Invalid, match=problem):
        read_mapping(path, "items")
