"""What each layer of a model costs, measured one layer at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from ..plan.errors import require
from ..plan.memory import peak_in_flight
from ..plan.ops import Op
from ..plan.partition import balanced, min_max
from ..plan.schedule import Schedule
from .batch import Tree, tensors, unmarked
from .device import Device, now_ms, profiler_activities
from .layer_state import init_seed
from .ledger import Ledger
from .stage import Objective, Stage, StepContext

if TYPE_CHECKING:
    import pandas


def label(op: Op) -> str:
    """What an operation is called in a profile, as "F stage 2 micro-batch 0".

    >>> from gpipe_lab.plan.ops import Kind
    >>> label(Op(Kind.R, 2, 0, 1))
    'R stage 2 micro-batch 0 segment 1'
    """
    segment = f" segment {op.segment}" if op.segment else ""
    return f"{op.kind.value} stage {op.stage} micro-batch {op.microbatch}{segment}"


@dataclass
class Recording:
    """The profile of what ran inside `recorded`: JSON in the Chrome trace event format, once it has ended."""

    content: bytes = b""


@contextmanager
def recorded(is_wanted: bool, scratch: str) -> Iterator[Recording]:
    """Profile what runs inside, if it is wanted. `scratch` is a folder for a file that is gone afterwards."""
    recording = Recording()
    if not is_wanted:
        yield recording
        return
    with profile(activities=profiler_activities(), acc_events=True) as profiler:
        yield recording
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = os.path.join(folder, "profile.json")
        profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            recording.content = file.read()


CRITERIA = ("parameters", "flops", "time", "memory")
REPEATS = 5


@dataclass(frozen=True)
class LayerProfile:
    """One layer on one micro-batch: counts, floating-point operations, ms, and bytes saved for backward."""

    name: str
    parameters: int
    parameter_bytes: int
    flops: int
    forward_ms: float
    backward_ms: float
    saved_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Profile:
    """All layers of a model. The loss, where there is one, counts with the last."""

    layers: tuple[LayerProfile, ...]

    def sizes(self, num_stages: int, by: str, *, schedule: Schedule | None = None) -> list[int]:
        """The number of layers of each stage, for `partition=`: the costliest stage costs least.

        by: "parameters", "flops", "time" (forward and backward), or "memory" (weights and their gradients,
        and what is saved for the micro-batches that `schedule` holds in flight; one without it).
        """
        require(by in CRITERIA, f"a cut is by one of {', '.join(CRITERIA)}", got=repr(by), where="partition")
        if by == "memory":
            return [len(span) for span in self._by_memory(num_stages, schedule)]
        costs: dict[str, list[float]] = {
            "parameters": [layer.parameters for layer in self.layers],
            "flops": [layer.flops for layer in self.layers],
            "time": [layer.forward_ms + layer.backward_ms for layer in self.layers],
        }
        return [len(span) for span in balanced(costs[by], num_stages)]

    def _by_memory(self, num_stages: int, schedule: Schedule | None) -> tuple[range, ...]:
        held = [1] * num_stages if schedule is None else list(peak_in_flight(schedule))

        def cost(stage: int, start: int, stop: int) -> float:
            inside = self.layers[start:stop]
            return sum(2 * layer.parameter_bytes + held[stage] * layer.saved_bytes for layer in inside)

        return min_max(len(self.layers), num_stages, cost)

    def frame(self) -> pandas.DataFrame:
        """One row a layer."""
        import pandas

        return pandas.DataFrame([vars(layer) for layer in self.layers])


def profile_layers(
    layers: Sequence[Any],
    names: Sequence[str],
    microbatch: Tree,
    device: Device,
    *,
    objective: Objective | None = None,
    seed: int = 0,
) -> Profile:
    """Run every layer forward and backward on what the layers before it give.

    Each is built, measured and let go in turn, so that the model need not fit.
    """
    found = []
    value = device.place(unmarked(microbatch))
    if objective is not None:
        loss_fn = objective.loss_fn
        loss_fn = loss_fn.to(device.torch_device) if isinstance(loss_fn, nn.Module) else loss_fn
        objective = replace(objective, loss_fn=loss_fn, target=device.place(unmarked(objective.target)))
    flags = [False] * len(tensors(value))
    for position, (name, layer) in enumerate(zip(names, layers, strict=True)):
        if not isinstance(layer, nn.Module):
            device.seed(init_seed(seed, position))
            layer = layer()
        last = position == len(layers) - 1
        ledger = Ledger(0)
        stage = Stage(0, [layer], position, device, ledger)
        measured, value, flags = _measure(stage, name, value, flags, objective if last else None)
        found.append(measured)
    return Profile(tuple(found))


def _measure(
    stage: Stage, name: str, value: Tree, flags: list[bool], objective: Objective | None
) -> tuple[LayerProfile, Tree, list[bool]]:
    forward_ms, backward_ms = [], []
    flops = saved = 0
    for repeat in range(REPEATS + 1):  # the first warms up and is counted instead of timed
        with FlopCounterMode(display=False) if repeat == 0 else nullcontext() as counter:
            start = now_ms()
            output = stage.forward(0, value, flags, StepContext(), objective=objective)
            stage.device.finish()
            middle = now_ms()
            saved = stage.ledger.totals["saved"]
            wanted = [
                t for t, needed in zip(tensors(output.tree), output.needs_gradient, strict=True) if needed
            ]
            stage.backward(0, 0, [torch.ones_like(t) for t in wanted])
            stage.device.finish()
            end = now_ms()
        if counter is not None:
            flops = counter.get_total_flops()
        else:
            forward_ms.append(middle - start)
            backward_ms.append(end - middle)
    parameters = list(stage.layers.parameters())
    for parameter in parameters:
        parameter.grad = None
    measured = LayerProfile(
        name=name,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        flops=flops,
        forward_ms=median(forward_ms),
        backward_ms=median(backward_ms),
        saved_bytes=saved,
        output_bytes=sum(t.numel() * t.element_size() for t in tensors(output.tree)),
    )
    return measured, output.tree, output.needs_gradient
