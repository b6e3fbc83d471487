"""What is installed is what is in the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import service

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel, built offline from a copy, because building writes beside the sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for folder in ("service", "models"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [*pip, "--no-index", "--wheel-dir", str(out), str(copy)]
    built = subprocess.run(command, check=True, capture_output=True, text=True)
    assert built.stdout + built.stderr == ""  # every line would be the first thing of `make demo`
    (path,) = out.glob("*.whl")
    return zipfile.Path(path)


def test_the_wheel_holds_every_file_of_both_packages(wheel: zipfile.Path) -> None:
    """Modules, type markers the page and templates travel in the wheel; READMEs do not."""
    packed = {
        name
        for name in wheel.root.namelist()
        if not name.endswith("/") and ".dist-info/" not in name
    }
    present = {
        path.relative_to(ROOT).as_posix()
        for folder in ("service", "models")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"
    }
    assert packed == present


def test_the_wheel_says_what_it_is(wheel: zipfile.Path) -> None:
    """Version, license and console script are stated in the wheel's metadata."""
    info = wheel / f"heed-{service.__version__}.dist-info"
    metadata = (info / "METADATA").read_text("utf-8")
    assert f"\nVersion: {service.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0 AND MIT\n" in metadata
    for name in ("LICENSE", "service/http/playground/vendor/uplot-1.6.32/LICENSE"):
        packed = info / "licenses" / name
        assert packed.read_text("utf-8") == (ROOT / name).read_text("utf-8")
    assert "heed = service.cli:main" in (info / "entry_points.txt").read_text("utf-8")
