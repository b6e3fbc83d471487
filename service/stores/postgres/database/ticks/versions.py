"""Users by their versions.

A version is the tick of the user's last change. The index has no versions but ranges of them, which
are the same for changes that follow one another closely: see the migration that made it.
"""

RANGE_BITS = 17  # of a version, that its range leaves out

LAST_VERSION = """\
SELECT version FROM heed.users WHERE namespace_no = %(no)s
 ORDER BY version_range DESC, version DESC LIMIT 1"""
"""Statement that reads the greatest version of all users, and the rows of its range."""

LAST_RANGE = f"""\
SELECT ((max(version_range) + 1) << {RANGE_BITS}) - 1 FROM heed.users WHERE namespace_no = %(no)s"""
"""Statement that reads the end of its range, which no version exceeds, from the index."""


def changed_between(after: str, until: str | None = None) -> str:
    """Return the condition that users have changed after a tick, up to another.

    Args:
        after: the tick, in SQL.
        until: likewise; None: until now.
    """
    condition = f"version_range >= {after}::bigint >> {RANGE_BITS} AND version > {after}::bigint"
    if until is None:
        return condition
    return (
        f"{condition} AND version_range <= {until}::bigint >> {RANGE_BITS}"
        f" AND version <= {until}::bigint"
    )
