"""The running service of an installation, as its metrics describe it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.domain.errors import HeedError
from service.domain.settings import PREFIX, Settings
from service.runtime.data_layout import FIRST_KEY_FILE

_PATIENCE = 10.0  # seconds for a busy service to answer; where none listens, that is known at once
_REFUSED = (401, 403)


class KeyRefused(HeedError):
    """The service answers its metrics to holders of a key alone."""


def read_metrics(settings: Settings, environment: Mapping[str, str]) -> Mapping[str, float] | None:
    """Read the metrics of the running service, summed over its workers; None if none answers.

    Those of one cache are named with the label, such as `heed_cache_bytes{cache="history"}`. The
    key is the one in `HEED_API_KEY`, else one that the service keeps in a file.

    Raises:
        KeyRefused: the service needs a key, and there is none that it accepts.
    """
    host = settings.host if settings.host not in ("", "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
    if not settings.port:
        return None
    address = f"[{host}]" if ":" in host else host
    token = _find_token(settings, environment)
    try:
        answer = httpx.get(
            f"http://{address}:{settings.port}/metrics",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=_PATIENCE,
        )
        if answer.status_code in _REFUSED:
            raise KeyRefused(f"The running service answers /metrics with {answer.status_code}")
        answer.raise_for_status()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                cache = sample.labels.get("cache")
                name = sample.name if cache is None else f'{sample.name}{{cache="{cache}"}}'
                sums[name] = sums.get(name, 0.0) + sample.value
    except (httpx.HTTPError, ValueError):
        return None
    return sums if any(name.startswith("heed_") for name in sums) else None


def _find_token(settings: Settings, environment: Mapping[str, str]) -> str:
    """Return the caller's key, or the first one in a file; empty if there is none."""
    token = environment.get(f"{PREFIX}API_KEY", "").strip()
    for path in (settings.metrics_key_file, settings.data / FIRST_KEY_FILE):
        if not token and path:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                token = Path(path).read_text("ascii").strip()
    return token
