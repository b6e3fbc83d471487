"""The `TextEncoder` protocol, and the encoder of static embeddings that ships in a wheel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


class TextEncoder(Protocol):
    """Encoder of texts as unit vectors of one space.

    `name` identifies the space: vectors of different names must never be compared.
    """

    name: str
    dimension: int  # length of a vector
    quick: bool  # whether one text is encoded in less time than it takes to wake another thread

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors [n, dimension], float32; all zero for a text without any token."""
        ...


class StaticEncoder:
    """Mean of static token embeddings (WordLlama, 256-d): microseconds a query, no network.

    The weights and the tokenizer ship inside the installed package. Token embeddings are
    averaged, so word order does not count.

    Texts are case-folded (Unicode's full case folding) before they are tokenized. The vocabulary is
    that of a language model, which splits a word in capitals into pieces of other meanings: on a
    collection in lower case, queries in capitals had a quarter of the nDCG.
    """

    name = "wordllama-l2-supercat-256-uncased"
    dimension = 256
    quick = True

    def __init__(self) -> None:
        self._tokenizer, self._weight = _load_wordllama()

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors [n, 256], float32; all zero for a text without any token."""
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        end = 0
        while (start := end) < len(texts):
            size = 0
            while end < min(start + _BATCH, len(texts)) and (size < _SIZE or end == start):
                size += len(texts[end])
                end += 1
            batch = [text.casefold() for text in texts[start:end]]
            tokens = [
                encoding.ids
                for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            ]
            flat = torch.tensor([token for ids in tokens for token in ids], dtype=torch.int64)
            offsets = np.cumsum([0] + [len(ids) for ids in tokens[:-1]])
            # A bag sums ragged texts without padding them to the longest; the mean's division
            # is left out, since the vector is scaled to unit length anyway.
            with torch.inference_mode():
                bags = torch.nn.functional.embedding_bag(
                    flat, self._weight, torch.from_numpy(offsets), mode="sum"
                )
                out[start : start + len(batch)] = torch.nn.functional.normalize(bags).numpy()
        return out


# Encoded at once; both bound the memory of a long list of long texts:
_BATCH = 1_024  # texts
_SIZE = 1 << 20  # characters, without the last text


@cache
def _load_wordllama() -> tuple[Any, torch.Tensor]:
    """Load WordLlama's tokenizer and its token embeddings [vocabulary, 256], float32."""
    # WordLlama configures the root logger when imported; a library must not: undone here.
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    import wordllama

    root.handlers[:], root.level = handlers, level
    # It looks for its tokenizer in the wrong folder ("tokenizer", not "tokenizers") and would
    # download it; as a cache folder, its own package holds both files under the right names.
    package = Path(wordllama.__file__).parent
    model = wordllama.WordLlama.load(cache_dir=package, disable_download=True)
    model.tokenizer.no_padding()
    return model.tokenizer, torch.from_numpy(model.embedding)
