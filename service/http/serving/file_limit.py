"""The limit on open files of a process, and the connections that it allows."""

from __future__ import annotations

import logging
import resource

from service.domain.settings import Settings
from service.http.serving.connection_limits import BURST

_FILES = 512  # for the store, models, other workers and namespaces

_log = logging.getLogger(__name__)


def fit_connections(settings: Settings) -> Settings:
    """Raise the limit on open files for `max_connections`; lower these to fit the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + BURST + _FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return settings
    kept = max(1, allowed // 4, allowed - BURST - _FILES)
    _log.warning(
        "HEED_MAX_CONNECTIONS is %d, which takes %d open files; the limit is %d, so that a worker "
        "keeps %d connections. Raise the limit (ulimit -n, LimitNOFILE=)",
        settings.max_connections,
        wanted,
        allowed,
        kept,
    )
    return settings.model_copy(update={"max_connections": kept})
