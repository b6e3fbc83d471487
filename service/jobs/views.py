"""Jobs as JSON values, in the form of the API."""

from __future__ import annotations

from typing import Any

from service.domain.timestamps import to_rfc3339
from service.jobs.job import Job
from service.runtime.file_paths import without_folders


def job_document(job: Job) -> dict[str, Any]:
    """Return the public fields of a job."""
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
