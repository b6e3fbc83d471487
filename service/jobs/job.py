"""State of one training job, and the messages of its process.

The process writes JSON lines to stdout: `{"stage": …, "epoch": …, "epochs": …, "step": …,
"steps": …, "loss": …, "validation": {…}, "eta_s": …}` as it proceeds, and at its end
`{"result": {…}}` or `{"error": …}`. The last lines of all other output are kept as a log.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from service.domain.errors import Invalid
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.timestamps import to_rfc3339
from service.runtime.data_layout import without_folders

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]

LOG_LINES = 40  # lines
LOG_WIDTH = 500  # characters of a line
_STOP_REASONS: Mapping[JobState, str] = {
    "cancelled": "cancelled on request",
    "failed": "interrupted: the service was shut down",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A job at one moment. Times are integer microseconds UTC."""

    id: str
    state: JobState
    options: Mapping[str, Any]
    created: int
    started: int | None = None
    finished: int | None = None
    progress: Mapping[str, Any] | None = None  # the last progress message
    curve: tuple[Mapping[str, Any], ...] = ()  # the last one of each epoch: its loss, validation
    metrics: Mapping[str, Any] | None = None  # of the result; until then, of the last validation
    result: Mapping[str, Any] | None = None  # the published version, its metrics and times
    error: str | None = None
    exit_code: int | None = None  # minus the number of the signal that ended the process
    log: tuple[str, ...] = ()  # last lines of stdout that are no messages
    stderr: tuple[str, ...] = ()
    started_by: str | None = None  # the program and process that runs it, for people

    @property
    def is_final(self) -> bool:
        return self.state not in {"queued", "running"}

    def with_stdout(self, line: str) -> Job:
        match message := _message(line):
            case {"result": dict(result)}:
                metrics = result.get("metrics")
                return dataclasses.replace(
                    self,
                    result=result,
                    metrics=metrics if isinstance(metrics, dict) else self.metrics,
                )
            case {"error": str(error)}:
                return dataclasses.replace(self, error=error[: 4 * LOG_WIDTH])
            case {"stage": str(), **rest}:
                validation = rest.get("validation")
                return dataclasses.replace(
                    self,
                    progress=message,
                    curve=_extended(self.curve, rest),
                    metrics=validation if isinstance(validation, dict) else self.metrics,
                )
        return dataclasses.replace(self, log=_tail(self.log, line))

    def with_stderr(self, line: str) -> Job:
        return dataclasses.replace(self, stderr=_tail(self.stderr, line))

    def with_exit(self, code: int, finished: int, stopped: JobState | None) -> Job:
        """Return the job after its process ended with an exit code, or minus a signal's number.

        `stopped` is the state, unless it succeeded, of a job that was stopped.
        """
        done = dataclasses.replace(self, exit_code=code, finished=finished)
        if code == 0 and self.result is not None and self.error is None:
            return dataclasses.replace(done, state="succeeded")
        if stopped is not None:
            return dataclasses.replace(done, state=stopped, error=_STOP_REASONS[stopped])
        return dataclasses.replace(done, state="failed", error=self.error or self._why(code))

    def with_error(self, error: str, finished: int) -> Job:
        """Return the job as failed, for a reason outside its process."""
        return dataclasses.replace(self, state="failed", error=error, finished=finished)

    def to_json(self) -> bytes:
        return orjson.dumps(self, option=orjson.OPT_INDENT_2)

    @classmethod
    def from_json(cls, data: bytes) -> Job:
        """Parse what `to_json` returned; raises ValueError for damaged bytes."""
        try:
            job = cls(**orjson.loads(data))
            if job.state not in get_args(JobState) or not isinstance(job.created, int):
                raise ValueError(f"{job.state!r}, created {job.created!r}")
            curve, log, stderr = tuple(job.curve), tuple(job.log), tuple(job.stderr)
            return dataclasses.replace(job, curve=curve, log=log, stderr=stderr)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a job: {error}") from error

    def _why(self, code: int) -> str:
        if code == 0:
            return "the training process ended without a result"
        if code == -signal.SIGKILL:
            return (
                "the training process was killed (SIGKILL), most likely because memory ran out: "
                "give the container or the machine more, train with the preset quick, or run "
                "`heed train` where there is more memory"
            )
        if code < 0:
            return f"the training process was ended by signal {-code}"
        # The output may name files and servers: only `heed jobs show` has it.
        more = f"; heed jobs show {self.id} has the end of its output" if self.stderr else ""
        return f"the training process ended with exit code {code}{more}"


def _message(line: str) -> dict[str, Any] | None:
    try:
        # Refuses NaN, infinities and lone surrogates, which no answer may contain.
        message = orjson.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _extended(
    curve: tuple[Mapping[str, Any], ...], progress: Mapping[Any, Any]
) -> tuple[Mapping[str, Any], ...]:
    epoch, loss = progress.get("epoch"), progress.get("loss")
    if not isinstance(epoch, int) or not isinstance(loss, int | float):
        return curve
    point = {"epoch": epoch, "loss": loss, **(progress.get("validation") or {})}
    return (*(curve[:-1] if curve and curve[-1]["epoch"] == epoch else curve), point)


def _tail(lines: tuple[str, ...], line: str) -> tuple[str, ...]:
    return (*lines[1 - LOG_LINES :], line[:LOG_WIDTH])


def job_document(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "state": job.state,
        "options": dict(job.options),
        "started_by": job.started_by,
        "created": to_rfc3339(job.created),
        "started": None if job.started is None else to_rfc3339(job.started),
        "finished": None if job.finished is None else to_rfc3339(job.finished),
        "progress": job.progress,
        "curve": list(job.curve),
        "metrics": job.metrics,
        "result": job.result,
        "error": job.error and without_folders(job.error),
    }


MAX_EPOCHS = 1000  # no log needs a tenth of them
MAX_SEED = 2**63 - 1

# name -> least and largest value, or the allowed values
OPTIONS: Mapping[str, tuple[int, int] | tuple[str, ...]] = {
    "epochs": (1, MAX_EPOCHS),
    "preset": ("quick", "best"),
    "seed": (0, MAX_SEED),
}


def training_command(data: Path, encoder: str, options: Mapping[str, Any]) -> Sequence[str]:
    """Return the command that trains on an absolute directory and publishes without activating.

    Raises Invalid, at `/options/NAME`, for an unknown option or a value that is not allowed.
    """
    argv = [sys.executable, "-m", "service.cli", "train", "--as-job", "--json-progress"]
    # The directory is a namespace's own already, whatever HEED_NAMESPACE is inherited.
    argv += ["--no-activate", "--data", str(data), "--namespace", DEFAULT_NAMESPACE]
    argv += ["--encoder", encoder]
    for name, value in options.items():
        allowed = OPTIONS.get(name)
        if allowed is None:
            names = ", ".join(sorted(OPTIONS))
            raise Invalid(f"/options/{name}", f"is not an option of training; those are {names}")
        if isinstance(allowed[0], int):
            least, most = allowed
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Invalid(f"/options/{name}", f"must be a whole number of at least {least}")
            if value > most:
                raise Invalid(f"/options/{name}", f"must be a whole number of at most {most}")
        elif value not in allowed:
            raise Invalid(f"/options/{name}", f"must be one of {', '.join(map(str, allowed))}")
        argv += [f"--{name}", str(value)]
    return argv
