"""A sentence-transformers model in a folder, made on the spot: a BERT of two layers, at random."""

from __future__ import annotations

from pathlib import Path

WIDTH = 32  # dimensions of its vectors
CUT = 16  # tokens of a text that it reads, the two special ones among them
WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("a", "the", "cat", "dog", "sea", "boat", "below", "violin", "strings", "bread", "and", "of"),
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
    *"bcdefghijklmnopqrstuvwxyz0123456789",
)


def make(folder: Path, *, seed: int = 0) -> Path:
    """The folder, with a model in it whose weights the seed decides."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    parts = folder.with_name(folder.name + "-parts")
    parts.mkdir(parents=True)
    (parts / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizer(str(parts / "vocab.txt")).save_pretrained(parts)
    shape = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=2 * CUT,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(shape).save_pretrained(parts)
    reader = Transformer(str(parts), max_seq_length=CUT)
    SentenceTransformer(modules=[reader, Pooling(WIDTH)], device="cpu").save(str(folder))
    return folder


def package(site: Path, name: str, *, models: int = 1) -> Path:
    """The folder of the model in a package that is installed in `site`, which Python finds."""
    files = []
    folder = site / name.replace("-", "_") / "model"
    for number in range(models):
        folder = site / name.replace("-", "_") / f"model{number}"
        make(folder)
        files += [str(path.relative_to(site)) for path in folder.rglob("*") if path.is_file()]
    described = site / f"{name.replace('-', '_')}-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (described / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return folder
