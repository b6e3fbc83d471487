"""Settings of the service, read once from the environment when the app is created.

Each is an environment variable with the prefix `HEED_`: `HEED_DEADLINE=0.5 heed serve`. No other
module of the service reads these variables, and the object is frozen.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.domain.errors import Invalid
from service.domain.names import NAMESPACE_VARIABLE
from service.domain.records import ATTRIBUTES

PREFIX = "HEED_"
STATIC_ENCODER = "static"  # the text encoder that ships with Heed
# Attributes that hold identifiers, by the names that shops give them.
KEYWORD_FIELDS = ("sku", "isbn", "ean", "gtin", "upc", "asin", "mpn", "part_number", "barcode")
# Variables of the clients among the commands, which are no settings of the service.
CLIENT_VARIABLES = frozenset({f"{PREFIX}API_KEY"})
_ORIGIN = re.compile(r"https?://[^/\s*?#@,]+", re.ASCII | re.IGNORECASE)
PICTURES = "image"  # the role of the page whose pictures come from other hosts
_PAGE_FIELDS = ("item_id", "title", "description", "tags", "categories", "published_at")
_PAGE_FIELD = re.compile(rf"(?:{'|'.join(_PAGE_FIELDS)}|{re.escape(ATTRIBUTES)}.+)")
_KiB = 1024
_MiB = 1024 * _KiB


class Settings(BaseSettings):
    """Settings of the service: built by keywords in code, by `Settings.read()` at start-up."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", allow_inf_nan=False
    )

    # ---- location and processes
    data: Path = Field(
        Path("./data"),
        description="Directory of all stored data: the store, the models, the jobs.",
    )
    store: str = Field(
        "",
        description="Where the truth is kept: `sqlite:` or nothing for a file in `HEED_DATA`, or "
        "the URL of a PostgreSQL database that any number of machines share, "
        "`postgresql://user@host/database`. A password is best left to a `passfile` that the URL "
        "names.",
        repr=False,
    )
    host: str = Field("127.0.0.1", description="Address to bind.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to bind; 0 picks a free one.")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Worker processes that share the port and the memory of the loaded model; "
        "Linux only.",
    )
    allowed_hosts: str = Field(
        "",
        description="Host names that requests may use, separated by commas, besides localhost, "
        "127.0.0.1, [::1] and `HEED_HOST` (of every address: any IP address). `*` allows every "
        "name, and thereby pages of other sites to read and write (DNS rebinding).",
    )
    insecure: bool = Field(
        False,
        description="Allow binding an address that other machines can reach although there is no "
        "API key, so that nothing authenticates them.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity that is logged."
    )
    keys: Literal["auto", "required", "off"] = Field(
        "auto",
        description="When requests need an API key: `auto`, once one was created; `required`, "
        "always; `off`, never, whatever keys there are.",
    )
    metrics_key_file: str = Field(
        "",
        description="File in which the service keeps an API key with the scope `metrics`, for a "
        "Prometheus beside it; its owner and group can read it. None is created while there is no "
        "other key.",
    )
    cors_origins: str = Field(
        "",
        description="Origins whose pages may send requests from a browser (CORS), such as "
        "`https://shop.example`, separated by commas; none by default.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto",
        description="Form of the log on stderr: `json`, one object a line; `console`, lines for "
        "people; `auto`, lines for people on a terminal and JSON elsewhere.",
    )
    access_log: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of requests that the log has a line of, at level `info`; 0 for none. "
        "Answers with a status of 500 or more always have one.",
    )

    # ---- page
    page_fields: str = Field(
        "price=attributes.price, url=attributes.url",
        description="Fields of items that the page at `/` shows, as `role=field` separated by "
        "commas. Roles are `image`, `url`, `price`, `currency` and `subtitle`; any other name is "
        "shown as a label. With `image` the page loads pictures from other hosts.",
    )

    # ---- model and memory
    encoder: str = Field(
        STATIC_ENCODER,
        description="Text encoder: `static`, the name of an installed package that contains a "
        "sentence-transformers model (needs the extra `transformers`), or the path of a model "
        "folder, with a slash in it.",
    )
    embedding_dim: int = Field(
        256,
        ge=1,
        le=4096,
        description="Dimensions of item embeddings and of the keys and values of events; must be "
        "those of the text encoder, 256 for `static`.",
    )
    keyword_fields: str = Field(
        ",".join(KEYWORD_FIELDS),
        description="Attributes that hold identifiers, separated by commas: search matches them, "
        "like item ids, as wholes and by their beginnings. Case, spaces, hyphens and underscores "
        "of the names do not matter; `NAME.MEMBER` names a member of an object.",
    )
    max_exact_rows: int = Field(
        100_000,
        ge=0,
        description="Most field keys that retrieval mode `auto` attends exactly in search; coarse "
        "beyond.",
    )
    history_cache_bytes: int = Field(
        640 * _MiB,
        ge=0,
        description="Memory for what each worker keeps of users between requests, in bytes: their "
        "events and what the model computed from them, of all open namespaces together.",
    )
    max_attention_error: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Relative error of a head's context that is allowed, at 99 % confidence, where "
        "the older events of a long history are attended by FAISS's lists; the default of "
        "`retrieval.max_error`.",
    )

    max_open_namespaces: int = Field(
        16,
        ge=1,
        description="Namespaces besides `default` that a worker holds open; of more, the one that "
        "is unused longest is closed.",
    )

    # ---- limits
    max_connections: int = Field(
        2048,
        ge=1,
        description="Connections that a worker keeps open; beyond that, the sender with most of "
        "them loses one that waits for its client. A sender may have a quarter of them for "
        "requests that are slow to arrive.",
    )
    idle_timeout: int = Field(
        5, ge=1, description="Seconds that a connection may be idle; then it is closed."
    )
    max_header_bytes: int = Field(
        32 * _KiB,
        ge=1024,
        description="Largest request header with its request line, in bytes; a larger one is "
        "refused with 431.",
    )
    header_timeout: float = Field(
        5.0,
        gt=0,
        description="Seconds for a request's header to arrive; then the answer is 408.",
    )
    max_body_bytes: int = Field(
        _MiB, ge=1, description="Largest request body, in bytes; NDJSON streams are exempt."
    )
    max_buffered_bytes: int = Field(
        256 * _MiB,
        ge=1,
        description="Bytes of request bodies that a worker buffers, a quarter of them for one "
        "sender; more are refused with 429.",
    )
    max_ndjson_line_bytes: int = Field(
        256 * _KiB, ge=1, description="Longest line of an NDJSON stream, in bytes."
    )
    max_targets: int = Field(1000, ge=1, description="Most target items of one score request.")
    max_in_flight: int = Field(
        512, ge=1, description="Requests that a worker handles at once; more are refused with 429."
    )
    max_streams: int = Field(
        4,
        ge=1,
        description="NDJSON streams that a worker reads at once, half of them of one sender; more "
        "are refused with 429.",
    )
    deadline: float = Field(
        1.0,
        gt=0,
        description="Seconds that a request may take once its body has arrived; then the answer is "
        "503. Activating a model and writing items may take longer.",
    )
    body_timeout: float = Field(
        15.0,
        gt=0,
        description="Seconds for a request's body, or the next chunk of a stream, to arrive; a "
        "stream must send 1 KiB for each of them. An answer waits as long for its client to read.",
    )
    drain_timeout: float = Field(
        10.0,
        ge=0,
        description="Seconds that requests in flight have to finish at shutdown. The process ends "
        "5 s later at the latest.",
    )
    worker_timeout: float = Field(
        30.0,
        ge=5,
        description="Seconds after which a worker whose event loop does not run is killed and "
        "replaced. With one worker there is no process that could do so.",
    )

    max_events: int = Field(
        0,
        ge=0,
        description="Most events of a namespace, for clients over HTTP; more are refused with 507. "
        "0: no limit, as for the next two.",
    )
    max_items: int = Field(
        0, ge=0, description="Most items of a namespace's catalogue; more are refused with 507."
    )
    max_store_bytes: int = Field(
        0,
        ge=0,
        description="Most bytes of a namespace's `heed.db`, without free pages; what would add to "
        "them is refused with 507. Models and the write-ahead log are not counted.",
    )

    @field_validator("page_fields")
    @classmethod
    def _check_page_fields(cls, text: str) -> str:
        parse_page_fields(text)
        return text

    @field_validator("store")
    @classmethod
    def _check_store(cls, text: str) -> str:
        if text not in ("", "sqlite:") and not text.startswith(("postgresql://", "postgres://")):
            raise ValueError(
                "must be sqlite: (a file in HEED_DATA) or postgresql://user@host/database"
            )
        return text

    @field_validator("cors_origins")
    @classmethod
    def _check_cors_origins(cls, text: str) -> str:
        for origin in _split(text):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: scheme and host, and a port if it is not the "
                    "scheme's, such as https://shop.example; * is not allowed"
                )
        return text

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """The origins in `cors_origins`, as browsers send them."""
        return tuple(origin.lower() for origin in _split(self.cors_origins))

    @property
    def keyword_names(self) -> tuple[str, ...]:
        return tuple(_split(self.keyword_fields))

    @classmethod
    def read(cls, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read the settings from the environment; `overrides`, by field name, take precedence.

        Raises:
            Invalid: naming the variable or the option, its fault and what is allowed.
        """
        try:
            return cls(**(overrides or {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = "_".join(str(part) for part in first["loc"])
            is_option = name in (overrides or {})
            named = f"--{name.replace('_', '-')}" if is_option else PREFIX + name.upper()
            fault = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
            raise Invalid("", f"{named}: {fault} (it is {first['input']!r})") from None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_page_fields(text: str) -> Mapping[str, str]:
    """Return the field of each role or label in `role=field, label=field, …`.

    Raises:
        ValueError: naming the part that is wrong, and what is allowed.
    """
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, field = (word.strip() for word in part.partition("="))
        if not (role and equals and field):
            raise ValueError(f"{part!r} must be role=field, such as {PICTURES}={ATTRIBUTES}picture")
        if _PAGE_FIELD.fullmatch(field) is None:
            allowed = f"one of {', '.join(_PAGE_FIELDS)} and {ATTRIBUTES}NAME"
            raise ValueError(f"{field!r} in {part!r} must be {allowed}")
        if role in fields:
            raise ValueError(f"{role!r} stands there twice")
        fields[role] = field
    return fields


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that starts with `HEED_` but is not a setting."""
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    known = settings | CLIENT_VARIABLES | {NAMESPACE_VARIABLE}
    sentences = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            own = name.upper().removeprefix(PREFIX)  # what all begin with makes none alike
            close = difflib.get_close_matches(own, [each.removeprefix(PREFIX) for each in known], 1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            sentences.append(f"{name} is not a setting{hint}")
    return sentences


def check_embedding_dim(settings: Settings, encoder: str, dimension: int) -> None:
    """Check that `embedding_dim` equals the text encoder's dimension.

    Raises:
        Invalid: naming the setting and the one value that is allowed.
    """
    if settings.embedding_dim != dimension:
        raise Invalid(
            "",
            f"{PREFIX}EMBEDDING_DIM is {settings.embedding_dim}, but must be {dimension}: the "
            f"dimension of the text encoder {encoder}",
        )


def is_loopback(host: str) -> bool:
    """Report whether only this machine can reach an address; False for other host names."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
