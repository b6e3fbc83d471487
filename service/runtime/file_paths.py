"""Paths of files in messages that leave the machine."""

from __future__ import annotations

import re

# An absolute path of two parts or more, or one of them relative to the working directory. What
# stands before must not be part of a word, of a URL or of a path already matched.
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[^\s/:;,'\"()]+/)*(?=[^\s/:;,'\"()]+)")


def without_folders(text: str) -> str:
    """Return a message with the folders of its paths left out: `/data/heed.db` becomes `heed.db`.

    Names of files say enough to act on; where they lie is nobody's business but the operator's,
    whose log has the whole path.
    """
    return _FOLDERS.sub("", text)
