"""Search by a title with one mistyped word."""

import random
import string

import pytest

from models.ranking.search import search
from models.text.encoders import StaticEncoder
from service.domain.records import Item
from service.engine.search import match_text
from service.maintenance.search_calibration import build_snapshot
from service.snapshots.text_embeddings import EmbeddingCache

# Words of five letters and more, some of them a mistake apart: castle and cattle.
TEXT = """
anchor balcony basket blanket bottle bridge bucket butter candle carpet castle cattle cellar
chapel cheese chimney circus clover coffee copper cotton cradle curtain dagger desert dinner
dragon engine farmer feather ferry finger flower forest fountain garden garlic giraffe glacier
guitar hammer harbour helmet honey hospital island jacket jungle kettle kitchen ladder lantern
lemon library lobster machine magnet market meadow mirror monkey mountain museum mustard needle
ocean orchard organ oyster palace paper parrot pepper piano pigeon pillow pirate planet pocket
potato prison pumpkin puzzle rabbit railway ribbon river rocket saddle salmon school shadow
silver spider station statue storm sugar summer sunset teapot temple theatre thunder ticket
tiger tractor treasure trumpet tunnel turtle umbrella valley velvet village violin volcano
walnut weather whisper window winter wizard
"""
WORDS = TEXT.split()
TITLES = 300
EMBEDDINGS = EmbeddingCache(StaticEncoder())


def titles() -> list[str]:
    """Three words each, no two titles of the same words."""
    rng = random.Random(0)
    made: dict[frozenset[str], str] = {}
    while len(made) < TITLES:
        three = rng.sample(WORDS, 3)
        made.setdefault(frozenset(three), " ".join(three).capitalize())
    return list(made.values())


def edited(word: str, kind: str, rng: random.Random) -> str:
    """Another word one mistake away: a letter more, less or other, or two that changed places."""
    letter, at = rng.choice(string.ascii_lowercase), rng.randrange(len(word))
    if kind == "insert":
        other = word[:at] + letter + word[at:]
    elif kind == "delete":
        other = word[:at] + word[at + 1 :]
    elif kind == "substitute":
        other = word[:at] + letter + word[at + 1 :]
    else:
        at = min(at, len(word) - 2)
        other = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return other if other != word else edited(word, kind, rng)


@pytest.mark.parametrize("kind", ["insert", "delete", "substitute", "transpose"])
def test_a_title_with_one_mistake_finds_its_item(kind: str) -> None:
    """Every title with one edited letter finds its item among the first three."""
    called = titles()
    items = [Item(str(n), title=title, description="") for n, title in enumerate(called)]
    snapshot = build_snapshot(items, EMBEDDINGS)
    rng = random.Random(kind)
    lost = []
    for n, title in enumerate(called):
        words = title.split()
        place = rng.randrange(len(words))
        words[place] = edited(words[place], kind, rng)
        query = " ".join(words)
        assert query != title
        _, matches = match_text(
            query, snapshot, EMBEDDINGS.query, allowed=snapshot.catalogue.servable
        )
        rows = search(matches, limit=3).rows.tolist()
        if snapshot.catalogue.row(str(n)) not in rows:
            lost.append((title, query, [snapshot.catalogue.titles[row] for row in rows]))
    assert lost == []
