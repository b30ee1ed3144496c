"""A value that a paper published, beside what this package predicts for it."""

from __future__ import annotations

from typing import NamedTuple

from .models import Device

GIB = 2**30
GOOD = 0.05  # a prediction within so much of what was published needs no reason
ANY_DEVICE = Device(
    name="any", title="any", memory_bytes=1, peak_tflops=1, node_gb_s=1, link_gb_s=1, per_node=1
)  # for bytes alone


class Comparison(NamedTuple):
    """One published value, its prediction (None: cannot be predicted), and why they differ."""

    table: str
    case: str
    quantity: str
    unit: str
    published: float
    predicted: float | None
    why: str

    @property
    def error(self) -> float | None:
        """predicted / published - 1."""
        return None if self.predicted is None else self.predicted / self.published - 1


def reason(published: float, predicted: float, above: str, below: str) -> str:
    """Why the published value lies above or below the prediction; nothing where it is near."""
    if abs(predicted / published - 1) <= GOOD:
        return ""
    return above if published > predicted else below
