"""Print the pip options that take torch's CPU build, or nothing where its index is out of reach.

On Linux, PyPI's torch brings gigabytes of CUDA. The CPU builds have an index of their own, which
not every network lets through: it is asked first, and a silent one costs three seconds.

Usage: pip install $(python torch_index.py INDEX) -r torch.txt    (an empty INDEX asks nobody)
"""

import re
import sys
import threading
import urllib.request
from http.client import HTTPException
from pathlib import Path

ANSWER_S = 3.0  # until the first byte; covers name resolution, which sockets' timeouts do not
PAGE_S = 20.0  # for the rest of the page, on a slow line


def main(index: str) -> None:
    """Write the options to stdout, what was decided to stderr."""
    pins = Path(__file__).with_name("torch.txt").read_text().splitlines()
    version = next(pin.removeprefix("torch==") for pin in pins if pin.startswith("torch=="))
    answered, offered = threading.Event(), threading.Event()
    problems: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(f"{index}/torch/", timeout=ANSWER_S) as page:
                answered.set()
                if re.search(rf"torch-{re.escape(version)}(\+|%2B|-)", page.read().decode()):
                    offered.set()
        except (OSError, HTTPException, ValueError) as error:
            problems.append(f" ({index}: {error})")

    if index:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        if answered.is_set():
            asking.join(PAGE_S)
    if offered.is_set():
        print(f"torch: {version} from {index}", file=sys.stderr)
        print("--index-url", index)
    else:
        print(f"torch: {version} from pip's own index{''.join(problems)}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "")
