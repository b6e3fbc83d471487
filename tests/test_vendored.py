"""Files of others that are part of the page: whose, of which version, and unchanged."""

from __future__ import annotations

import hashlib
import re

from tests.support.server import ROOT

VENDOR = ROOT / "service" / "http" / "playground" / "vendor"
# SHA-256 of the files of each package on registry.npmjs.org, by `npm pack NAME@VERSION`.
PACKAGES = {
    "uplot-1.6.32": {
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    },
}


def test_vendored_files_are_those_of_the_named_version() -> None:
    """Each folder holds the files of the version that it names, byte for byte, and its licence."""
    found = {
        folder.name: {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in VENDOR.iterdir()
    }
    assert found == PACKAGES


def test_the_page_loads_what_is_vendored() -> None:
    """The page names each vendored script and style sheet at its place, and none that is not."""
    named = re.findall(r'"playground/vendor/([^"]+)"', (VENDOR.parent / "index.html").read_text())
    files = {f"{folder}/{name}" for folder, names in PACKAGES.items() for name in names}
    assert set(named) == {name for name in files if not name.endswith("LICENSE")}
