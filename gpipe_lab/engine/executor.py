"""One loop over one rank's operations: this is where a schedule becomes a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..plan.memory import MemoryRow
from ..plan.ops import COMPUTE, RECEIVES, SENDS, Kind, Op
from ..plan.schedule import Schedule, peer
from ..plan.trace import COMM_LANE, COMPUTE_LANE, WAIT_LANE, Event
from .gradients import GradientBook
from .ledger import Ledger
from .links import Incoming, Links, Sent, tag_of
from .message import MessageMeta, check_agreed, pack
from .pace import Pace
from .stage import Objective, Stage, StepContext
from .streams import Device, now_ms
from .tracer import Tracer
from .tree import Tree, map_tensors, tensors


class Board(Protocol):
    """Where a rank says what it is doing, so that its death can be placed."""

    def mark(self, op: Op) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One step as a rank is told it. All ranks are told the same, but for inputs and targets.

    `schedule` is lowered; `first_schedule` is the same lowered with receives as late as can be, for a
    step in which message shapes are still to be agreed on. `inputs` are there where stage 0 is, `targets`
    and `scales` where the last stage is. `every` is the k of checkpointing "every:k".
    """

    schedule: Schedule
    first_schedule: Schedule
    signatures: tuple[str, ...]
    sizes: tuple[int, ...]
    step: StepContext
    inputs: list[Tree] | None = None
    targets: list[Tree] | None = None
    scales: tuple[float, ...] = ()
    pace: Pace | None = None
    every: int | None = None


@dataclass
class RankResult:
    """What one rank brings home from a step. `losses` has each micro-batch's loss, not scaled."""

    rank: int
    events: list[Event] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    bytes_sent: dict[tuple[int, int], int] = field(default_factory=dict)
    overran: int = 0


@dataclass
class Value:
    """A stage's input, or the gradients of its output, on their way between two operations."""

    tree: Tree
    needs_gradient: list[bool]
    held: list[int] = field(default_factory=list)  # what the ledger is to release once it is used


class Agreements:
    """Which messages both ends of every boundary have agreed on, by transfer and input signature.

    It lives as long as the stages do. Every rank has seen the same steps, so each knows without asking
    whether a step brings something new.
    """

    def __init__(self) -> None:
        self.metas: dict[tuple[Kind, int, str], MessageMeta] = {}
        self.seen: set[tuple[str, bool]] = set()


class Executor:
    """Runs lowered schedules on one rank, with the stages that live there."""

    def __init__(
        self,
        rank: int,
        stages: dict[int, Stage],
        device: Device,
        ledger: Ledger,
        board: Board,
        gradients: GradientBook,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.device = device
        self.ledger = ledger
        self.board = board
        self.gradients = gradients
        self.loss_fn = loss_fn
        self.agreements = Agreements()
        self.handlers: dict[Kind, Callable[[Op], None]] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
        }

    def run(self, job: StepJob, links: Links) -> RankResult:
        """One step over `links`. Gradients accumulate in `.grad`."""
        self._begin(job, links)
        for index, op in enumerate(self.schedule.ops[self.rank]):
            self.board.mark(op)
            if op.kind in COMPUTE:
                self._compute(op, index)
            elif op.kind in SENDS:
                self._send(op)
            elif op.kind in RECEIVES:
                self._post_receive(op)
            self._note_sent(self.links.completed())
        self._note_sent(self.links.finish())
        self.board.clear()
        self.result.losses = {m: loss.item() for m, loss in self.losses.items()}
        self.result.events = self.tracer.events()
        stamps = [stamp for _, stamp, *_ in self.ledger.rows]
        self.result.memory = self.ledger.memory_rows(self.device.times(stamps))
        return self.result

    def _begin(self, job: StepJob, links: Links) -> None:
        new = {(signature, job.step.gradients) for signature in job.signatures} - self.agreements.seen
        self.agreements.seen |= new
        self.job = job
        self.links = links
        self.schedule = job.first_schedule if new else job.schedule
        self.tracer = Tracer(self.rank, self.device)
        self.result = RankResult(self.rank)
        self.losses: dict[int, torch.Tensor] = {}  # read off at the end, so that a GPU is not waited for
        self.values: dict[Op, Value] = {}  # by the operation that made or received them
        self.incoming: dict[Op, tuple[Incoming, MessageMeta, list[int]]] = {}
        for stage in self.stages.values():
            stage.reset()
        self.device.begin_step()
        self.ledger.begin(self.device.stamp())

    # Computation

    def _compute(self, op: Op, index: int) -> None:
        for needed in self.schedule.needs[op]:
            if needed in self.incoming:
                self._wait(needed)
        start, started_ms = self.device.stamp(), now_ms()
        self.ledger.start(op, index, start)
        if self.job.pace is None:
            self.handlers[op.kind](op)
        else:
            self._paced(op, self.job.pace, started_ms)
        end = self.device.stamp()
        self.ledger.snapshot(end)
        self.tracer.add(COMPUTE_LANE, op, start, end)

    def _paced(self, op: Op, pace: Pace, started_ms: float) -> None:
        """Run `op`, then hold it until its time, counted from its own start, is over."""
        if pace.flops_per_ms is not None:
            with FlopCounterMode(display=False) as counter:
                self.handlers[op.kind](op)
            duration_ms = counter.get_total_flops() / pace.flops_per_ms
        else:
            self.handlers[op.kind](op)
            segments = 1 + self.schedule.last_segment.get((op.stage, op.microbatch), 0)
            rows = self.job.sizes[op.microbatch]
            duration_ms = pace.duration_ms(op, num_segments=segments, rows=rows, largest=max(self.job.sizes))
        self.device.finish()
        left_ms = started_ms + duration_ms - now_ms()
        self.result.overran += left_ms < 0
        time.sleep(max(0.0, left_ms) / 1000.0)

    def _forward(self, op: Op) -> None:
        entering = self._first_input(op) if op.stage == 0 else self.values.pop(self.schedule.needs[op][0])
        output = self.stages[op.stage].forward(
            op.microbatch,
            entering.tree,
            entering.needs_gradient,
            self.job.step,
            objective=self._objective(op),
            segments=self._segments(op),
        )
        self.ledger.release("communication", entering.held)
        if op.stage < self.schedule.num_stages - 1:
            self.values[op] = Value(output.tree, output.needs_gradient)
            return
        if output.loss is not None:
            self.losses[op.microbatch] = output.loss
        if not self.job.step.gradients:
            self.result.outputs[op.microbatch] = map_tensors(torch.Tensor.cpu, output.tree)

    def _recompute(self, op: Op) -> None:
        self.stages[op.stage].recompute(op.microbatch, op.segment)

    def _backward(self, op: Op) -> None:
        arriving = None
        if op.segment == self.schedule.last_segment[op.stage, op.microbatch]:
            arriving = self._arriving_gradients(op)
        gradients = self.stages[op.stage].backward(
            op.microbatch, op.segment, None if arriving is None else arriving.tree
        )
        if arriving is not None:
            self.ledger.release("communication", arriving.held)
        self.gradients.count()
        if op.segment == 0 and op.stage > 0:
            self.values[op] = Value(gradients, [False] * len(gradients))

    def _arriving_gradients(self, op: Op) -> Value | None:
        """The gradients of a stage's output; None at the last stage, or where nothing needs one."""
        sources = [n for n in self.schedule.needs[op] if n.kind is Kind.RECV_B or n.stage > op.stage]
        return self.values.pop(sources[0], None) if sources else None

    def _first_input(self, op: Op) -> Value:
        """A copy of the micro-batch, so that a first layer that works in place leaves the batch alone."""
        assert self.job.inputs is not None, "inputs are sent to the rank of stage 0"
        batch = self.device.place(map_tensors(torch.clone, self.job.inputs[op.microbatch]))
        return Value(batch, [False] * len(tensors(batch)))

    def _objective(self, op: Op) -> Objective | None:
        if op.stage < self.schedule.num_stages - 1 or self.loss_fn is None or self.job.targets is None:
            return None
        m = op.microbatch
        return Objective(self.loss_fn, self.device.place(self.job.targets[m]), self.job.scales[m])

    def _segments(self, op: Op) -> list[range] | None:
        """How the schedule cuts this stage for this micro-batch, or None where nothing is recomputed."""
        if Op(Kind.R, op.stage, op.microbatch) not in self.schedule.rank_of:
            return None
        count = 1 + self.schedule.last_segment[op.stage, op.microbatch]
        return segment_layers(len(self.stages[op.stage].layers), count, self.job.every)

    # Messages

    def _send(self, op: Op) -> None:
        (source,) = self.schedule.needs[op]
        value = self.values.pop(source)
        if op.kind is Kind.SEND_B and not value.tree:
            return  # nothing at this boundary needs a gradient, and the other end knows
        where = f"{op} on rank {self.rank}"
        message = pack(value.tree, needs_gradient=value.needs_gradient, where=where)
        to = self.schedule.stage_to_rank[peer(op).stage]
        tag = tag_of(op, self.schedule.num_stages)
        agreed = self.agreements.metas.setdefault(self._agreement(op), message.meta)
        if agreed is message.meta:
            self.links.send_meta(agreed, to, tag)
        check_agreed(message.meta, agreed, where)
        keys = self.ledger.hold(_outgoing(op), message.tensors)
        self.links.send(op, message, to, tag).held = keys
        link = (self.rank, to)
        self.result.bytes_sent[link] = self.result.bytes_sent.get(link, 0) + message.num_bytes

    def _post_receive(self, op: Op) -> None:
        if op.kind is Kind.RECV_B and not self._expects_gradients(op):
            return
        send = peer(op)
        source = self.schedule.stage_to_rank[send.stage]
        tag = tag_of(op, self.schedule.num_stages)
        key = self._agreement(send)
        if key not in self.agreements.metas:
            self.agreements.metas[key] = self.links.receive_meta(source, tag)
        meta = self.agreements.metas[key]
        incoming = self.links.receive(meta, source, tag)
        self.incoming[op] = incoming, meta, self.ledger.hold("communication", incoming.tensors)

    def _expects_gradients(self, op: Op) -> bool:
        sent = self.agreements.metas[self._agreement(Op(Kind.SEND_F, op.stage, op.microbatch))]
        return any(tensor.needs_gradient for tensor in sent.tensors)

    def _wait(self, op: Op) -> None:
        incoming, meta, keys = self.incoming.pop(op)
        start = self.device.stamp()
        received = incoming.wait()
        end = self.device.stamp()
        self.tracer.add(WAIT_LANE, op, start, end)
        self.tracer.add(COMM_LANE, op, end, end)
        flags = [tensor.needs_gradient for tensor in meta.tensors]
        self.values[op] = Value(meta.assemble(received), flags, keys)

    def _agreement(self, send: Op) -> tuple[Kind, int, str]:
        return send.kind, send.stage, self.job.signatures[send.microbatch] + str(self.job.step.gradients)

    def _note_sent(self, done: Sequence[Sent]) -> None:
        for sent in done:
            self.ledger.release(_outgoing(sent.op), sent.held)
            self.tracer.add(COMM_LANE, sent.op, sent.start, sent.done.result())


def _outgoing(op: Op) -> str:
    """What a tensor under way counts as: an output may be saved for the backward as well, a gradient not."""
    return "outputs" if op.kind is Kind.SEND_F else "communication"


def segment_layers(num_layers: int, num_segments: int, every: int | None = None) -> list[range]:
    """The positions of the layers of each segment: `every` a segment, or as many as gives that count."""
    size = every or -(-num_layers // num_segments)
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]
