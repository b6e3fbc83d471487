"""The field `degraded`: true while the current model version cannot be served."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from models.recommender.artifact import WEIGHTS_FILE
from service.domain.errors import ModelRejected
from service.domain.settings import Settings
from service.engine.compose import compose
from service.engine.engine import Engine
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.live_snapshot import Served
from service.snapshots.registry import Registry
from tests.support import asking
from tests.support.engine_story import opened
from tests.support.tiny import World, item_id


async def answers(engine: Engine) -> list[Any]:
    """One answer to each kind of question."""
    requester, item = asking.who(user_id="u0"), item_id(0, 1)
    return [
        await asking.ask(engine, asking.score(requester, (item,))),
        await asking.ask(engine, asking.recommend(requester, limit=3)),
        await asking.ask(engine, asking.search(requester, "rocket")),
        await asking.ask(engine, asking.similar(item)),
    ]


def damaged_weights(data: Path, version: str) -> None:
    """Activate a version through another registry and truncate its weights."""
    Registry(data / MODELS_FOLDER).activate(version)
    weights = data / MODELS_FOLDER / "versions" / version / WEIGHTS_FILE
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:100])


def damaged_pointer(data: Path, _version: str) -> None:
    """Damage the file that names the current version."""
    (data / MODELS_FOLDER / "current").write_bytes(b"damaged")


def removed(data: Path, version: str) -> None:
    """Activate a version through another registry and delete it."""
    Registry(data / MODELS_FOLDER).activate(version)
    shutil.rmtree(data / MODELS_FOLDER / "versions" / version)


@pytest.mark.parametrize("damage", [damaged_weights, damaged_pointer, removed])
async def test_answers_are_degraded_while_the_current_model_cannot_serve(
    world: World,
    tmp_path: Path,
    damage: Callable[[Path, str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The old model answers, degraded, until a valid version is activated; the log says so once."""
    data = world.copy(tmp_path / "data")
    async with opened(data) as engine:
        before = await answers(engine)
        assert {answer.degraded for answer in before} == {False}
        damage(data, world.second)
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                await engine.parts.live.follow_registry()
        assert len(caplog.records) == 1
        during = await answers(engine)
        assert {answer.degraded for answer in during} == {True}
        assert {answer.model_version for answer in during} == {world.first}
        if damage is damaged_weights:
            with pytest.raises(ModelRejected):  # which changes nothing
                await engine.activate(world.second)
            assert {answer.degraded for answer in await answers(engine)} == {True}
            await engine.activate(world.first)
        else:
            Registry(data / MODELS_FOLDER).activate(world.first)  # as another process
            await engine.parts.live.follow_registry()
        assert {answer.degraded for answer in await answers(engine)} == {False}


@pytest.mark.parametrize("damage", [damaged_weights, damaged_pointer])
@pytest.mark.parametrize("workers", [False, True])
async def test_a_start_with_a_damaged_model_serves_the_newest_intact_one(
    world: World,
    tmp_path: Path,
    damage: Callable[[Path, str], None],
    workers: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = world.copy(tmp_path / "data")
    damage(data, world.second)
    intact = world.first if damage is damaged_weights else world.second
    # The loop of a parent ends before it forks.
    load = partial(asyncio.run, loaded_alone(data)) if workers else lambda: None
    async with opened(data, await asyncio.to_thread(load)) as engine:
        found = await answers(engine)
        assert {answer.degraded for answer in found} == {True}
        assert {answer.model_version for answer in found} == {intact}
        is_ready, checks = await engine.ready()
        model = checks["details"]["model"]
        assert (is_ready, checks["model"], model["degraded"]) == (True, intact, True)
        assert ("current" if damage is damaged_pointer else WEIGHTS_FILE) in model["fault"]
        assert str(tmp_path) not in model["fault"]
        await engine.activate(intact)
        assert not (await answers(engine))[0].degraded
    assert f"heed models activate {intact}" in caplog.text


async def loaded_alone(data: Path) -> Served:
    """Return what a parent hands to the workers that it forks."""
    parts = compose(Settings(data=data), threads=1)
    try:
        await parts.live.open()
    finally:
        await parts.close()
    return parts.live.served
