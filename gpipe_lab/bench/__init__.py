"""What the engine costs, measured beside torch's own pipelining: `python -m gpipe_lab.bench`."""

from .counterpart import their_traces
from .record import origin

__all__ = ["origin", "their_traces"]
