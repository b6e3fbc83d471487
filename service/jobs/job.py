"""One training job: what is known of it, and what its process says.

The process writes JSON lines to its stdout: `{"stage": …, "epoch": …, "epochs": …, "step": …,
"steps": …, "loss": …, "validation": {…}, "eta_s": …}` as it goes on, and at its end
`{"result": {…}}` or `{"error": …}`. Everything else it says is kept as the tail of a log.
"""

import dataclasses
import json
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]

TAIL = 40  # lines
WIDTH = 500  # characters of a line


@dataclass(frozen=True, slots=True)
class Job:
    """A job at one moment. Times are microseconds UTC."""

    id: str
    state: State
    options: Mapping[str, Any]
    created: int
    started: int | None = None
    finished: int | None = None
    progress: Mapping[str, Any] | None = None  # the last line of progress
    metrics: Mapping[str, Any] | None = None  # of the result; before there is one, of validation
    result: Mapping[str, Any] | None = None  # the version published, or why it was refused
    error: str | None = None
    exit_code: int | None = None  # minus the signal's number when a signal ended it
    log: tuple[str, ...] = ()  # last lines of stdout that were no messages
    stderr: tuple[str, ...] = ()

    @property
    def final(self) -> bool:
        """True when it has ended, well or not."""
        return self.state not in {"queued", "running"}

    def heard(self, line: str) -> "Job":
        """The job after its process wrote `line` to stdout."""
        match message := _message(line):
            case {"result": dict(result)}:
                metrics = result.get("metrics")
                return dataclasses.replace(
                    self,
                    result=result,
                    metrics=metrics if isinstance(metrics, dict) else self.metrics,
                )
            case {"error": error}:
                return dataclasses.replace(self, error=_text(error))
            case {"stage": str(), **rest}:
                validation = rest.get("validation")
                return dataclasses.replace(
                    self,
                    progress=message,
                    metrics=validation if isinstance(validation, dict) else self.metrics,
                )
        return dataclasses.replace(self, log=_tail(self.log, line))

    def noted(self, line: str) -> "Job":
        """The job after its process wrote `line` to stderr."""
        return dataclasses.replace(self, stderr=_tail(self.stderr, line))

    def ended(self, code: int, finished: int, *, stopped: State | None, reason: str) -> "Job":
        """The job after its process ended with `code`.

        Args:
            stopped: the state if it did not succeed because it was stopped, for `reason`.
        """
        done = dataclasses.replace(self, exit_code=code, finished=finished)
        if code == 0 and self.result is not None and self.error is None:
            return dataclasses.replace(done, state="succeeded")
        if stopped is not None:
            return dataclasses.replace(done, state=stopped, error=reason)
        return dataclasses.replace(done, state="failed", error=self.error or self._why(code))

    def failed(self, error: str, finished: int) -> "Job":
        """The job, failed for a reason that its process did not give."""
        return dataclasses.replace(self, state="failed", error=error, finished=finished)

    def dump(self) -> bytes:
        """The job as JSON. Raises TypeError or ValueError when its options are not JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False).encode()

    @classmethod
    def load(cls, data: bytes) -> "Job":
        """The job that `dump` was called on. Raises ValueError when the bytes are damaged."""
        try:
            job = cls(**json.loads(data))
            if job.state not in get_args(State) or not isinstance(job.created, int):
                raise ValueError(f"{job.state!r}, created {job.created!r}")
            return dataclasses.replace(job, log=tuple(job.log), stderr=tuple(job.stderr))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a job: {error}") from error

    def _why(self, code: int) -> str:
        if code == 0:
            return "the training process ended without a result"
        if code == -signal.SIGKILL:
            return "the training process was killed (SIGKILL); it may have run out of memory"
        if code < 0:
            return f"the training process was ended by signal {-code}"
        said = f": {self.stderr[-1]}" if self.stderr else ""
        return f"the training process ended with exit code {code}{said}"


def _message(line: str) -> dict[str, Any] | None:
    try:
        # JSON has neither NaN nor infinity, and no answer of ours may carry one.
        message = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
        json.dumps(message, ensure_ascii=False).encode()  # a lone surrogate could not be answered
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _text(error: object) -> str:
    if isinstance(error, dict) and isinstance(error.get("detail"), str):
        error = error["detail"]
    return (error if isinstance(error, str) else json.dumps(error))[: 4 * WIDTH]


def _tail(lines: tuple[str, ...], line: str) -> tuple[str, ...]:
    return (*lines[1 - TAIL :], line[:WIDTH])
