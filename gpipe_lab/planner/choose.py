"""Rank settings by their simulated plans, under a memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

from ..plan.errors import InputError, is_count, require
from ..plan.partition import uniform
from ..plan.units import format_bytes, parse_bytes
from .estimate import Layer, Measured, Plan, Setting, cut_by_time, cut_evenly, measured_layers, plan_of
from .models import Device

if TYPE_CHECKING:
    import pandas

PROPOSED = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")
CHECKPOINTS = ("never", "every:1", "always")
FEW_OPERATIONS = 5_000  # a schedule of no more is simulated whole at once
MOST_OPERATIONS = 300_000  # of a schedule that is simulated whole: a few seconds


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A setting that is out, and why.

    peak_bytes: what its fullest rank needs, or needs at least; None where memory is not the reason.
    """

    setting: Setting
    reason: str
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What fits, the fastest first, and what does not, with the reason.

    num_slower: settings that were not simulated to the end, because they cannot be among the fastest.
    """

    ranked: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    limit_bytes: int | None
    num_slower: int = 0
    find_least: Callable[[], Rejected | None] = field(repr=False, compare=False)

    @cached_property
    def least(self) -> Rejected | None:
        """Where nothing fits, the setting that needs least memory, simulated whole."""
        return None if self.ranked else self.find_least()

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
            remedy=f"memory_limit={least.peak_bytes}, or more devices" if least else "another batch size",
        )
        return self.ranked[0]

    def __str__(self) -> str:
        told = [f"{len(self.ranked)} settings that fit, the fastest first:", *map(str, self.ranked)]
        if not self.ranked:
            told = [f"none of {len(self.rejected)} settings fits"]
            if self.least is not None:
                told.append(f"least, {format_bytes(self.least.peak_bytes or 0)}: {self.least.setting}")
        if self.num_slower:
            told.append(f"{self.num_slower} others are slower")
        return "\n".join([*told, f"{len(self.rejected)} are out, and why: .frame()"])

    __repr__ = __str__

    def frame(self) -> pandas.DataFrame:
        """One row a setting: those that fit by rank, then the rejected with their reason."""
        import pandas

        rows: list[dict[str, object]] = []
        for plan in self.ranked:
            results = {
                "step (ms)": plan.step_ms,
                "samples/s": plan.samples_per_s,
                "ms a sample and card": plan.ms_per_sample,
                "bubble (%)": 100 * plan.bubble_fraction,
                "MFU (%)": 100 * plan.model_flops_utilisation,
                "peak (MiB)": plan.peak_bytes / 2**20,
                "why not": "",
            }
            rows.append(_named(plan.setting) | results)
        for out in self.rejected:
            peak = None if out.peak_bytes is None else out.peak_bytes / 2**20
            rows.append(_named(out.setting) | {"peak (MiB)": peak, "why not": out.reason})
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


class _Look(NamedTuple):
    """What was seen of a setting: whole, or with few micro-batches, and then the numbers are its least."""

    setting: Setting
    is_whole: bool
    num_operations: int  # of the whole schedule
    step_ms: float
    peak_bytes: int
    reason: str  # why it does not fit; "" where it does
    plan: Plan | None = None  # kept of few: a plan is large

    def as_rejected(self) -> Rejected:
        return Rejected(setting=self.setting, reason=self.reason, peak_bytes=self.peak_bytes)


def _look_at(setting: Setting, plan: Plan) -> _Look:
    """A look at a setting by its plan, or by that of fewer of its micro-batches.

    The busiest rank works through the micro-batches that were left out, at best without a pause; and more
    of them are never held in less memory.
    """
    shown, schedule = plan.setting.num_microbatches, plan.trace.schedule
    assert schedule is not None
    left_out = setting.num_microbatches - shown
    busiest_ms = max(plan.trace.busy_ms(rank) for rank in range(schedule.num_ranks)) / shown
    num_operations = sum(map(len, schedule.ops)) * setting.num_microbatches // shown
    reason = ""
    if not plan.fits:
        rank, held = plan.fullest
        told = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.bytes.items() if size)
        at_least = "at least " if left_out else ""
        limit = format_bytes(plan.memory.limit_bytes or 0)
        reason = f"rank {rank} needs {at_least}{format_bytes(plan.peak_bytes)} of {limit}: {told}"
    step_ms = plan.step_ms + left_out * busiest_ms
    return _Look(setting, not left_out, num_operations, step_ms, plan.peak_bytes, reason)


def choose(
    settings: Iterable[Setting],
    layers: Callable[[Setting], Sequence[Layer]],
    *,
    limit_bytes: int | None,
    cut: Callable[[Sequence[Layer], int], tuple[range, ...]] = cut_by_time,
    device: Device | None = None,
    flops: float = 0.0,
    refuses: Callable[[Setting], None] = lambda setting: None,
    per_card: bool = False,
    most: int | None = None,
) -> Plans:
    """Rank settings over layers that a function gives for each; `most` plans are enough.

    Ranked by the time for a sample, or (per_card) by all devices' time for it. Long schedules are simulated
    with few micro-batches first: enough to reject what is over the limit already, and to see how fast a
    setting can be at best. Then the fastest are simulated whole, until no other can be among them.
    refuses: raises `InputError` for a setting that is out, as a schedule does that does not exist for it.
    """

    def plan(setting: Setting) -> Plan:
        return plan_of(setting, layers(setting), cut=cut, device=device, limit_bytes=limit_bytes, flops=flops)

    def whole(setting: Setting) -> _Look:
        found = plan(setting)
        return _look_at(setting, found)._replace(plan=found)

    def cost(look: _Look) -> float:
        cards = look.setting.num_devices if per_card else 1
        return math.inf if look.reason else look.step_ms * cards / look.setting.batch_size

    def first_look(setting: Setting) -> _Look:
        own = layers(setting)
        uniform(len(own), setting.num_stages)  # more ranks than layers are refused before a schedule is built
        _shortened(setting).build()
        share = sum(layer.weight_bytes for layer in own) // setting.num_stages
        if limit_bytes is not None and share > limit_bytes:
            needed = f"{format_bytes(share)} of {format_bytes(limit_bytes)}"
            reason = f"weights alone need {needed} on an average rank"
            return _Look(setting, False, 0, math.inf, share, reason)
        look = _look_at(setting, plan(_shortened(setting)))
        require(
            look.num_operations <= MOST_OPERATIONS,
            f"schedules of at most {MOST_OPERATIONS:,} operations are simulated",
            got=f"{look.num_operations:,}",
        )
        is_small = look.num_operations <= FEW_OPERATIONS
        return look if look.is_whole or not is_small else _look_at(setting, plan(setting))

    refused: list[Rejected] = []
    looks: dict[Setting, _Look] = {}
    for setting in settings:
        try:
            refuses(setting)
            looks[setting] = first_look(setting)
        except InputError as error:
            refused.append(Rejected(setting=setting, reason=f"{error.rule}: {error.got}"))
    fastest = [look for look in islice(_in_order(looks, cost, whole), most) if not look.reason]
    ranked = [look.plan or plan(look.setting) for look in fastest]
    rejected = [look.as_rejected() for look in looks.values() if look.reason]

    def find_least() -> Rejected | None:
        least = next(_in_order(looks, lambda look: look.peak_bytes, whole), None)
        return least and least.as_rejected()

    return Plans(
        ranked=tuple(ranked),
        rejected=(*refused, *rejected),
        limit_bytes=limit_bytes,
        num_slower=len(looks) - len(ranked) - len(rejected),
        find_least=find_least,
    )


def _in_order(
    looks: dict[Setting, _Look], value: Callable[[_Look], float], whole: Callable[[Setting], _Look]
) -> Iterator[_Look]:
    """Whole looks by rising value, each made, and put into `looks`, only when no other can come before it."""
    queue = [(value(look), number, setting) for number, (setting, look) in enumerate(looks.items())]
    heapify(queue)
    while queue:
        _, number, setting = heappop(queue)
        if looks[setting].is_whole or math.isinf(value(looks[setting])):
            yield looks[setting]
        else:
            looks[setting] = whole(setting)
            heappush(queue, (value(looks[setting]), number, setting))


def _shortened(setting: Setting) -> Setting:
    """With at most two micro-batches a rank; as many more than a multiple of P as the whole has."""
    p, m = setting.num_stages, setting.num_microbatches
    return setting if m <= 2 * p else replace(setting, num_microbatches=p + m % p)


def tune(
    profiles: Mapping[int, Measured],
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
) -> Plans:
    """Plan every setting of a grid over measured layers, and rank them by the cards' time for a sample.

    profiles: micro-batch size m -> what `lab.profile` measured on m samples. min_batch, max_batch: of M · m.
    input_bytes: of one sample, which is all that a checkpointed first stage keeps. weight_copies: what is
    held for each weight: 2 for it and its gradient, 4 with Adam's two moments. Layers are cut uniformly.

    Raises `InputError` for an empty grid.
    """
    limit_bytes = parse_bytes(memory_limit)
    require(limit_bytes is not None, "a card has a limit", got="memory_limit=None", where="tune")
    counts = [*num_stages, *num_microbatches, *profiles]
    require(
        bool(profiles and num_stages and num_microbatches and checkpoints and schedules)
        and all(is_count(n) for n in counts),
        "a grid has at least one P, m, M, schedule and checkpoint mode, whole numbers of at least 1",
        got=f"P={[*num_stages]}, m={[*profiles]}, M={[*num_microbatches]}",
        where="tune",
        remedy="profiles={4: lab.profile(model, inputs[:4], targets[:4], loss_fn=loss_fn)}",
    )
    layers = {
        m: measured_layers(profile, input_bytes=m * input_bytes, weight_copies=weight_copies)
        for m, profile in profiles.items()
    }
    settings = [
        Setting(num_stages=p, microbatch_size=m, num_microbatches=n, schedule=name, checkpoint=mode)
        for p, m, n, mode, name in product(num_stages, profiles, num_microbatches, checkpoints, schedules)
        if min_batch <= m * n <= (m * n if max_batch is None else max_batch) and p <= len(layers[m])
    ]
    require(
        bool(settings),
        "the grid holds a setting that the model allows",
        got=f"no setting with {min_batch} ≤ M · m ≤ {max_batch} and a layer for every stage",
        where="tune",
    )
    return choose(
        settings,
        lambda setting: layers[setting.microbatch_size],
        limit_bytes=limit_bytes,
        cut=cut_evenly,
        per_card=True,
    )
