"""Mapping files: the options of `heed import` by kind of record, in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w

from service.domain.errors import Invalid
from service.runtime.durable_files import open_replacement

Kind = Literal["items", "events", "users"]
Options = Mapping[str, Any]
"""Values by the names of options, with underscores; `map` and `constant` are tables."""

MAX_MAPPING = 256 << 10  # bytes of a file
MAX_DOTS = 100  # in a line: tomllib's memory grows with the square of a key's parts
# What the value of each option must be.
_ALL = {"map": "a table of texts", "constant": "a table of texts"}
_ALL |= dict.fromkeys(
    ("delimiter", "encoding", "decimal", "list_separator", "time_format", "timezone"), "a text"
)
_ALL |= {"quotes": "true or false", "absent": "a list of texts"}
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "items": _ALL,
    "events": _ALL | {"weight_from": "a text", "negative": "a text", "dislikes_below": "a number"},
    "users": _ALL,
}


def read_mapping(path: Path, kind: Kind) -> dict[str, Any]:
    """Read the options of one kind of record; without its section there are none.

    Raises:
        Invalid: the file is not TOML, or has an unknown option or a value of a wrong type.
    """
    return dict(_sections(path).get(kind, {}))


def _sections(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_MAPPING + 1)
        if len(content) > MAX_MAPPING:
            raise Invalid(
                "", f"{path} is larger than {MAX_MAPPING:,} bytes, the most that is allowed"
            )
        for number, line in enumerate(content.split(b"\n"), 1):
            if (dots := line.count(b".")) > MAX_DOTS:
                detail = f"has {dots:,} dots; at most {MAX_DOTS} are allowed"
                raise Invalid("", f"{path}, line {number}: {detail}")
        sections = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid("", f"{path} must be TOML: {error}") from None
    except RecursionError:
        raise Invalid("", f"{path} must be TOML: it is nested too deep") from None
    except OSError as error:
        raise Invalid("", f"{path} cannot be read: {error.strerror}") from None
    for name, section in sections.items():
        if name not in OPTIONS or not isinstance(section, dict):
            raise Invalid("", f"{path}: [{name}] must be one of [items] [events] [users]")
        for option, value in section.items():
            _check(path, name, option, value)
    return sections


def write_mapping(path: Path, kind: Kind, options: Options) -> None:
    """Write the options of one kind of record; other sections of the file stay.

    Raises:
        Invalid: the file exists, and is no mapping file.
    """
    sections = _sections(path) if path.exists() else {}
    sections[kind] = {name: value for name, value in options.items() if value not in (None, {})}
    with open_replacement(path) as file:
        tomli_w.dump(sections, file)


def _check(path: Path, section: str, option: str, value: Any) -> None:
    place = f"{path}, [{section}] {option}"
    wanted = OPTIONS[section].get(option)
    if wanted is None:
        raise Invalid("", f"{place} is unknown; allowed are {', '.join(OPTIONS[section])}")
    is_valid = {
        "a table of texts": isinstance(value, dict)
        and all(isinstance(v, str) or _is_list(v) for v in value.values()),
        "a text": isinstance(value, str),
        "a list of texts": _is_list(value),
        "true or false": isinstance(value, bool),
        "a number": type(value) in (int, float),
    }
    if not is_valid[wanted]:
        raise Invalid("", f"{place} must be {wanted}")


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
