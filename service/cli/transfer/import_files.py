"""Commands `heed import items|events|users`: your own files, read as they were exported."""

from __future__ import annotations

from service.cli.console import DATA, Data
from service.cli.transfer.file_import import FileImport
from service.cli.transfer.import_options import (
    Absent,
    Constants,
    CreateItems,
    Decimal,
    Delimiter,
    DislikesBelow,
    DryRun,
    Encoding,
    ExistingOnly,
    Files,
    ListSeparator,
    MappingFile,
    Maps,
    NegativeRows,
    Quotes,
    Rejects,
    SaveMapping,
    SkipBad,
    Strict,
    TimeFormat,
    Timezone,
    Update,
    WeightFrom,
    merge_options,
)


def import_items(
    files: Files,
    data: Data = DATA,
    mapping: MappingFile = None,
    maps: Maps = None,
    constants: Constants = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    quotes: Quotes = None,
    absent: Absent = None,
    decimal: Decimal = None,
    list_separator: ListSeparator = None,
    time_format: TimeFormat = None,
    timezone: Timezone = None,
    save_mapping: SaveMapping = None,
    update: Update = False,
    existing_only: ExistingOnly = False,
    dry_run: DryRun = False,
    strict: Strict = False,
    skip_bad: SkipBad = False,
    rejects: Rejects = None,
) -> None:
    """Your catalogue: item_id, title, description, tags, categories, attributes, …

    Further fields are published_at, hidden and embedding. item_id is required. Filters, rules and
    at_most read tags, categories and attributes: a price is attributes.price, a department one of
    categories.

    Rows of one item in one file are put together: lists unite, and of any other field the first
    value that is not blank stays. To keep the last one, sort the file the other way round.

    For example, with --dry-run first, which stores nothing:

    heed import items products.csv --map item_id=SKU --map title=Name --map attributes.price=Price
    """
    given = {
        "map": maps, "constant": constants, "delimiter": delimiter, "encoding": encoding,
        "quotes": quotes, "absent": absent, "decimal": decimal, "list_separator": list_separator,
        "time_format": time_format,
        "timezone": timezone,
    }  # fmt: skip
    options = merge_options("items", mapping, given, save_mapping)
    work = FileImport(
        "items", options, data, skip_bad, rejects, update=update, existing_only=existing_only
    )
    work.run(files, dry_run=dry_run, strict=strict)


def import_events(
    files: Files,
    data: Data = DATA,
    mapping: MappingFile = None,
    maps: Maps = None,
    constants: Constants = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    quotes: Quotes = None,
    absent: Absent = None,
    decimal: Decimal = None,
    list_separator: ListSeparator = None,
    time_format: TimeFormat = None,
    timezone: Timezone = None,
    weight_from: WeightFrom = None,
    negative: NegativeRows = None,
    dislikes_below: DislikesBelow = None,
    create_items: CreateItems = False,
    save_mapping: SaveMapping = None,
    dry_run: DryRun = False,
    strict: Strict = False,
    skip_bad: SkipBad = False,
    rejects: Rejects = None,
) -> None:
    """Your event log: user_id, item_id, type, weight, timestamp, event_id, …

    user_id and item_id are required. Where a file does not say it, type is view, weight is 1, and
    timestamp is the time of the import.

    Files that overlap store each event once: without event_id, an event is known by its content.
    With --dislikes-below there may be a rating: events rated below it are of type dislike.

    For example, with --dry-run first, which stores nothing:

    heed import events orders.csv --map user_id=Customer --map item_id=SKU --map timestamp=Date
    --timezone Europe/London --constant type=purchase --weight-from Quantity:log --negative return
    """
    given = {
        "map": maps, "constant": constants, "delimiter": delimiter, "encoding": encoding,
        "quotes": quotes, "absent": absent, "decimal": decimal, "list_separator": list_separator,
        "time_format": time_format,
        "timezone": timezone, "weight_from": weight_from, "negative": negative,
        "dislikes_below": dislikes_below,
    }  # fmt: skip
    options = merge_options("events", mapping, given, save_mapping)
    work = FileImport("events", options, data, skip_bad, rejects, create_items=create_items)
    work.run(files, dry_run=dry_run, strict=strict)


def import_users(
    files: Files,
    data: Data = DATA,
    mapping: MappingFile = None,
    maps: Maps = None,
    constants: Constants = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    quotes: Quotes = None,
    absent: Absent = None,
    decimal: Decimal = None,
    list_separator: ListSeparator = None,
    save_mapping: SaveMapping = None,
    dry_run: DryRun = False,
    skip_bad: SkipBad = False,
    rejects: Rejects = None,
) -> None:
    """Your users' profiles: user_id, attributes, interests; each replaces the stored one.

    Rows of one user in one file are put together, as rows of one item are.
    """
    given = {
        "map": maps, "constant": constants, "delimiter": delimiter, "encoding": encoding,
        "quotes": quotes, "absent": absent, "decimal": decimal, "list_separator": list_separator,
    }  # fmt: skip
    options = merge_options("users", mapping, given, save_mapping)
    work = FileImport("users", options, data, skip_bad, rejects)
    work.run(files, dry_run=dry_run, strict=False)
