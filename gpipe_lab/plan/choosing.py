"""Rank settings over layers that were measured or worked out: by closed forms first, then by simulation.

What does not fit, or does not exist, is kept with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import formulas
from .costing import Plan, Setting, lay_out
from .errors import require
from .layer_costs import Layer, Stages, cut, held_weights
from .models import Device, Precision
from .units import format_bytes

if TYPE_CHECKING:
    import pandas

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")
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
        lay_out(
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
