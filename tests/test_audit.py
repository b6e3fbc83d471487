"""The audit of locked dependencies, with a stand-in for pip-audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[1] / "requirements" / "audit.py"

SAFE = {"name": "safe", "version": "1", "vulns": []}
HOLED = {"name": "holed", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "unknown", "version": "3", "skip_reason": "not found"}


def audit(folder: Path, dependencies: list[Any] | None) -> tuple[int, str]:
    """Run the audit where pip-audit prints these dependencies; None: it fails."""
    fake = folder / "pip-audit"
    said = "oops" if dependencies is None else json.dumps({"dependencies": dependencies})
    fake.write_text(f"#!{sys.executable}\nimport sys\nprint({said!r})\n")
    fake.chmod(0o755)
    command = [sys.executable, str(AUDIT), str(fake), "requirements.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("dependencies", "code", "said"),
    [
        ([SAFE, SAFE], 0, "2 of 2 packages looked up in osv, 0 vulnerable"),
        ([SAFE, HOLED], 1, "holed 2: PYSEC-1, fixed in 2.1"),
        ([SAFE, UNKNOWN, UNKNOWN], 0, "NOT AUDITED"),
        (None, 0, "NOT AUDITED"),
    ],
)
def test_audit(tmp_path: Path, dependencies: list[Any] | None, code: int, said: str) -> None:
    """An advisory fails the audit, and an unreachable database is said to be one."""
    found, text = audit(tmp_path, dependencies)
    assert found == code
    assert said in text
