"""Import of files: their survey, a dry run or a strict check, and the storing of their records."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import typer
from rich.table import Table

from service.cli.console import err, open_store, out
from service.cli.import_options import ImportOptions, merge_options, read_options, split_item_fields
from service.domain.errors import HeedError, Invalid

_SHOWN = 5  # rows of a dry run
_RATING = re.compile(r"rating|stars?\b|score", re.IGNORECASE)  # names of columns of ratings


class FileImport:
    """One call of a command: its files, read alike, and where they go."""

    def __init__(
        self, kind: Literal["items", "events", "users"], given: ImportOptions, data: Path
    ) -> None:
        self._kind, self._given, self._data = kind, given, data
        self._options = options = merge_options(kind, given)
        self._update = getattr(given, "update", False)
        self._existing_only = getattr(given, "existing_only", False)
        if given.rejects is not None and not given.skip_bad:
            raise Invalid("", "--rejects needs --skip-bad")
        if self._existing_only and not self._update:
            raise Invalid("", "--existing-only needs --update")
        self._ahead: list[str] = []  # warnings before anything is stored
        self._is_foreign = False  # the catalogue has items, and none of these
        self._items_read = None
        if getattr(given, "create_items", False):
            options, items = split_item_fields(options)
            self._items_read = read_options("items", items, skip_bad=given.skip_bad)
        self._read = read_options(kind, options, skip_bad=given.skip_bad)

    def run(self, files: Sequence[Path]) -> None:
        """Read the files, and store their records unless it is a dry run."""
        from service.datasets.imports import RejectedRows

        rejects, dry_run = self._given.rejects, self._given.dry_run
        strict = getattr(self._given, "strict", False)
        rejected = RejectedRows(rejects) if rejects and not dry_run else nullcontext()
        with _on_disk(files) as paths, open_store(self._data) as store:
            with rejected as rows:
                sources = [self._open(path, name, rows) for path, name in paths]
                for source in sources:
                    self._describe(source)
                self._compare(store, sources)
                _print_warnings(self._ahead)
                if dry_run or strict:
                    # Bad rows are written when the rows are stored, and only then.
                    checked = [self._open(path, name, None) for path, name in paths]
                    for source, other in zip(sources, checked, strict=True):
                        other.refused = source.refused
                        if self._items_read is not None:
                            other.created = source.created
                    warnings = self._check(store, checked, show=dry_run)
                    if dry_run:
                        _check_any(checked)
                        return
                    if warnings:
                        raise Invalid("", "nothing is stored, since --strict was given")
                if self._is_foreign:
                    _confirm()
                self._store(store, sources)
            _check_any(sources)
            if rows is not None and rows.count:
                err.print(f"bad rows are in {rejects}, why in {rejects}.reasons",
                          markup=False, soft_wrap=True)  # fmt: skip
            if self._kind == "items":
                from service.cli.search import calibrate_grown

                calibrate_grown(store, self._data)

    def _open(self, path: Path, name: str | None, rejected: Any) -> Any:
        from service.datasets.record_files import EventsFile, ItemsFile, UsersFile

        def keep(row: Any, message: str) -> None:
            survey = source.survey
            encoding = self._read.encoding if survey.form == "csv" else None
            rejected.add(survey.header, row, message, encoding=encoding)

        source: Any
        given: dict[str, Any] = {"on_bad": None if rejected is None else keep, "name": name}
        reader = {"items": ItemsFile, "events": EventsFile, "users": UsersFile}[self._kind]
        if self._kind == "events":
            given["dislikes_below"] = self._options.get("dislikes_below")
            given["items_in"] = self._items_read and ItemsFile(path, self._items_read, name=name)
        source = reader(path, self._read, **given)
        return source

    def _describe(self, source: Any) -> None:
        from service.datasets.field_mapping import listed_names

        mapping = source.survey.mapping
        if text := source.survey.describe():
            out.print(f"{source.name}: {text}", markup=False, soft_wrap=True)
        unread = mapping.unread
        if self._items_read is not None:
            unread = [name for name in unread if name in source.items_in.survey.mapping.unread]
        if unread:
            keeps = ", --map attributes.NAME=COLUMN keeps it as an attribute"
            ratings = [name for name in unread if _RATING.search(name)]
            if self._kind == "events":
                keeps = f"; --map rating={ratings[0]} --dislikes-below N" if ratings else ""
                keeps += " stores low ratings as dislikes" if ratings else ""
            self._ahead.append(
                f"{source.name}: not read: {listed_names(unread)}. --map FIELD=COLUMN reads one"
                + keeps
            )
        weights = [mapping.weight.column] if mapping.weight else mapping.columns.get("weight", ())
        for name in weights:
            if _RATING.search(name) and self._options.get("dislikes_below") is None:
                self._ahead.append(
                    f"{source.name}: {name} looks like ratings, and is read as weights: a low "
                    f"rating then counts as a little interest. --map rating={name} "
                    "--dislikes-below N, without a weight, stores low ratings as dislikes"
                )

    def _compare(self, store: Any, sources: Sequence[Any]) -> None:
        """Find the items that the catalogue does not have, and warn of what that says."""
        from service.datasets.imports import listed, spelling_warning, titled_items, unknown_items

        if self._items_read is not None:
            for source in sources:
                source.created = frozenset(asyncio.run(unknown_items(store, source.items_in.ids)))
        if self._kind != "items":
            return
        ids = dict.fromkeys(item_id for source in sources for item_id in source.ids)
        if not self._update:
            foreign = foreign_catalogue(store, self._data, ids)
            self._is_foreign = foreign is not None
            self._ahead += [foreign] if foreign else []
            bare = [source for source in sources if not source.survey.mapping.has("title")]
            bare_ids = dict.fromkeys(item_id for source in bare for item_id in source.ids)
            if titled := asyncio.run(titled_items(store, bare_ids)):
                self._ahead.append(
                    f"items that lose their titles, since a row replaces all of its item: "
                    f"{len(titled):,}: {listed(map(repr, titled), len(titled))}; --update changes "
                    "only the fields that the file has"
                )
            return
        unknown = asyncio.run(unknown_items(store, ids))
        if self._existing_only:
            for source in sources:
                source.refused = frozenset(unknown)
        elif unknown:
            self._ahead.append(
                f"items that the catalogue does not have: {len(unknown):,}: "
                f"{listed(map(repr, unknown), len(unknown))}; --update creates them, and "
                "--existing-only refuses them"
            )
            if spelt := asyncio.run(spelling_warning(store, unknown)):
                self._ahead.append(spelt)

    def _check(self, store: Any, sources: Sequence[Any], *, show: bool) -> list[str]:
        """Read everything and print the warnings; with `show` also what would be stored."""
        from service.datasets.imports import ImportWarnings
        from service.datasets.rows import to_row

        warnings, count, created = ImportWarnings(), 0, 0
        first: list[dict[str, Any]] = []
        for source in sources:
            records = source.records()
            if self._kind == "events":
                for _ in warnings.items(source.items()):
                    created += 1
                records = warnings.events(records)
            elif self._kind == "items" and not self._update:  # which has some of the fields
                records = warnings.items(records)
            with out.status(f"reading {source.name}"):
                first += [to_row(record) for record in islice(records, _SHOWN - len(first))]
                count += sum(1 for _ in records)
        count += len(first)
        refused = sum(source.skipped.count for source in sources)
        messages = self._odd(sources) + asyncio.run(warnings.messages(store))
        if show:
            if first:
                out.print(_table(first))
            by_type = ", ".join(f"{n:,} {name}" for name, n in warnings.types.most_common())
            types = f" ({by_type})" if by_type else ""
            left_out = sum(source.left_out for source in sources)
            united = sum(source.repeated.rows for source in sources)
            together = f", rows put together with earlier ones of their id: {united:,}"
            out.print(
                f"{count:,} {self._kind}{types} would be stored, "
                f"{f'{created:,} items created, ' if created else ''}{refused:,} bad rows refused, "
                f"{left_out:,} left out{together if united else ''}.",
                markup=False,
                soft_wrap=True,
            )
        for source in sources:
            self._print_skipped(source)
        _print_warnings(messages)
        if note := warnings.note():
            out.print(note, soft_wrap=True)
        return messages + self._ahead

    def _store(self, store: Any, sources: Sequence[Any]) -> None:
        from service.datasets import imports

        warnings = imports.ImportWarnings()
        name = ", ".join(source.name for source in sources)
        with running_import(store, name) as (import_id, reading):
            for source in sources:
                with reading(source) as progress:
                    if self._kind == "users":
                        users = imports.import_users(store, source, progress, import_id=import_id)
                        text = f"{asyncio.run(users):,} profiles stored"
                    elif self._update:
                        items = imports.import_patches(store, source, progress, import_id=import_id)
                        text = f"{asyncio.run(items):,} items updated"
                    else:
                        records = imports.import_dataset(
                            store,
                            source,
                            progress,
                            import_id=import_id,
                            items_through=warnings.items,
                            events_through=warnings.events,
                        )
                        text = str(asyncio.run(records))
                if united := source.repeated.rows:
                    text += f"; rows put together with earlier ones of their id: {united:,}"
                if source.left_out:
                    text += f"; rows left out: {source.left_out:,}"
                out.print(f"{source.name}: {text}", markup=False, soft_wrap=True)
                self._print_skipped(source)
        _print_warnings(self._odd(sources) + asyncio.run(warnings.messages(store)))
        if note := warnings.note():
            out.print(note, soft_wrap=True)
        out.print(f"Import {import_id}; heed import --undo {import_id} takes it back.")

    def _odd(self, sources: Sequence[Any]) -> list[str]:
        """Return what is odd about the rows of files that were read."""
        found = []
        for source in sources:
            texts = [
                source.times.warning(),
                source.survey.warning(),
                source.repeated.warning(),
            ]
            if self._kind == "events":
                if source.items_in is not None:
                    texts.append(source.items_in.repeated.warning())
                if source.zero_ratings:
                    texts.append(
                        f"ratings of 0: {source.zero_ratings:,}, stored as dislikes; if 0 stands "
                        "for no rating, --absent 0 reads it so"
                    )
                if source.unrated:
                    texts.append(
                        f"events without a rating: {source.unrated:,}, stored like those that are "
                        "no dislikes"
                    )
            found += [f"{source.name}: {text}" for text in texts if text]
        return found

    def _print_skipped(self, source: Any) -> None:
        """Print a message for each of the first bad rows, and the number of all."""
        said = dict.fromkeys(source.skipped.messages)
        if self._items_read is not None:  # which has read the same rows
            said |= dict.fromkeys(source.items_in.skipped.messages)
        for line in said:
            err.print(f"skipped {line}", markup=False, soft_wrap=True)
        if source.skipped.count > len(source.skipped.messages):
            err.print(
                f"skipped {source.skipped.count:,} rows in all; --rejects FILE keeps them, and why",
                soft_wrap=True,
            )


@contextmanager
def running_import(store: Any, name: str) -> Iterator[tuple[int, Any]]:
    """Begin an import; if it stops early, say how much it has read and how to take it back.

    Yields its id, and a function that draws a progress bar for one source.
    """
    from service.cli.progress_bars import reading_bar

    import_id = asyncio.run(store.begin_import(name))
    rows: dict[tuple[int, str], int] = {}

    @contextmanager
    def reading(source: Any) -> Iterator[Callable[[str, int], None]]:
        with reading_bar(out, source) as draw:

            def progress(stage: str, count: int) -> None:
                rows[id(source), stage] = count
                draw(stage, count)

            yield progress

    try:
        yield import_id, reading
    except (HeedError, KeyboardInterrupt):
        total = Counter[str]()
        for (_, stage), count in rows.items():
            total[stage] += count
        counts = " and ".join(f"{count:,} {stage}" for stage, count in total.items())
        err.print(
            f"Import {import_id} stopped after {counts}; they stay, and heed import --undo "
            f"{import_id} takes them back."
            if counts
            else f"Import {import_id} stopped; nothing is stored.",
            soft_wrap=True,
        )
        raise


def foreign_catalogue(store: Any, data: Path, item_ids: Iterable[str]) -> str | None:
    """Return a sentence if the catalogue has items, and none of these; else None."""
    from service.datasets.imports import unknown_items

    stored, ids = asyncio.run(store.counts())["items"], dict.fromkeys(item_ids)
    if not stored or not ids or len(asyncio.run(unknown_items(store, ids))) < len(ids):
        return None
    sources = [each.source for each in asyncio.run(store.imports()) if not each.is_undone]
    origin = f", of {sources[0]}" if sources else ""
    return (
        f"{data} has {stored:,} items{origin}, and none of these {len(ids):,}: all would be "
        "recommended together. --data DIRECTORY imports into another one"
    )


def ask_if_foreign(store: Any, data: Path, item_ids: Iterable[str]) -> None:
    """Ask on a terminal, and warn elsewhere, before items are added to those of another source."""
    if warning := foreign_catalogue(store, data, item_ids):
        _print_warnings([warning])
        _confirm()


def _confirm() -> None:
    if sys.stdin.isatty():
        typer.confirm("Import into it?", abort=True)


def _check_any(sources: Sequence[Any]) -> None:
    """Raise `Invalid` if every row of files that have some was bad."""
    bad = sum(source.skipped.count for source in sources)
    if bad and not any(source.accepted or source.left_out for source in sources):
        raise Invalid("", f"nothing is stored, since every row is bad: {bad:,}")


@contextmanager
def _on_disk(files: Sequence[Path]) -> Iterator[list[tuple[Path, str | None]]]:
    """Yield the paths, with a name for a pipe, which is first written to a file.

    Files are read twice: to find out what they are, and to import them.
    """
    from service.datasets.record_files import BadRow

    if list(map(str, files)).count("-") > 1:
        raise Invalid("", "- can be read only once")
    with tempfile.TemporaryDirectory(prefix="heed-import-") as folder:
        pipe = Path(folder) / "pipe"
        if Path("-") in files:
            with pipe.open("wb") as file, out.status("reading the pipe"):
                shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield [(pipe, "-") if str(path) == "-" else (path, None) for path in files]
        except HeedError as error:
            # The readers name the file that they read, which nobody but them has seen.
            error.detail = error.detail.replace(str(pipe), "-")
            if isinstance(error, BadRow):
                error.detail += (
                    ". --skip-bad goes on past bad rows, with --rejects FILE to keep them"
                )
            raise


def _table(rows: list[dict[str, Any]]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row)
    table = Table(*names)
    for row in rows:
        cells = map(row.get, names)
        table.add_row(*("" if cell is None else _short(cell) for cell in cells))
    return table


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        text = ", ".join(map(str, value))
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {_short(member)}" for name, member in value.items())
    else:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _print_warnings(messages: Sequence[str]) -> None:
    for message in messages:
        err.print(f"warning: {message}", markup=False, soft_wrap=True)
