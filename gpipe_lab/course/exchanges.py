"""A schedule's messages really sent, in the order written down, by the strictest rule that NCCL may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..plan.ops import COMPUTE, RECEIVES, SENDS, TRANSFERS, Kind, Op, peer
from ..plan.schedule import Schedule, dependencies

if TYPE_CHECKING:
    from ..lab.lab import Lab
    from ..lab.worker import RankContext

Received = list[tuple[Op, Op]]  # (receive, the send whose message it got), in the order received
HANGS_AFTER_S = 5.0  # a message takes a millisecond, but a busy machine may keep a rank from a core


def play(lab: Lab, schedule: Schedule, *, hangs_after_s: float = HANGS_AFTER_S) -> list[Received]:
    """Send a lowered schedule's messages between real processes; what each rank received, in order.

    Nothing is computed: a message is the name of its send. Every rank has one queue of transfers over
    gloo; each waits for its other end before the next begins, and messages are matched by their order
    alone, without tags, as NCCL does. The schedule is not validated, so that what is wrong in it shows:
    `RankFailed` names a rank and its operation where no rank has moved for `hangs_after_s`.
    """
    return lab.call(play_rank, [(schedule,)] * lab.num_ranks, watchdog_s=hangs_after_s)


def play_rank(context: RankContext, schedule: Schedule) -> Received:
    """A job: this rank's row of the schedule."""
    from ..engine.device import CpuDevice
    from ..engine.distributed import GlooTransport, Meeting
    from ..engine.messages import pack
    from ..engine.transport import Incoming

    transport = GlooTransport(CpuDevice(), Meeting.of_default_group(), strict=True)
    incoming: dict[Op, Incoming] = {}
    received: Received = []

    if context.rank >= schedule.num_ranks:
        return received
    row = schedule.ops[context.rank]
    for op in row:
        context.board.mark(op)
        other = schedule.rank_of[peer(op)] if op.kind in TRANSFERS else context.rank
        if op.kind in SENDS:
            transport.send(
                op, pack(encoded(op), needs_gradient=[False], where=str(op)), other, tag=0, made=None
            )
        elif op.kind in RECEIVES:
            meta = pack(encoded(op), needs_gradient=[False], where=str(op)).meta
            incoming[op] = transport.receive(meta, other, tag=0)
        elif op.kind in COMPUTE:
            for needed in dependencies(op, schedule):
                if needed in incoming:
                    context.board.mark(needed, waits=True)
                    (message,) = incoming.pop(needed).wait()
                    received.append((needed, decoded(message)))
    last_send = next((op for op in reversed(row) if op.kind in SENDS), row[-1])
    context.board.mark(last_send, waits=True)
    transport.finish()
    transport.close()
    return received


def encoded(op: Op) -> Any:
    """An operation as a tensor of numbers: its kind, stage and micro-batch."""
    import torch

    return torch.tensor([_TRANSFERS.index(op.kind.value), op.stage, op.microbatch])


def decoded(message: Any) -> Op:
    """The operation that was encoded so."""
    kind, stage, microbatch = message.tolist()
    return Op(Kind(_TRANSFERS[kind]), stage, microbatch)


_TRANSFERS = sorted(kind.value for kind in TRANSFERS)
