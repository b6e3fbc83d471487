"""The trained artifact: a model, the ids it was trained on, and their file format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models.data.interactions import DISLIKE
from models.recommender.recommender import MAX_REQUEST_GAP, Recommender, RecommenderConfig

ItemCounts = NDArray[np.int64]

ARTIFACT_FORMAT = 5
_DRAWING = ("normal_", "uniform_", "kaiming_uniform_")  # that initialise weights at random
_ITEM_COUNTS = "item_counts"  # name of the tensor beside the weights
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "I32": torch.int32}
_INTEGER_BUFFERS = {
    "statistics.transition_items": torch.int32,
    "statistics.similar_items": torch.int32,
    "statistics.max_request_gap": torch.int64,
}
WEIGHTS_FILE, DESCRIPTION_FILE, ITEMS_FILE = "weights.safetensors", "model.json", "items.json"


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """A trained model with the ids it was trained on.

    Raises ValueError if the parts do not fit each other or a weight is not finite.
    """

    model: Recommender
    item_ids: tuple[str, ...]  # row order of the id embedding
    item_counts: ItemCounts  # [N] events per item in training
    text_encoder: str  # name of the text encoder whose vectors are the model's content
    metadata: Mapping[str, Any]
    event_types: tuple[str, ...] = ("view",)  # names of the event types, row order

    def __post_init__(self) -> None:
        items = self.model.config.n_items
        if len(self.item_ids) != items or self.item_counts.shape != (items,):
            raise ValueError(
                f"the model has {items} items, the vocabulary {len(self.item_ids)}, "
                f"the counts {self.item_counts.shape}: they must agree"
            )
        if np.any(self.item_counts < 0):
            raise ValueError("counts must not be negative")
        _check_distinct(self.item_ids)
        _check_types(self.event_types, self.model.config)
        for name, weight in self.model.state_dict().items():
            # A finite sum, which takes no memory, is of finite elements; others may overflow it.
            if not (torch.isfinite(weight.sum()) or torch.isfinite(weight).all()):
                raise ValueError(f"weight {name} is not finite everywhere")
        columns, counts, _ = self.model.statistics.transition_counts
        if ((columns < 0) | (columns > items)).any():
            raise ValueError(f"transition items must be in [0, {items}]")
        if (counts < 0).any():
            raise ValueError("transition counts must not be negative")
        similarity = self.model.statistics.similarity
        if similarity is not None and ((similarity.items < 0) | (similarity.items > items)).any():
            raise ValueError(f"similar items must be in [0, {items}]")
        if not 0 <= int(self.model.statistics.max_request_gap) <= MAX_REQUEST_GAP:
            raise ValueError(f"max_request_gap must be in [0, {MAX_REQUEST_GAP}] microseconds")

    def to_files(self) -> dict[str, bytes]:
        """Serialise to named byte strings: safetensors and JSON, nothing pickled."""
        tensors = {name: value.contiguous() for name, value in self.model.state_dict().items()}
        tensors[_ITEM_COUNTS] = torch.from_numpy(self.item_counts)
        description = {
            "format": ARTIFACT_FORMAT,
            "config": self.model.config.as_dict(),
            "text_encoder": self.text_encoder,
            "event_types": self.event_types,
            "metadata": dict(self.metadata),
        }
        return {
            WEIGHTS_FILE: save(tensors),
            DESCRIPTION_FILE: json.dumps(description, indent=1, allow_nan=False).encode(),
            ITEMS_FILE: json.dumps(self.item_ids, ensure_ascii=False).encode(),
        }

    @classmethod
    def from_files(cls, files: Mapping[str, bytes | bytearray]) -> TrainedModel:
        """Read what `to_files` wrote. The weights are views of a bytearray, and copies of bytes.

        Raises ValueError, naming the file that is missing, malformed or does not fit the others.
        """
        for name in (WEIGHTS_FILE, DESCRIPTION_FILE, ITEMS_FILE):
            if name not in files:
                raise ValueError(f"{name} is missing")
        with _naming(DESCRIPTION_FILE):
            description = json.loads(files[DESCRIPTION_FILE])
            if description["format"] != ARTIFACT_FORMAT:
                raise ValueError(
                    f"format {description['format']} of an artifact cannot be read, only "
                    f"{ARTIFACT_FORMAT}: train the model again"
                )
            encoder, metadata = description["text_encoder"], dict(description["metadata"])
            if not isinstance(encoder, str):
                raise ValueError(f"text_encoder must be a name, not {encoder!r}")
            config = RecommenderConfig(**description["config"])
            types = description["event_types"]
            if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
                raise ValueError("event_types must be a list of names")
            _check_types(types, config)
        with _naming(ITEMS_FILE):
            item_ids = json.loads(files[ITEMS_FILE])
            if not isinstance(item_ids, list) or not all(isinstance(id_, str) for id_ in item_ids):
                raise ValueError("must be a list of strings")
            if len(item_ids) != config.n_items:
                raise ValueError(f"{len(item_ids)} ids, where the model has {config.n_items} items")
            _check_distinct(item_ids)
        with _naming(WEIGHTS_FILE):
            tensors = _tensors_in(files[WEIGHTS_FILE])
            counts = tensors.pop(_ITEM_COUNTS)
            if counts.dtype != torch.int64:
                raise ValueError(f"{_ITEM_COUNTS} must be int64, not {counts.dtype}")
            for name, weight in tensors.items():
                wanted = _INTEGER_BUFFERS.get(name, torch.float32)
                if weight.dtype != wanted:
                    raise ValueError(f"weight {name} must be {wanted}, not {weight.dtype}")
            # Checked before a model of the described size is allocated.
            last = f"encoder.blocks.{config.blocks - 1}.out.weight"
            width = config.attention_heads * (config.dim // config.heads)
            if (
                tensors["content_projection.weight"].shape != (config.dim, config.content_dim)
                or tensors["statistics.transition_items"].shape
                != (config.n_items, config.transitions_per_item)
                or (
                    config.similar_items
                    and tensors["statistics.similar_items"].shape
                    != (config.n_items, config.similar_items)
                )
                or tensors["cross_attention.w_q.weight"].shape != (width, config.dim)
                or (config.blocks and last not in tensors)
            ):
                raise ValueError(f"its weights are not of the shape in {DESCRIPTION_FILE}")
            with _WithoutDrawing():
                model = Recommender(config)
            model.load_state_dict(tensors, assign=True)
            ids, names = tuple(item_ids), tuple(types)
            return cls(model.eval(), ids, counts.numpy(), encoder, metadata, names)


class _WithoutDrawing(TorchFunctionMode):
    """Leaves out the random initialisation of weights, which are replaced.

    The meta device would leave out all of it, but imports torch._dynamo, which takes seconds.
    """

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def _naming(file: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{file}: {error}") from error


def _tensors_in(data: bytes | bytearray) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, as views of its bytes where those are writable.

    The format is the one of https://huggingface.co/docs/safetensors. Its library copies each
    tensor, which takes longer than reading hundreds of megabytes, and as much memory again.
    """
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    start = 8 + int.from_bytes(buffer[:8], "little")
    header = json.loads(buffer[8:start])
    if not isinstance(header, dict):
        raise ValueError("its header must be a JSON object")
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = entry["shape"], entry["data_offsets"]
        if not all(isinstance(each, int) and each >= 0 for each in (*shape, begin, end)):
            raise ValueError(f"the shape and the place of {name} must be whole numbers")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} must be of one of {', '.join(_DTYPES)}")
        dtype, count = _DTYPES[entry["dtype"]], math.prod(shape)
        if end - begin != count * dtype.itemsize or end > len(buffer) - start:
            raise ValueError(f"{name} is not where the header says")
        flat = torch.empty(0, dtype=dtype)  # no buffer is viewed from its end
        if count:
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begin)
        found[name] = flat.reshape(shape)
    return found


def _check_distinct(item_ids: Sequence[str]) -> None:
    if len(set(item_ids)) < len(item_ids):
        raise ValueError("item ids must be distinct")


def _check_types(types: Sequence[str], config: RecommenderConfig) -> None:
    if len(types) != config.n_event_types:
        raise ValueError(f"{len(types)} event types, where the model has {config.n_event_types}")
    if len(set(types)) < len(types):
        raise ValueError("event_types must be distinct")
    dislike = types.index(DISLIKE) if DISLIKE in types else -1
    if dislike != config.dislike_type:
        raise ValueError(f"the model's dislikes are of type {config.dislike_type}, not {dislike}")
