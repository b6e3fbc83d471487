"""Settings of the service, read once from the environment when the app is created.

Each is an environment variable with the prefix `HEED_`: `HEED_DEADLINE=0.5 heed serve`. No other
module of the service reads these variables, and the object is frozen.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.domain import page_fields
from service.domain.errors import Invalid

PREFIX = "HEED_"
STATIC_ENCODER = "static"  # the text encoder that ships with Heed
# Attributes that hold identifiers, by the names that shops give them.
KEYWORD_FIELDS = ("sku", "isbn", "ean", "gtin", "upc", "asin", "mpn", "part_number", "barcode")
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
        description="Allow binding an address that other machines can reach, although nothing "
        "authenticates them.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity that is logged."
    )

    # ---- page
    page_fields: str = Field(
        page_fields.DEFAULT,
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
        description="Most rows that retrieval mode `auto` attends exactly in search and "
        "/v1/attend; coarse beyond.",
    )
    history_cache_bytes: int = Field(
        640 * _MiB,
        ge=0,
        description="Memory for what each worker keeps of users between requests, in bytes: their "
        "events and what the model computed from them.",
    )
    max_attention_error: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Relative error of a head's context that is allowed, at 99 % confidence, where "
        "the older events of a long history are attended by clusters; the default of "
        "`retrieval.max_error`.",
    )
    audit_fraction: float = Field(
        0.005,
        ge=0,
        le=1,
        description="Fraction of approximate answers that are computed again exactly in the "
        "background, for the histogram heed_attention_relative_error of /metrics.",
    )

    # ---- limits
    max_connections: int = Field(
        512,
        ge=1,
        description="Connections that a worker keeps open; a further one replaces the one that is "
        "idle longest, or is closed if none is idle.",
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
        description="Bytes of request bodies that a worker buffers; more are refused with 429.",
    )
    max_ndjson_line_bytes: int = Field(
        256 * _KiB, ge=1, description="Longest line of an NDJSON stream, in bytes."
    )
    max_targets: int = Field(1000, ge=1, description="Most target items of one score request.")
    max_in_flight: int = Field(
        64, ge=1, description="Requests that a worker handles at once; more are refused with 429."
    )
    max_streams: int = Field(
        4,
        ge=1,
        description="NDJSON streams that a worker reads at once; more are refused with 429.",
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
        description="Seconds for a request's body to arrive; for a stream, its next chunk. Also "
        "for a client to read on, where an answer waits for it.",
    )
    drain_timeout: float = Field(
        10.0,
        ge=0,
        description="Seconds that requests in flight have to finish at shutdown.",
    )

    @field_validator("page_fields")
    @classmethod
    def _check_page_fields(cls, text: str) -> str:
        page_fields.parse(text)
        return text

    @property
    def keyword_names(self) -> tuple[str, ...]:
        """The names in `keyword_fields`."""
        return tuple(name.strip() for name in self.keyword_fields.split(",") if name.strip())

    @classmethod
    def read(cls, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read the settings from the environment; `overrides`, by field name, take precedence.

        Raises:
            Invalid: naming the variable, its fault and what is allowed.
        """
        try:
            return cls(**(overrides or {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            variable = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
            raise Invalid("", f"{variable}: {first['msg']} (it is {first['input']!r})") from None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that starts with `HEED_` but is not a setting."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    sentences = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
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


def check_bind_address(settings: Settings) -> None:
    """Check that `host` is a loopback address, unless `insecure` is set: Heed authenticates nobody.

    A host name other than `localhost` may resolve to anything, so it is refused.

    Raises:
        Invalid: naming the setting that allows the address.
    """
    if settings.insecure or is_loopback(settings.host):
        return
    raise Invalid(
        "",
        f"refusing to bind {settings.host or 'every address'}: other machines could read and "
        f"write everything. Bind 127.0.0.1, or set {PREFIX}INSECURE=true if the network is "
        "protected by other means.",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; False for other host names."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
