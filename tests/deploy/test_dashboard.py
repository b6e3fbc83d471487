"""Grafana's dashboard: its queries, run by a real Prometheus that scrapes a real Heed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from service.domain.keys import issue_key
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.heed_process import ROOT
from tests.support.prometheus_server import PrometheusServer
from tests.support.server import Server
from tests.support.stores import run_on
from tests.support.tiny import AT, World, item_id
from tests.support.waiting import eventually
from tests.support.workers import children

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "heed.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
COUNT = 2


@pytest.fixture(scope="module")
def prometheus(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    """Prometheus with some seconds of series of two workers that answer, refuse and fail.

    The service needs keys, and Prometheus has the one that the service keeps for it.
    """
    data = world.copy(tmp_path_factory.mktemp("watched") / "data")
    folder = tmp_path_factory.mktemp("prometheus")
    key_file = folder / "metrics.key"
    key, token = issue_key("shop", frozenset({"read", "write"}), 0)
    run_on(SQLiteStore(data / STORE_FILE), lambda store: store.add_key(key))
    with (
        Server(data, workers=COUNT, metrics_key_file=key_file) as server,
        server.client() as http,
        PrometheusServer(server.url.removeprefix("http://"), folder, key_file) as prometheus,
    ):
        assert http.get("/metrics").status_code == 401
        http.headers["authorization"] = f"Bearer {token}"

        def scraped() -> bool:
            use(http)
            counted = prometheus.query(
                'sum(increase(heed_http_requests_total{route="/v1/score"}[10s])) > 0'
                " and count(heed_worker_up == 1) == 2 and count(heed_events) == 2"
                " and count_over_time(sum(rate(heed_errors_total[5s]))[5s:1s]) > 2"
            )
            return bool(counted)

        def use(http: Any) -> None:
            for n in range(4):
                http.post(
                    "/v1/score", json={"user_id": "u1", "item_ids": [item_id(0, n)], "at": AT}
                )
                http.post("/v1/recommend", json={"user_id": f"u{n}", "limit": 3})
            http.get("/v1/items/no-such-item")
            events = [{"user_id": "u1", "item_id": item_id(0, 1)}]
            http.post("/v1/events", json={"events": events})

        eventually(scraped)
        assert len(children(server.pid)) == COUNT
        yield prometheus


def queries() -> list[Any]:
    return [
        pytest.param(target, panel, id=f"{panel['title']}-{target['refId']}")
        for panel in PANELS
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(("target", "panel"), queries())
def test_a_query_has_data(
    prometheus: PrometheusServer, target: dict[str, str], panel: dict[str, Any]
) -> None:
    """Each query returns numbers within the range of its panel, with the labels of its legend."""
    expression = target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".*")
    assert "$" not in expression
    found = prometheus.query(expression)
    assert found, expression
    values = [float(series["value"][1]) for series in found]
    known = [value for value in values if not math.isnan(value)]
    assert known, expression  # a ratio of a label that was not used is NaN
    range_ = panel["fieldConfig"]["defaults"]
    assert min(known) >= range_.get("min", 0)
    assert max(known) <= range_.get("max", math.inf)
    labels = [part.partition("}}")[0] for part in target["legendFormat"].split("{{")[1:]]
    assert all(label in series["metric"] for label in labels for series in found)


def test_ready_and_workers_are_as_they_are(prometheus: PrometheusServer) -> None:
    """The first panels show what is known of this server, and no alert fires of it."""
    by_title = {panel["title"]: panel["targets"][0]["expr"] for panel in PANELS}

    def shown(title: str) -> list[dict[str, Any]]:
        return prometheus.query(by_title[title].replace("$instance", ".*"))

    assert [series["value"][1] for series in shown("Ready")] == ["1"]
    assert [series["value"][1] for series in shown("Workers up")] == [str(COUNT)]
    (model,) = shown("Model")
    assert model["metric"]["version"]
    alerts = prometheus.get("/api/v1/rules")["groups"][0]["rules"]
    assert all(rule["health"] == "ok" for rule in alerts if rule["evaluationTime"])
    assert [rule["name"] for rule in alerts if rule["state"] == "firing"] == []


def test_the_provisioning_fits_the_dashboard() -> None:
    """All panels use the provisioned source, and panels neither overlap nor share an id."""
    (source,) = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text()
    )["datasources"]
    used = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert used == {source["uid"]}
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
