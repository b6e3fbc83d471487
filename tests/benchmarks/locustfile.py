"""The load of `heed loadtest` for Locust, for those who prefer its page.

    pip install locust
    locust -f tests/benchmarks/locustfile.py --host http://127.0.0.1:8000
    locust -f tests/benchmarks/locustfile.py --host … --headless -u 20 -r 5 -t 60s

Locust is no dependency of Heed; install it beside Heed, into the same environment. Its users wait
for their answers: a closed loop, which asks less while the server stands still, so that its
percentiles are better than what `heed loadtest` says of the same server. Users, items and
words come from the service; events are written for users named loadtest-…, forgotten at the end.
HEED_LOADTEST_HEADERS holds headers, one a line, such as `Authorization: Bearer …`.
"""

from __future__ import annotations

import logging
import os
import random
from typing import Any

from locust import HttpUser, between, events, task

from service.lab.load_options import DEFAULT_MIX, Options, parse_headers, parse_mix
from service.lab.open_loop import PREPARED
from service.lab.workload import Requests, by_hand, delete_all, draw_sample, open_http

SHARES = parse_mix(os.environ.get("HEED_LOADTEST_MIX", DEFAULT_MIX))
logging.getLogger("httpx").setLevel(logging.WARNING)  # Locust shows what others log
HEADER = os.environ.get("HEED_LOADTEST_HEADERS", "").splitlines()


@events.test_start.add_listener  # type: ignore[untyped-decorator]  # Locust is not installed
def prepare(environment: Any, **_: Any) -> None:
    """Sample users and items of the service."""
    options = Options(environment.host, header=HEADER)
    with open_http(options) as http:
        sample = draw_sample(http, options.users, options.seed)
    environment.heed = Requests(SHARES, sample, options)


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def clean(environment: Any, **_: Any) -> None:
    """Remove the events that were written."""
    with open_http(Options(environment.host, header=HEADER)) as http:
        left = delete_all(http, environment.heed.written_paths())[1]
    for command in by_hand(environment.host, left):
        logging.getLogger("heed").warning("left by the load test: %s", command)


class Requester(HttpUser):  # type: ignore[misc]
    """Sends a request about once a second, of a kind drawn by the shares of the mix."""

    wait_time = between(0.5, 1.5)

    def on_start(self) -> None:
        """Send the given headers with every request."""
        self.client.headers.update(
            {"Content-Type": "application/json", **dict(parse_headers(HEADER))}
        )

    @task  # type: ignore[untyped-decorator]
    def request(self) -> None:
        """Send one request."""
        (kind,) = random.choices(list(SHARES), list(SHARES.values()))
        path, body = self.environment.heed.encode(kind, random.randrange(PREPARED))
        self.client.post(path, data=body)
