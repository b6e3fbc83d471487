"""Storage of jobs: one JSON file each, and marker files that request a cancellation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.domain.errors import NotFound
from service.domain.names import is_name, next_time, timestamped_name
from service.jobs.job import Job
from service.runtime import durable_files


class JobStore:
    """Reads and writes the jobs in `directory`, of which the newest `keep` are kept."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        durable_files.make_directory(directory)

    def ids(self) -> list[str]:
        """Return the ids of all jobs, oldest first."""
        return sorted(path.stem for path in self._directory.glob("*.json") if is_name(path.stem))

    def create(self, options: Mapping[str, Any], created: int, started_by: str) -> Job:
        """Write a queued job with a new id, and delete the oldest jobs beyond `keep`.

        Raises:
            StoreFull: the disk is full.
        """
        names = self.ids()
        for name in names[: max(0, len(names) + 1 - self._keep)]:
            self._path(name).unlink(missing_ok=True)
            self._cancel_path(name).unlink(missing_ok=True)
        name = timestamped_name(next_time(created, names))
        job = Job(name, "queued", dict(options), created, started_by=started_by)
        with durable_files.translate_disk_full("the disk has no room for a job"):
            self.write(job)
        return job

    def write(self, job: Job) -> None:
        """Replace a job's file atomically and durably. One writer at a time. Raises OSError."""
        durable_files.replace(self._path(job.id), job.to_json())

    def read(self, job_id: str) -> Job:
        """Read a job; a damaged file gives a failed job whose `error` says so.

        Raises NotFound, without opening a file when `job_id` is not a valid name.
        """
        if not is_name(job_id):
            raise NotFound(f"there is no job {job_id[:80]!r}")
        try:
            job = Job.from_json(self._path(job_id).read_bytes())
            if job.id != job_id:
                raise ValueError(f"it describes the job {job.id!r}")
        except FileNotFoundError:
            raise NotFound(f"there is no job {job_id}") from None
        except ValueError as error:
            return Job(job_id, "failed", {}, 0, error=f"its record is damaged: {error}")
        return job

    def request_cancellation(self, job_id: str) -> None:
        """Ask the process that runs the job, whichever it is, to stop it."""
        self._cancel_path(job_id).touch()

    def is_cancellation_requested(self, job_id: str) -> bool:
        """True after `request_cancellation`, by any process."""
        return self._cancel_path(job_id).exists()

    def _path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"

    def _cancel_path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.cancel"
