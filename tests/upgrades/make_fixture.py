"""Make the data directory of this version of Heed that later versions must open.

Run it once for each schema version, before the next one is begun, and commit what it makes:

    python -m tests.upgrades.make_fixture

It fills `tests/upgrades/v<SCHEMA_VERSION>` with invented events, items, profiles, scenarios, an
import and a tiny model, and `digests.json` beside the directory's store with the digests of its
records. An existing fixture is never made again: it stands for what a release wrote.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from models.training.presets import Preset, TrainConfig
from service.domain.records import Event, Item, User
from service.maintenance.backup import digest_file
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from tests.support import tiny

FOLDER = Path(__file__).parent
DIGESTS = "digests.json"
# As small as a model can be.
SMALLEST = Preset(
    "smallest",
    dim=8,
    blocks=1,
    dropout=0.0,
    transitions_per_item=2,
    train_config=TrainConfig(
        epochs=10, attention_epochs=4, batch_tokens=120, warmup_steps=5, learning_rate=1e-2
    ),
)


def make(data: Path) -> None:
    """Fill the directory `data`."""
    data.mkdir(parents=True)

    async def write() -> None:
        store = SQLiteStore(data / STORE_FILE)
        await store.put_items(tiny.items())
        await store.append(tiny.events())
        number = await store.begin_import("invented.csv")
        imported = [
            Event("mia", f"space-{n:02}", f"m{n}", "like", 2.0, 1_700_000_000_000_000 + n)
            for n in range(9)
        ]
        await store.append(imported, import_id=number)
        await store.put_items([Item("space-00", "imported over")], import_id=number)
        await store.put_user(User("mia", {"city": "Bonn"}, ("space",)))
        await store.put_scenario("home", {"question": "popular"})
        await store.delete_event("mia", "m3")
        await store.forget("u39")
        await store.close()

    asyncio.run(write())
    tiny.train(data, SMALLEST)
    # Both are derived and large.
    (data / EMBEDDINGS_FILE).unlink(missing_ok=True)
    shutil.rmtree(data / CACHE_FOLDER, ignore_errors=True)
    shutil.rmtree(data / MODELS_FOLDER / "staging", ignore_errors=True)
    (data / MODELS_FOLDER / "lock").unlink(missing_ok=True)
    digests = asyncio.run(digest_file(data / STORE_FILE))
    written = {table: each._asdict() for table, each in digests.items()}
    (data / DIGESTS).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    make(FOLDER / f"v{SCHEMA_VERSION}")
