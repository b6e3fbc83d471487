"""Errors that Heed raises on purpose, free of HTTP: `service.http.problems` assigns statuses.

Every error carries `detail`, one sentence for the caller that names the fault and what is allowed;
it never contains a secret, a path of the source code or a traceback.
"""


class HeedError(Exception):
    """Base of all errors that Heed raises on purpose. Subclasses can be copied and pickled."""

    def __init__(self, detail: str) -> None:
        # `args` stays as passed to the subclass: copying and pickling call it with `args` again.
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


class Invalid(HeedError, ValueError):
    """The input breaks a rule. `pointer` is a JSON pointer (RFC 6901) to the offending field.

    Also a `ValueError`, so that pydantic validators may raise it.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(detail)
        self.pointer = pointer

    def __str__(self) -> str:
        return f"{self.pointer}: {self.detail}" if self.pointer else self.detail


class NotFound(HeedError):
    """The named resource does not exist."""


class Conflict(HeedError):
    """The request contradicts the current state; nothing was changed."""


class TooLarge(HeedError):
    """The request is bigger than the configured limit."""


class Unavailable(HeedError):
    """Not possible now; the same request may succeed after `retry_after` seconds."""

    def __init__(self, detail: str, retry_after: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class Overloaded(Unavailable):
    """Refused at once: a limit on concurrent work is reached."""


class Crowded(Overloaded):
    """Refused while it arrives, and its connection closed: its sender holds too many places."""


class RateLimited(Unavailable):
    """The API key has sent as many requests as its rate allows."""


class DeadlineExceeded(Unavailable):
    """The work did not finish within the request's deadline."""


class StoreFull(Unavailable):
    """The disk is full; reads go on, writes succeed again once there is room."""


class StoreUnreachable(Unavailable):
    """The database server does not answer; questions go on with what is known of users."""


class QuotaExceeded(HeedError):
    """The store would hold more than it may; nothing was changed. Waiting does not help."""


class StoreReadOnly(Unavailable):
    """The disk can only be read; reads go on."""


class Corrupt(HeedError):
    """Stored bytes fail their integrity check. The detail names the file."""


class Incompatible(HeedError):
    """Stored data belongs to another program or to a newer version of this one."""


class ModelRejected(HeedError):
    """A model version failed verification or the quality gate; the current one keeps serving."""
