"""Shell that runs the blocks of the operator's pages, with this checkout as `heed`.

Bash runs each block. `heed`, `systemctl` and `docker` are scripts that hand their arguments to the
test and wait for it: `heed` is forked from a process with its imports, `systemctl` starts and stops
the unit of the guide, and what `docker` is told is compared with docker-compose.yml.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from service.cli import app
from service.domain.settings import PREFIX
from tests.support.heed_process import PATIENCE, ROOT, HeedProcess

# Pages of docs/operate and their headings, in the order in which an operator follows them.
GUIDE = (
    ("install", "In a container"),
    ("install", "Under systemd"),
    ("watch", "Look"),
    ("backup", "Back up"),
    ("backup", "Restore"),
    ("backup", "Salvage"),
    ("upgrade", "Upgrade and go back"),
    ("keys", "Rotate a key"),
    ("backup", "Forget a user"),
)
DATA, BACKUPS, PORT = "/var/lib/heed", "/var/backups/heed", 8000  # as the guide writes them
_CALL = """#!/bin/bash
call=$(mktemp -d "$CALLS/XXXXXX")
mkfifo "$call/code"
env -0 > "$call/environment"
printf '%s\\0' "${0##*/}" "$@" > "$call/written"
mv "$call/written" "$call/words"
read -r code < "$call/code"
cat "$call/said.out"
cat "$call/said.err" >&2
exit "$code"
"""


class Block(NamedTuple):
    section: str  # its heading
    language: str
    text: str


def read_blocks(*sections: tuple[str, str]) -> list[Block]:
    """Return the blocks of sections, each a page of docs/operate and a heading, in order."""
    blocks = []
    for page, title in sections or GUIDE:
        text = (ROOT / "docs" / "operate" / f"{page}.md").read_text("utf-8")
        section = f"{title}\n" + text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for part in section.split("\n### "):
            fences = re.findall(r"^```(\S*)\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
            blocks += [Block(part.split("\n")[0], language, code) for language, code in fences]
    return blocks


def check_heed(words: Sequence[str]) -> None:
    """Assert that `heed` accepts these arguments, without running it."""
    command: Any = get_command(app)
    rest = [word for word in words if word != "--help"]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    if rest:  # a name alone speaks of the command
        assert rest[0][0] == "-" or not hasattr(command, "commands"), (
            f"heed has no command {rest[0]}"
        )
        try:
            command.make_context("heed", rest)
        except Exception as error:
            raise AssertionError(f"heed {shlex.join(words)}: {error}") from error


def check_docker(words: Sequence[str]) -> None:
    """Assert that a `docker compose` command fits docker-compose.yml."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert words[0] == "compose", words
    action, rest = words[1], [word for word in words[2:] if not word.startswith("--")]
    if action == "up":
        assert (ROOT / "Dockerfile").is_file()
        assert set(words[2:]) <= {"--detach", "--build"}
        assert set(rest) <= set(services)
        return
    assert action in {"exec", "run"}, f"docker compose {action} is not known to this test"
    service, program, *arguments = rest if action == "run" else words[2:]
    assert service in services, service
    assert program in {"heed", "cat"}, program
    if program == "heed":
        check_heed(arguments)


class GuidedShell:
    """Runs blocks of the guide in a folder, where its directories are folders too.

    `places` stand for addresses that the guide writes; `tools` is a folder of further programs.
    """

    def __init__(
        self,
        folder: Path,
        places: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        tools: Path | None = None,
    ) -> None:
        self._places = places or {}
        self.folder, self.data, self.backups = folder, folder / "data", folder / "backups"
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._calls, programs = folder / "calls", folder / "programs"
        self._calls.mkdir()
        programs.mkdir()
        for name in ("heed", "systemctl", "docker"):
            (programs / name).write_text(_CALL)
            (programs / name).chmod(0o700)
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)} | {
            "PATH": f"{programs}:{tools or programs}:{os.environ['PATH']}",
            "CALLS": str(self._calls),
            f"{PREFIX}DATA": str(self.data),
            f"{PREFIX}PORT": self.url.rpartition(":")[2],
            f"{PREFIX}DEADLINE": "60",  # a busy machine is no failure
            **(settings or {}),
        }
        self._units: dict[str, list[str]] = {}  # variables, then the command
        self._service: HeedProcess | None = None
        self.logs = folder / "service.log"

    def run(self, block: Block) -> str:
        """Run a block as a shell would; return what it printed.

        Raises AssertionError where a command fails or the block is in no language known here.
        """
        if block.language == "ini":
            self._read_unit(block.text)
            return ""
        assert block.language in {"sh", "console"}, f"{block.section}: cannot run {block.language}"
        text = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
        script = ["bash", "-euo", "pipefail", "-c", self._here(text)]
        out = self.folder / "block.out"
        with out.open("wb") as file:
            shell = subprocess.Popen(
                script, cwd=self.folder, env=self._environment, stdout=file, stderr=file
            )
            until = time.monotonic() + PATIENCE
            while shell.poll() is None:
                for call in sorted(self._calls.iterdir()):
                    if (call / "words").exists():
                        self._answer(call)
                time.sleep(0.01)
                if time.monotonic() > until:
                    shell.kill()
        assert shell.returncode == 0, f"{block.section}: {block.text}\n{out.read_text()}"
        return out.read_text()

    def stop(self) -> None:
        """Stop the service if it runs; it must end well."""
        if self._service is not None:
            self._service.send(signal.SIGTERM)
            assert self._service.wait() == 0, self._service.log()
            self._service = None

    def _here(self, text: str) -> str:
        places = {DATA: self.data, BACKUPS: self.backups, f"localhost:{PORT}": self.url[7:]}
        places |= self._places
        for written, real in places.items():
            text = text.replace(written, str(real))
        return text

    def _read_unit(self, text: str) -> None:
        unit = configparser.ConfigParser(strict=True)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(self._here(text))
        service = unit["Service"]
        program, *arguments = shlex.split(service["ExecStart"])
        assert program.endswith("/heed")
        check_heed(arguments)
        assert "WantedBy" in unit["Install"]
        self._units["heed"] = [*shlex.split(service["Environment"]), *arguments]

    def _answer(self, call: Path) -> None:
        program, *words = (call / "words").read_text().split("\0")[:-1]
        (call / "words").unlink()
        for name in ("said.out", "said.err"):
            (call / name).write_text("")
        try:
            environment = (call / "environment").read_text().split("\0")[:-1]
            code = self._execute(program, words, call / "said.err", environment)
        except AssertionError as error:  # the block fails, and the script does not wait for ever
            code = 1
            (call / "said.err").write_text(f"{error}\n")
        (call / "code").write_text(f"{code}\n")  # a pipe: the script waits for it

    def _execute(
        self, program: str, words: list[str], log: Path, environment: Sequence[str]
    ) -> int:
        if program == "heed":
            assert words[0] != "serve", "let systemctl start it"
            given = dict(each.split("=", 1) for each in environment if each.startswith(PREFIX))
            settings = self._environment | given
            return HeedProcess(*words, log=log, environment=settings, folder=self.folder).wait()
        if program == "systemctl":
            self._control(*words)
        else:
            check_docker(words)
        return 0

    def _control(self, verb: str, unit: str) -> None:
        self.stop()
        if verb == "start":
            words = self._units[unit]
            variables = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
            self._service = HeedProcess(
                *(word for word in words if not re.match(r"[A-Z_]+=", word)),
                log=self.logs,
                environment=self._environment | variables,
                folder=self.folder,
            )
        else:
            assert verb == "stop", f"systemctl {verb} is not known to this test"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
