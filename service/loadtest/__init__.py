"""`heed loadtest`: an open loop against a running service, latency counted from when it was due.

Whoever asks only when the last answer came (a closed loop) asks less while the server stands still,
and so does not see it ("coordinated omission"). Here requests leave on schedule, and one that waits
behind a stall has waited from the moment at which it was to leave.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import uvloop
from rich.console import Console

from service import __version__
from service.domain.errors import Unavailable
from service.domain.timestamps import to_rfc3339
from service.loadtest.client import Answer, post
from service.loadtest.loading import Load, Options
from service.loadtest.material import Written, clean, client, gather
from service.loadtest.memory import Watch
from service.loadtest.mix import DISTINCT, Requests, parsed
from service.loadtest.report import terminal, words
from service.loadtest.report.terminal import stage
from service.loadtest.sending import is_success
from service.loadtest.target import Target

__all__ = ["Options", "run"]


def run(console: Console, options: Options) -> dict[str, Any]:
    """Load a service, clean up after it, print what was found and return it as plain values.

    SIGINT and SIGTERM end the load early; what was measured until then is reported.

    Raises:
        Invalid: for an option that makes no sense.
        NotFound: when the service has nothing to ask about.
        Unavailable: when it does not answer, or refuses a request of the mix, before the load.
    """
    target, shares = Target.of(options.url), parsed(options.mix)
    with client(options.url, options.headers) as http:
        with stage(console, "looking at histories") as told:
            material = gather(http, users=options.users, seed=options.seed, told=told)
        lent = material.users if options.write_to_users else ()
        written = Written(len(material.users), lent)
        requests = Requests(
            list(shares),
            material,
            written,
            targets=options.targets,
            limit=options.limit,
            seed=options.seed,
        )
        began = time.time()
        found: dict[str, Any] = {
            "started": to_rfc3339(int(began * 1e6)),
            "options": options.as_dict(),
            "mix": shares,
            "distinct_requests": DISTINCT,
            "machine": _generator(),
            "data": material.as_dict(),
        }
        try:
            tried = uvloop.run(_tried(target, requests, options))
            found["data"]["model"] = _model(tried)
            terminal.data(console, found)
            paths = {kind: f"{target.prefix}/v1/{kind}" for kind in shares}
            load = Load(console, options, shares, requests, target, paths)
            with Watch(options.url, options.headers, options.duration) as watch:
                found |= load.measured("load")
            found["memory"] = watch.as_dict()
        finally:
            found["cleaning"] = _cleaned(console, http, written, keep=options.keep)
        found["warnings"] = words.warnings(found)
    terminal.everything(console, found)
    return found


# ------------------------------------------------------------------------------ the parts


async def _tried(target: Target, requests: Requests, options: Options) -> dict[str, dict[str, Any]]:
    """One request of each kind and its answer. Raises `Unavailable` where one is refused."""
    found = {}
    for kind in requests.kinds:
        body = requests.body(kind)
        path = f"{target.prefix}/v1/{kind}"
        answer = await _asked(
            target, post(path, body, host=target.authority, headers=options.headers), options
        )
        if not is_success(answer.status):
            said = answer.body[:300].decode("utf-8", "replace")
            raise Unavailable(f"POST {path} was answered with {answer.status}: {said}")
        found[kind] = {"ask": kind, "answer": answer.json()}
    return found


async def _asked(target: Target, request: bytes, options: Options) -> Answer:
    try:
        async with asyncio.timeout(options.timeout):
            connection = await target.connect()
            try:
                return await connection.ask(request)
            finally:
                connection.close()
    except TimeoutError:
        raise Unavailable(
            f"{options.url} did not answer one request in {options.timeout:g} s (--timeout)"
        ) from None
    except OSError as error:
        raise Unavailable(f"{options.url} does not answer: {error}") from None


def _generator() -> dict[str, Any]:
    """The machine and the versions that send the load."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "heed": __version__,
    }


def _model(tried: Mapping[str, Mapping[str, Any]]) -> str | None:
    versions = (each["answer"].get("model_version") for each in tried.values())
    return next((str(version) for version in versions if version), None)


def _cleaned(console: Console, http: Any, written: Written, *, keep: bool) -> dict[str, Any]:
    """Take away what was written, unless it is to be kept; what is left is named."""
    paths = written.paths()
    found: dict[str, Any] = {
        "run": written.run,
        "events": len(written.events),
        "of": "users of the service" if written.lent else "users of its own",
        "kept": keep,
        "left": paths,
    }
    if not keep and paths:
        with stage(console, "cleaning up") as told:
            found["left"] = clean(http, paths, told)
    return found
