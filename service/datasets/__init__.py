"""Readers of public data sets and of one's own files: all give `Item` and `Event` streams."""

from service.datasets.base import Counts, Dataset, Progress, batches
from service.datasets.collections import Collection, Judged, collection
from service.datasets.collections import own as own_judgments
from service.datasets.files import EventsFile, ItemsFile, Reading, Skipped, UsersFile, write
from service.datasets.movielens import LICENCE as MOVIELENS_LICENCE
from service.datasets.movielens import MovieLens
from service.datasets.movielens import fetch as fetch_movielens
from service.datasets.online_retail import OnlineRetail
from service.datasets.pyvideo import PyVideo
from service.datasets.rows import Times, lines
from service.datasets.tables import table

__all__ = [
    "MOVIELENS_LICENCE",
    "Collection",
    "Counts",
    "Dataset",
    "EventsFile",
    "ItemsFile",
    "Judged",
    "MovieLens",
    "OnlineRetail",
    "Progress",
    "PyVideo",
    "Reading",
    "Skipped",
    "Times",
    "UsersFile",
    "batches",
    "collection",
    "fetch_movielens",
    "lines",
    "own_judgments",
    "table",
    "write",
]
