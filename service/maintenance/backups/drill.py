"""Drill: restoring a backup into a temporary place, and answering a question from it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from service.domain.errors import Corrupt, Invalid
from service.domain.settings import PREFIX, Settings
from service.engine.engine import open_engine
from service.engine.recommend import recommend_items
from service.maintenance.backups.backup_writer import BackupProgress
from service.maintenance.backups.manifest import BackupManifest
from service.maintenance.backups.restore import restore
from service.questions.asked import RecommendIn
from service.runtime.data_layout import namespace_folder
from service.snapshots.text_encoders import is_folder


class DrillResult(NamedTuple):
    """A drill that succeeded. `answers` has the number of recommended items by namespace."""

    manifest: BackupManifest
    answers: dict[str, int]
    seconds: float


def drill(
    source: Path,
    settings: Settings,
    *,
    work: Path | None = None,
    progress: BackupProgress = lambda _stage, _done, _total: None,
) -> DrillResult:
    """Restore a backup into a temporary directory, recommend from each namespace, and remove it.

    Args:
        source: the backup's folder, which stays as it is.
        settings: of the service; the text encoder is the one recorded in the manifest.
        work: where the temporary directory is made; by default the system's place for them.
        progress: called as it proceeds.

    Raises:
        NotFound, Incompatible, Corrupt, StoreFull: as `restore`; Corrupt also where the service
            does not serve the model that the manifest names.
        Invalid: the manifest names a folder for the text encoder, and the settings another.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="heed-drill-", dir=work) as temporary:
        data = Path(temporary, "data")
        manifest = restore(source, data, progress=progress)
        encoder = manifest.settings.get("encoder", settings.encoder)
        if is_folder(encoder) and encoder != settings.encoder:  # a forged one may name any
            raise Invalid(
                "",
                f"the backup was served with the text encoder in the folder {encoder}: set "
                f"{PREFIX}ENCODER to it, if it is yours, and run the drill again",
            )
        answers = {}
        for name, content in manifest.namespaces.items():
            progress(f"{name}: answering a question", 0, 0)
            folder = namespace_folder(data, name)
            used = Settings.read(
                {**settings.model_dump(), "data": folder, "store": "", "encoder": encoder}
            )
            answers[name], model = asyncio.run(_recommend(used))
            if content.model not in (None, model):
                raise Corrupt(f"{source}: {name} serves the model {model}, not {content.model}")
    return DrillResult(manifest, answers, time.monotonic() - started)


async def _recommend(settings: Settings) -> tuple[int, str]:
    """Recommend for one user of the store, or for nobody; return the number of items, the model."""
    engine = await open_engine(settings)
    try:
        question = RecommendIn(user_id=await engine.typical_user(), limit=10)
        answer = await engine.ask(recommend_items, question)
    finally:
        await engine.close()
    return len(answer["items"]), answer["model_version"]
