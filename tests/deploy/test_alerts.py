"""Prometheus' configuration and alerts, checked and run by promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.heed_process import ROOT
from tests.support.prometheus_server import CONFIGURATION, program

ALERTS = yaml.safe_load((CONFIGURATION / "alerts.yml").read_text())
TESTS = yaml.safe_load((CONFIGURATION / "alerts_test.yml").read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def promtool(*arguments: str, folder: Path = CONFIGURATION) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    """Prometheus accepts its configuration and the rules that it names, where the key is."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(CONFIGURATION / name, tmp_path)
    configuration = (tmp_path / "prometheus.yml").read_text().replace("/keys/", f"{tmp_path}/")
    (tmp_path / "prometheus.yml").write_text(configuration)
    for name in ("metrics.key", "cluster-metrics.key"):
        (tmp_path / name).write_text("a key")
    promtool("check", "config", "prometheus.yml", folder=tmp_path)


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_each_alert_is_tested_both_ways() -> None:
    """For each alert there are series on which it fires and others on which it does not."""
    tried = {
        (case["alertname"], bool(case["exp_alerts"]))
        for test in TESTS["tests"]
        for case in test["alert_rule_test"]
    }
    names = {rule["alert"] for rule in rules()}
    assert tried == {(name, fires) for name in names for fires in (True, False)}


def test_alerts_name_metrics_that_exist() -> None:
    """Each metric of an expression is in docs/reference/metrics.md."""
    table = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    known = set(re.findall(r"^\| `(heed_\w+)` \|", table, re.MULTILINE))
    named = {
        re.sub(r"(_bucket|_count|_sum)$", "", name)
        for rule in rules()
        for name in re.findall(r"\bheed_\w+", rule["expr"])
    }
    assert named - known == set()
    assert named
