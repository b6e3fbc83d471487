"""Health check of a container: `python -m service.runtime.health_check`, and `heed health`.

It imports only the standard library, since containers run it every few seconds.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

_SERVING = {b"serve", b"demo", b"uvicorn"}  # commands that listen
_TIMEOUT = 2.0  # seconds


def serves(command: Path = Path("/proc/1/cmdline")) -> bool:
    """True unless process 1, which the container runs, is a command of heed that never listens.

    If that cannot be read the answer is True, as for any other program: a service is expected.
    """
    try:
        words = command.read_bytes().split(b"\0")
    except OSError:
        return True
    names = [word.rpartition(b"/")[2] for word in words]
    is_heed = any(name in {b"heed", b"service.cli"} for name in names)
    return not is_heed or not _SERVING.isdisjoint(names)


def check(url: str) -> tuple[bool, str]:
    """Ask a service whether it is ready; return the verdict and a sentence that says why."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health/ready", timeout=_TIMEOUT) as answer:
            checks = json.load(answer).get("checks", {})
        if not checks:  # a service with API keys says no more without one
            return True, "ready"
        model = checks.get("details", {}).get("model", {})
        if model.get("degraded"):
            return True, f"ready, but degraded: {model.get('fault')}"
        return True, f"ready, serving model {checks.get('model')}"
    except urllib.error.HTTPError as error:
        return False, f"not ready: status {error.code}"
    except (OSError, ValueError) as error:
        return False, f"no answer from {url}: {getattr(error, 'reason', error)}"


def local_url() -> str:
    """Return the address of the service of this machine, by its setting HEED_PORT."""
    return f"http://127.0.0.1:{os.environ.get('HEED_PORT') or 8000}"


def main() -> int:
    if not serves():
        print("healthy: this container runs a command that does not listen")  # noqa: T201
        return 0
    is_ready, sentence = check(local_url())
    print(sentence)  # noqa: T201
    return 0 if is_ready else 1


if __name__ == "__main__":
    sys.exit(main())
