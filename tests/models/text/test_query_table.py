"""The query table against a loop in float64, and the tokens of a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.text.query_table import QueryTable, TokenizingEncoder
from models.text.sentence_encoder import SentenceEncoder
from models.text.static_encoder import StaticEncoder, TextEncoder
from tests.support import tiny_bert
from tests.support.token_encoder import WIDTH, TokenEncoder, sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.make(tmp_path_factory.mktemp("models") / "tiny")


def rows_for(encoder: TokenizingEncoder, seed: int = 0) -> NDArray[np.float32]:
    size = len(encoder.vocabulary), encoder.dimension
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_a_vector_is_the_direction_of_the_sum_of_its_rows() -> None:
    """A query's vector equals a float64 loop over its tokens; a repeated token counts twice."""
    encoder = TokenEncoder()
    table = QueryTable(encoder, rows_for(encoder))
    texts = [*sentences(20), "w3 w3 w5"]
    for ids, vector in zip(encoder.tokenize(texts), table.encode(texts), strict=True):
        total = np.zeros(WIDTH)
        for token in ids:
            total += table.rows[token].astype(np.float64)
        np.testing.assert_allclose(vector, total / np.linalg.norm(total), atol=1e-6)
    assert table.encode(texts).dtype == np.float32


def test_queries_do_not_go_through_the_encoder() -> None:
    """A table encodes queries with the encoder's tokenizer alone."""
    encoder = TokenEncoder()
    promised: TextEncoder = QueryTable(encoder, rows_for(encoder))
    promised.encode(sentences(3))
    assert (promised.quick, promised.dimension, encoder.encoded) == (True, WIDTH, [])


def test_texts_without_tokens_or_direction_have_zero_vectors() -> None:
    """No token, and rows that add up to nothing, give zero vectors and no warning."""
    encoder = TokenEncoder()
    rows = rows_for(encoder)
    rows[2] = -rows[1]
    found = QueryTable(encoder, rows).encode(["", "unknown", "w0 w1", "w0"])
    assert found.any(axis=1).tolist() == [False, False, False, True]


def test_the_name_is_of_the_encoder_and_of_the_rows() -> None:
    """Other rows, or another encoder, are another name; the same are the same."""
    first, other = TokenEncoder(), TokenEncoder(seed=1)
    tables = [(first, 0), (first, 1), (other, 0), (first, 0)]
    names = [QueryTable(encoder, rows_for(encoder, seed)).name for encoder, seed in tables]
    assert names[0] == names[3]
    assert len(set(names)) == 3
    assert names[0].startswith(f"{first.name}+table-")


def test_rows_that_do_not_fit_are_refused() -> None:
    """A table of another shape, or with numbers that are not finite, is refused."""
    encoder = TokenEncoder()
    rows = rows_for(encoder)
    for wrong in (rows[1:], rows[:, 1:]):
        with pytest.raises(ValueError, match=r"^the table is .*, not \(61, 16\) as token-encoder"):
            QueryTable(encoder, wrong)
    rows[3, 4] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        QueryTable(encoder, rows)


def test_a_transformer_says_its_tokens(folder: Path) -> None:
    """Tokens are those of the model's tokenizer, of long texts too, which its vectors are cut."""
    # Takes seconds, which every process that collects this file would spend.
    import transformers

    encoder = SentenceEncoder(folder)
    assert isinstance(encoder, TokenizingEncoder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["the cat and the dog", "catboat", "", "cat sea " * tiny_bert.CUT]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    before = encoder.encode(texts)
    assert encoder.tokenize(texts) == expected
    assert [encoder.tokenize([text])[0] for text in texts] == expected
    np.testing.assert_array_equal(encoder.encode(texts), before)


def test_a_transformers_vocabulary_has_the_text_of_each_token(folder: Path) -> None:
    """Words stand for themselves, pieces for their letters, special tokens for nothing."""
    vocabulary = SentenceEncoder(folder).vocabulary
    assert len(vocabulary) == len(tiny_bert.WORDS)
    for word, text in zip(tiny_bert.WORDS, vocabulary, strict=True):
        assert text == ("" if word.startswith("[") else word.removeprefix("##"))


def test_the_static_encoder_needs_no_table() -> None:
    """The static encoder is no tokenizing encoder: it is quick itself."""
    assert not isinstance(StaticEncoder(), TokenizingEncoder)
