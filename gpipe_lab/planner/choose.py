"""Choose P, M, checkpointing and schedule under a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..plan import formulas
from ..plan.errors import is_count, require, require_count
from ..plan.memory import MemoryReport, MemoryRow, StageBytes, peak_in_flight, simulate_memory
from ..plan.ops import BACKWARD, Kind
from ..plan.partition import uniform
from ..plan.recompute import with_recompute
from ..plan.schedule import Schedule
from ..plan.schedules import SCHEDULES
from ..plan.simulate import Costs, simulate
from ..plan.trace import Trace
from ..plan.units import format_bytes, parse_bytes
from .costs import Layer, Plan, Setting, Stages, cut, held_weights, layers_of, plan_of
from .models import DEVICES, MODELS, Device, Model, Precision

if TYPE_CHECKING:
    import pandas


PROPOSED = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")
CHECKPOINTS = ("never", "every:1", "always")
MOST_OPERATIONS = 300_000  # of a schedule that is simulated: about three seconds


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A setting that is out, why, and the bytes its fullest rank would need at most (None: not asked)."""

    setting: Setting
    reason: str
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Plans:
    """What fits, the fastest first, and what does not, with the reason."""

    ranked: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    limit_bytes: int | None
    num_fitting: int  # also those that were not simulated

    @property
    def least(self) -> Rejected | None:
        """Of the settings that do not fit, the one that needs least."""
        too_big = [out for out in self.rejected if out.peak_bytes is not None]
        return min(too_big, key=lambda r: r.peak_bytes or 0, default=None)

    @property
    def best(self) -> Plan:
        """The fastest that fits; `InputError` with the least that would fit where nothing does."""
        least = self.least
        got = self.rejected[0].reason if self.rejected else "no setting"
        if least is not None:
            got = f"the least that fits is {format_bytes(least.peak_bytes or 0)}: {least.setting}"
        require(
            bool(self.ranked),
            "some setting fits the memory limit",
            got=got,
            where=f"plan, limit {'none' if self.limit_bytes is None else format_bytes(self.limit_bytes)}",
            remedy=f"memory_limit={least.peak_bytes}, or more devices" if least else "another batch_size",
        )
        return self.ranked[0]

    def __str__(self) -> str:
        told = [f"{self.num_fitting} of {self.num_fitting + len(self.rejected)} settings fit; the fastest:"]
        told += map(str, self.ranked)
        if not self.ranked:
            told = [f"none of {len(self.rejected)} settings fits"]
            if self.least is not None:
                told.append(f"least, {format_bytes(self.least.peak_bytes or 0)}: {self.least.setting}")
        return "\n".join([*told, "all of them, and why not: .frame()"])

    __repr__ = __str__

    def frame(self) -> pandas.DataFrame:
        """One row a setting: those that fit by rank, then the rejected with their reason."""
        import pandas

        rows = []
        for plan in self.ranked:
            results = {
                "step (ms)": plan.step_ms,
                "samples/s": plan.samples_per_s,
                "bubble (%)": 100 * plan.bubble_fraction,
                "MFU (%)": 100 * plan.model_flops_utilisation,
                "peak (GiB)": plan.peak_bytes / 2**30,
                "why not": "",
            }
            rows.append(_named(plan.setting) | results)
        for out in self.rejected:
            peak = None if out.peak_bytes is None else out.peak_bytes / 2**30
            rows.append(_named(out.setting) | {"peak (GiB)": peak, "why not": out.reason})
        return pandas.DataFrame(rows)


def _named(setting: Setting) -> dict[str, object]:
    return {
        "P": setting.num_stages,
        "T": setting.tensor_parallel,
        "D": setting.num_replicas,
        "m": setting.microbatch_size,
        "M": setting.num_microbatches,
        "schedule": setting.schedule,
        "checkpoint": setting.checkpoint,
    }


def choose(
    settings: Iterator[Setting] | Sequence[Setting],
    layers: Callable[[Setting], Sequence[Layer]],
    *,
    precision: Precision,
    limit_bytes: int | None,
    device: Device | None = None,
    shard_optimizer: bool = False,
    flops: float = 0.0,
    refuses: Callable[[Setting], str] = lambda setting: "",
    most: int = 6,
) -> Plans:
    """Rank settings over layers that a function gives for each: what `propose` does with worked-out ones."""
    cuts: dict[tuple[int, int, int], tuple[range, ...]] = {}
    fitting: list[tuple[float, int, Setting]] = []
    rejected = []
    for number, setting in enumerate(settings):
        own = layers(setting)
        reason = refuses(setting) or _unfit(setting, len(own))
        if reason:
            rejected.append(Rejected(setting=setting, reason=reason))
            continue
        num_stages = setting.num_stages * setting.num_chunks
        key = (num_stages, setting.microbatch_size, setting.tensor_parallel)
        if key not in cuts:
            cuts[key] = cut(own, num_stages)
        stages = Stages(tuple(tuple(own[s.start : s.stop]) for s in cuts[key]), setting.checkpoint)
        sharers = setting.num_replicas if shard_optimizer else 1
        rank, parts = fullest_rank(stages, setting, precision, sharers)
        peak = sum(parts.values())
        if limit_bytes is not None and peak > limit_bytes:
            told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
            reason = f"rank {rank} needs {format_bytes(peak)} of {format_bytes(limit_bytes)}: {told}"
            rejected.append(Rejected(setting=setting, reason=reason, peak_bytes=peak))
        else:
            fitting.append((least_ms(stages, setting) / setting.batch_size, number, setting))
    fitting.sort()
    small = [s for _, _, s in fitting if _num_operations(s) <= MOST_OPERATIONS]
    plans = [
        plan_of(
            setting,
            layers(setting),
            precision=precision,
            device=device,
            limit_bytes=limit_bytes,
            shard_optimizer=shard_optimizer,
            flops=flops,
        )
        for setting in small[:most]
    ]
    ranked = sorted(plans, key=lambda found: found.step_ms / found.setting.batch_size)
    return Plans(tuple(ranked), tuple(rejected), limit_bytes, len(fitting))


def fullest_rank(
    stages: Stages, setting: Setting, precision: Precision, sharers: int = 1
) -> tuple[int, dict[str, int]]:
    """The rank that needs most, and its bytes by category at most, from the closed forms of what is held."""
    p, v = setting.num_stages, setting.num_chunks
    needs = []
    for rank in range(p):
        mine = range(rank, p * v, p)
        held = _held(setting, rank)
        weights: dict[str, int] = {}
        for stage in mine:
            for name, size in held_weights(stages.layers[stage], precision, sharers).items():
                weights[name] = weights.get(name, 0) + size
        kept = held * max(stages.kept[stage] for stage in mine)
        needs.append(
            weights
            | {
                "communication": sum(stages.communication[stage] for stage in mine),
                "boundary" if stages.recomputes else "saved": kept,
                "recomputed": _restored(setting, rank) * max(stages.recomputed[stage] for stage in mine),
            }
        )
    rank = max(range(p), key=lambda rank: sum(needs[rank].values()))
    return rank, needs[rank]


def _held(setting: Setting, rank: int) -> int:
    p, m = setting.num_stages, setting.num_microbatches
    if setting.schedule == "interleaved":
        return formulas.interleaved_peak(p, m, setting.num_chunks, rank)
    return formulas.peak_in_flight(setting.schedule, p, m, rank)


def _restored(setting: Setting, rank: int) -> int:
    """Micro-batches restored at once: a split backward holds its own until its W, which lags behind."""
    return min(rank + 1, setting.num_microbatches) if setting.schedule == "zero_bubble_h1" else 1


def least_ms(stages: Stages, setting: Setting) -> float:
    """About the makespan, from closed forms over the slowest stage; messages take no time."""
    p, m, v = setting.num_stages, setting.num_microbatches, setting.num_chunks
    costs = stages.costs
    forward, backward, weight = max(
        zip(costs.forward, costs.backward, costs.backward_weight, strict=True),  # type: ignore[arg-type]
        key=lambda times: times[0] + times[1],
    )
    recompute = forward if stages.recomputes else 0.0
    if setting.schedule == "interleaved":
        return formulas.interleaved_ms(p, m, v, forward + recompute, backward)
    if setting.schedule == "zero_bubble_h1":
        idle = formulas.zero_bubble_h1_bubble_ms(p, forward, backward - weight + recompute, weight)
        return m * (forward + backward + recompute) + idle
    return formulas.pipeline_ms(p, m, forward + recompute, backward)


def _unfit(setting: Setting, num_layers: int) -> str:
    """Why the schedule does not exist for the setting, or the model has too few layers; "" if it does."""
    if setting.num_stages * setting.num_chunks > num_layers:
        return f"{num_layers} layers are too few for {setting.num_stages * setting.num_chunks} stages"
    if setting.schedule == "interleaved" and setting.num_microbatches % setting.num_stages:
        return f"interleaved wants M a multiple of P = {setting.num_stages}"
    if setting.schedule == "interleaved" and setting.num_stages == 1:
        return "one rank has nothing to interleave"
    if setting.schedule == "zero_bubble_h1" and setting.checkpoint == "every:1":
        return "a split backward is recomputed whole, not layer by layer"
    return ""


def _num_operations(setting: Setting) -> int:
    kinds = 2 + (setting.schedule == "zero_bubble_h1") + (setting.checkpoint != "never")
    return kinds * setting.num_stages * setting.num_chunks * setting.num_microbatches


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


T = TypeVar("T")


def known_model(model: Model | str) -> Model:
    """A model, or the one of `gl.MODELS` with that name."""
    return _known(model, MODELS, Model, remedy='"llama3-8b"')


def known_device(device: Device | str) -> Device:
    """A device, or the one of `gl.DEVICES` with that name."""
    return _known(device, DEVICES, Device, remedy='"h100"')


def _known(asked: T | str, catalogue: Mapping[str, T], kind: type[T], *, remedy: str) -> T:
    found = catalogue.get(asked) if isinstance(asked, str) else asked
    require(
        isinstance(found, kind),
        f"a {kind.__name__.lower()} is a gl.{kind.__name__} or one of {', '.join(catalogue)}",
        got=repr(asked),
        where="plan",
        remedy=remedy,
    )
    assert found is not None
    return found


def estimate(
    model: Model | str,
    device: Device | str,
    *,
    num_stages: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    num_replicas: int = 1,
    tensor_parallel: int = 1,
    schedule: str = "one_f_one_b",
    checkpoint: str = "never",
    fused_attention: bool = True,
    shard_optimizer: bool = False,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    memory_limit: str | int | None = None,
) -> Plan:
    """What one setting takes: time, bubble, bytes of every rank by category, bytes over links.

    efficiency: the share of the device's peak that its matrix products reach, an assumption unless measured.
    shard_optimizer: the copies divide the optimizer's state among them (ZeRO-1). memory_limit: of one
    device; its own memory unless given.
    """
    setting = Setting(
        num_stages=num_stages,
        num_replicas=num_replicas,
        tensor_parallel=tensor_parallel,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        checkpoint=checkpoint,
    )
    for name in ("num_replicas", "tensor_parallel", "microbatch_size"):
        require_count(getattr(setting, name), name, where="estimate")
    _check_efficiency(efficiency)
    shape, card = known_model(model), known_device(device)
    precision = precision or Precision()
    layers = layers_of(
        shape,
        card,
        microbatch_size=microbatch_size,
        tensor_parallel=tensor_parallel,
        fused_attention=fused_attention,
        efficiency=efficiency,
        precision=precision,
    )
    return plan_of(
        setting,
        layers,
        precision=precision,
        device=card,
        limit_bytes=parse_bytes(memory_limit) or card.memory_bytes,
        shard_optimizer=shard_optimizer,
        flops=_step_flops(shape, setting.batch_size),
    )


def propose(
    model: Model | str,
    device: Device | str,
    num_devices: int,
    *,
    batch_size: int,
    memory_limit: str | int | None = None,
    num_stages: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] = (1,),
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    schedules: Sequence[str] = PROPOSED,
    checkpoints: Sequence[str] = CHECKPOINTS,
    fused_attention: bool = True,
    shard_optimizer: bool = False,
    efficiency: float = 0.5,
    precision: Precision | None = None,
    most: int = 6,
) -> Plans:
    """The settings of a model on `num_devices` devices for one step of `batch_size` sequences, ranked.

    D = devices / (P·T) copies, M = batch / (D·m) micro-batches each. num_stages: the P to try; the divisors
    of the devices that leave a layer for every stage unless given. `most` of those that fit, the fastest by
    their closed forms, are simulated and returned. The rest is as in `estimate`.
    """
    require_count(num_devices, "num_devices", where="plan")
    require_count(batch_size, "batch_size", where="plan")
    _check_efficiency(efficiency)
    shape, card = known_model(model), known_device(device)
    precision = precision or Precision()

    @cache
    def layers(microbatch_size: int, t: int) -> tuple[Layer, ...]:
        return layers_of(
            shape,
            card,
            microbatch_size=microbatch_size,
            tensor_parallel=t,
            fused_attention=fused_attention,
            efficiency=efficiency,
            precision=precision,
        )

    def settings() -> Iterator[Setting]:
        for t in tensor_parallel:
            for p in num_stages or _divisors(num_devices // t if num_devices % t == 0 else 1):
                for m in microbatch_sizes:
                    d = num_devices // (p * t)
                    micro = batch_size // (d * m) if d else 0
                    for name, mode in product(schedules, checkpoints):
                        yield Setting(
                            num_stages=p,
                            num_replicas=d,
                            tensor_parallel=t,
                            microbatch_size=m,
                            num_microbatches=micro,
                            schedule=name,
                            checkpoint=mode,
                        )

    def refuses(setting: Setting) -> str:
        p, t, d = setting.num_stages, setting.tensor_parallel, setting.num_replicas
        if d * p * t != num_devices:
            return f"P·T = {p * t} does not divide {num_devices} devices"
        if t > 1 and (shape.key_heads % t or t > card.per_node):
            return f"T = {t} divides {shape.key_heads} key heads and stays within a node of {card.per_node}"
        if setting.batch_size != batch_size or setting.num_microbatches < 1:
            return f"D·m = {d * setting.microbatch_size} does not divide a batch of {batch_size}"
        return ""

    return choose(
        settings(),
        lambda setting: layers(setting.microbatch_size, setting.tensor_parallel),
        precision=precision,
        device=card,
        limit_bytes=parse_bytes(memory_limit) or card.memory_bytes,
        shard_optimizer=shard_optimizer,
        flops=_step_flops(shape, batch_size),
        refuses=refuses,
        most=most,
    )


def _step_flops(model: Model, batch_size: int) -> float:
    """Forward and backward of one step's sequences: three times the forward's."""
    return 3.0 * batch_size * (model.layers * model.layer_flops(1) + model.head_flops(1))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_efficiency(efficiency: float) -> None:
    require(
        isinstance(efficiency, int | float) and 0 < efficiency <= 1,
        "efficiency is a share of the device's peak, above 0 and at most 1",
        got=f"efficiency={efficiency!r}",
        where="plan",
        remedy="efficiency=0.5",
    )
