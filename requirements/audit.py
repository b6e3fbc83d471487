"""Audits the locked dependencies against a database of advisories, where one can be reached.

Usage: python audit.py PIP_AUDIT FILE... Exits with 1 where a locked version has a known
vulnerability. Where no database can be reached it says so and exits with 0: a build without
a network is no proof of safety, and no fault of the dependencies either.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SERVICES = ("osv", "pypi")  # of pip-audit; the first one that knows the packages is used
MOST_UNKNOWN = 0.5  # share of packages beyond which an index is a mirror without advisories


def main(pip_audit: str, files: list[str]) -> int:
    """Print what is known of the dependencies in requirements files; return the exit code."""
    reasons = []
    for service in SERVICES:
        command = [pip_audit, "--format", "json", "--progress-spinner", "off", "-s", service]
        command += ["--disable-pip", "--no-deps", "--timeout", "10"]
        for file in files:
            command += ["-r", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            packages = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError):
            lines = done.stderr.strip().splitlines() or ["no answer"]
            reasons.append(f"{service}: {lines[-1].partition(':')[0].rpartition('.')[2]}")
            continue
        known = [package for package in packages if "skip_reason" not in package]
        if len(known) < (1 - MOST_UNKNOWN) * len(packages):
            reasons.append(f"{service}: knows {len(known)} of {len(packages)} packages")
            continue
        return _report(service, known, len(packages))
    print("audit: NOT AUDITED, for no database of advisories was reached:")
    for reason in reasons:
        print(f"  {reason}")
    return 0


def _report(service: str, known: list[dict[str, Any]], count: int) -> int:
    bad = [package for package in known if package["vulns"]]
    print(f"audit: {len(known)} of {count} packages looked up in {service}, {len(bad)} vulnerable")
    for package in bad:
        for advisory in package["vulns"]:
            fixed = ", ".join(advisory["fix_versions"]) or "no version"
            print(f"  {package['name']} {package['version']}: {advisory['id']}, fixed in {fixed}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
