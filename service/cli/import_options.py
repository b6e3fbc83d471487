"""Options of `heed import items|events|users`, and mapping files that keep them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.console import out
from service.domain.errors import Invalid

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE…",
        help="CSV, TSV, JSONL, JSON arrays or Parquet; .gz and .xz too. - reads a pipe.",
    ),
]
DislikesBelow = Annotated[
    float | None,
    typer.Option("--dislikes-below", help="Store ratings below this number as dislikes."),
]


@dataclass(frozen=True)
class ImportOptions:
    """Options of every import of files: how they are read, and what is done with them."""

    mapping: Annotated[
        Path | None,
        typer.Option(
            "--mapping",
            metavar="mapping.toml",
            help="Take all of these options from a file; those of the command line come first.",
        ),
    ] = None
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="FIELD=COLUMN",
            help="Read a field from a column of another name. attributes.NAME=COLUMN keeps a "
            "column as an attribute, attributes.place.lat=COLUMN as a member of an object; "
            "attributes.NAME:TYPE=COLUMN says its type: number, text, flag, list or json. May be "
            "repeated: from several columns a list takes all, another field the first that is not "
            "empty.",
        ),
    ] = None
    constants: Annotated[
        list[str] | None,
        typer.Option("--constant", metavar="FIELD=VALUE", help="The same value in every row."),
    ] = None
    delimiter: Annotated[
        str | None, typer.Option(help="Between the cells of CSV. Found out if not given.")
    ] = None
    encoding: Annotated[
        str | None, typer.Option(help="Of CSV, such as latin-1. Found out if not given.")
    ] = None
    quotes: Annotated[
        bool | None,
        typer.Option(
            "--quotes/--no-quotes",
            help="Quotation marks enclose cells of CSV, or are letters. Found out if not given.",
        ),
    ] = None
    absent: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A text that means that there is no value, in fields of any type, such as NULL. "
            "May be repeated. \\N always does in CSV and Parquet.",
        ),
    ] = None
    decimal: Annotated[
        str | None,
        typer.Option(metavar=". or ,", help="Decimal mark of CSV. Found out if not given."),
    ] = None
    list_separator: Annotated[
        str | None, typer.Option(help="Between the members of a list in a cell.", show_default="|")
    ] = None
    save_mapping: Annotated[
        Path | None,
        typer.Option(
            "--save-mapping",
            metavar="mapping.toml",
            help="Write these options to a file, also with --dry-run. The file may have sections "
            "of items, events and users.",
        ),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Store nothing: show the first rows as they would be, and all warnings.",
        ),
    ] = False
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Report bad rows and go on, instead of stopping.")
    ] = False
    rejects: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --skip-bad: write the bad rows here, and why to FILE.reasons. Rows of CSV "
            "are in the encoding of --encoding, in UTF-8 without it. Both files are replaced.",
        ),
    ] = None


@dataclass(frozen=True)
class TimedOptions(ImportOptions):
    """Options of files whose records have times."""

    time_format: Annotated[
        str | None,
        typer.Option(
            help="rfc3339; s, ms, us or ns since 1970; or such as '%d/%m/%Y %H:%M'. Found out if "
            "not given.",
        ),
    ] = None
    timezone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="Of times that name none: Europe/London, UTC, …"),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Store nothing if there is anything to warn of.")
    ] = False


@dataclass(frozen=True)
class ItemOptions(TimedOptions):
    """Options of `heed import items`."""

    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Change only the fields that the file has columns of: a change of stock needs "
            "item_id and the stock. A blank cell empties its field.",
        ),
    ] = False
    existing_only: Annotated[
        bool,
        typer.Option(
            "--existing-only",
            help="With --update: rows of items that the catalogue does not have are bad rows.",
        ),
    ] = False


@dataclass(frozen=True)
class EventOptions(TimedOptions):
    """Options of `heed import events`."""

    weight_from: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN[:log]",
            help="Weigh events by a number, such as a quantity, or by 1 + its logarithm.",
        ),
    ] = None
    negative: Annotated[
        Literal["skip", "return"] | None,
        typer.Option(
            help="Rows whose --weight-from is negative: leave them out, or store them as events of "
            "type return.",
        ),
    ] = None
    dislikes_below: DislikesBelow = None
    create_items: Annotated[
        bool,
        typer.Option(
            "--create-items",
            help="Create the items that the catalogue does not have. --map title=COLUMN, and other "
            "fields of items, say what is known of them.",
        ),
    ] = False


def merge_options(kind: Any, given: ImportOptions) -> dict[str, Any]:
    """Merge the options of the command line with those of a mapping file."""
    from service.datasets.field_mapping import split_assignment
    from service.datasets.mapping_file import OPTIONS, read_mapping, write_mapping

    options = {} if given.mapping is None else read_mapping(given.mapping, kind)
    for table, texts, right in (
        ("map", given.maps, "COLUMN"),
        ("constant", given.constants, "VALUE"),
    ):
        assigned: dict[str, Any] = {}
        for text in texts or []:
            name, value = split_assignment(text, f"--{table}", right)
            assigned[name] = [*assigned[name], value] if name in assigned else [value]
        single = {name: v[0] if len(v) == 1 else v for name, v in assigned.items()}
        options[table] = {**options.get(table, {}), **single}
    values = {name: getattr(given, name, None) for name in OPTIONS[kind]}
    options |= {name: value for name, value in values.items() if value is not None}
    if given.save_mapping is not None:
        write_mapping(given.save_mapping, kind, options)
        out.print(f"{given.save_mapping}: section \\[{kind}] written", soft_wrap=True)
    return options


def split_item_fields(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the events of a file, and those of the items in the same rows."""
    from service.datasets.rows import EVENT

    events, items = dict(options), dict(options)
    for table in ("map", "constant"):
        named = options[table]
        own = {name for name in named if name in EVENT.fields or name == "rating"}
        events[table] = {name: named[name] for name in named if name in own}
        items[table] = {name: named[name] for name in named if name not in own - {"item_id"}}
    for name in ("weight_from", "negative"):
        items.pop(name, None)
    return events, items


def read_options(kind: str, options: dict[str, Any], *, skip_bad: bool) -> Any:
    """Build `ReadOptions`; raises `Invalid` for values that are not allowed."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    from service.datasets.field_mapping import FieldMapping
    from service.datasets.record_files import ReadOptions
    from service.domain.settings import KEYWORD_FIELDS, Settings

    zone = None
    if (name := options.get("timezone")) is not None:
        try:
            zone = ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise Invalid(
                "", f"--timezone must be such as Europe/London or UTC, not {name!r}"
            ) from None
    if (decimal := options.get("decimal")) not in (None, ".", ","):
        raise Invalid("", f"--decimal must be . or , not {decimal!r}")
    if (negative := options.get("negative")) not in (None, "skip", "return"):
        raise Invalid("", f"--negative must be skip or return, not {negative!r}")
    separator = options.get("list_separator", "|")
    if not separator:
        raise Invalid("", "--list-separator must not be empty")
    mapping = FieldMapping.parse(
        options["map"], options["constant"], options.get("weight_from"), negative
    )
    return ReadOptions(
        mapping=mapping,
        delimiter=options.get("delimiter"),
        encoding=options.get("encoding"),
        quotes=options.get("quotes"),
        decimal=decimal,
        absent=options.get("absent", ()),
        identifiers=(*KEYWORD_FIELDS, *Settings.read().keyword_names),
        list_separator=separator,
        time_format=options.get("time_format"),
        zone=zone,
        skip_bad=skip_bad,
        dims=None if kind == "users" else _dims(),
    )


def _dims() -> int:
    """Return the dimensions of vectors, from the settings of the service."""
    from service.domain.settings import Settings, check_embedding_dim

    settings = Settings.read()
    if settings.model_fields_set & {"embedding_dim", "encoder"}:
        # The encoder takes seconds to load: only explicit settings are compared with it.
        from service.snapshots.text_embeddings import open_encoder

        encoder = open_encoder(settings.encoder)
        check_embedding_dim(settings, encoder.name, encoder.dimension)
    return settings.embedding_dim
