"""Structured logs: one JSON object a line on stderr, or readable lines on a terminal.

Everything goes through the root logger of `logging`: the service's modules, uvicorn's, warnings and
uncaught exceptions. Messages of exceptions can quote what a client sent, so only those of types
that never do are logged, unless the level is `debug`.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, TextIO

import apsw
import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from service.domain.errors import HeedError

Format = Literal["auto", "json", "console"]

# The id of the request that the code at hand works for; in each of its log lines.
REQUEST: ContextVar[str | None] = ContextVar("heed.request", default=None)
# The id of the trace that it belongs to, where traces are exported.
TRACE: ContextVar[str | None] = ContextVar("heed.trace", default=None)

# Workers share the pipe of stderr, and POSIX keeps a write whole up to this size (PIPE_BUF).
MAX_LINE_BYTES = 4096

_MAX_FRAMES = 12  # the innermost frames of each exception that are logged
_MAX_CHAIN = 4  # exceptions of a chain of causes that are logged
_MAX_EVENT = 2_000  # characters
# Types whose messages are written by Heed or the system: paths, addresses, names of libraries.
_PLAIN_ERRORS = (HeedError, OSError, MemoryError, ImportError, apsw.Error)
# asyncio appends the repr of a task or transport to its sentence, and warnings their source.
_FIRST_LINE_ONLY = frozenset({"asyncio", "py.warnings"})

_STAMP = structlog.processors.TimeStamper(fmt="iso", utc=True)

_process_fields: dict[str, Any] = {}


def configure(
    level: str, format: Format = "auto", stream: TextIO | None = None, *, uncaught: bool = True
) -> None:
    """Send all log records and warnings of this process to one stream, by default stderr.

    The format `auto` is `console` on a terminal and `json` elsewhere. With `uncaught`, uncaught
    exceptions are logged too, instead of printed by Python.
    """
    stream = stream or sys.stderr
    as_json = format == "json" or (format == "auto" and not stream.isatty())
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        _STAMP,
        _add_context,
        _render_exceptions(with_messages=level == "debug"),
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    ]
    render: Processor = _render_json
    if not as_json:
        render = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    handler = _Handler(stream, as_json=as_json)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[*shared, render]))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx logs the address of each request, which may have a query.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Callers get the error and report it.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    logging.captureWarnings(True)
    if uncaught:
        sys.excepthook = _log_uncaught
        sys.unraisablehook = _log_unraisable
        threading.excepthook = _log_uncaught_in_thread


def is_json() -> bool:
    """Report whether `configure` has chosen JSON for this process."""
    return any(isinstance(each, _Handler) and each.as_json for each in logging.root.handlers)


def write(logger: logging.Logger, level: int, event: str, fields: Mapping[str, Any]) -> None:
    """Log an event as `logger.log(level, event, extra=fields)` does.

    If this process writes JSON lines, no record is made, which takes a third of the time: for
    what is logged for each request.
    """
    if not logger.isEnabledFor(level):
        return
    handler = logging.root.handlers[0] if len(logging.root.handlers) == 1 else None
    if not (isinstance(handler, _Handler) and handler.as_json and _is_of_root(logger)):
        logger.log(level, event, extra=fields)
        return
    name = logging.getLevelName(level).lower()
    line = _STAMP(None, "", {"event": event, "level": name, "logger": logger.name, **fields})
    try:
        handler.write_line(_render_json(None, "", _add_context(None, "", line)))
    except (OSError, ValueError):
        logger.log(level, event, extra=fields)  # whose handler reports what is wrong


def _is_of_root(logger: logging.Logger) -> bool:
    """Report whether the root logger's handlers are all that see the records of a logger."""
    each: logging.Logger | None = logger
    while each is not None and each is not logging.root:
        if each.handlers or not each.propagate:
            return False
        each = each.parent
    return True


def set_process_fields(**fields: Any) -> None:
    """Add these fields to each later log line of this process, such as the worker's number."""
    _process_fields.update(fields)


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Log a failure: what failed, and what follows from it, after a semicolon."""
    happened, _, then = what.partition("; ")
    if isinstance(error, (HeedError, OSError)):
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("%s: %s%s", happened, reason, then and f"; {then}")
    else:
        logger.error("%s", what, exc_info=error)


class RepeatedWork:
    """Logs failures of all work that a process repeats. For one thread.

    A fault that several watches meet at once, such as a database that is away, is logged once.
    """

    def __init__(self) -> None:
        self._failing: dict[Hashable, type[BaseException]] = {}

    def failed(self, logger: logging.Logger, work: Hashable, what: str, error: Exception) -> None:
        """Note that work has failed; log it unless other work already fails for the same reason."""
        kind = type(error)
        is_known = self._failing.get(work) is kind or (
            isinstance(error, (HeedError, OSError)) and kind in self._failing.values()
        )
        self._failing[work] = kind
        if not is_known:
            log_failure(logger, what, error)

    def succeeded(self, logger: logging.Logger, work: Hashable) -> None:
        """Note that work has succeeded; log it for all that has failed for the same reason."""
        kind = self._failing.get(work)
        if kind is not None:
            self._failing = {key: each for key, each in self._failing.items() if each is not kind}
            logger.info("work in the background succeeds again, after %s", kind.__name__)

    def ended(self, work: Hashable) -> None:
        """Forget work that is no longer repeated."""
        self._failing.pop(work, None)


REPEATED = RepeatedWork()  # of this process


class _Handler(logging.StreamHandler[TextIO]):
    """A handler that reports its own failures as log lines too."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        super().__init__(stream)
        self.as_json = as_json

    def write_line(self, line: str) -> None:
        self.acquire()
        try:
            self.stream.write(line + self.terminator)
            self.flush()
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Report that a record could not be formatted or written."""
        failure = sys.exc_info()[0]
        event = {
            "event": "a log record could not be written",
            "level": "error",
            "logger": record.name,
            "line": f"{record.pathname}:{record.lineno}",
            "error": "" if failure is None else failure.__name__,
        }
        try:
            self.stream.write(_render_json(None, "", event) + self.terminator)
            self.flush()
        except (OSError, ValueError):
            pass  # nothing reads stderr any more


def _render_exceptions(*, with_messages: bool) -> Processor:
    """Return a processor that renders `exc_info` as a traceback, without values and most messages.

    `with_messages` keeps them all.
    """

    def render(error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        message = f": {error}" if with_messages or isinstance(error, _PLAIN_ERRORS) else ""
        stack = "".join(traceback.format_list(frames))
        return f"Traceback (most recent call last):\n{stack}{name}{message}"

    def process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        record: logging.LogRecord | None = event.get("_record")
        info = event.pop("exc_info", None) or (record.exc_info if record else None)
        error = info[1] if isinstance(info, tuple) else info
        if isinstance(error, BaseException):
            # The innermost cause first, as Python prints them.
            event["exception"] = "\n\n".join(map(render, reversed([*_chain(error)])))
        return event

    return process


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then its causes, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(current))
        yield current
        implicit = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or implicit


def _add_context(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if event.get("logger") in _FIRST_LINE_ONLY:
        event["event"] = str(event["event"]).partition("\n")[0]
    event["event"] = str(event["event"])[:_MAX_EVENT]
    if "request_id" not in event and (request := REQUEST.get()) is not None:
        event["request_id"] = request
    if (trace := TRACE.get()) is not None:
        event["trace_id"] = trace
    return {**event, **_process_fields}


def _render_json(_logger: WrappedLogger | None, _method: str, event: EventDict) -> str:
    """Render one line of at most `MAX_LINE_BYTES` bytes, with the newline."""
    exception = event.get("exception", "")
    kept = len(exception)
    while len(line := _dump(event)) >= MAX_LINE_BYTES:
        if kept < 100:
            event = {
                name: value[:200] if isinstance(value, str) else value
                for name, value in event.items()
                if not isinstance(value, dict | list | tuple)
            }
            return _dump(event)[: MAX_LINE_BYTES - 1].decode(errors="ignore")
        # The end has the exception that was raised last.
        kept = kept * 3 // 4
        event = {**event, "exception": f"… {exception[-kept:]}"}
    return line.decode()


def _dump(event: EventDict) -> bytes:
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        plain = {
            str(name): str(value).encode(errors="replace").decode() for name, value in event.items()
        }
        return orjson.dumps(plain)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("heed").critical("uncaught exception", exc_info=error)


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread else "a thread"
        logging.getLogger("heed").critical(
            "uncaught exception in %s", name, exc_info=args.exc_value
        )


def _log_unraisable(args: Any) -> None:
    logging.getLogger("heed").error("an exception was ignored", exc_info=args.exc_value)
