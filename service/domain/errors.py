"""Errors that Heed raises on purpose, free of HTTP: `service.http.problems` assigns statuses.

Every error carries `detail`, one sentence for logs and commands that names the fault and what is
allowed; it never contains a secret or a traceback. Clients over HTTP read `told`, which names no
folder, host, role or database.
"""

from typing import ClassVar


class HeedError(Exception):
    """Base of all errors that Heed raises on purpose. Subclasses can be copied and pickled."""

    # Sentence for clients over HTTP, since a detail may name files and servers; None if the detail
    # is written for clients.
    public: ClassVar[str | None] = "The request could not be answered."

    def __init__(self, detail: str) -> None:
        # `args` stays as passed to the subclass: copying and pickling call it with `args` again.
        self.detail = detail

    def __str__(self) -> str:
        return self.detail

    @property
    def told(self) -> str:
        """The sentence for clients over HTTP."""
        return self.detail if self.public is None else self.public

    @property
    def state(self) -> str:
        """The sentence for checks of readiness: it may name files, and no server."""
        return self.told if isinstance(self, Unavailable) else self.detail


class Invalid(HeedError, ValueError):
    """The input breaks a rule. `pointer` is a JSON pointer (RFC 6901) to the offending field.

    Also a `ValueError`, so that pydantic validators may raise it.
    """

    public = None

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(detail)
        self.pointer = pointer

    def __str__(self) -> str:
        return f"{self.pointer}: {self.detail}" if self.pointer else self.detail


class NotFound(HeedError):
    """The named resource does not exist."""

    public = None


class Conflict(HeedError):
    """The request contradicts the current state; nothing was changed."""

    public = None


class TooLarge(HeedError):
    """The request is bigger than the configured limit."""

    public = None


class Unavailable(HeedError):
    """Not possible now; the same request may succeed after `retry_after` seconds."""

    public: ClassVar[str | None] = "This is not possible now; send the request again."

    def __init__(self, detail: str, retry_after: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class Busy(Unavailable):
    """Something else is in progress. The detail says what, and names no folder or server."""

    public = None


class Overloaded(Unavailable):
    """Refused at once: a limit on concurrent work is reached."""

    public: ClassVar[str | None] = None


class DatabaseOverloaded(Overloaded):
    """The database server is at its limits."""

    public = "The database is at its limits; send the request again."


class Crowded(Overloaded):
    """The sender holds too many places: the arriving request is refused, its connection closed."""


class RateLimited(Unavailable):
    """The API key has sent as many requests as its rate allows."""

    public = None


class DeadlineExceeded(Unavailable):
    """The work did not finish within the request's deadline."""

    public = None


class StoreFull(Unavailable):
    """The disk is full; reads go on, writes succeed again once there is room."""

    public = "The disk is full: reads go on, and writes once there is room."


class StoreUnreachable(Unavailable):
    """The database server does not answer; questions go on with what is known of users."""

    public = "The database does not answer; send the request again."


class Unconfirmed(Unavailable):
    """A write may have been committed or not, or may be lost with the server."""

    public = (
        "The database does not confirm the write, which may have succeeded; send it again, with "
        "the same event_id."
    )


class QuotaExceeded(HeedError):
    """The store would hold more than it may; nothing was changed. Waiting does not help."""

    public = None


class StoreReadOnly(Unavailable):
    """The disk can only be read; reads go on."""

    public = "The store can only be read: writes are refused."


class Corrupt(HeedError):
    """Stored bytes fail their integrity check. The detail names the file."""

    public = "Stored data fails its integrity check."


class Incompatible(HeedError):
    """Stored data belongs to another program or to a newer version of this one."""

    public = "Stored data is of another version of Heed."


class ModelRejected(HeedError):
    """A model version failed verification or the quality gate; the current one keeps serving."""

    public = None
