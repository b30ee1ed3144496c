"""What makes the notebooks a course: exercises, hints, predictions, progress, and the machine's report."""

from .chapters import claims_table
from .claims import claim, claims
from .doctor import doctor
from .glossary import glossary
from .grading import check, hint, solution
from .loops import track
from .predict import predict
from .progress import progress
from .workload import tiny_batch, tiny_gpt

__all__ = [
    "check",
    "claim",
    "claims",
    "claims_table",
    "doctor",
    "glossary",
    "hint",
    "predict",
    "progress",
    "solution",
    "tiny_batch",
    "tiny_gpt",
    "track",
]
