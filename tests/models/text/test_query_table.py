"""Query tables: what they encode, and their fit to a transformer's vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.text import query_table
from models.text.encoders import SentenceEncoder, TextEncoder
from models.text.query_table import QueryTable, TokenizingEncoder, fit_query_table, fit_rows
from tests.support import tiny_bert
from tests.support.token_encoder import WIDTH, WORDS, TokenEncoder, sentences


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


def test_rows_equal_the_dense_solution_of_the_ridge_regression() -> None:
    encoder = TokenEncoder(bend=0.5)
    texts = sentences(200)
    tokens, targets = encoder.tokenize(texts), encoder.encode(texts)
    prior = np.random.default_rng(1).normal(size=(len(encoder.vocabulary), WIDTH))
    for ridge in (0.1, 2.0):
        design = np.zeros((len(texts), len(prior)))
        for row, ids in enumerate(tokens):
            for token in ids:
                design[row, token] += len(ids) ** -0.5
        left = design.T @ design + ridge * np.eye(len(prior))
        expected = np.linalg.solve(left, design.T @ targets + ridge * prior)
        start: NDArray[np.float32] = prior.astype(np.float32)
        found = fit_rows(tokens, targets, start, ridge, iterations=60)
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_tokens_of_no_text_keep_their_prior() -> None:
    encoder = TokenEncoder()
    texts = sentences(100, words=WORDS[:10])
    prior = np.random.default_rng(1).normal(size=(len(encoder.vocabulary), WIDTH))
    start: NDArray[np.float32] = prior.astype(np.float32)
    rows = fit_rows(encoder.tokenize(texts), encoder.encode(texts), start, 0.1)
    np.testing.assert_array_equal(rows[11:], start[11:])
    assert (rows[1:11] != start[1:11]).any(axis=1).all()


def test_a_table_imitates_the_encoder_on_texts_it_was_not_fitted_to() -> None:
    """On other texts the fitted table agrees far better than the tokens' own vectors do."""
    encoder = TokenEncoder(bend=0.3)
    fitted = fit_query_table(encoder, sentences(1_500))
    others = sentences(300, seed=1)
    expected = encoder.encode(others)

    def agreement(table: QueryTable) -> float:
        return float((table.encode(others) * expected).sum(axis=1).mean())

    alone = QueryTable(encoder, encoder.encode(encoder.vocabulary))
    assert agreement(fitted.table) > 0.97
    assert agreement(alone) < 0.9
    assert fitted.agreement == pytest.approx(agreement(fitted.table), abs=0.02)
    assert fitted.texts == 1_500


def test_a_fit_is_reproducible() -> None:
    """The same texts and seed give the same table."""
    texts = sentences(400)
    first, second = (fit_query_table(TokenEncoder(), texts) for _ in range(2))
    assert first.table.name == second.table.name


def test_texts_are_sampled_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MAX_TEXTS texts are encoded, each token once, and progress reaches each total."""
    monkeypatch.setattr(query_table, "MAX_TEXTS", 50)
    encoder, last = TokenEncoder(), dict[str, tuple[int, int]]()
    texts = list(dict.fromkeys(sentences(200)))
    fitted = fit_query_table(
        encoder, texts, progress=lambda stage, done, total: last.update({stage: (done, total)})
    )
    assert fitted.texts == 50
    assert len(set(encoder.encoded) & set(texts)) == 50
    assert len(encoder.encoded) == 50 + len(encoder.vocabulary)
    assert all(done == total for done, total in last.values())
    assert list(last) == ["encoding sentences", "encoding tokens", "fitting the query table"]


def test_what_cannot_be_fitted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few texts with tokens, and vocabularies too large, are refused before any encoding."""
    encoder = TokenEncoder()
    with pytest.raises(ValueError, match=r"^1 texts are too few"):
        fit_query_table(encoder, ["w1", "", "unknown"])
    monkeypatch.setattr(query_table, "MAX_TOKENS", 60)
    with pytest.raises(ValueError, match="has 61 tokens: a table has 60 at most"):
        fit_query_table(encoder, sentences(10))
    assert encoder.encoded == []
