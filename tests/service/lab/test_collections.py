"""Reading judged collections in the formats of Cranfield and BEIR."""

import gzip
import json
from pathlib import Path

import pytest

from service.datasets.base import JudgedQuery
from service.domain.errors import Invalid
from service.domain.records import Item
from service.lab.public_data import open_collection, read_judgments
from tests.support.judged import beir, cranfield


def test_cranfield_is_read_with_its_oddities(tmp_path: Path) -> None:
    found = open_collection(cranfield(tmp_path / "c"), "test")
    assert list(found.items()) == [
        Item("1", title="wings in a slipstream", description="an experimental study"),
        Item("7", title="shear flow"),
    ]
    assert found.judged_queries() == [
        JudgedQuery("what of wings in slipstreams", {"1": 4.0, "7": 0.0}),
        JudgedQuery("shear", {"7": 1.0}),
    ]


def test_beir_is_read_by_split(tmp_path: Path) -> None:
    documents = {"a": ("A", "first"), "b": ("", "second")}
    queries = {"1": "one", "2": "two", "3": "three"}
    grades = [("2", "b", 2), ("2", "a", 0), ("1", "a", 0)]
    found = open_collection(beir(tmp_path / "b", documents, queries, grades, "dev"), "dev")
    assert list(found.items()) == [
        Item("a", title="A", description="first"),
        Item("b", description="second"),
    ]
    assert found.judged_queries() == [JudgedQuery("two", {"b": 2.0, "a": 0.0})]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("qrels/test.tsv", "head\n1\ta\n", "test.tsv, line 2: must be query, document and grade"),
        ("qrels/test.tsv", "head\n1\ta\tx\n", "test.tsv, line 2: must be"),
        ("qrels/test.tsv", "head\n9\ta\t1\n", "query '9' is not among the queries"),
        (
            "queries.jsonl",
            '{"_id": "1", "text": "one"}\n{\n',
            "line 2: must be JSON",
        ),
        ("queries.jsonl", '{"_id": "1"}\n', "queries.jsonl, line 1, text: must be a string"),
        ("queries.jsonl", "[]\n", "queries.jsonl, line 1: must be a JSON object"),
    ],
)
def test_a_damaged_collection_is_named_by_file_and_line(
    tmp_path: Path, name: str, text: str, told: str
) -> None:
    folder = beir(tmp_path / "b", {"a": ("A", "x")}, {"1": "one"}, [("1", "a", 1)])
    (folder / name).write_text(text)
    with pytest.raises(Invalid, match=told):
        open_collection(folder, "test").judged_queries()


def test_a_damaged_cranfield_is_named_by_file_and_line(tmp_path: Path) -> None:
    for number, line in enumerate(("9 1 1", "1 1 x", "1 1")):
        folder = cranfield(tmp_path / str(number), cranqrel=f"1 1 1\n{line}\n")
        with pytest.raises(Invalid, match="cranqrel, line 2: must be the position of a query"):
            open_collection(folder, "test").judged_queries()


def test_pyvideo_needs_judgments_from_a_file(tmp_path: Path) -> None:
    empty = "event event_title language url youtube_id duration recorded summary description"
    talk: dict[str, object] = dict.fromkeys(empty.split(), "")
    talk |= {"speakers": [], "tags": [], "doc_id": "a", "title": "Descriptors"}
    with gzip.open(tmp_path / "videos.jsonl.gz", "wt") as file:
        file.write(json.dumps(talk) + "\n")
    (tmp_path / "own.csv").write_text("query,item_id\nattributes,a\n")
    with pytest.raises(Invalid, match="pyvideo has no judgments: give your own, --judgments"):
        open_collection(tmp_path, "test").judged_queries()
    assert [item.title for item in open_collection(tmp_path, "test").items()] == ["Descriptors"]
    assert read_judgments(tmp_path / "own.csv") == [JudgedQuery("attributes", {"a": 1.0})]


def test_what_is_no_collection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"has neither BEIR's corpus\.jsonl"):
        open_collection(tmp_path, "test")
    folder = beir(tmp_path / "b", {"a": ("A", "x")}, {"1": "one"}, [("1", "a", 1)])
    with pytest.raises(Invalid, match=r"train.tsv cannot be read"):
        open_collection(folder, "train").judged_queries()


def test_judgments_are_read_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("query,item_id,gain\nspace,a,3\nspace,b,\nsea,a,0\n")
    assert read_judgments(path) == [JudgedQuery("space", {"a": 3.0, "b": 1.0})]
    path.write_text("query,item_id,gain\nspace,a,much\n")
    with pytest.raises(Invalid, match="line 2, gain: must be a number"):
        read_judgments(path)
    path.write_text("query,gain\nspace,1\n")
    with pytest.raises(Invalid, match="item_id"):
        read_judgments(path)
