"""The explorer's settings as a value, and what follows from them without a picture, widget or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..plan.errors import InputError, require
from ..plan.memory import MemoryReport, StageBytes, simulate_memory
from ..plan.partition import balanced, uniform
from ..plan.recompute import parse_mode, with_recompute
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from ..plan.simulate import Costs, simulate
from ..plan.trace import Trace
from ..plan.validate import validate
from .style import number, size_of

# The model that Run runs: layers of one Linear and one Tanh, float32.
NUM_LAYERS = 16
WIDTH = 64  # features
ROWS = 64  # of a micro-batch
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # of its parameters
BOUNDARY_BYTES = 4 * ROWS * WIDTH  # of its output for one micro-batch
MESSAGES_HELD = 2  # at once, at most: one that comes and one that goes

CHECKPOINTS = ("never", "always", "except_last", "every:2")
CUTS = ("uniform", "balanced")
LONGEST_RUN_MS = 60_000
EQUAL_STAGES, EQUAL_LAYERS = "equal stages", "equal layers"
EVEN = (EQUAL_STAGES, EQUAL_LAYERS)

# How long each layer takes next to the others, given that the heaviest takes `heaviest` times the lightest.
LAYERS: dict[str, Callable[[float], list[float]]] = {
    EQUAL_STAGES: lambda heaviest: [1.0] * NUM_LAYERS,  # however the layers are cut
    EQUAL_LAYERS: lambda heaviest: [1.0] * NUM_LAYERS,
    "heavy last layer": lambda heaviest: [1.0] * (NUM_LAYERS - 1) + [heaviest],
    "heavy first layer": lambda heaviest: [heaviest] + [1.0] * (NUM_LAYERS - 1),
    "growing layers": lambda heaviest: [
        1 + (heaviest - 1) * layer / (NUM_LAYERS - 1) for layer in range(NUM_LAYERS)
    ],
}

Own = Schedule | Callable[[int, int], Schedule]  # a learner's schedule, or a function of P and M


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point of the explorer.

    `ratio` is backward over forward time; `forward_ms` is of one micro-batch on a rank's whole share of
    the model, on average; `send_ms` of one message. `layers` names how the layers' costs differ, `cut`
    how the layers are cut into stages. `memory_limit` is in bytes per rank. `own` are the learner's
    schedules by name.
    """

    num_stages: int = 4
    num_microbatches: int = 8
    schedule: str = "gpipe"
    checkpoint: str = "never"
    ratio: float = 2.0
    forward_ms: float = 10.0
    send_ms: float = 0.0
    layers: str = EQUAL_STAGES
    heaviest: float = 3.0
    cut: str = "uniform"
    memory_limit: int | None = None
    own: Mapping[str, Own] = field(default_factory=dict, repr=False, hash=False)

    @property
    def backward_ms(self) -> float:
        return self.ratio * self.forward_ms

    @property
    def words(self) -> str:
        """All of them as one line: what tells a run from another."""
        sizes = f"{self.schedule}, P = {self.num_stages}, M = {self.num_microbatches}"
        return ", ".join(filter(None, [sizes, self.costs]))

    @property
    def costs(self) -> str:
        """Ratio and checkpoint mode, where there is a backward; and whatever else is out of the ordinary."""
        trains = self.schedule != "forward_only"
        parts = [
            f"backward ÷ forward = {self.ratio:g}, checkpoint {self.checkpoint}" if trains else "",
            f"messages {number(self.send_ms)} ms" if self.send_ms else "",
            self.layers if self.layers != EQUAL_STAGES else "",
            f"heaviest × {self.heaviest:g}" if self.layers not in EVEN else "",
            f"{self.cut} cut" if self.layers != EQUAL_STAGES else "",
            f"limit {size_of(self.memory_limit)}" if self.memory_limit is not None else "",
        ]
        return ", ".join(filter(None, parts))


def authored(settings: Settings) -> Schedule:
    """The schedule without recompute, as a lab runs it; `InputError` for settings it does not allow."""
    p, m = settings.num_stages, settings.num_microbatches
    own = settings.own.get(settings.schedule)
    if own is None:
        return SCHEDULES[settings.schedule](p, m)
    schedule = own if isinstance(own, Schedule) else own(p, m)
    require(
        isinstance(schedule, Schedule),
        "your function of (num_stages, num_microbatches) returns a gl.Schedule",
        got=type(schedule).__name__,
        where=settings.schedule,
    )
    require(
        (schedule.num_ranks, schedule.num_microbatches) == (p, m),
        f"{settings.schedule} is for P = {schedule.num_ranks} and M = {schedule.num_microbatches}",
        got=f"P = {p}, M = {m}",
        where="Explorer(own=...)",
        remedy="move the sliders there, or give a function of (num_stages, num_microbatches)",
    )
    validate(schedule)
    return schedule


def layers_of(settings: Settings, num_stages: int) -> tuple[range, ...]:
    """The layers of every stage, as `cut` divides them."""
    if settings.cut == "uniform" or settings.layers == EQUAL_STAGES:
        return uniform(NUM_LAYERS, num_stages)
    return balanced(LAYERS[settings.layers](settings.heaviest), num_stages)


def forward_ms(settings: Settings, num_stages: int) -> float | tuple[float, ...]:
    """A stage's forward time, or one for each stage. All ranks together always have the same work."""
    mean = settings.forward_ms * settings.num_stages / num_stages
    if settings.layers == EQUAL_STAGES:
        return mean
    costs = LAYERS[settings.layers](settings.heaviest)
    share = num_stages / sum(costs)
    return tuple(mean * share * sum(costs[k] for k in part) for part in layers_of(settings, num_stages))


def backward_ms(settings: Settings, num_stages: int) -> float | tuple[float, ...]:
    """A stage's backward time, or one for each stage."""
    forward = forward_ms(settings, num_stages)
    if isinstance(forward, float):
        return settings.ratio * forward
    return tuple(settings.ratio * time for time in forward)


def simulated(settings: Settings) -> Trace:
    """What the simulator predicts for these settings."""
    plain = authored(settings)
    layers = [len(part) for part in layers_of(settings, plain.num_stages)]
    schedule = with_recompute(plain, settings.checkpoint, layers_per_stage=layers)
    costs = Costs(
        forward=forward_ms(settings, plain.num_stages),
        backward=backward_ms(settings, plain.num_stages),
        send=settings.send_ms,
    )
    return simulate(schedule, costs)


def simulated_memory(settings: Settings, trace: Trace) -> MemoryReport:
    """What the ranks would hold along a simulated trace, with room for the messages under way.

    A layer saves its output, a stage its input besides. Gradients count from the start, so the peak is
    one that a run does not pass.
    """
    assert trace.schedule is not None, "a simulated trace carries its schedule"
    sizes = []
    for part in layers_of(settings, trace.schedule.num_stages):
        weights = {"parameters": len(part) * LAYER_BYTES}
        if trace.schedule.trains:
            weights["gradients"] = len(part) * LAYER_BYTES
        if trace.num_ranks > 1:
            weights["communication"] = MESSAGES_HELD * BOUNDARY_BYTES
        layers = len(part) * BOUNDARY_BYTES  # an output each; the gradients of as many wait for W
        sizes.append(
            StageBytes(
                saved=layers + BOUNDARY_BYTES, boundary=BOUNDARY_BYTES, deferred=layers, weights=weights
            )
        )
    return simulate_memory(trace, sizes, limit_bytes=settings.memory_limit)


def problem(settings: Settings) -> str | None:
    """Why these settings cannot be run, in one line, or None."""
    try:
        schedule = authored(settings)
        layers = layers_of(settings, schedule.num_stages)
        every = parse_mode(settings.checkpoint)
        with_recompute(schedule, settings.checkpoint, layers_per_stage=[len(part) for part in layers])
    except InputError as error:
        return f"{error.rule} (got {error.got})"
    if settings.checkpoint != "never" and not schedule.trains:
        return f"checkpoint={settings.checkpoint!r}: without a backward there is nothing to recompute"
    fewest = min(map(len, layers))
    if every is not None and fewest < every:
        return f"{settings.checkpoint!r} needs {every} layers in every stage; here one has {fewest}"
    one_by_one = settings.forward_ms + settings.backward_ms + 2 * settings.send_ms
    longest = settings.num_stages * settings.num_microbatches * one_by_one
    if settings.schedule == "naive" and longest > LONGEST_RUN_MS:
        return f"a run would take {number(longest / 1000)} s, more than {LONGEST_RUN_MS / 1000:.0f} s"
    return None


def switched_off(settings: Settings) -> dict[str, str]:
    """The settings that mean nothing beside the others, by name, with the reason."""
    reasons = {}
    if settings.schedule == "forward_only":
        reasons["ratio"] = reasons["checkpoint"] = "there is no backward"
    if settings.layers == EQUAL_STAGES:
        reasons["cut"] = "the stages are equal, so there is nothing to balance"
    if settings.layers in EVEN:
        reasons["heaviest"] = "no layer is heavier than another"
    return reasons


def own_schedules(own: Own | Mapping[str, Own] | Sequence[Own] | None) -> dict[str, Own]:
    """The learner's schedules by a name that no built-in schedule has."""
    named: dict[str, Own] = {}
    if isinstance(own, Mapping):
        named |= own
    else:
        several: Sequence[Own] = () if own is None else own if isinstance(own, list | tuple) else (own,)
        for one in several:
            name = one.name if isinstance(one, Schedule) else getattr(one, "__name__", "own")
            named["own" if name == "<lambda>" else name] = one
    for one in named.values():
        require(
            isinstance(one, Schedule) or callable(one),
            "your own schedule is a gl.Schedule or a function of (num_stages, num_microbatches)",
            got=repr(one),
            where="Explorer(own=...)",
            remedy="own=my_schedule",
        )
    return {f"own: {name}" if name in SCHEDULES else name: one for name, one in named.items()}
