"""A new user's walk from a shop's exports to the rows of a home page, by docs/start.md.

The commands and the request run as they are written there, so that the page is all that a user
needs.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.heed_process import ROOT, HeedProcess
from tests.support.server import Server
from tests.support.shop_exports import Sale, write_exports
from tests.support.shop_sales import Sales

PATIENCE = 4 * 3_600.0  # seconds for a command; a training of all of Online Retail is long
PORT = 8000  # as the page writes it
_UNSAID = ("--save-mapping", "--mapping", "--skip-bad")  # with which the name of a step ends
CUSTOMERS = 12  # whose home pages are checked


class Guide(NamedTuple):
    """The commands, the request and the answer of docs/start.md."""

    commands: list[list[str]]  # arguments of `heed`, one after the other
    request: str  # a shell command
    body: dict[str, Any]  # of the request
    shown: dict[str, Any]  # the beginning of its answer


def read_guide() -> Guide:
    """Read docs/start.md: blocks of commands, one with the request, and one with its answer."""
    page = (ROOT / "docs" / "start.md").read_text("utf-8")
    shells = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (request,) = (block for block in shells if "curl" in block)
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = "".join(block for block in shells if block != request).replace("\\\n", " ").split("\n")
    words = (shlex.split(line, comments=True) for line in lines)
    heed = [line[1:] for line in words if line and line[0] == "heed"]
    body = re.search(r"-d '(.*?)'", request, re.DOTALL)
    assert body is not None
    return Guide(heed, request, json.loads(body[1]), json.loads(re.sub(r",?\s*…", "", shown)))


class Walk:
    """The walk over the exports of one shop, which are written into a folder.

    Args:
        shop: its sales.
        folder: to work in.
        training: options of `heed train` besides those of the page.
        fresh: start each command as a shell does, which is slower by its imports.
    """

    def __init__(
        self, shop: Sales, folder: Path, training: Sequence[str] = (), *, fresh: bool = False
    ) -> None:
        self.guide = read_guide()
        self.exports = write_exports(shop, folder)
        self.data = folder / "data"
        self.steps: list[tuple[str, float]] = []  # and their seconds
        self.dry: list[int] = []  # records that the dry runs have stored
        self.nights: list[Counter[Sale]] = []  # events after each import of them
        self.bad: list[int] = []  # rows that each of these imports has kept
        self.undone: Counter[Sale] = Counter()  # events after the last night is undone
        self.again: Counter[Sale] = Counter()  # events after both nights, imported again
        self._folder, self._training, self._fresh = folder, training, fresh

    def heed(self, *arguments: str) -> str:
        """Run a command that must end well; return what it printed."""
        files = [
            name
            for word in arguments
            for name in (sorted(each.name for each in self._folder.glob(word)) or [word])
        ]
        log = self._folder / "commands.log"
        process = HeedProcess(
            *files,
            log=log,
            environment={"HEED_DATA": str(self.data), "COLUMNS": "200"},
            folder=self._folder,
            fresh=self._fresh,
        )
        code = process.wait(PATIENCE)
        assert code == 0, f"heed {shlex.join(arguments)}: {log.read_text()}"
        return process.out()

    def stored(self) -> Counter[Sale]:
        store = SQLiteStore(self.data / STORE_FILE)
        return Counter(
            Sale(each.user_id, each.item_id, each.type, each.timestamp or 0, round(each.weight, 6))
            for each in store.scan_events()
        )

    def store(self) -> None:
        """Run the commands that come before the training, then undo and repeat the last import."""
        for command in self.guide.commands:
            if command[0] != "import":
                continue
            before = sum(self.stored().values()) if self.data.exists() else 0
            self._timed(*command)
            if "--dry-run" in command:
                self.dry.append(sum(self.stored().values()) - before)
            elif command[1] == "events":
                self.nights.append(self.stored())
                rejects = self._folder / command[command.index("--rejects") + 1]
                self.bad.append(len(rejects.read_text("utf-8-sig").splitlines()) - 1)
        listed = self._timed("import", "--list").splitlines()
        last = max(int(line.split("│")[1]) for line in listed if line.startswith("│"))
        self._timed("import", "--undo", str(last))
        self.undone = self.stored()
        again = [command for command in self.guide.commands if command[:2] == ["import", "events"]]
        for command in (again[-1], again[-2]):
            self._timed(*command)
        self.again = self.stored()

    def train(self) -> None:
        (command,) = (each for each in self.guide.commands if each[0] == "train")
        self._timed(*command, *self._training)

    @contextmanager
    def serve(self) -> Iterator[httpx.Client]:
        assert ["serve"] in self.guide.commands
        started = time.monotonic()
        with Server(self.data, fresh=self._fresh) as server, server.client() as client:
            self.steps.append(("heed serve", time.monotonic() - started))
            yield client
        assert "Traceback" not in server.log()

    def ask(self, http: httpx.Client) -> Any:
        request = self.guide.request.replace(f"localhost:{PORT}", http.base_url.netloc.decode())
        with self._step("curl …/v1/rows"):
            ran = subprocess.run(["bash", "-c", request], check=True, capture_output=True)
        return json.loads(ran.stdout)

    def pages(self, http: httpx.Client) -> list[dict[str, Any]]:
        """Return the home pages of some customers: the same request for each."""
        pages = []
        with self._step(f"the same for {CUSTOMERS} customers"):
            for user in sorted({sale.user_id for sale in self.exports.stored})[:CUSTOMERS]:
                answer = http.post("/v1/rows", json=self.guide.body | {"user_id": user})
                assert answer.status_code == 200, answer.text
                history = http.get(f"/v1/users/{user}/history?limit=1000").json()["events"]
                pages.append(answer.json() | {"history": history})
        return pages

    def _timed(self, *command: str) -> str:
        words = list(itertools.takewhile(lambda each: each not in _UNSAID, command))
        with self._step(shlex.join(["heed", *words])):
            return self.heed(*command)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.steps.append((name, time.monotonic() - started))
