"""The files of the jobs: one JSON document each, and the wishes to cancel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.domain.errors import Invalid, NotFound
from service.domain.names import is_name, timestamped_name
from service.jobs.job import Job
from service.runtime import durable_files


class JobFiles:
    """The jobs in `directory`, of which at most `keep` are remembered."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        durable_files.make_directory(directory)

    def names(self) -> list[str]:
        """The ids of all jobs, oldest first."""
        return sorted(path.stem for path in self._directory.glob("*.json") if is_name(path.stem))

    def create(self, options: Mapping[str, Any], created: int) -> Job:
        """A queued job with an id of its own, written; the oldest are forgotten for it.

        Raises:
            Invalid: the options are not JSON.
            StoreFull: there is no room.
        """
        names = self.names()
        for name in names[: max(0, len(names) + 1 - self._keep)]:
            self._path(name).unlink(missing_ok=True)
            self._wish(name).unlink(missing_ok=True)
        at = created
        while self._path(timestamped_name(at)).exists():
            at += 1
        job = Job(timestamped_name(at), "queued", dict(options), created)
        try:
            data = job.dump()
        except (TypeError, ValueError, RecursionError) as error:
            raise Invalid("/options", f"must be JSON: {error}") from error
        with durable_files.room("the disk has no room for a job"):
            durable_files.replace(self._path(job.id), data)
        return job

    def write(self, job: Job) -> None:
        """Put a job in its place, atomically and durably. One writer at a time. Raises OSError."""
        durable_files.replace(self._path(job.id), job.dump())

    def read(self, job_id: str) -> Job:
        """The job as it was written; one whose file is damaged is failed and says so.

        Raises NotFound, before anything is opened when `job_id` is no name.
        """
        if not is_name(job_id):
            raise NotFound(f"there is no job {job_id[:80]!r}")
        try:
            job = Job.load(self._path(job_id).read_bytes())
            if job.id != job_id:
                raise ValueError(f"it describes the job {job.id!r}")
        except FileNotFoundError:
            raise NotFound(f"there is no job {job_id}") from None
        except ValueError as error:
            return Job(job_id, "failed", {}, 0, error=f"its record is damaged: {error}")
        return job

    def wish_to_cancel(self, job_id: str) -> None:
        """Tell whichever process looks after the job that it shall stop."""
        self._wish(job_id).touch()

    def is_cancelled(self, job_id: str) -> bool:
        """True when somebody wished it."""
        return self._wish(job_id).exists()

    def _path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"

    def _wish(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.cancel"
