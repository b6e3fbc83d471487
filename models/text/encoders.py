"""Text encoders: static embeddings that ship in a wheel, and sentence-transformers in a folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cache, cached_property
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

    The weights and the tokenizer ship inside the installed package. Word order does not count.

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
    # WordLlama configures the root logger when it is imported: undone here.
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


_SENTENCE_BATCH = 32  # texts that go through the model together
_SENTENCE_CHUNK = 1_024  # texts whose tokens are held at a time

# Files that a module of a model needs: one of each group.
_WEIGHTS = ("*.safetensors", "*.bin")
_NEEDED = {
    "Transformer": (("config.json",), _WEIGHTS, ("tokenizer.json", "vocab.txt", "*.model")),
    "Pooling": (("config.json",),),
    "Dense": (("config.json",), _WEIGHTS),
}
_CONTENT = ("*.json", "*.txt", "*.model", *_WEIGHTS)  # what a folder of a module is read for


class SentenceEncoder:
    """Encoder by a sentence-transformers model, in milliseconds a text; word order counts.

    A text of more tokens than the model reads (256 for all-MiniLM-L6-v2) is cut there. A default
    prompt of the model goes before each text; other prompts are not used. Only the model's own
    tokenizer folds letter case.

    `name` is made of the model's content: it follows the model to another folder, and another model
    in the same folder has another name. Nothing is fetched, and none of the model's own code runs.

    Raises ValueError, naming the folder and what is missing or wrong there, and ImportError if
    sentence-transformers is not installed.
    """

    quick = False

    def __init__(self, folder: Path) -> None:
        folders = _checked(folder)
        self._model = _load(folder)
        # The libraries' own tokenizer, in Rust: it cuts and pads, and threads may share it.
        tokenizer = self._model.tokenizer
        self._tokenizer: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._uncut_tokenizer = _without_limits(self._tokenizer)
        # The first text sets the length to cut at; setting it later would disturb other threads.
        try:
            self.dimension = len(self._encode(["a"])[0])
        except Exception as error:
            raise ValueError(f"{folder}: the model reads no text: {error}") from error
        self.name = f"{_label(folders[0])}-{self.dimension}-{_digest(folder, folders)}"

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return unit vectors [n, dimension], float32; all zero for a text without any token."""
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(texts), _SENTENCE_CHUNK):
            chunk = list(texts[start : start + _SENTENCE_CHUNK])
            # A text without tokens would be encoded by the special tokens alone.
            tokens = self._tokenizer.encode_batch(chunk, add_special_tokens=False)
            spoken = [at for at, text in enumerate(tokens) if any(text.attention_mask)]
            if spoken:
                out[[start + at for at in spoken]] = self._encode([chunk[at] for at in spoken])
        return out

    @cached_property
    def vocabulary(self) -> Sequence[str]:
        """The text of each token by its id; empty for special tokens."""
        ids = [[token] for token in range(self._uncut_tokenizer.get_vocab_size())]
        # The mark of a piece that continues a word is no text.
        return [text.removeprefix("##") for text in self._uncut_tokenizer.decode_batch(ids)]

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens; long texts are not cut."""
        tokenizer = self._uncut_tokenizer
        if len(texts) == 1:  # a batch goes to other threads, which takes longer than one query
            return [tokenizer.encode(texts[0], add_special_tokens=False).ids]
        return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _encode(self, texts: list[str]) -> Vectors:
        vectors: Vectors = self._model.encode(
            texts, batch_size=_SENTENCE_BATCH, normalize_embeddings=True, show_progress_bar=False
        )
        return vectors


def _load(folder: Path) -> Any:
    """Load the model of a folder in float32 on the CPU, where searches are answered."""
    import transformers
    from sentence_transformers import SentenceTransformer

    # It draws a bar for the weights of each model it loads.
    transformers.utils.logging.disable_progress_bar()
    try:
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{folder}: the model cannot be loaded: {lines[0]}") from error
    return model.float().eval()


def _without_limits(tokenizer: Any) -> Any:
    """Copy a tokenizer, without padding and truncation, which the model sets on its own."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy


def _checked(folder: Path) -> list[Path]:
    """Return the folders of a model's modules in their order, the one that reads text first."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        named = [(module["type"].rpartition(".")[2], folder / module["path"]) for module in modules]
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no sentence-transformers model: modules.json is missing"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / 'modules.json'} lists no modules: {error}") from error
    if not named:
        raise ValueError(f"{folder / 'modules.json'} lists no modules")
    for kind, path in named:
        for group in _NEEDED.get(kind, ()):
            if not any(next(path.glob(pattern), None) for pattern in group):
                raise ValueError(f"{folder}: {' or '.join(group)} is missing in {path}")
    return [path for _, path in named]


def _label(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    # Files say by which name their weights were fetched, or at least of what kind they are.
    called = Path(str(config.get("_name_or_path") or config.get("model_type") or "model"))
    return called.name or "model"


def _digest(folder: Path, folders: Sequence[Path]) -> str:
    """Return 16 hexadecimal digits of all content that determines the vectors."""
    digest = hashlib.blake2b(digest_size=8)
    for part in sorted({folder, *folders}):
        for path in sorted({path for pattern in _CONTENT for path in part.glob(pattern)}):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "blake2b").digest()
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()
