"""Small collections with judgments, in the forms that are read."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

CRANFIELD = {
    "cran.all.1400": """.I 1
.T
wings in
a slipstream
.A
brenckman,m.
.W
an experimental study
.I 7
.T
shear flow
.W
""",
    "cran.qry": """.I 001
.W
what of wings
in slipstreams
.I 004
.W
flow past nothing
.I 009
.W
shear
""",
    "cranqrel": "1 1 1 \n1 7 -1\n\n3 7 4\n",
}


def cranfield(folder: Path, **changed: str) -> Path:
    """A folder with Cranfield's files, of two abstracts and three queries."""
    folder.mkdir(parents=True)
    for name, text in (CRANFIELD | changed).items():
        (folder / name).write_text(text)
    return folder


def beir(
    folder: Path,
    documents: Mapping[str, tuple[str, str]],
    queries: Mapping[str, str],
    grades: Sequence[tuple[str, str, int]],
    split: str = "test",
) -> Path:
    """A folder in BEIR's form; the documents are packed."""
    (folder / "qrels").mkdir(parents=True)
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        for id_, (title, text) in documents.items():
            file.write(json.dumps({"_id": id_, "title": title, "text": text}) + "\n")
    with open(folder / "queries.jsonl", "w") as file:
        file.writelines(json.dumps({"_id": i, "text": text}) + "\n" for i, text in queries.items())
    rows = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t{g}" for q, d, g in grades)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder
