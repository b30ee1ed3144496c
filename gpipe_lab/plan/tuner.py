"""Propose P, m and M for a card: what a measured profile and the simulator say, the best first.

Every setting of a grid is laid out: times come from a profile of the layers at that micro-batch size, the
makespan from the simulator, bytes from `simulate_memory`. A proposal is an estimate, to be checked by a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Protocol

from .errors import is_count, require
from .memory import MemoryReport, MemoryRow, StageBytes, peak_in_flight, simulate_memory
from .ops import BACKWARD, Kind
from .partition import uniform
from .recompute import with_recompute
from .schedule import Schedule
from .schedules import SCHEDULES
from .simulate import Costs, simulate
from .trace import Trace
from .units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import pandas

RECEIVES_AHEAD = 2  # messages that a rank is ready to receive before it needs them


class LayerCosts(Protocol):
    """What one layer costs on one micro-batch; `engine.profile.LayerProfile` is one."""

    @property
    def parameter_bytes(self) -> int: ...
    @property
    def forward_ms(self) -> float: ...
    @property
    def backward_ms(self) -> float: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...


class HasLayers(Protocol):
    @property
    def layers(self) -> Sequence[LayerCosts]: ...


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One setting and what it is estimated to take. `ms_per_sample` is a card's: makespan · P / (M · m)."""

    num_stages: int
    microbatch_size: int
    num_microbatches: int
    checkpoint: str
    schedule: str
    makespan_ms: float
    bubble_fraction: float
    peak_bytes: int
    limit_bytes: int

    @property
    def batch_size(self) -> int:
        return self.microbatch_size * self.num_microbatches

    @property
    def ms_per_sample(self) -> float:
        return self.makespan_ms * self.num_stages / self.batch_size

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def build(self) -> Schedule:
        """The schedule to run, without recomputes: give `checkpoint` to the run."""
        return SCHEDULES[self.schedule](self.num_stages, self.num_microbatches)

    def __str__(self) -> str:
        setting = f"P = {self.num_stages}, m = {self.microbatch_size}, M = {self.num_microbatches}"
        memory = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}"
        return (
            f"{setting}, {self.schedule}, checkpoint {self.checkpoint}: estimated "
            f"{self.ms_per_sample:.2f} ms a sample and card, bubble {100 * self.bubble_fraction:.0f} %, "
            f"peak {memory}{'' if self.fits else ': does not fit'}"
        )

    __repr__ = __str__


@dataclass(frozen=True)
class Proposals:
    """Every setting of the grid, those that fit first, the fastest first among them."""

    all: tuple[Proposal, ...]

    @property
    def fitting(self) -> tuple[Proposal, ...]:
        return tuple(p for p in self.all if p.fits)

    @property
    def best(self) -> Proposal:
        """The fastest that fits; `InputError` where none does."""
        require(
            self.all[0].fits,
            "some setting fits the card",
            got=f"the smallest needs {format_bytes(min(p.peak_bytes for p in self.all))}",
            where="tune",
            remedy="more stages, a smaller micro-batch, checkpoint='always', or a larger memory_limit",
        )
        return self.all[0]

    def frame(self) -> pandas.DataFrame:
        """One row a setting."""
        import pandas

        return pandas.DataFrame(
            {
                "P": [p.num_stages for p in self.all],
                "m": [p.microbatch_size for p in self.all],
                "M": [p.num_microbatches for p in self.all],
                "schedule": [p.schedule for p in self.all],
                "checkpoint": [p.checkpoint for p in self.all],
                "ms a sample and card": [p.ms_per_sample for p in self.all],
                "bubble (%)": [100 * p.bubble_fraction for p in self.all],
                "peak (bytes)": [p.peak_bytes for p in self.all],
                "fits": [p.fits for p in self.all],
            }
        )


def tune(
    profiles: Mapping[int, HasLayers],
    memory_limit: str | int,
    *,
    num_stages: Sequence[int] = (1, 2, 4, 8),
    num_microbatches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    checkpoints: Sequence[str] = ("never", "always"),
    schedules: Sequence[str] = ("gpipe",),
    min_batch: int = 1,
    max_batch: int | None = None,
    input_bytes: int = 0,
    weight_copies: int = 2,
) -> Proposals:
    """Lay out every setting of the grid and rank it.

    profiles: micro-batch size m -> what `lab.profile` measured on m samples. min_batch, max_batch: of M · m.
    input_bytes: of one sample, which is all that a checkpointed first stage keeps. weight_copies: what is
    held for each weight: 2 for it and its gradient, 4 with Adam's two moments. Layers are cut uniformly.

    Raises `InputError` for an empty grid.
    """
    limit_bytes = parse_bytes(memory_limit)
    require(limit_bytes is not None, "a card has a limit", got="memory_limit=None", where="tune")
    assert limit_bytes is not None
    counts = [*num_stages, *num_microbatches, *profiles]
    require(
        bool(profiles and num_stages and num_microbatches and checkpoints and schedules)
        and all(is_count(n) for n in counts),
        "a grid has at least one P, m, M, schedule and checkpoint mode, whole numbers of at least 1",
        got=f"P={[*num_stages]}, m={[*profiles]}, M={[*num_microbatches]}",
        where="tune",
        remedy="profiles={4: lab.profile(model, inputs[:4], targets[:4], loss_fn=loss_fn)}",
    )
    found = []
    for p, (m, profile), n, checkpoint, name in product(
        num_stages, profiles.items(), num_microbatches, checkpoints, schedules
    ):
        if len(profile.layers) < p or not min_batch <= m * n <= (m * n if max_batch is None else max_batch):
            continue
        schedule = with_recompute(SCHEDULES[name](p, n), checkpoint)
        trace, memory = lay_out(schedule, profile, input_bytes=m * input_bytes, weight_copies=weight_copies)
        found.append(
            Proposal(
                num_stages=p,
                microbatch_size=m,
                num_microbatches=n,
                checkpoint=checkpoint,
                schedule=name,
                makespan_ms=trace.makespan_ms,
                bubble_fraction=trace.bubble_fraction,
                peak_bytes=max(memory.peak_bytes(rank) for rank in range(p)),
                limit_bytes=limit_bytes,
            )
        )
    require(
        bool(found),
        "the grid holds a setting that the model allows",
        got=f"no setting with {min_batch} ≤ M · m ≤ {max_batch} and a layer for every stage",
        where="tune",
    )
    return Proposals(tuple(sorted(found, key=lambda p: (not p.fits, p.ms_per_sample))))


def estimated_peak(
    schedule: Schedule, profile: HasLayers, *, input_bytes: int = 0, weight_copies: int = 2
) -> int:
    """Bytes of the fullest card, as `lay_out` estimates them."""
    _, memory = lay_out(schedule, profile, input_bytes=input_bytes, weight_copies=weight_copies)
    return max(memory.peak_bytes(rank) for rank in memory.ranks)


def lay_out(
    schedule: Schedule,
    profile: HasLayers,
    *,
    input_bytes: int = 0,
    weight_copies: int = 2,
    limit_bytes: int | None = None,
) -> tuple[Trace, MemoryReport]:
    """The simulated trace of `schedule` over a profiled model, cut uniformly, and the bytes it would hold.

    The schedule has one stage a rank. input_bytes: of one micro-batch at the model's input. Messages under
    way are counted at their most: two expected, and those sent. With recompute a rank is fullest in a
    backward, when all it sent but one has arrived; without, at its last forward, when a slow neighbour may
    have taken none of them yet.
    """
    num_stages = schedule.num_stages
    cut = [profile.layers[span.start : span.stop] for span in uniform(len(profile.layers), num_stages)]
    costs = Costs(
        forward=[sum(layer.forward_ms for layer in stage) for stage in cut],
        backward=[sum(layer.backward_ms for layer in stage) for stage in cut],
    )
    crossing = [stage[-1].output_bytes for stage in cut[:-1]]  # at every cut
    recomputes = any(op.kind is Kind.R for op in schedule.rank_of)
    sizes = []
    for k, (stage, in_flight) in enumerate(zip(cut, peak_in_flight(schedule), strict=True)):
        boundary = crossing[k - 1] if k else input_bytes
        messages = max(crossing[max(k - 1, 0) : k + 1], default=0)  # the cuts before and after this stage
        weights = {
            "parameters": (weight_copies - 1) * sum(layer.parameter_bytes for layer in stage),
            "communication": (RECEIVES_AHEAD + (1 if recomputes else in_flight)) * messages,
        }
        saved = max(sum(layer.saved_bytes for layer in stage), boundary)
        sizes.append(StageBytes(saved=saved, boundary=boundary, weights=weights))
    trace = simulate(schedule, costs)
    held = simulate_memory(trace, sizes, limit_bytes=limit_bytes)
    rows = sorted((*held.rows, *_gradients(trace, cut)), key=lambda row: row.time_ms)
    return trace, replace(held, rows=tuple(rows))


def _gradients(trace: Trace, cut: Sequence[Sequence[LayerCosts]]) -> Iterator[MemoryRow]:
    """Gradients come with each stage's first backward, layer by layer, while its activations go.

    What they add at most within that backward is dated to its start, all of them to its end.
    """
    seen = set()
    for event in trace.computations:
        stage = event.op.stage
        if event.op.kind not in BACKWARD or stage in seen:
            continue
        seen.add(stage)
        come = gone = most = 0
        for layer in reversed(cut[stage]):
            come += layer.parameter_bytes
            most = max(most, come - gone)
            gone += layer.saved_bytes
        for time_ms, size in ((event.start_ms, most), (event.end_ms, come)):
            yield MemoryRow(event.rank, -1, time_ms, "gradients", size, event.op)
