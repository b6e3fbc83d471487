"""Paths of files in messages that leave the machine."""

from __future__ import annotations

import re
from pathlib import Path

# An absolute path of two parts or more, or one of them relative to the working directory. What
# stands before must not be part of a word, of a URL or of a path already matched.
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[^\s/:;,'\"()]+/)*(?=[^\s/:;,'\"()]+)")


def without_folders(text: str, data: Path | None = None) -> str:
    """Return a message with the folders of its paths left out: `/data/heed.db` becomes `heed.db`.

    With `data`, a directory, its name may be any, with spaces too.

    Names of files say enough to act on; where they lie is nobody's business but the operator's,
    whose log has the whole path.
    """
    for folder in () if data is None else (data.resolve(), data.absolute(), data):
        text = text.replace(f"{folder}/", "")
    return _FOLDERS.sub("", text)
