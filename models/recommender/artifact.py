"""`Trained`: a trained model with the ids it was trained on, and the files both are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save

from models.data.interactions import DISLIKE
from models.recommender.config import RecommenderConfig
from models.recommender.recommender import UNBOUNDED, Recommender

Counts = NDArray[np.int64]

FORMAT = 3
_EVENTS = "events"  # the tensor of events per item
_WHOLE = {"columns": torch.int32, "horizon": torch.int64}  # tensors of whole numbers
WEIGHTS, DESCRIPTION, ITEMS = "weights.safetensors", "model.json", "items.json"


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained model with the ids it was trained on.

    Raises ValueError where the parts do not fit each other or a weight is not finite.
    """

    model: Recommender
    item_ids: tuple[str, ...]  # row order of the id embedding
    counts: Counts  # [N] events per item in training
    encoder: str  # name of the text encoder whose vectors the model reads
    metadata: Mapping[str, Any]
    types: tuple[str, ...] = ("view",)  # names of the types of events, row order

    def __post_init__(self) -> None:
        items = self.model.config.items
        if len(self.item_ids) != items or self.counts.shape != (items,):
            raise ValueError(
                f"the model has {items} items, the vocabulary {len(self.item_ids)}, "
                f"the counts {self.counts.shape}: they must agree"
            )
        if np.any(self.counts < 0):
            raise ValueError("counts must not be negative")
        _check_distinct(self.item_ids)
        _check_types(self.types, self.model.config)
        for name, weight in self.model.state_dict().items():
            if not torch.isfinite(weight).all():
                raise ValueError(f"weight {name} is not finite everywhere")
        columns, counts = self.model.followers
        if ((columns < 0) | (columns > items)).any():
            raise ValueError(f"followers must be rows of {items} items, or {items} for none")
        if (counts < 0).any():
            raise ValueError("counts of followers must not be negative")
        if not 0 <= int(self.model.horizon) <= UNBOUNDED:
            raise ValueError(f"the horizon must be in [0, {UNBOUNDED}] microseconds")

    def pack(self) -> dict[str, bytes]:
        """Named byte strings: safetensors and JSON, nothing pickled."""
        tensors = {name: value.contiguous() for name, value in self.model.state_dict().items()}
        tensors[_EVENTS] = torch.from_numpy(self.counts)
        description = {
            "format": FORMAT,
            "config": self.model.config.as_dict(),
            "encoder": self.encoder,
            "types": self.types,
            "metadata": dict(self.metadata),
        }
        return {
            WEIGHTS: save(tensors),
            DESCRIPTION: json.dumps(description, indent=1, allow_nan=False).encode(),
            ITEMS: json.dumps(self.item_ids, ensure_ascii=False).encode(),
        }

    @classmethod
    def unpack(cls, files: Mapping[str, bytes]) -> Trained:
        """What `pack` wrote.

        Raises:
            ValueError: saying which file is missing, malformed or does not fit the others.
        """
        for name in (WEIGHTS, DESCRIPTION, ITEMS):
            if name not in files:
                raise ValueError(f"{name} is missing")
        with _blamed(DESCRIPTION):
            description = json.loads(files[DESCRIPTION])
            if description["format"] != FORMAT:
                raise ValueError(f"format {description['format']} is not {FORMAT}")
            encoder, metadata = description["encoder"], dict(description["metadata"])
            if not isinstance(encoder, str):
                raise ValueError(f"encoder must be a name, not {encoder!r}")
            config = RecommenderConfig(**description["config"])
            types = description["types"]
            if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
                raise ValueError("types must be a list of names")
            _check_types(types, config)
        with _blamed(ITEMS):
            item_ids = json.loads(files[ITEMS])
            if not isinstance(item_ids, list) or not all(isinstance(id_, str) for id_ in item_ids):
                raise ValueError("must be a list of strings")
            if len(item_ids) != config.items:
                raise ValueError(f"{len(item_ids)} ids, where the model has {config.items} items")
            _check_distinct(item_ids)
        with _blamed(WEIGHTS):
            tensors = load(files[WEIGHTS])
            counts = tensors.pop(_EVENTS)
            if counts.dtype != torch.int64:
                raise ValueError(f"counts must be int64, not {counts.dtype}")
            for name, weight in tensors.items():
                wanted = _WHOLE.get(name, torch.float32)
                if weight.dtype != wanted:
                    raise ValueError(f"weight {name} must be {wanted}, not {weight.dtype}")
            # Before a model of the size that the description claims takes any memory.
            last = f"encoder.blocks.{config.blocks - 1}.out.weight"
            if (
                tensors["content.weight"].shape != (config.dim, config.content)
                or tensors["columns"].shape != (config.items, config.followers)
                or (config.blocks and last not in tensors)
            ):
                raise ValueError(f"its weights are not of the shape that {DESCRIPTION} gives")
            model = Recommender(config)
            model.load_state_dict(tensors)
            ids, names = tuple(item_ids), tuple(types)
            return cls(model.eval(), ids, counts.numpy(), encoder, metadata, names)


@contextmanager
def _blamed(file: str) -> Iterator[None]:
    """Whatever is wrong inside is a ValueError that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError,
            SafetensorError) as error:  # fmt: skip
        raise ValueError(f"{file}: {error}") from error


def _check_distinct(item_ids: Sequence[str]) -> None:
    if len(set(item_ids)) < len(item_ids):
        raise ValueError("item ids must be distinct")


def _check_types(types: Sequence[str], config: RecommenderConfig) -> None:
    if len(types) != config.types:
        raise ValueError(f"{len(types)} names of types, where the model has {config.types}")
    if len(set(types)) < len(types):
        raise ValueError("types must be distinct")
    dislike = types.index(DISLIKE) if DISLIKE in types else -1
    if dislike != config.dislike:
        raise ValueError(f"the model's dislikes are of type {config.dislike}, not {dislike}")
