"""`make bench`: timing, correctness of the figures, processes and the report."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from rich.console import Console
from starlette.testclient import TestClient

from models.ranking.recommend import INDEXED_CANDIDATES, Ranked
from models.ranking.recommend import candidates as find_candidates
from models.ranking.scoring import Scores, score
from service.domain.errors import NotFound, Unavailable
from service.domain.records import Event, Item
from service.domain.timestamps import to_rfc3339
from service.engine.search import SearchOutcome
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.benchmarks import suite
from tests.benchmarks.attention import kernels
from tests.benchmarks.attention.kernels import Kernel
from tests.benchmarks.attention.long_attention import exact_contexts
from tests.benchmarks.catalogue import candidates
from tests.benchmarks.harness import conditions, machine
from tests.benchmarks.harness.closed_loop import Load, closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned, serving
from tests.benchmarks.harness.timing import alternate, ratios, spread
from tests.benchmarks.http import ingest, latency
from tests.benchmarks.http.floor import floor_app
from tests.benchmarks.http.latency import Case
from tests.benchmarks.workload.data import BenchmarkData, prepare_data, random_model
from tests.benchmarks.workload.in_process import jobs
from tests.benchmarks.workload.loaded import load_data
from tests.benchmarks.workload.questions import TARGETS, questions
from tests.support import reference

TINY = suite.Effort(
    items=1_200,
    users=6,
    memories=(300,),
    kernel_rounds=1,
    catalogues=(600,),
    histories=(20,),
    judges=2,
    candidate_rounds=1,
    ingest_rounds=2,
    batches=1,
    http_rounds=2,
    requests=4,
    floor_at_work=True,
)
SLEEP = "print('http://127.0.0.1:1', flush=True); import time; time.sleep(60)"


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def files(folder: Path) -> dict[str, str]:
    """What a folder holds, to the byte."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ------------------------------------------------------------------------------ timing


def test_turns_are_taken_and_times_are_of_one_call() -> None:
    """Every work is called in every round, each round begins with another, and repeats count."""
    now = 0.0
    called: list[str] = []

    def work(name: str, seconds: float) -> Any:
        def call() -> None:
            nonlocal now
            now += seconds
            called.append(name)

        return call

    works = {"slow": work("slow", 0.4), "quick": work("quick", 0.1)}
    timed = alternate(works, 3, shortest=0.25, clock=lambda: now)
    assert timed.ratio("slow", "quick") == pytest.approx((4, 4, 4))
    assert timed.seconds("quick") == pytest.approx((0.1, 0.1, 0.1))
    quick = ["quick"] * 3  # a sample lasts at least a quarter of a second
    first, second = ["slow", *quick], [*quick, "slow"]
    assert called == ["slow"] * 2 + ["quick"] * 2 + first + second + first


def test_ratios_are_of_rounds() -> None:
    """A round that is slow for both sides leaves the ratio as it is."""
    assert ratios([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == (2.0, 2.0, 2.0)
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 2.0, 4.0)


# ------------------------------------------------------------------------------ kernels


@pytest.fixture(scope="module")
def measured() -> list[Kernel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return kernels.measure((40, 300), 1, targets=(1, 3))
    finally:
        torch.set_num_threads(before)


def test_the_truth_is_the_definition() -> None:
    """The float64 reference equals a loop over plain numbers."""
    material = kernels.clustered_rows(30, 2)
    truth = exact_contexts(material)
    for head, (keys, values, bias, queries) in enumerate(
        zip(material.keys, material.values, material.log_weights, material.queries, strict=True)
    ):
        logits = reference.logits(
            queries.double().numpy(),
            keys.double().numpy(),
            bias.double().expand(2, -1).numpy(),
            np.ones((2, 30)),
            reference.scaled_dot,
        )
        weights = np.array([reference.softmax(row.tolist()) for row in logits])
        context = weights @ values.double().numpy()
        np.testing.assert_allclose(truth[head].numpy(), context, atol=1e-6)


def test_exact_paths_are_exact(measured: list[Kernel]) -> None:
    """All three paths stay within float32 of the truth, for every size and number of targets."""
    sizes = [(each.rows, each.targets) for each in measured]
    assert sizes == [(40, 1), (40, 3), (300, 1), (300, 3)]
    for each in measured:
        assert set(each.errors) == {"scaled_dot_product_attention", "attend", "fused"}
        assert max(each.errors.values()) < 1e-5


# ------------------------------------------------------------------------------ candidates


def test_recall_counts_the_best_of_all_scores() -> None:
    """It is the share of the highest scores among the candidates, and 1 when all items are."""
    snapshot = candidates.random_snapshot(700)
    memories = [candidates.random_memory(snapshot, 30, seed) for seed in range(3)]
    found = candidates.measure(
        (400,), 1, histories=(20,), users=2, own=(snapshot, memories)
    ).catalogues
    assert [(each.items, each.own, each.users) for each in found] == [
        (400, False, 2),
        (700, True, 3),
    ]
    assert found[0].recall == found[0].recall_without == 1.0
    hits = 0
    for memory in memories:
        totals = score(snapshot, memory, np.arange(700)).total.tolist()
        best = sorted(range(700), key=lambda row: -totals[row])[: candidates.TOP]
        among = find_candidates(snapshot, memory, snapshot.has_vector, INDEXED_CANDIDATES)
        hits += len(set(best) & set(among.tolist()))
    assert found[1].recall_without == pytest.approx(hits / (3 * candidates.TOP))
    assert 0.5 < found[1].recall <= 1.0


def test_a_random_model_is_the_same_again_and_leaves_the_generator_alone() -> None:
    """Two of one seed are equal; numbers drawn afterwards are what they would have been."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = random_model(50, content=8, seed=5), random_model(50, content=8, seed=5)
    assert torch.equal(torch.rand(3), expected)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])


# ------------------------------------------------------------------------------ ingestion


def test_requests_and_rows_are_the_same_events() -> None:
    """What is sent and what SQLite writes agree event by event, and no id comes twice."""
    ground = BenchmarkData(Path(), "", 3, 0, 0, ("a", "b", "c"), (), (), (), None)
    made = ingest.batches(ground, 3)
    users: dict[int, str] = {}
    seen: set[str] = set()
    for batch in made:
        sent = orjson.loads(batch.request.partition(b"\r\n\r\n")[2])["events"]
        by_id = {event["event_id"]: event for event in sent}
        assert len(sent) == len(batch.rows) == ingest.BATCH
        for user_no, timestamp, _, item_no, _, weight, event_id, _ in batch.rows:
            event = by_id.pop(event_id)
            assert users.setdefault(user_no, event["user_id"]) == event["user_id"]
            assert users.setdefault(item_no, event["item_id"]) == event["item_id"]
            assert to_rfc3339(timestamp) == event["timestamp"]
            assert weight == 1.0
            assert event_id not in seen
            seen.add(event_id)
        assert not by_id
    keys = [row[:3] for batch in made for row in batch.rows]
    assert len(set(keys)) == len(keys)


# ------------------------------------------------------------------------------ the ground


def test_a_store_in_use_is_copied_as_of_one_moment(tmp_path: Path) -> None:
    """What was acknowledged and still lies in the log is in the copy; the file is not touched."""

    def copied() -> None:
        with prepare_data(tmp_path) as ground:
            assert (ground.items, ground.users, ground.events) == (1, 2, 3)
            assert ground.item_ids == ("a",)
            assert ground.askers == (("ada", 2),)
            assert ground.model is None
            copy = SQLiteStore(ground.data / STORE_FILE)
            assert asyncio.run(copy.append([Event("ada", "a")])).stored == 1
            asyncio.run(copy.close())

    async def use() -> None:
        store = SQLiteStore(tmp_path / STORE_FILE)
        await store.put_items([Item("a"), Item("b", hidden=True)])
        await store.append([Event("ada", "a"), Event("ada", "b"), Event("bob", "a")])
        before = (tmp_path / STORE_FILE).read_bytes()
        assert (tmp_path / f"{STORE_FILE}-wal").stat().st_size
        await asyncio.to_thread(copied)
        assert (tmp_path / STORE_FILE).read_bytes() == before
        assert (await store.counts())["events"] == 3
        await store.close()

    asyncio.run(use())


@pytest.mark.parametrize("fill", [False, True])
def test_nothing_to_measure_is_said(tmp_path: Path, fill: bool) -> None:
    """A directory without a store, or with an empty one, is refused by name."""
    if fill:
        asyncio.run(SQLiteStore(tmp_path / STORE_FILE).close())
    with pytest.raises(NotFound, match=str(tmp_path)), prepare_data(tmp_path):
        pass


# ------------------------------------------------------------------------------ processes


def test_a_server_that_ends_says_why() -> None:
    """The error of a server that exits has its last output."""
    with (
        pytest.raises(Unavailable, match=r"ended with 1: .*no room"),
        serving(["-c", "raise SystemExit('no room')"], core=None, environment={}),
    ):
        pass


def test_a_server_is_watched_and_stopped_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has the core and the environment it was given, and is gone when the block fails."""
    core = Cores.choose().server
    code = f"import os; assert os.environ['HEED_X'] and 'HEED_Y' not in os.environ; {SLEEP}"
    monkeypatch.setenv("HEED_Y", "1")
    watched: list[Server] = []

    def fail() -> None:
        with serving(["-c", code], core=core, environment={"HEED_X": "1"}) as server:
            watched.append(server)
            assert core is None or os.sched_getaffinity(server.pid) == {core}
            memory = server.memory()
            assert memory is not None
            assert memory["highest"] >= memory["resident"] > 2**20
            assert server.cpu_seconds() is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not alive(watched[0].pid)
    assert (watched[0].memory(), watched[0].cpu_seconds()) == (None, None)


def test_server_ends_with_the_benchmark_process() -> None:
    """Killed without a chance to clean up, the benchmark leaves no server behind."""
    code = (
        "import time; from tests.benchmarks.harness.processes import serving\n"
        f"with serving(['-c', {SLEEP!r}], core=None, environment={{}}) as server:\n"
        "    print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as measuring:
        assert measuring.stdout is not None
        pid = int(measuring.stdout.readline())
        assert alive(pid)
        measuring.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def test_pinning_ends() -> None:
    """After `pinned` the thread has its previous affinity."""
    before = os.sched_getaffinity(0)
    with pinned(min(before)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_a_connection_that_is_lost_is_an_error() -> None:
    """A connection closed before the response raises ConnectionError."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with connected(port, 1) as connections:
                with pytest.raises(ConnectionError):
                    await closed_loop(connections, [encode_post("/", {})])

    asyncio.run(ask())


# ------------------------------------------------------------------------------ all of it


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run on a copy of a small data set, and what was seen around it."""
    data = tmp_path_factory.mktemp("data")
    folders: list[Path] = []
    with prepare_data(None, items=TINY.items, users=TINY.users) as ground:
        for name in (STORE_FILE, MODELS_FOLDER):
            os.rename(ground.data / name, data / name)
    before = files(data)
    patch = pytest.MonkeyPatch()
    described = machine.describe_machine

    def seen(folder: Path, cores: Cores) -> dict[str, Any]:
        folders.append(folder)
        return described(folder, cores)

    patch.setattr(machine, "describe_machine", seen)
    shown = io.StringIO()
    try:
        report = suite.run(Console(file=shown, width=200), data=data, effort=TINY)
    finally:
        patch.undo()
    return {
        "report": report,
        "shown": shown.getvalue(),
        "folders": folders,
        "before": before,
        "after": files(data),
    }


def test_a_run_leaves_nothing_behind(ran: dict[str, Any]) -> None:
    """The copy is gone, and the data is what it was."""
    assert ran["folders"]
    assert not ran["folders"][0].exists()
    assert ran["after"] == ran["before"]


def test_a_report_is_plain_and_says_what_it_is_of(ran: dict[str, Any]) -> None:
    """The report is JSON without NaN and describes the machine and the data."""
    report = json.loads(json.dumps(ran["report"], allow_nan=False))
    assert set(report) == {
        "quick", "machine", "data", "kernels", "candidates", "histories", "ingest", "http", "memory"
    }  # fmt: skip
    assert {"processor", "cores", "placement", "torch", "sqlite"} <= report["machine"].keys()
    assert report["data"]["items"] == TINY.items
    assert report["data"]["histories"] == [200, 1000]
    assert report["data"]["model"] is not None
    for part in ("Attention over n rows", "candidates of", "Durable events", "Questions over HTTP"):
        assert part in ran["shown"]


def test_timing_compares_one_appended_event_with_the_full_history(ran: dict[str, Any]) -> None:
    """The report has the ratio of appending one event to encoding all, per preset."""
    found = ran["report"]["histories"]
    assert [each["preset"] for each in found] == ["quick", "best"]
    for each in found:
        assert each["append_ratio"]["median"] > 0
        assert each["append_ratio_with_the_windows_moves"]["median"] > 0
        assert each["kept_bytes"] > 200 * 4 * 64
    assert "A new event of a history of 200" in ran["shown"]


def test_every_acknowledged_event_was_counted(ran: dict[str, Any]) -> None:
    """As many events as were sent are reported; the run itself counted them in the store."""
    found = ran["report"]["ingest"]
    assert found["events"] == ingest.BATCH * (1 + TINY.ingest_rounds * TINY.batches)
    for rate in ("events_per_second", "sqlite_rows_per_second", "sqlite_rows_per_core_second"):
        assert found[rate]["median"] > 0
    assert found["ratio"]["q25"] <= found["ratio"]["median"] <= found["ratio"]["q75"]


def test_all_servers_answer_with_the_same_size(ran: dict[str, Any]) -> None:
    """No request fails, and all servers' answers have nearly the same size."""
    cases = ran["report"]["http"]["cases"]
    assert [(case["question"], case["connections"]) for case in cases] == [
        (name, connections)
        for name in ("score-200", "recommend-200", "score-1000", "recommend-1000", "search")
        for connections in latency.CONCURRENCY
    ]
    for case in cases:
        assert case["failed"] == 0
        assert case["requests"] == TINY.http_rounds * TINY.requests
        sizes = case["answer_bytes"]
        assert sizes["heed"] == sizes["plain"] > 1000
        assert sizes["typed"] == pytest.approx(sizes["heed"], rel=0.02)  # floats spelt otherwise
        assert {"attend", "store", "total"} <= case["stages"].keys()
        assert case["job_seconds"] > 0
        assert case["ratio_to_floor_and_job"]["typed"]["median"] > 0
        assert case["ratio_to_working_floor"]["median"] > 0
        for seconds in case["seconds"].values():
            assert 0 < seconds["p50"] <= seconds["p95"] <= seconds["p99"]


def test_questions_are_about_items_that_exist() -> None:
    """Targets are distinct items of the catalogue, and the same questions come again."""
    ids = tuple(f"i{n}" for n in random.Random(0).sample(range(1000), 300))
    titles = ("The river of stone and glass", "Winter")
    ground = BenchmarkData(Path(), "", 300, 1, 5, ids, titles, (("ada", 5),), (), None)
    asked = questions(ground)
    assert asked == questions(ground)
    assert [question.name for question in asked] == ["score-5", "recommend-5", "search"]
    for body in asked[0].bodies:
        assert len(set(body["item_ids"])) == TARGETS
        assert set(body["item_ids"]) <= set(ids)
    assert {body["query"] for body in asked[2].bodies} == {"The river of", "Winter"}
    assert [q.name for q in questions(replace(ground, titles=()))] == ["score-5", "recommend-5"]


def test_added_time_by_hand() -> None:
    """The added time of a case is Heed's time per request over floor plus job, by hand."""

    def loads(*milliseconds: float) -> list[Load]:
        return [Load(1.0, [each / 1e3] * 3) for each in milliseconds]

    case = Case(
        "score-5",
        5,
        4,
        {"heed": loads(12, 8, 16), "plain": loads(2, 2, 4), "typed": loads(4, 4, 8)},
        [0.002, 0.001, 0.003],
        {},
        {},
    )
    assert case.added("typed").median == pytest.approx(1.0)  # 3 / (1 + 2), 2 / (1 + 1), 4 / (2 + 3)
    assert case.added("typed").low == pytest.approx(0.9)
    assert case.added("plain").median == pytest.approx(1.2)  # 3 / 2.5, 2 / 1.5, 4 / 4


def test_the_floor_at_work_does_one_job_for_each_request() -> None:
    """The working floor runs one job per request, in turn, and returns the given answer."""
    done: list[str] = []
    works = {"ours": [partial(done.append, name) for name in "ab"]}
    answer = {"items": [], "model_version": "v", "retrieval": "exact", "degraded": False}
    answers = {name: {"ask": "score", "answer": answer} for name in ("ours", "other")}
    client = TestClient(floor_app(answers, works))
    for name in ("ours", "other", "ours", "ours"):
        found = client.post(f"/typed/{name}", json={"item_ids": ["x"]})
        assert (found.status_code, found.json()) == (200, answer)
    assert client.post("/plain/ours", json={"item_ids": ["x"]}).json() == answer
    assert done == ["a", "b", "a"]


def test_the_floor_is_served_by_a_process_of_its_own(tmp_path: Path) -> None:
    """The command says its address, and answers the bytes of its file."""
    answer = {"items": [], "model_version": "v", "retrieval": "exact", "degraded": False}
    path = tmp_path / "answers.json"
    path.write_bytes(orjson.dumps({"one": {"ask": "score", "answer": answer}}))

    async def ask() -> object:
        async with connected(server.port, 1) as (connection,):
            body = {"item_ids": ["x"]}
            return (await connection.send(encode_post("/plain/one", body))).json()

    arguments = ["-m", "tests.benchmarks.http.floor", str(path)]
    with serving(arguments, core=None, environment={}) as server:
        assert asyncio.run(ask()) == answer


def test_the_job_alone_is_what_is_answered() -> None:
    """The in-process jobs return the items of the answers over HTTP."""
    with prepare_data(None, items=300, users=4) as ground:
        asked = questions(ground)
        own = load_data(ground)
        works, ids = jobs(ground, own, asked), own.snapshot.catalogue.vocabulary

        async def answers() -> dict[str, list[str]]:
            found = {}
            async with connected(server.port, 1) as (connection,):
                for each in asked:
                    answer = await connection.send(encode_post(f"/v1/{each.ask}", each.bodies[0]))
                    found[each.name] = [item["item_id"] for item in answer.json()["items"]]
            return found

        with conditions.serve_data(ground, Cores(None, None)) as server:
            said = asyncio.run(answers())
        assert {each.ask for each in asked} == {"score", "recommend", "search"}
        for each in asked:
            found = works[each.name][0]()
            if each.ask == "score":
                assert isinstance(found, Scores)
                assert len(found.total) == len(said[each.name])
            elif each.ask == "recommend":
                assert isinstance(found, Ranked)
                assert [ids.id(row) for row in found.rows.tolist()] == said[each.name]
            else:
                assert isinstance(found, SearchOutcome)
                assert [ids.id(row) for row in found.found.rows.tolist()] == said[each.name]
