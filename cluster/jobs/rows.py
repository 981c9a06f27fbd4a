"""Rows of the book as records."""

from __future__ import annotations

import json
import sqlite3
from typing import Final

from cluster.jobs.records import Job, JobAnswer, JobError

_PLAIN: Final = (
    *("id", "key", "endpoint", "status", "created_s", "started_s", "ended_s", "expires_s"),
    *("num_starts", "num_bytes", "number"),
)


def job_of(row: sqlite3.Row) -> Job:
    """Return the job of a row."""
    error = None if row["error"] is None else JobError(*json.loads(row["error"]))
    answer = None
    if row["answer"] is not None:
        status, headers = json.loads(row["answer"])
        answer = JobAnswer(status, tuple((name, value) for name, value in headers), error)
    plain = {name: row[name] for name in _PLAIN}
    return Job(**plain, facts=json.loads(row["facts"]), error=error, answer=answer)
