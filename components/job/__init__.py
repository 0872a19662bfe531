"""Jobs: many ranks of one program, run somewhere, waited for, ended.

`run_job(backend(config), spec)` is the whole interface. Success is the job's own completion marker, the outcome file;
conditions and exit codes of the place it runs in are only evidence about a death. What the ranks compute is not known
here. The back ends are imported when chosen.
"""

from muster.job.run import JobError, backend, run_job
from muster.job.spec import Ended, JobBackend, JobEvent, JobSpec, Notify, Outcome, read_outcome

__all__ = [
    "Ended",
    "JobBackend",
    "JobError",
    "JobEvent",
    "JobSpec",
    "Notify",
    "Outcome",
    "backend",
    "read_outcome",
    "run_job",
]
