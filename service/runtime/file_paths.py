"""Paths of files in messages: without folders where they leave the machine, and who owns them."""

from __future__ import annotations

import os
import pwd
import re
from contextlib import suppress
from pathlib import Path

# An absolute path of two parts or more, or one of them relative to the working directory. It must
# not begin within a word, a URL or a path already matched.
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[^\s/:;,'\"()]+/)*(?=[^\s/:;,'\"()]+)")


def without_folders(text: str, data: Path | None = None) -> str:
    """Return a message with the folders of its paths left out: `/data/heed.db` becomes `heed.db`.

    `data` is a directory whose name may also have spaces.

    Names of files say enough to act on; where they lie is nobody's business but the operator's,
    whose log has the whole path.
    """
    for folder in () if data is None else (data.resolve(), data.absolute(), data):
        text = text.replace(f"{folder}/", "")
    return _FOLDERS.sub("", text)


def is_denied(path: Path) -> bool:
    """Report whether the permissions of a file keep this process from changing it."""
    return path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def denied(path: Path) -> str:
    """Return what to do about a file that this process has no permission for."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            owner = _user(place.stat().st_uid)
            return (
                f"the user {_user(os.geteuid())} has no permission for {path}; {place} belongs to "
                f"{owner}: run heed as the user who owns the data directory and may write to it, "
                "or give it to this user (chown -R, chmod -R u+rwX)"
            )
    raise AssertionError(path)  # the root is there


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
