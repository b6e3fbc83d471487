"""Readers of public data sets and of your own files, and writers of tables and exports.

Comes in: files in BEIR's, MovieLens' and other public formats, JSON lines, CSV, TSV, Parquet.
Goes out: streams of `Item`, `Event` and `User`, judged queries, files.
"""

from service.datasets.base import Dataset, JudgedQuery, ReadProgress, RecordCounts, batches
from service.datasets.collections import open_collection, read_judgments
from service.datasets.files import (
    EventsFile,
    ItemsFile,
    ReadOptions,
    SkippedRows,
    UsersFile,
    export_records,
)
from service.datasets.movielens import LICENCE as MOVIELENS_LICENCE
from service.datasets.movielens import MovieLens
from service.datasets.movielens import fetch as fetch_movielens
from service.datasets.online_retail import OnlineRetail
from service.datasets.pyvideo import PyVideo
from service.datasets.rows import TimeFormat, to_json_lines
from service.datasets.tables import open_table

__all__ = [
    "MOVIELENS_LICENCE",
    "Dataset",
    "EventsFile",
    "ItemsFile",
    "JudgedQuery",
    "MovieLens",
    "OnlineRetail",
    "PyVideo",
    "ReadOptions",
    "ReadProgress",
    "RecordCounts",
    "SkippedRows",
    "TimeFormat",
    "UsersFile",
    "batches",
    "export_records",
    "fetch_movielens",
    "open_collection",
    "open_table",
    "read_judgments",
    "to_json_lines",
]
