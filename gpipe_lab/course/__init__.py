"""What makes the notebooks a course: exercises, hints, predictions, progress, and the machine's report."""

from .claims import claim, claims
from .doctor import doctor
from .grading import check, hint, solution
from .loops import track
from .predict import predict
from .progress import progress
from .workload import tiny_batch, tiny_gpt

__all__ = [
    "check",
    "claim",
    "claims",
    "doctor",
    "hint",
    "predict",
    "progress",
    "solution",
    "tiny_batch",
    "tiny_gpt",
    "track",
]
