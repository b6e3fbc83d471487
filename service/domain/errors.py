"""What can go wrong in Heed's own terms. No HTTP here: `problems` gives each its status.

Every error carries `detail`, one sentence for the caller that says what was wrong and what is
allowed; it never carries a secret, a path of this machine's code or a traceback.
"""


class HeedError(Exception):
    """Base of all errors that Heed raises on purpose. They copy and pickle whole."""

    def __init__(self, detail: str) -> None:
        # `args` stays what the subclass was called with: copying and pickling call it again so.
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


class Invalid(HeedError, ValueError):
    """The input breaks a rule. `pointer` is a JSON pointer (RFC 6901) to the offending field.

    It is a `ValueError` as well, so that it may be raised from a pydantic validator.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(detail)
        self.pointer = pointer

    def __str__(self) -> str:
        return f"{self.pointer}: {self.detail}" if self.pointer else self.detail


class NotFound(HeedError):
    """What was asked for by name does not exist."""


class Conflict(HeedError):
    """The request contradicts what is already there; nothing was changed."""


class TooLarge(HeedError):
    """The request is bigger than the configured limit."""


class Unavailable(HeedError):
    """Not possible now; the same request may succeed after `retry_after` seconds."""

    def __init__(self, detail: str, retry_after: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class Overloaded(Unavailable):
    """Refused at once because too much is already in flight."""


class DeadlineExceeded(Unavailable):
    """The work did not finish within the request's deadline."""


class StoreFull(Unavailable):
    """The store has no room left; reads go on, writes succeed again once there is room."""


class Corrupt(HeedError):
    """Stored bytes fail their own checks. The detail names the file."""


class Incompatible(HeedError):
    """Stored data belongs to another program or to a newer version of this one."""


class ModelRejected(HeedError):
    """A model version failed verification or the quality gate; the old one goes on serving."""
