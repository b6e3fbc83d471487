"""Every setting of the service, read once from the environment when the app is created.

Each is an environment variable with the prefix `HEED_`: `HEED_DEADLINE=0.5 heed serve`. Nothing
else reads the environment, and the object is frozen: what the app started with is what it has.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.domain.errors import Invalid

PREFIX = "HEED_"
STATIC = "static"  # the text encoder that comes along
_KiB = 1024
_MiB = 1024 * _KiB


class Settings(BaseSettings):
    """The service's settings. Build with keywords in code, with `Settings.read()` at start-up."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid"
    )

    # ---- where
    data: Path = Field(
        Path("./data"),
        description="Directory of everything that is kept: the store, the models, the jobs.",
    )
    host: str = Field("127.0.0.1", description="Address to bind.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to bind; 0 picks a free one.")
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that serve the port and share what was loaded; on Linux.",
    )
    insecure: bool = Field(
        False,
        description="Allow an address that other machines can reach although anyone could then "
        "read and write everything.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )

    # ---- what
    encoder: str = Field(
        STATIC,
        description="Text encoder: `static`, a package that carries a sentence-transformers model "
        "(with the extra `transformers`), or the folder of one, with a slash in it.",
    )
    embedding_dim: int = Field(
        256,
        ge=1,
        le=4096,
        description="Dimensions of item embeddings and of the keys and values that events bring; "
        "must be those of the text encoder; 256 for `static`.",
    )
    exact_up_to: int = Field(
        100_000,
        ge=0,
        description="Rows up to which retrieval mode `auto` attends exactly; coarse beyond.",
    )
    history_cache_bytes: int = Field(
        256 * _MiB,
        ge=0,
        description="Memory for materialised user histories, in bytes, in each worker.",
    )
    encoding_cache_bytes: int = Field(
        64 * _MiB,
        ge=0,
        description="Memory for what the encoder keeps of histories, in bytes, in each worker.",
    )
    memory_cache_bytes: int = Field(
        64 * _MiB,
        ge=0,
        description="Memory for the keys and values of whoever asked last, in bytes, in each "
        "worker; they serve again until a new event, or the time, changes them.",
    )
    long_history_bytes: int = Field(
        512 * _MiB,
        ge=0,
        description="Memory for the older events of long histories, put together, in bytes.",
    )
    max_error: float = Field(
        0.01,
        gt=0,
        le=1,
        description="How far the context of a head may be off, relative to its length, where the "
        "older events of a long history are not attended one by one; a request may say otherwise.",
    )
    check_share: float = Field(
        0.005,
        ge=0,
        le=1,
        description="Share of such answers that are computed again exactly, off their path, for "
        "the histogram heed_attention_relative_error of /metrics.",
    )

    # ---- limits
    max_body: int = Field(
        _MiB, ge=1, description="Largest request body, in bytes; NDJSON streams are excepted."
    )
    max_held: int = Field(
        256 * _MiB,
        ge=1,
        description="Bytes of all bodies that a worker holds at once; more are refused with 429.",
    )
    max_ndjson_line: int = Field(
        256 * _KiB, ge=1, description="Longest line of an NDJSON stream, in bytes."
    )
    max_targets: int = Field(1000, ge=1, description="Most targets that one request may score.")
    max_in_flight: int = Field(
        64, ge=1, description="Requests a worker works on at once; more are refused with 429."
    )
    max_streams: int = Field(
        4, ge=1, description="NDJSON streams a worker reads at once; more are refused with 429."
    )
    deadline: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds a request may take once its body has arrived; then it is a 503. "
        "Activating a model may take longer.",
    )
    body_timeout: float = Field(
        15.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for a request's body to arrive (of a stream: for its next chunk).",
    )
    drain: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that requests in flight get to finish at shutdown.",
    )

    @classmethod
    def read(cls, given: Mapping[str, Any] | None = None) -> Self:
        """The settings of this process's environment; what is `given` counts before it.

        Raises:
            Invalid: naming the variable, what was wrong with it and what is allowed.
        """
        try:
            return cls(**(given or {}))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            variable = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
            raise Invalid("", f"{variable}: {first['msg']} (it is {first['input']!r})") from None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Sentences about variables that look like settings and are none, most likely misspelt."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    sentences = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            sentences.append(f"{name} is not a setting{hint}")
    return sentences


def refuse_dimension(settings: Settings, encoder: str, dimension: int) -> None:
    """Refuse vectors of another length than those of the text encoder, which they stand beside.

    Raises:
        Invalid: naming the setting, and the one value that it may have.
    """
    if settings.embedding_dim != dimension:
        raise Invalid(
            "",
            f"{PREFIX}EMBEDDING_DIM is {settings.embedding_dim}, but must be {dimension}: as many "
            f"dimensions as the text encoder {encoder} gives",
        )


def refuse_exposure(settings: Settings) -> None:
    """Refuse to serve other machines while nothing asks them who they are.

    Only loopback addresses pass, unless `insecure` was said. A host name other than `localhost`
    may resolve to anything, so it does not pass.

    Raises:
        Invalid: saying how to bind anyway.
    """
    if settings.insecure or _is_loopback(settings.host):
        return
    raise Invalid(
        "",
        f"refusing to bind {settings.host or 'every address'}: other machines could read and "
        f"write everything. Bind 127.0.0.1, or say {PREFIX}INSECURE=true if the network is "
        "protected by other means.",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
