"""The demo: it serves at once, and the model that is trained beside without a restart."""

import time
from pathlib import Path

from tests.support.server import PATIENCE, Server
from tests.support.tiny import World

MOST_LINES = 15  # before it serves, of the installation, the import and the service


def test_a_demo_serves_before_it_trains(world: World, tmp_path: Path) -> None:
    """A demo answers untrained; it prints the time left, and its own model is then served."""
    data = world.copy(tmp_path / "data", trained=False)
    asked = {"user_id": "u9", "limit": 5, "explain": 1}
    with Server(data, command="demo") as server, server.client() as http:
        # The first line of the training may be there; nothing else may come before the address.
        before = server.out().partition("Heed serves on")[0] + server.log()
        assert len(before.splitlines()) < MOST_LINES // 2
        answers = [http.post("/v1/recommend", json=asked).json()]
        assert answers[0]["model_version"] == "untrained"
        assert answers[0]["items"]
        end = time.monotonic() + PATIENCE
        while " is served now" not in server.out():
            assert time.monotonic() < end, server.out()
            answers.append(http.post("/v1/recommend", json=asked).json())
            time.sleep(0.1)
        version = http.post("/v1/recommend", json=asked).json()["model_version"]
        (job,) = http.get("/v1/jobs").json()["jobs"]
    assert (job["state"], job["result"]["version"]) == ("succeeded", version)
    for line in (*server.out().splitlines(), *server.log().splitlines()):
        assert not line.startswith("{"), line
        assert "heed.access" not in line
    assert f"The model {version} is served now." in server.out()
    assert "of at most 44, about " in server.out()
    assert {answer["model_version"] for answer in answers} <= {"untrained", version}
    assert all(answer["items"] for answer in answers)

    with Server(data, command="demo") as again, again.client() as http:
        assert http.post("/v1/recommend", json=asked).json()["model_version"] == version
        assert len(http.get("/v1/jobs").json()["jobs"]) == 1  # nothing is trained twice
