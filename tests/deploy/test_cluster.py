"""The profile `cluster` of docker-compose.yml, and its files in deploy/cluster/."""

from __future__ import annotations

import re
import runpy
import stat
from itertools import combinations
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict

from service.domain.settings import Settings
from service.engine.engine import Engine
from service.http.app import create_app
from tests.deploy.cluster_drill import ORDER
from tests.support.heed_process import ROOT
from tests.support.http_fake import FakeEngine

FOLDER = ROOT / "deploy" / "cluster"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
CLUSTER = {name: each for name, each in SERVICES.items() if each.get("profiles") == ["cluster"]}
NODES = [name for name in CLUSTER if name.startswith("postgres-")]
MEMBERS = [name for name in CLUSTER if name.startswith("etcd-")]
REPLICAS = [name for name in CLUSTER if name.startswith("replica-")]
PATRONI = yaml.safe_load((FOLDER / "patroni.yml").read_text())
BALANCER = (FOLDER / "haproxy.cfg").read_text()


def test_nothing_but_the_address_is_single() -> None:
    """There are two of each part that may fail, three that vote, and one balancer on loopback."""
    assert (len(NODES), len(MEMBERS), len(REPLICAS)) == (2, 3, 2)
    rest = set(CLUSTER) - {*NODES, *MEMBERS, *REPLICAS}
    assert rest == {"balancer", "credentials"}
    published = {name for name, each in CLUSTER.items() if "ports" in each}
    assert published == {"balancer"}
    assert "depends_on" not in SERVICES["api"]  # the single service needs nothing of it


def test_the_drill_kills_every_container() -> None:
    assert set(ORDER) == set(CLUSTER) - {"credentials"}


def test_containers_come_back_by_themselves() -> None:
    """Each has a restart policy, and a health check of its own or of Heed's image."""
    for name, service in CLUSTER.items():
        if name == "credentials":
            continue
        assert service["restart"] == "unless-stopped", name
        if name not in REPLICAS:
            assert service["healthcheck"]["start_interval"], name


def test_every_volume_and_file_exists() -> None:
    """Named volumes are declared, each node has its own, and mounted files are there."""
    declared = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in declared or (ROOT / Path(source)).exists(), (name, source)
    for one, other in combinations([*NODES, *MEMBERS, *REPLICAS], 2):
        own, others = (
            {v.split(":")[0] for v in CLUSTER[n]["volumes"] if not v.endswith(":ro")}
            for n in (one, other)
        )
        assert not own & others


def test_etcd_and_the_database_are_reached_from_within_alone() -> None:
    """Only the database's nodes reach etcd, and both are on networks that lead nowhere else."""
    networks = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["networks"]
    assert all(networks[name]["internal"] for name in ("database", "etcd"))
    members = {name for name, each in SERVICES.items() if "etcd" in each.get("networks", ())}
    assert members == {*NODES, *MEMBERS}
    for name in NODES:
        assert set(CLUSTER[name]["networks"]) == {"database", "etcd"}


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_ask_every_node_of_the_database(name: str) -> None:
    """The URL names all nodes and no password, and takes the node that takes writes."""
    settings = CLUSTER[name]["environment"]
    url = settings["HEED_STORE"]
    assert urlsplit(url).password is None
    given = conninfo_to_dict(url)
    assert str(given["host"]).split(",") == NODES
    assert given["target_session_attrs"] == "read-write"
    mounted = {volume.split(":")[1] for volume in CLUSTER[name]["volumes"]}
    assert str(Path(str(given["passfile"])).parent) in mounted
    hosts = settings["HEED_ALLOWED_HOSTS"].split(",")
    assert {"balancer", name} <= set(hosts)


def test_one_replica_creates_the_keys() -> None:
    """The first replica makes the first key and Prometheus' key, and no other does."""
    first, *others = REPLICAS
    assert "command" not in CLUSTER[first]  # its image's own, with --first-key
    assert "--first-key" in (ROOT / "Dockerfile").read_text().splitlines()[-1]
    assert "HEED_METRICS_KEY_FILE" in CLUSTER[first]["environment"]
    for name in others:
        assert "--first-key" not in CLUSTER[name]["command"]
        assert "HEED_METRICS_KEY_FILE" not in CLUSTER[name]["environment"]
        assert CLUSTER[name]["environment"]["HEED_KEYS"] == "required"


def test_only_a_standby_with_every_commit_is_promoted() -> None:
    """Patroni asks all members of etcd, and commits wait for a standby."""
    assert [host.partition(":")[0] for host in PATRONI["etcd3"]["hosts"]] == MEMBERS
    rules = PATRONI["bootstrap"]["dcs"]
    assert rules["synchronous_mode"] == "quorum"
    assert "synchronous_commit" not in rules["postgresql"]["parameters"]
    assert rules["ttl"] >= rules["loop_wait"] + 2 * rules["retry_timeout"]
    for name in MEMBERS:
        settings = CLUSTER[name]["environment"]
        assert settings["ETCD_NAME"] == name
        peers = dict(each.split("=") for each in settings["ETCD_INITIAL_CLUSTER"].split(","))
        assert list(peers) == MEMBERS
        assert peers[name] == settings["ETCD_INITIAL_ADVERTISE_PEER_URLS"]


def test_the_balancer_knows_every_replica() -> None:
    """Both backends have all replicas, and checks that differ: readiness, then life."""
    backends = dict(re.findall(r"^backend (\w+)\n((?: .*\n)+)", BALANCER, re.MULTILINE))
    assert set(backends) == {"ready", "alive"}
    for text in backends.values():
        assert re.findall(r"^ +server (\S+) ([\w-]+):8000", text, re.MULTILINE) == [
            (name, name) for name in REPLICAS
        ]
    assert "uri /health/ready" in backends["ready"]
    assert "uri /health/live" in backends["alive"]


def test_only_questions_are_asked_twice() -> None:
    """The balancer repeats what a key with the scope `read` may send, and nothing else."""
    (pattern,) = re.findall(r"^ +acl question path_reg (\S+)$", BALANCER, re.MULTILINE)
    assert "disable-l7-retry unless get or post question" in BALANCER
    engine = cast(Engine, FakeEngine())
    paths: dict[str, Any] = create_app(Settings(embedding_dim=4), engine=engine).openapi()["paths"]
    checked = 0
    for path, operations in paths.items():
        for method, operation in operations.items():
            asks = any("read" in scopes.get("key", ()) for scopes in operation["security"])
            if method == "get":
                assert asks or path == "/metrics" or path.startswith("/health/")
            if method == "post":
                example = re.sub(r"\{\w+\}", "a%2Fb", path)
                assert bool(re.search(pattern, example)) == asks, path
                checked += 1
    assert checked > 10


def test_passwords_are_made_once(tmp_path: Path) -> None:
    """Each is long and differs, later starts keep them, and only the owner reads libpq's file."""
    main = runpy.run_path(str(FOLDER / "credentials.py"))["main"]
    main(tmp_path)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(first) == {"superuser", "replication", "heed", "patroni", "pgpass"}
    assert len(set(first.values())) == len(first)
    assert all(len(text.strip()) >= 43 for text in first.values())
    assert first["pgpass"] == f"*:*:*:heed:{first['heed']}"
    assert stat.S_IMODE((tmp_path / "pgpass").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "superuser").stat().st_mode) == 0o640
    (tmp_path / "replication").unlink()
    main(tmp_path)
    second = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert second.pop("replication") != first.pop("replication")
    assert second == first
