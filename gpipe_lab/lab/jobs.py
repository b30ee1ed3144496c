"""What the driver asks of a rank: each function runs in a worker, with its context first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engine.batch import Tree
from ..engine.device import Device, open_device
from ..engine.executor import RankResult, StepJob
from ..engine.loss import LossFn
from ..engine.profile import Profile, profile_layers, recorded
from ..engine.rank_pipeline import Layer, PipelineSpec, RankPipeline
from ..engine.saving import load_state as read_state
from ..engine.saving import save_state as write_state
from ..engine.stage import Objective
from ..engine.transport import Transport, open_transport
from ..plan.errors import InputError
from .worker import RankContext


@dataclass(frozen=True)
class ProfileJob:
    """One micro-batch to profile layers on, and what the last one's loss needs."""

    microbatch: Tree
    target: Tree = None
    loss_fn: LossFn | None = None
    seed: int = 0


def run_once(
    context: RankContext,
    spec: PipelineSpec,
    job: StepJob,
    warm_up: StepJob | None,
    repeats: int,
    strict: bool,
) -> tuple[list[tuple[RankResult, float]], dict[str, torch.Tensor]]:
    """Build a pipeline, step it `repeats` times from the same state, and let it go again."""
    pipeline = _build(context, spec)
    jobs = [warm_up] if warm_up is not None else []
    steps = []
    start = pipeline.snapshot()
    for this in (*jobs, *[replace(job, profile=False)] * (repeats - 1), job):
        pipeline.zero_grad()
        start.restore()
        steps.append(_step(context, pipeline, this, strict, update=False))
    return [(result, loss) for result, loss, _ in steps[len(jobs) :]], pipeline.gradients.copies()


def profile(
    context: RankContext, layers: Sequence[Layer], names: Sequence[str], job: ProfileJob
) -> Profile | None:
    """Measure a model's layers one by one; the first rank does, and the others leave it the machine."""
    if context.rank > 0:
        return None
    objective = None if job.loss_fn is None else Objective(job.loss_fn, job.target, 1.0)
    return profile_layers(layers, names, job.microbatch, _device(context), objective=objective, seed=job.seed)


def build(context: RankContext, key: str, spec: PipelineSpec) -> None:
    """Keep a pipeline under `key` until the workers are replaced."""
    context.state[key] = _build(context, spec)


def drop(context: RankContext, key: str) -> None:
    context.state.pop(key, None)


def step(
    context: RankContext, key: str, job: StepJob, update: bool, strict: bool
) -> tuple[RankResult, float, float]:
    return _step(context, context.state[key], job, strict, update=update)


def ask(context: RankContext, key: str, method: str, *args: Any) -> Any:
    """Call a method of the pipeline kept under `key`."""
    pipeline: RankPipeline = context.state[key]
    return getattr(pipeline, method)(*args)


def gradients(context: RankContext, key: str) -> dict[str, torch.Tensor]:
    pipeline: RankPipeline = context.state[key]
    return pipeline.gradients.copies()


def save_state(context: RankContext, key: str, folder: str, steps: int) -> str:
    return str(write_state(context.state[key], _transport(context), folder, steps))


def load_state(context: RankContext, key: str, folder: str) -> int | InputError:
    """The steps behind the state, or why it does not fit: the pipeline then keeps what it has."""
    try:
        return read_state(context.state[key], _transport(context), folder)
    except InputError as refused:
        return refused


def _build(context: RankContext, spec: PipelineSpec) -> RankPipeline:
    return RankPipeline(context.rank, spec, _device(context), context.board, _transport(context))


def _step(
    context: RankContext, pipeline: RankPipeline, job: StepJob, strict: bool, *, update: bool
) -> tuple[RankResult, float, float]:
    transport = _transport(context, strict)
    transport.link_ms = 0.0 if job.pace is None else job.pace.link_ms
    with recorded(job.profile, context.scratch) as recording:
        if job.step.gradients:
            result, loss, norm = pipeline.step(job, transport, update=update)
        else:
            (result, loss), norm = pipeline.evaluate(job, transport), 0.0
    result.profile = recording.content
    return result, loss, norm


def _device(context: RankContext) -> Device:
    if "device" not in context.state:
        context.state["device"] = open_device(context.device_plan, context.rank)
    return context.state["device"]


def _transport(context: RankContext, strict: bool = False) -> Transport:
    """This rank's end of the engine's messages, made once for each process group."""
    key = "strict transport" if strict else "transport"
    if key not in context.groups:
        context.groups[key] = open_transport(context.device_plan, _device(context), strict=strict)
    return context.groups[key]
