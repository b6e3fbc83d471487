"""The static text encoder that ships in a wheel."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import wordllama

import models.text.encoders
from models.text.encoders import StaticEncoder, TextEncoder


@pytest.fixture(scope="module")
def encoder() -> StaticEncoder:
    return StaticEncoder()


def test_a_vector_is_the_direction_of_the_sum_of_its_tokens(encoder: StaticEncoder) -> None:
    """A vector is the normalised sum of its token embeddings, by a float64 loop."""
    package = Path(wordllama.__file__).parent
    model = wordllama.WordLlama.load(cache_dir=package, disable_download=True)
    tokenizer, weights = model.tokenizer, model.embedding
    tokenizer.no_padding()
    texts = ["attention is all you need", "naïve café, 東京!", "a", "word " * 300]
    got = encoder.encode(texts)
    for text, vector in zip(texts, got, strict=True):
        total = np.zeros(256)
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            total += weights[token].astype(np.float64)
        np.testing.assert_allclose(vector, total / np.linalg.norm(total), atol=1e-6)


def test_vectors_are_float32_of_unit_length(encoder: StaticEncoder) -> None:
    vectors = encoder.encode(["one", "two words", "three more words"])
    assert vectors.shape == (3, encoder.dimension)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert encoder.encode([]).shape == (0, encoder.dimension)


def test_a_text_without_tokens_has_a_zero_vector(encoder: StaticEncoder) -> None:
    alone = encoder.encode(["cat"])[0]
    mixed = encoder.encode(["", "cat", "", "cat", ""])
    assert not mixed[::2].any()
    np.testing.assert_allclose(mixed[1::2], [alone, alone], atol=1e-7)
    assert not encoder.encode([""]).any()


def test_neighbours_and_batches_do_not_matter(
    encoder: StaticEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text has one vector, whatever is encoded beside it and however it is cut into batches."""
    texts = ["a cat", "", "a much longer text about many things", "dogs", "a cat"]
    together = encoder.encode(texts)
    monkeypatch.setattr(models.text.encoders, "_BATCH", 2)
    np.testing.assert_allclose(encoder.encode(texts), together, atol=1e-7)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(alone, together, atol=1e-7)


@pytest.mark.parametrize(
    "text",
    ["Garlic soup", "The DNA of AIDS", "Straße", "NAÏVE café", "Ǆungla", "οδός", "ﬁne", "İ"],
)
def test_letter_case_does_not_change_a_vector(encoder: StaticEncoder, text: str) -> None:
    """Capitals, lower case and titles are one text, wherever Unicode folds them to the same."""
    written = [text, text.lower(), text.upper(), text.title()]
    same = [each for each in written if each.casefold() == text.casefold()]
    assert len(same) > 1
    vectors = encoder.encode(same)
    np.testing.assert_array_equal(vectors, np.broadcast_to(vectors[0], vectors.shape))


def test_like_texts_are_near(encoder: StaticEncoder) -> None:
    """Texts about one subject have a larger cosine than texts about different subjects."""
    dog, puppy, economics = encoder.encode(["a dog", "puppies", "monetary policy"])
    assert dog @ puppy > dog @ economics + 0.2


def test_it_is_a_text_encoder(encoder: StaticEncoder) -> None:
    """The encoder satisfies the `TextEncoder` protocol."""
    promised: TextEncoder = encoder
    assert promised.name
    assert promised.dimension == promised.encode(["x"]).shape[1]


def test_loading_leaves_logging_and_the_network_alone() -> None:
    """In a fresh process without a network: no handler is added, the level stays, and it works."""
    script = (
        "import logging, socket\n"
        "def refuse(*_): raise RuntimeError('network')\n"
        "socket.socket.connect = refuse\n"
        "from models.text.encoders import StaticEncoder\n"
        "assert StaticEncoder().encode(['hello']).any()\n"
        "root = logging.getLogger()\n"
        "assert root.handlers == [] and root.level == logging.WARNING, root\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def test_long_texts_are_encoded_a_few_at_a_time(
    encoder: StaticEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are not in memory together, and their vectors are those of each text."""
    texts = ["a", "long " * 30, "b c", "words " * 40, "", "d"]
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    monkeypatch.setattr(models.text.encoders, "_SIZE", 100)
    sizes: list[int] = []

    class Tokenizer:
        def encode_batch_fast(self, batch: list[str], **options: bool) -> object:
            sizes.append(sum(map(len, batch)))
            return tokenizer.encode_batch_fast(batch, **options)

    tokenizer = encoder._tokenizer
    monkeypatch.setattr(encoder, "_tokenizer", Tokenizer())
    assert np.array_equal(encoder.encode(texts), alone)
    assert sizes == [151, 243, 1]
