"""What the engine costs, measured beside torch's own pipelining: `python -m gpipe_lab.bench`."""

from .counterpart import theirs
from .record import origin

__all__ = ["origin", "theirs"]
