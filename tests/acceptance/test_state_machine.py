"""Real servers under random operations, kills and restarts, beside a model of dicts."""

from __future__ import annotations

from pathlib import Path

from tests.support.postgres_server import PostgresDatabases
from tests.support.state_machine import DatabasePlace, FilesPlace, run_machine
from tests.support.tiny import World


def test_a_server_agrees_with_a_model_of_dicts(world: World, tmp_path: Path) -> None:
    """Writes, forgets, merges, swaps, trainings, kills and restarts leave what the model has."""
    run_machine(FilesPlace(world), tmp_path)


def test_replicas_agree_with_a_model_of_dicts(
    world: World, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """The same holds of two servers over one PostgreSQL, of which any is called or killed."""
    run_machine(DatabasePlace(world, postgres.create_database), tmp_path)
