"""Jobs at one moment: what the lines of their process add."""

from __future__ import annotations

from service.jobs.job import Job


def test_the_curve_has_the_last_message_of_each_epoch() -> None:
    job = Job("j", "running", {}, 1)
    for line in (
        '{"stage": "reading events", "step": 1, "steps": 2}',
        '{"stage": "training", "epoch": 1, "loss": 5}',
        '{"stage": "training", "epoch": 1, "loss": 4.5}',
        '{"stage": "training", "epoch": 2, "loss": 3.5, "validation": {"hr": 0.2, "ndcg": 0.1}}',
        '{"stage": "training", "epoch": 3, "loss": null}',
        "no message",
    ):
        job = job.with_stdout(line)
    curve = ({"epoch": 1, "loss": 4.5}, {"epoch": 2, "loss": 3.5, "hr": 0.2, "ndcg": 0.1})
    assert job.curve == curve
    assert Job.from_json(job.to_json()).curve == curve


def test_jobs_of_before_have_no_curve() -> None:
    assert Job.from_json(b'{"id": "j", "state": "failed", "options": {}, "created": 1}').curve == ()
