"""Measurements of an engine, exported by OpenTelemetry from the exporter's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from service.engine.engine import Engine
from service.runtime import tracing
from service.runtime.logs import log_failure

_log = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds for the event loop to measure


def export_measurements(engine: Engine) -> None:
    """Export what `/metrics` has of an engine. Call it on the event loop that serves it."""
    loop = asyncio.get_running_loop()

    def read() -> Sequence[tracing.Reading]:
        measured = asyncio.run_coroutine_threadsafe(engine.measure(), loop)
        try:
            return [tracing.Reading(*each) for each in measured.result(_PATIENCE)]
        except Exception as error:  # noqa: BLE001 - the next export may succeed
            measured.cancel()
            log_failure(_log, "an engine was not measured for OpenTelemetry", error)
            return []

    # Instruments are named by a first reading, for which the loop must be free.
    loop.run_in_executor(None, tracing.export_readings, read)
