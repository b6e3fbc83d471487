"""Text encoders: the one that ships in a wheel, and a tiny random sentence-transformers model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import wordllama

import models.text.encoders
from models.text.encoders import SentenceEncoder, StaticEncoder, TextEncoder
from tests.support import tiny_bert
from tests.support.tiny_bert import CUT, WIDTH

pytestmark = pytest.mark.verify

TEXTS = ["a cat and a dog", "the boat below the sea", "bread", "dog", "a violin of strings " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> SentenceEncoder:
    return SentenceEncoder(folder)


@pytest.fixture(scope="module")
def static() -> StaticEncoder:
    return StaticEncoder()


@pytest.fixture(scope="module", params=["static", "encoder"])
def either(request: pytest.FixtureRequest) -> TextEncoder:
    made: TextEncoder = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same model in a folder of another name, to be changed."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


# ---------------------------------------------------------------------------- both


def test_a_text_without_tokens_has_a_zero_vector(either: TextEncoder) -> None:
    alone = either.encode(["cat"])[0]
    mixed = either.encode(["", "cat", "", "cat", ""])
    assert not mixed[::2].any()
    np.testing.assert_allclose(mixed[1::2], [alone, alone], atol=1e-6)
    assert not either.encode([""]).any()
    assert either.encode([]).shape == (0, either.dimension)


def test_neighbours_and_batches_do_not_matter(
    either: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text has one vector, whatever is encoded beside it and however it is cut into batches."""
    texts = [*TEXTS, "", *TEXTS[:2]]
    together = either.encode(texts)
    for name, size in (("_BATCH", 2), ("_SENTENCE_BATCH", 2), ("_SENTENCE_CHUNK", 3)):
        monkeypatch.setattr(models.text.encoders, name, size)
    np.testing.assert_allclose(either.encode(texts), together, atol=1e-5)
    alone = np.concatenate([either.encode([text]) for text in texts])
    np.testing.assert_allclose(alone, together, atol=1e-5)


@pytest.mark.parametrize("is_static", [True, False])
def test_loading_leaves_logging_and_the_network_alone(folder: Path, is_static: bool) -> None:
    """In a fresh process without a network: nothing is drawn or logged, and it works."""
    made = "StaticEncoder()" if is_static else f"SentenceEncoder(Path({str(folder)!r}))"
    script = (
        "import logging, socket\n"
        "def refuse(*_): raise RuntimeError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from pathlib import Path\n"
        "from models.text.encoders import SentenceEncoder, StaticEncoder\n"
        f"assert {made}.encode(['hello']).any()\n"
        "root = logging.getLogger()\n"
        "assert root.handlers == [] and root.level == logging.WARNING, root\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------- sentences


def test_a_vector_is_the_direction_of_the_mean_of_its_tokens(
    folder: Path, encoder: SentenceEncoder
) -> None:
    """A vector is the normalised mean of BERT's token states, by a float64 loop."""
    # Takes seconds, which every process that collects this file would spend.
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    bert = transformers.AutoModel.from_pretrained(folder).eval()
    for text, vector in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        ids = tokenizer(text, truncation=True, max_length=CUT)["input_ids"]
        with torch.inference_mode():
            states = bert(torch.tensor([ids])).last_hidden_state[0].double().numpy()
        total = np.zeros(WIDTH)
        for state in states:
            total += state
        np.testing.assert_allclose(vector, total / np.linalg.norm(total), atol=1e-5)


def test_half_a_precision_is_read_in_float32(copy: Path) -> None:
    """Half-precision weights give float32 vectors of unit length."""
    import transformers

    bert = transformers.AutoModel.from_pretrained(copy, dtype=torch.float16)
    bert.save_pretrained(copy)
    vectors = SentenceEncoder(copy).encode(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_a_long_text_is_cut(encoder: SentenceEncoder) -> None:
    """A long text is truncated at the model's maximum number of tokens."""
    words = ["cat", "sea"] * CUT
    whole, cut, shorter = encoder.encode(
        [" ".join(words), " ".join(words[: CUT - 2]), " ".join(words[: CUT - 3])]
    )
    np.testing.assert_allclose(whole, cut, atol=1e-6)
    assert np.abs(whole - shorter).max() > 1e-3


def test_threads_share_it(folder: Path) -> None:
    """Threads that share an encoder get the same vectors as one alone."""
    encoder = SentenceEncoder(folder)
    lists = [[f"{text} {number}" for text in TEXTS] for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(encoder.encode, lists))
    for texts, vectors in zip(lists, found, strict=True):
        np.testing.assert_allclose(vectors, encoder.encode(texts), atol=1e-5)


def test_the_name_is_the_models_own(encoder: SentenceEncoder, copy: Path) -> None:
    """A model's name does not depend on its folder or README."""
    promised: TextEncoder = encoder
    (copy / "README.md").write_text("Much is said of it here.")
    assert promised.name == SentenceEncoder(copy).name
    assert promised.name.startswith(f"bert-{WIDTH}-")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", '"layer_norm_eps": 1e-12', '"layer_norm_eps": 0.1'),
        ("tokenizer.json", '"cat"', '"rat"'),
        ("1_Pooling/config.json", '"mean"', '"max"'),
    ],
)
def test_whatever_decides_the_vectors_is_in_the_name(
    encoder: SentenceEncoder, copy: Path, file: str, old: str, new: str
) -> None:
    """A change of configuration, vocabulary or pooling changes the name."""
    content = (copy / file).read_text()
    (copy / file).write_text(content.replace(old, new))
    other = SentenceEncoder(copy)
    assert np.abs(other.encode(["cat"]) - encoder.encode(["cat"])).max() > 1e-3
    assert other.name != encoder.name


def test_other_weights_are_another_space(encoder: SentenceEncoder, tmp_path: Path) -> None:
    other = SentenceEncoder(tiny_bert.make(tmp_path / "tiny", seed=1))
    assert other.name != encoder.name
    assert np.abs(other.encode(TEXTS) - encoder.encode(TEXTS)).max() > 0.1


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("modules.json", "modules.json is missing"),
        ("config.json", "config.json is missing"),
        ("model.safetensors", r"\*.safetensors or \*.bin is missing"),
        ("tokenizer.json", "tokenizer.json or vocab.txt .* is missing"),
        ("1_Pooling/config.json", "config.json is missing in .*1_Pooling"),
    ],
)
def test_missing_file_is_named(copy: Path, gone: str, said: str) -> None:
    (copy / gone).unlink()
    with pytest.raises(ValueError, match=f"{copy}.*{said}"):
        SentenceEncoder(copy)


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    """A path that is no folder is refused by name."""
    with pytest.raises(ValueError, match=r"nowhere is no folder"):
        SentenceEncoder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is no folder"):
        SentenceEncoder(tmp_path / "file")


@pytest.mark.parametrize(
    "content", ["", "{", "3", "{}", "[]", "[3]", '[{"path": ""}]', '[{"type": 3, "path": ""}]']
)
def test_a_list_of_modules_that_is_none_is_named(copy: Path, content: str) -> None:
    """A modules.json without a list of modules is refused by name."""
    (copy / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=r"copy/modules.json lists no modules"):
        SentenceEncoder(copy)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_is_named(copy: Path, file: str) -> None:
    """A truncated model file is refused with the name of the model."""
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{copy}: the model cannot be loaded: .+"):
        SentenceEncoder(copy)


# ---------------------------------------------------------------------------- static


def test_a_vector_is_the_direction_of_the_sum_of_its_tokens(static: StaticEncoder) -> None:
    """A vector is the normalised sum of its token embeddings, by a float64 loop."""
    package = Path(wordllama.__file__).parent
    model = wordllama.WordLlama.load(cache_dir=package, disable_download=True)
    tokenizer, weights = model.tokenizer, model.embedding
    tokenizer.no_padding()
    texts = ["attention is all you need", "naïve café, 東京!", "a", "word " * 300]
    got = static.encode(texts)
    for text, vector in zip(texts, got, strict=True):
        total = np.zeros(256)
        for token in tokenizer.encode(text, add_special_tokens=False).ids:
            total += weights[token].astype(np.float64)
        np.testing.assert_allclose(vector, total / np.linalg.norm(total), atol=1e-6)


@pytest.mark.parametrize(
    "text",
    ["Garlic soup", "The DNA of AIDS", "Straße", "NAÏVE café", "Ǆungla", "οδός", "ﬁne", "İ"],
)
def test_letter_case_does_not_change_a_vector(static: StaticEncoder, text: str) -> None:
    """Capitals, lower case and titles are one text, wherever Unicode folds them to the same."""
    written = [text, text.lower(), text.upper(), text.title()]
    same = [each for each in written if each.casefold() == text.casefold()]
    assert len(same) > 1
    vectors = static.encode(same)
    np.testing.assert_array_equal(vectors, np.broadcast_to(vectors[0], vectors.shape))


def test_long_texts_are_encoded_a_few_at_a_time(
    static: StaticEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are not in memory together, and their vectors are those of each text."""
    texts = ["a", "long " * 30, "b c", "words " * 40, "", "d"]
    alone = np.concatenate([static.encode([text]) for text in texts])
    monkeypatch.setattr(models.text.encoders, "_SIZE", 100)
    sizes: list[int] = []

    class Tokenizer:
        def encode_batch_fast(self, batch: list[str], **options: bool) -> object:
            sizes.append(sum(map(len, batch)))
            return tokenizer.encode_batch_fast(batch, **options)

    tokenizer = static._tokenizer
    monkeypatch.setattr(static, "_tokenizer", Tokenizer())
    assert np.array_equal(static.encode(texts), alone)
    assert sizes == [151, 243, 1]
