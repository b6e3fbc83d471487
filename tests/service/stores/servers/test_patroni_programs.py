"""Error for a machine without Patroni, which names the packages."""

from __future__ import annotations

import shutil

import pytest

from tests.support.patroni_cluster import PatroniCluster


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster without Patroni or etcd is refused with the names of the packages."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(FileNotFoundError, match="apt-get install patroni etcd-server"):
        PatroniCluster()
