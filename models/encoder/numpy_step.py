"""One more event through the history encoder, in numpy.

The products of one event are so small that torch takes longer to start them than to do them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.encoder.history_encoder import GAP_SCALE, EncoderBlock, EncoderCache, HistoryEncoder
from models.encoder.recency_bias import AGE_BUCKETS, age_bucket_edges, position_bucket

Array = NDArray[np.float32]


class _Norm(NamedTuple):
    """A LayerNorm's parameters."""

    weight: Array
    bias: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        centred = x - np.add.reduce(x) / len(x)  # `mean` takes four times as long to begin
        normed = centred * (1 / np.sqrt(centred @ centred / len(x) + self.eps))
        scaled: Array = normed * self.weight + self.bias
        return scaled


class _Block(NamedTuple):
    """An encoder block's parameters: W [out, in], b [out]."""

    norm: _Norm
    key_value: Array
    query_gate: tuple[Array, Array]
    out: Array
    norm_feed: _Norm
    feed: tuple[Array, Array]
    down: Array
    table: Array  # [H, buckets]


class NumpyEncoder:
    """`HistoryEncoder.append` of single events, for an encoder that is no longer trained."""

    def __init__(self, encoder: HistoryEncoder) -> None:
        """Take the weights as they are now."""
        self._norm_in = _norm(encoder.norm_in)
        self._gap = GAP_SCALE * _array(encoder.gap.weight)
        self._edges = age_bucket_edges().numpy()
        self._blocks = [_block(each) for each in encoder.blocks if isinstance(each, EncoderBlock)]

    def append(self, cache: EncoderCache, event: Tensor, timestamp: int) -> EncoderCache:
        """The state after one more event.

        Args:
            state: what was kept of the events before.
            event: the item vector [dim].
            timestamp: microseconds.
        """
        blocks, heads, old, size = cache.keys.shape
        room = (blocks, heads, old + 1, size)
        keys, values = np.empty(room, np.float32), np.empty(room, np.float32)
        keys[:, :, :old], values[:, :, :old] = cache.keys.numpy(), cache.values.numpy()
        times = np.empty(old + 1, np.int64)
        times[:old], times[old] = cache.timestamps.numpy(), timestamp
        ages = np.searchsorted(self._edges, timestamp - times, side="right")  # [old + 1]
        bucket = _positions(old + 1) + ages
        x: Array = self._norm_in(event.numpy() + self._gap[ages[old - 1] if old else 0])
        for number, block in enumerate(self._blocks):
            normed = block.norm(x)
            own = (block.key_value @ normed).reshape(2, heads, size)
            keys[number, :, old], values[number, :, old] = own
            if number < blocks - 1:
                mixed = _attended(block, normed, keys[number], values[number], bucket)
                x = _fed(block, x + mixed)
        return EncoderCache(
            torch.from_numpy(keys), torch.from_numpy(values), torch.from_numpy(times),
            torch.from_numpy(x),
        )  # fmt: skip


def _attended(
    block: _Block, normed: Array, keys: Array, values: Array, bucket: NDArray[np.int64]
) -> Array:
    """What attention adds to the stream, [dim]."""
    weight, bias = block.query_gate
    both = weight @ normed + bias
    heads, _, size = keys.shape
    query, gate = both[: heads * size].reshape(heads, size), both[heads * size :]
    mixed = attend_one(query, keys, values, block.table.take(bucket, 1)).reshape(-1)
    added: Array = _sigmoid(gate) * (block.out @ mixed)
    return added


def attend_one(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Attend from one query [H, d] over keys and values [H, n, d] with bias [H, n]: [H, d]."""
    scores: Array = (keys @ query[:, :, None])[:, :, 0] * query.shape[1] ** -0.5 + bias
    scores -= np.maximum.reduce(scores, 1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, 1, keepdims=True)
    context: Array = (scores[:, None] @ values)[:, 0]
    return context


def _fed(block: _Block, x: Array) -> Array:
    """The stream after the gated SwiGLU."""
    weight, bias = block.feed
    fed = weight @ block.norm_feed(x) + bias
    hidden = block.down.shape[1]
    left, right, gate = fed[:hidden], fed[hidden : 2 * hidden], fed[2 * hidden :]
    passed: Array = x + _sigmoid(gate) * (block.down @ (left * _sigmoid(left) * right))
    return passed


def _sigmoid(x: Array) -> Array:
    squashed: Array = 0.5 * np.tanh(0.5 * x) + 0.5  # which does not overflow
    return squashed


_POSITIONS = (position_bucket(torch.arange(4_096)) * AGE_BUCKETS).flip(0).numpy()


def _positions(count: int) -> NDArray[np.int64]:
    """The position's part of the buckets of this many events, the newest last."""
    if count > len(_POSITIONS):
        distance = torch.arange(count - 1, -1, -1)
        return (position_bucket(distance) * AGE_BUCKETS).numpy()
    return _POSITIONS[len(_POSITIONS) - count :]


def _block(block: EncoderBlock) -> _Block:
    return _Block(
        _norm(block.norm_attention),
        _array(block.key_value.weight),
        _affine(block.query_gate),
        _array(block.out.weight),
        _norm(block.norm_feed),
        _affine(block.feed),
        _array(block.down.weight),
        _array(block.recency.table()),
    )


def _norm(norm: nn.LayerNorm) -> _Norm:
    return _Norm(_array(norm.weight), _array(norm.bias), norm.eps)


def _affine(layer: nn.Linear) -> tuple[Array, Array]:
    return _array(layer.weight), _array(layer.bias)


def _array(weight: Tensor) -> Array:
    array: NDArray[Any] = weight.detach().cpu().numpy().astype(np.float32)
    return array
