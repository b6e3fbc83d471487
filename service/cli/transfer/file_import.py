"""Import of files: their survey, a dry run or a strict check, and the storing of their records."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from service.cli.console import err, open_store, out
from service.cli.transfer.import_options import read_options
from service.domain.errors import HeedError, Invalid

_SHOWN = 5  # rows of a dry run


class FileImport:
    """One call of a command: its files, read alike, and where they go."""

    def __init__(
        self,
        kind: Literal["items", "events", "users"],
        options: dict[str, Any],
        data: Path,
        skip_bad: bool,
        rejects: Path | None,
        *,
        update: bool = False,
    ) -> None:
        if rejects is not None and not skip_bad:
            raise Invalid("", "--rejects needs --skip-bad")
        self._kind, self._options, self._data = kind, options, data
        self._rejects, self._update = rejects, update
        self._read = read_options(kind, options, skip_bad=skip_bad)

    def run(self, files: Sequence[Path], *, dry_run: bool, strict: bool) -> None:
        """Read the files, and store their records unless it is a dry run."""
        from service.datasets.files.record_files import BadRow

        try:
            self._run(files, dry_run=dry_run, strict=strict)
        except BadRow as error:
            error.detail += ". --skip-bad goes on past bad rows, with --rejects FILE to keep them"
            raise

    def _run(self, files: Sequence[Path], *, dry_run: bool, strict: bool) -> None:
        from service.datasets.rejected_rows import RejectedRows

        keeps = self._rejects is not None and not dry_run
        rejected = RejectedRows(self._rejects) if self._rejects and keeps else nullcontext()
        with _on_disk(files) as paths, open_store(self._data) as store:
            with rejected as rows:
                sources = [self._open(path, name, rows) for path, name in paths]
                for source in sources:
                    self._describe(source)
                if dry_run or strict:
                    # Bad rows are written when the rows are stored, and only then.
                    checked = [self._open(path, name, None) for path, name in paths]
                    warnings = self._check(store, checked, show=dry_run)
                    if dry_run:
                        _check_any(checked)
                        return
                    if warnings:
                        raise Invalid("", "nothing is stored, since --strict was given")
                self._store(store, sources)
            _check_any(sources)
            if rows is not None and rows.count:
                err.print(f"bad rows are in {self._rejects}, why in {self._rejects}.reasons",
                          markup=False, soft_wrap=True)  # fmt: skip
            if self._kind == "items":
                from service.cli.search_calibration import calibrate_grown

                calibrate_grown(store, self._data)

    def _open(self, path: Path, name: str | None, rejected: Any) -> Any:
        from service.datasets.files.record_files import EventsFile, ItemsFile, UsersFile

        def keep(row: Any, message: str) -> None:
            rejected.add(source.survey.header, row, message)

        on_bad = None if rejected is None else keep
        source: Any
        if self._kind == "events":
            below = self._options.get("dislikes_below")
            source = EventsFile(path, self._read, dislikes_below=below, on_bad=on_bad, name=name)
        else:
            reader = ItemsFile if self._kind == "items" else UsersFile
            source = reader(path, self._read, on_bad=on_bad, name=name)
        return source

    def _describe(self, source: Any) -> None:
        from service.datasets.files.field_mapping import listed_names

        found = source.survey
        if text := found.describe():
            out.print(f"{source.name}: {text}", markup=False, soft_wrap=True)
        if unread := found.mapping.unread:
            err.print(
                f"warning: {source.name}: not read: {listed_names(unread)}. --map FIELD=COLUMN "
                "reads one, --map attributes.NAME=COLUMN keeps it as an attribute",
                markup=False,
                soft_wrap=True,
            )

    def _check(self, store: Any, sources: Sequence[Any], *, show: bool) -> list[str]:
        """Read everything and print the warnings; with `show` also what would be stored."""
        from service.datasets.files.rows import to_row
        from service.datasets.import_warnings import ImportWarnings

        warnings, count = ImportWarnings(), 0
        first: list[dict[str, Any]] = []
        for source in sources:
            records = source.records()
            if self._kind == "events":
                records = warnings.events(records)
            elif self._kind == "items" and not self._update:  # which has some of the fields
                records = warnings.items(records)
            with out.status(f"reading {source.name}"):
                first += [to_row(record) for record in islice(records, _SHOWN - len(first))]
                count += sum(1 for _ in records)
        count += len(first)
        messages = _time_warnings(sources) + asyncio.run(warnings.messages(store))
        if show:
            if first:
                out.print(_table(first))
            by_type = ", ".join(f"{n:,} {name}" for name, n in warnings.types.most_common())
            types = f" ({by_type})" if by_type else ""
            refused = sum(source.skipped.count for source in sources)
            left_out = sum(source.left_out for source in sources)
            out.print(
                f"{count:,} {self._kind}{types} would be stored, {refused:,} bad rows refused, "
                f"{left_out:,} left out.",
                markup=False,
                soft_wrap=True,
            )
        for source in sources:
            _print_skipped(source.skipped)
        _print_warnings(messages)
        # `_describe` has printed these.
        return messages + [name for source in sources for name in source.survey.mapping.unread]

    def _store(self, store: Any, sources: Sequence[Any]) -> None:
        from service.datasets.import_warnings import ImportWarnings

        warnings = ImportWarnings()
        import_id = asyncio.run(store.begin_import(", ".join(source.name for source in sources)))
        try:
            self._store_each(store, sources, import_id, warnings)
        except HeedError:
            err.print(
                f"Import {import_id} stopped; what it has stored stays, and heed import --undo "
                f"{import_id} takes it back.",
                soft_wrap=True,
            )
            raise
        _print_warnings(_time_warnings(sources) + asyncio.run(warnings.messages(store)))
        out.print(f"Import {import_id}; heed import --undo {import_id} takes it back.")

    def _store_each(
        self, store: Any, sources: Sequence[Any], import_id: int, warnings: Any
    ) -> None:
        from service.cli.transfer.row_bars import reading_bar
        from service.datasets import import_into_store

        for source in sources:
            if self._kind == "users":
                with out.status(f"reading {source.name}"):
                    users = import_into_store.import_users(store, source, import_id=import_id)
                    count = asyncio.run(users)
                text = f"{count:,} profiles stored"
            elif self._update:
                with out.status(f"reading {source.name}"):
                    patches = import_into_store.import_patches(store, source, import_id=import_id)
                    count = asyncio.run(patches)
                text = f"{count:,} items updated"
            else:
                with reading_bar(out, source) as progress:
                    done = asyncio.run(
                        import_into_store.import_dataset(
                            store,
                            source,
                            progress,
                            import_id=import_id,
                            items_through=warnings.items,
                            events_through=warnings.events,
                        )
                    )
                text = str(done)
            if source.left_out:
                text += f"; {source.left_out:,} rows left out"
            out.print(f"{source.name}: {text}", markup=False, soft_wrap=True)
            _print_skipped(source.skipped)


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


def _time_warnings(sources: Sequence[Any]) -> list[str]:
    """Return what is odd about the times of files that were read."""
    return [f"{source.name}: {text}" for source in sources if (text := source.times.warning())]


def _print_warnings(messages: Sequence[str]) -> None:
    for message in messages:
        err.print(f"warning: {message}", markup=False, soft_wrap=True)


def _print_skipped(skipped: Any) -> None:
    """Print a message for each of the first skipped rows, and the number of all."""
    for line in skipped.messages:
        err.print(f"skipped {line}", markup=False, soft_wrap=True)
    if skipped.count > len(skipped.messages):
        err.print(
            f"skipped {skipped.count:,} rows in all; --rejects FILE keeps them, and why",
            soft_wrap=True,
        )
