"""Pacing: hold every operation until a set time has passed, so that few cores show many stages."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.errors import require
from ..plan.ops import Op
from ..plan.schedule import Schedule
from ..plan.simulate import Cost, Costs, is_time

MS_FIELDS = ("forward_ms", "backward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long each operation of a paced run lasts, in ms: a number, or one number per stage.

    The times are those of a micro-batch of `rows` rows (by default the largest of the run) and scale with
    its true size. Unless given, backward_input and backward_weight take half a backward each and a
    recompute a forward. With `flops_per_ms` an operation lasts as long as its floating-point operations
    take at that rate instead. `link_ms` holds every message that long. The computation, the messages and
    the gradients are the true ones; only the speed is set, so a paced run says nothing about speed.
    """

    forward_ms: Cost | None = None
    backward_ms: Cost | None = None
    backward_input_ms: Cost | None = None
    backward_weight_ms: Cost | None = None
    recompute_ms: Cost | None = None
    rows: int | None = None
    flops_per_ms: float | None = None
    link_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in (*MS_FIELDS, "flops_per_ms", "link_ms"):
            value = getattr(self, name)
            is_list = isinstance(value, list | tuple) and name in MS_FIELDS
            numbers = [] if value is None else list(value) if is_list else [value]
            require(
                all(map(is_time, numbers)),
                "a pace is a finite time in ms, not negative, or a list of them, one per stage",
                got=f"{name}={value!r}",
                where="Pace",
                remedy=f"{name}=10.0",
            )
        by_time = self.forward_ms is not None and self.backward_ms is not None
        by_rate = self.flops_per_ms is not None and self.flops_per_ms > 0
        require(
            by_time != by_rate and (by_time or self.forward_ms is None),
            "a pace has forward_ms and backward_ms, or flops_per_ms alone",
            got=repr(self),
            where="Pace",
            remedy="Pace(forward_ms=10, backward_ms=20)",
        )
        require(
            self.rows is None or (isinstance(self.rows, int) and self.rows >= 1),
            "rows is the size of the micro-batch that the times are for",
            got=f"rows={self.rows!r}",
            where="Pace",
            remedy="rows=None for the largest micro-batch of the run",
        )

    def check_stages(self, num_stages: int) -> None:
        """Raise `InputError` where a list of times does not have one entry per stage."""
        for name in MS_FIELDS:
            value = getattr(self, name)
            require(
                value is None or not isinstance(value, list | tuple) or len(value) == num_stages,
                "a list of paces has one entry per stage",
                got=f"{name}={value!r} for {num_stages} stages",
                where="Pace",
                remedy=f"{name}=10.0, the same for every stage",
            )

    def costs(self) -> Costs:
        """The same times for the simulator, for micro-batches of the stated size."""
        assert self.forward_ms is not None and self.backward_ms is not None, "a rate has no fixed times"
        return Costs(
            forward=self.forward_ms,
            backward=self.backward_ms,
            backward_input=self.backward_input_ms,
            backward_weight=self.backward_weight_ms,
            recompute=self.recompute_ms,
            send=self.link_ms,
        )

    def duration_ms(self, op: Op, schedule: Schedule, *, rows: int, largest: int) -> float:
        """How long `op` lasts on a micro-batch of `rows` rows, `largest` being the run's largest."""
        scale = rows / (self.rows or largest)
        return self.costs().duration_ms(op, schedule) * scale
