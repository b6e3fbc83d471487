"""The comparison with peers: order of turns, quality, and the verdict on the faster one."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from service.domain.errors import Unavailable
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import serving
from tests.benchmarks.harness.timing import Spread
from tests.benchmarks.peers import __main__ as command
from tests.benchmarks.peers import report
from tests.benchmarks.peers.effort import least
from tests.benchmarks.peers.environments import Pythons, versions
from tests.benchmarks.peers.quality import ABSENT, Nearest, ranks, recall
from tests.benchmarks.peers.questions import Quality
from tests.benchmarks.peers.turns import HEED, Case, Peer, answers, measure, verdict

FOLDER = Path(command.__file__).parent

# Writes down who was asked what, and answers with it; what it does not know is refused.
FAKE = """
import http.server, json, sys
name, diary = sys.argv[1:]
class Fake(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        with open(diary, "a") as file:
            file.write(f"{name} {self.path} {body.decode()}\\n")
        self.send_response(404 if self.path == "/nowhere" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def diary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers") / "diary"


@pytest.fixture(scope="module")
def ports(diary: Path) -> Iterator[dict[str, int]]:
    """Two fake peers, and one that stands for Heed."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                serving(["-c", FAKE, name, str(diary)], core=None, environment={}, patience=30)
            ).port
            for name in (HEED, "one", "two")
        }


def peers(ports: dict[str, int], kinds: tuple[str, ...] = ("score",)) -> list[Peer]:
    return [
        Peer(
            name,
            port,
            {kind: [encode_post(f"/{kind}", n) for n in range(3)] for kind in kinds},
            name,
        )
        for name, port in ports.items()
    ]


def test_every_peer_gets_the_same_requests_in_rotating_order(
    diary: Path, ports: dict[str, int]
) -> None:
    """One round warms up; then everybody has a turn in each, and goes on where they stopped."""
    diary.write_text("")
    found = measure(peers(ports), (1,), rounds=2, requests=2)
    said = [line.split(" ") for line in diary.read_text().splitlines()]
    warm, first, second = said[:9], said[9:15], said[15:]
    assert [(name, body) for name, _, body in warm] == [
        (name, str(n)) for name in ports for n in range(3)
    ]
    assert [name for name, *_ in first] == [HEED, HEED, "one", "one", "two", "two"]
    assert [name for name, *_ in second] == ["one", "one", "two", "two", HEED, HEED]
    assert [body for *_, body in first] == ["0", "1"] * 3
    assert [body for *_, body in second] == ["2", "0"] * 3
    assert [(case.kind, case.connections) for case in found] == [("score", 1)]
    assert {name: [len(turn) for turn in turns] for name, turns in found[0].latencies.items()} == {
        name: [2, 2] for name in ports
    }


def test_each_kind_and_each_concurrency_is_a_case(diary: Path, ports: dict[str, int]) -> None:
    """Progress is reported to the end, and a kind that a peer does not have it is not asked."""
    diary.write_text("")
    some = peers(ports, ("score", "recommend"))
    some[1] = Peer("one", some[1].port, {"score": some[1].questions["score"]}, "")
    calls: list[tuple[int, int]] = []
    found = measure(some, (1, 4), rounds=1, requests=4, progress=lambda *each: calls.append(each))
    assert [(case.kind, case.connections, set(case.latencies)) for case in found] == [
        ("score", 1, {HEED, "one", "two"}),
        ("score", 4, {HEED, "one", "two"}),
        ("recommend", 1, {HEED, "two"}),
        ("recommend", 4, {HEED, "two"}),
    ]
    assert calls == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert "one /recommend" not in diary.read_text()


def test_an_answer_that_is_none_stops_everything(ports: dict[str, int]) -> None:
    """A refused request stops the comparison with the peer's status and body."""
    refusing = Peer("two", ports["two"], {"score": [encode_post("/nowhere", "?")]}, "")
    with pytest.raises(Unavailable, match=r"two answered 404: b'\"\?\"'"):
        measure([refusing], (1,), rounds=1, requests=1)
    with pytest.raises(Unavailable, match="two answered 404"):
        answers(refusing, refusing.questions["score"])


def case(**seconds: list[float]) -> Case:
    """What took so many seconds in its rounds, of ten requests each."""
    return Case(
        "score",
        1,
        {name: [[each / 10] * 10 for each in own] for name, own in seconds.items()},
        seconds,
    )


def test_ratios_are_of_rounds() -> None:
    """What slows a whole round cancels out; percentiles and rates are over all of them."""
    made = case(Heed=[1.0, 2.0, 10.0], slow=[3.0, 8.0, 50.0], quick=[0.5, 1.0, 5.0])
    assert made.times("slow") == pytest.approx((4.0, 3.5, 4.5))
    assert made.times("quick") == pytest.approx((0.5, 0.5, 0.5))
    assert made.rate("quick") == pytest.approx(30 / 6.5)
    assert made.percentile("Heed", 50) == pytest.approx(0.2)
    plain = made.as_dict()["peers"]["slow"]
    assert plain["heed_times_as_fast"] == {"median": 4.0, "q25": 3.5, "q75": 4.5}
    assert plain["p99_seconds"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("found", "word"),
    [((2, 1.1, 3), "faster"), ((0.5, 0.4, 0.9), "slower"), ((1.2, 0.9, 1.5), "as fast")],
)
def test_a_spread_over_both_sides_of_one_decides_nothing(
    found: tuple[float, float, float], word: str
) -> None:
    """The verdict is faster or slower only if both quartiles agree."""
    assert verdict(Spread(*found)) == word


def test_where_heed_is_slower_is_said_with_quality_and_reason() -> None:
    """Where Heed is slower, the report has the ratio, both qualities and the reason."""
    made = case(Heed=[2.0, 2.0, 2.0], slow=[3.0, 3.0, 3.0], quick=[0.5, 0.5, 0.4])
    who = [Peer(name, 0, {}, name, f"{name} keeps nothing.") for name in made.latencies]
    good = {"Heed": Quality(0.3, 0.2, (0, 0), 9), "quick": Quality(0.2, 0.1, (0, 0), 9)}
    (line,) = report.lost([made], who, good)
    assert line == (
        "score, 1 at once: quick is 4.00 (4.00–4.50) times as fast, with NDCG@10 0.100 beside "
        "0.200. quick keeps nothing."
    )
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    report.cases(console, "title", [made], "caption")
    report.slower(console, [line])
    assert "1.50 (1.50–1.50) times as fast" in shown.getvalue()
    assert "0.25 (0.23–0.25) times as fast: SLOWER" in shown.getvalue()
    assert line in shown.getvalue()
    report.slower(console, [])
    assert "Heed is slower nowhere here." in shown.getvalue()


def test_ranks_and_recall_by_hand() -> None:
    """A target's place in its list, a share of what is best; a list that repeats itself is none."""
    assert ranks([[4, 2, 7], [1], [], [5, 6]], [7, 1, 3, 9]).tolist() == [2, 0, ABSENT, ABSENT]
    assert recall([[1, 2], [3]], [[2, 9], [3, 4]]) == 0.5
    with pytest.raises(ValueError, match="twice"):
        ranks([[4, 4]], [4])
    with pytest.raises(ValueError, match="cannot be judged"):
        recall([], [])


def test_equal_keys_count_as_one_another() -> None:
    """Either of two equal keys counts as found."""
    keys = np.array([[1, 0], [0, 1], [0.6, 0.8], [0.6, 0.8], [-1, 0]], np.float32)
    nearest = Nearest(keys, np.array([[1, 0], [0, 1]], np.float32), 2)
    assert nearest.recall([[0, 2]], [0]) == 1.0
    assert nearest.recall([[3, 0]], [0]) == 1.0
    assert nearest.recall([[0, 1], [1, 4]], [0, 1]) == 0.5
    assert nearest.recall([[]], [0]) == 0.0
    with pytest.raises(ValueError, match="twice"):
        nearest.recall([[0, 0]], [0])


def test_the_least_effort_that_is_enough_is_chosen() -> None:
    """The least effort that reaches the goal is chosen, else the least of the best."""
    tried: list[int] = []

    def look(effort: int) -> list[list[int]]:
        tried.append(effort)
        return [[min(effort, 40)]]

    def judge(found: object) -> float:
        return found[0][0] / 40  # type: ignore[index,no-any-return]

    assert least(look, judge, goal=0.5, ladder=(10, 20, 40, 80)) == (20, 0.5)
    assert tried == [10, 20]
    assert least(look, judge, goal=1.1, ladder=(10, 40, 80)) == (40, 1.0)


def test_an_environment_that_lacks_a_package_is_named() -> None:
    """A missing package or interpreter is refused with the command to run."""
    with pytest.raises(Unavailable, match=r"has no litserve, .*run `make bench-peers`"):
        versions(Pythons(Path(sys.executable), Path(sys.executable)))
    with pytest.raises(Unavailable, match="make bench-peers"):
        versions(Pythons(Path("/nowhere/python"), Path("/nowhere/python")))


@pytest.mark.parametrize("asked", [[], ["recommend"], ["search"]])
def test_help_is_shown(asked: list[str]) -> None:
    """`--help` of the command and its subcommands names Heed, and `--quick` for subcommands."""
    shown = CliRunner().invoke(command.app, [*asked, "--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert "Heed" in shown.output
    assert ("--quick" in shown.output) == bool(asked)


def test_what_runs_elsewhere_imports_nothing_that_is_not_there() -> None:
    """sasrec.py imports only packages of RecTools' environment."""
    allowed = sys.stdlib_module_names | {"numpy", "torch", "pandas", "rectools", "fastapi"}
    allowed |= {"pydantic", "uvicorn"}
    waiting, seen = [FOLDER / "sasrec.py"], set[Path]()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in names:
                own = FOLDER.parents[2] / (name.replace(".", "/") + ".py")
                if own.is_file():
                    waiting += {own} - seen
                else:
                    assert name.split(".")[0] in allowed, f"{path} imports {name}"
    own_files = {"sasrec.py", "quality.py", "served.py", "metrics.py", "log_shards.py"}
    assert {path.name for path in seen} == own_files
