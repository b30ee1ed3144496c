"""One loop over one rank's operations: this is where a schedule becomes a run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from ..plan.errors import InputError
from ..plan.memory import CATEGORIES, MemoryRow
from ..plan.ops import COMPUTE, RECEIVES, SENDS, TRANSFERS, Kind, Op
from ..plan.schedule import Schedule, dependencies, send_of
from ..plan.trace import COMPUTE_LANE, Event
from .batch import Tree, tensors
from .device import now_ms
from .gradients import GradientAccumulator
from .ledger import Ledger
from .loss import LossFn
from .mailbox import Agreements, Board, Mailbox, Tracer, Value
from .pace import Pace
from .profile import label
from .stage import Objective, Stage, StepContext
from .transport import Transport

Handler = Callable[[Op], None]


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """One step as a rank is told it. All ranks are told the same, but for inputs and targets.

    `schedule` is lowered; `first_schedule` is the same lowered with receives as late as can be, for a
    step in which message shapes are still to be agreed on. `inputs` has, by micro-batch, what stage 0 on
    the rank needs, `targets` what the last stage there does. `every` is the k of checkpointing "every:k".
    """

    schedule: Schedule
    first_schedule: Schedule
    signatures: tuple[str, ...]
    sizes: tuple[int, ...]
    step: StepContext
    inputs: Mapping[int, Tree] = field(default_factory=dict)
    targets: Mapping[int, Tree] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    pace: Pace | None = None
    every: int | None = None
    posts_ahead: bool = True  # whether receives may be posted ahead of need, also while an operation is held
    profile: bool = False  # whether torch's profiler runs along
    outputs: bool = False  # whether a training step brings the model's outputs back too


@dataclass
class RankResult:
    """What one rank brings home from a step. `losses` has each micro-batch's loss, not scaled.

    `unsplit` has, by stage, the names of weights that a split backward did not leave to its W.
    """

    rank: int
    events: list[Event] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    bytes_sent: dict[tuple[int, int], int] = field(default_factory=dict)
    bytes_reduced: dict[tuple[int, ...], int] = field(default_factory=dict)
    unsplit: dict[int, tuple[str, ...]] = field(default_factory=dict)
    overran: int = 0
    allocator_peak_bytes: int | None = None  # of torch's own allocator, on a GPU
    profile: bytes = b""  # what torch's profiler recorded, as JSON


class Step:
    """One lowered schedule on one rank, made ready: `run` is the loop over the rank's operations.

    Making it is a collective call of all ranks where the schedule has links that are not open yet. What the
    step needs is worked out then, so that nothing waits for it within.
    """

    def __init__(
        self,
        job: StepJob,
        transport: Transport,
        *,
        stages: dict[int, Stage],
        loss_fn: LossFn | None,
        gradients: GradientAccumulator,
        agreements: Agreements,
        ledger: Ledger,
        board: Board,
    ) -> None:
        self.rank = transport.rank
        self.device = transport.device
        self.job = job
        self.stages = stages
        self.loss_fn = loss_fn
        self.gradients = gradients
        self.ledger = ledger
        self.board = board
        signatures = [f"{signature} {job.step.gradients}" for signature in job.signatures]
        microbatches = {op.microbatch for op in job.schedule.ops[self.rank]}
        is_agreeing = agreements.begin([signatures[m] for m in microbatches])
        self.schedule = schedule = job.first_schedule if is_agreeing else job.schedule
        transport.open_links(schedule)
        for stage in stages.values():
            stage.begin(training=job.step.training)
        self.inputs = {m: self.device.pin(tree) for m, tree in job.inputs.items()}
        self.targets = {m: self.device.pin(tree) for m, tree in job.targets.items()}
        mine = schedule.ops[self.rank]
        self.needs = {op: dependencies(op, schedule) for op in mine if op.kind in COMPUTE}
        posts_ahead = job.pace is not None and job.posts_ahead and transport.in_any_order and not is_agreeing
        self.ahead = receives_after(mine) if posts_ahead else {}
        self.tracer = Tracer(self.rank, self.device)
        self.mailbox = Mailbox(
            schedule,
            signatures,
            transport=transport,
            agreements=agreements,
            ledger=ledger,
            tracer=self.tracer,
            board=board,
        )
        handlers: dict[Kind, Handler] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
            **dict.fromkeys(SENDS, self.mailbox.send),
            **dict.fromkeys(RECEIVES, self.mailbox.post),
        }
        self.handlers = {kind: _named(h) for kind, h in handlers.items()} if job.profile else handlers
        self.losses: dict[int, torch.Tensor] = {}  # read off at the end, so that a GPU is not waited for
        self.outputs: dict[int, Tree] = {}
        self.values: dict[Op, Value] = {}  # by the operation that made or received them
        self.overran = 0
        self.refusal: InputError | None = None  # why this rank has given the step up, and where
        self.refused_at: Op | None = None

    def run(self) -> RankResult:
        """Gradients accumulate, and their sums are still to be finished.

        An operation that breaks a rule ends the work of this rank (`refusal`), not its part in the exchange
        of messages: so all ranks come to the end of the step, where they learn of it, and the weights stay.
        """
        self.device.begin_step()
        self.ledger.begin(self.device.stamp())
        for index, op in enumerate(self.schedule.ops[self.rank]):
            self.board.mark(op)
            self.ledger.doing = op
            if self.refusal is None:
                try:
                    if op.kind in COMPUTE:
                        self._compute(op, index)
                    elif op.kind in TRANSFERS and not self.mailbox.expects(op):
                        self.handlers[op.kind](op)
                except InputError as error:
                    self.refusal, self.refused_at = error, op
            if self.refusal is not None:
                self.mailbox.pass_over(op)
        self.board.mark(op, waits=True)
        self.mailbox.settle(wait=True)
        memory_ms = self.device.times([stamp for _, stamp, *_ in self.ledger.rows])
        result = RankResult(
            self.rank,
            events=self.tracer.events(),
            memory=self.ledger.memory_rows(memory_ms),
            losses={m: loss.item() for m, loss in sorted(self.losses.items())},
            outputs=self.outputs,
            bytes_sent=self.mailbox.bytes_sent,
            overran=self.overran,
            allocator_peak_bytes=self.device.peak_bytes(),
        )
        self.board.clear()  # not before the device has come to its end: what hangs there is in this step
        return result

    def abandon(self) -> None:
        """Let go of what a step that was given up has left."""
        self.values.clear()
        for name, category in CATEGORIES.items():
            if category.released == "step":
                self.ledger.drop(name)
        if self.refusal is not None:  # its frames would keep the graph that they were in the middle of
            traceback.clear_frames(self.refusal.__traceback__)
        for stage in self.stages.values():
            stage.abandon()
        self.gradients.abandon()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """A rule that is broken within is a reason to give the step up, before or after its operations."""
        try:
            yield
        except InputError as error:
            if self.refusal is None:
                self.refusal = error

    def _compute(self, op: Op, index: int) -> None:
        for needed in self.needs[op]:
            if self.mailbox.expects(needed):
                self.values[needed] = self.mailbox.fetch(needed)
                self.board.mark(op)
        if self.job.pace is None:
            start = self.device.stamp()
            self.ledger.start(op, index, start)
            self.handlers[op.kind](op)
            end = self.device.stamp()
            self.mailbox.settle()
        else:
            start = now_ms()
            self.ledger.start(op, index, start)
            self._paced(op, self.job.pace, start)
            end = now_ms()
        self.ledger.snapshot(end)
        self.tracer.add(COMPUTE_LANE, op, start, end)

    def _paced(self, op: Op, pace: Pace, started_ms: float) -> None:
        """Run `op`, then hold it until its time, counted from its own start, is over.

        The time is used to post the receives that come next, where links leave the order to tags.
        """
        if pace.flops_per_ms is not None:
            with FlopCounterMode(display=False) as counter:
                self.handlers[op.kind](op)
            duration_ms = counter.get_total_flops() / pace.flops_per_ms
        else:
            self.handlers[op.kind](op)
            sizes = self.job.sizes
            rows, largest = sizes[op.microbatch], max(sizes)
            duration_ms = pace.duration_ms(op, self.schedule, rows=rows, largest=largest)
        self.device.finish()
        self.mailbox.settle()
        for receive in self.ahead.get(op, ()):
            self.handlers[receive.kind](receive)
        left_ms = started_ms + duration_ms - now_ms()
        self.overran += left_ms < 0
        time.sleep(max(0.0, left_ms) / 1000.0)

    def _forward(self, op: Op) -> None:
        entering = self._first_input(op) if op.stage == 0 else self.values.pop(self.needs[op][0])
        output = self.stages[op.stage].forward(
            op.microbatch,
            entering.tree,
            entering.needs_gradient,
            self.job.step,
            objective=self._objective(op),
            segments=self._segments(op),
            defer_weights=self._has(Kind.W, op),
        )
        self.ledger.release(entering.category, entering.held)
        if op.stage < self.schedule.num_stages - 1:
            self._hand_on(op, Value(output.tree, output.needs_gradient))
            return
        if output.loss is not None:
            self.losses[op.microbatch] = output.loss
        if self.job.outputs or not self.job.step.gradients:
            self.outputs[op.microbatch] = self.device.copy_out(output.tree)

    def _recompute(self, op: Op) -> None:
        loss = self.stages[op.stage].recompute(op.microbatch, op.segment)
        if loss is not None:
            self.losses[op.microbatch] = loss

    def _backward(self, op: Op) -> None:
        # None at the last stage, where nothing needs a gradient, and for a segment that goes on from another.
        arriving = next((self.values.pop(n) for n in self.needs[op] if n in self.values), None)
        gradients = self.stages[op.stage].backward(
            op.microbatch, op.segment, None if arriving is None else arriving.tree
        )
        if arriving is not None:
            self.ledger.release(arriving.category, arriving.held)
        self.gradients.accumulate()
        if op.segment == 0 and op.stage > 0:
            self._hand_on(op, Value(gradients, [False] * len(gradients)))

    def _hand_on(self, op: Op, value: Value) -> None:
        """To the stage that needs it: as a message, or as it is where that stage is here too."""
        send = send_of(op, self.schedule)
        if send is None:
            value.category = "outputs"
            value.held = self.ledger.hold("outputs", tensors(value.tree))
            self.values[op] = value
        else:
            self.mailbox.prepare(send, value)

    def _backward_weight(self, op: Op) -> None:
        self.stages[op.stage].backward_weight(op.microbatch)
        self.gradients.accumulate()

    def _first_input(self, op: Op) -> Value:
        """A copy of the micro-batch, so that a first layer that works in place leaves the batch alone."""
        batch = self.device.copy_in(self.inputs[op.microbatch])
        return Value(batch, [False] * len(tensors(batch)))

    def _objective(self, op: Op) -> Objective | None:
        if op.stage < self.schedule.num_stages - 1 or self.loss_fn is None or not self.targets:
            return None
        m = op.microbatch
        return Objective(self.loss_fn, self.device.place(self.targets[m]), self.job.scales[m])

    def _has(self, kind: Kind, op: Op) -> bool:
        """Whether the schedule has such an operation for this stage and micro-batch."""
        schedule = self.schedule
        return kind in schedule.kinds and Op(kind, op.stage, op.microbatch) in schedule.rank_of

    def _segments(self, op: Op) -> list[range] | None:
        """How the schedule cuts this stage for this micro-batch, or None where nothing is recomputed."""
        if not self._has(Kind.R, op):
            return None
        count = 1 + self.schedule.last_segment.get((op.stage, op.microbatch), 0)
        return segment_layers(len(self.stages[op.stage].layers), count, self.job.every)


def receives_after(ops: Sequence[Op]) -> dict[Op, list[Op]]:
    """By computation, the receives between it and the next."""
    found: dict[Op, list[Op]] = {}
    for op in ops:
        if op.kind in COMPUTE:
            following = found[op] = []
        elif op.kind in RECEIVES and found:
            following.append(op)
    return found


def _named(handler: Handler) -> Handler:
    """The same, each operation under its name in torch's profile."""

    def handle(op: Op) -> None:
        with record_function(label(op)):
            handler(op)

    return handle


def segment_layers(num_layers: int, num_segments: int, every: int | None = None) -> list[range]:
    """The positions of the layers of each segment: `every` a segment, or as many as gives that count.

    A split backward is recomputed whole, whatever `every` says.
    """
    size = every if every and num_segments > 1 else -(-num_layers // num_segments)
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]
