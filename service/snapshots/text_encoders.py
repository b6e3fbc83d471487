"""The text encoder that a setting names: `static`, a package that carries a model, or a folder."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from models.text.encoders import SentenceEncoder, StaticEncoder, TextEncoder
from service.domain.errors import Invalid
from service.domain.settings import PREFIX, STATIC_ENCODER


def open_encoder(setting: str) -> TextEncoder:
    """Open a text encoder. Nothing is downloaded: an encoder that is not installed is refused.

    Args:
        setting: `static`; or the name of an installed package that carries a
            sentence-transformers model; or, with a slash in it, the folder of one.

    Raises:
        Invalid: naming the setting, what is wrong with it, and what to do.
    """
    if setting == STATIC_ENCODER:
        return StaticEncoder()
    # The model's folder is all that is loaded from; libraries that would look further, for what
    # a folder lacks, are told not to before they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        return SentenceEncoder(_folder(setting))
    except ImportError as error:
        raise Invalid(
            "",
            f"{PREFIX}ENCODER is {setting}, which needs sentence-transformers ({error}): "
            "pip install 'heed[transformers]'",
        ) from None
    except ValueError as error:
        raise Invalid("", f"{PREFIX}ENCODER is {setting}: {error}") from error


def is_folder(setting: str) -> bool:
    """Report whether a setting names the folder of a model, rather than a package."""
    return os.sep in setting or setting in {".", ".."}


def _folder(setting: str) -> Path:
    """Return the model's folder. Raises ValueError where there is none."""
    if is_folder(setting):
        return Path(setting).expanduser().absolute()
    try:
        files = metadata.files(setting) or []
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"it is not {STATIC_ENCODER}, and no package of that name is installed: pip install "
            f"it, or write a folder with a slash, such as ./{setting}"
        ) from None
    # Found by what was installed: the package itself is not run for it.
    found = [Path(str(file.locate())).parent for file in files if file.name == "modules.json"]
    if len(found) != 1:
        raise ValueError(
            f"the package carries {len(found)} sentence-transformers models (folders with "
            "modules.json), where one is needed: write the folder of one"
        )
    return found[0]
