"""One rank's messages during a step: agreed on, sent, received, counted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..plan.ops import RECEIVES, SENDS, TRANSFERS, Kind, Op, peer
from ..plan.schedule import Schedule
from ..plan.trace import COMM_LANE, WAIT_LANE, Event
from .batch import Tree
from .device import Device
from .ledger import Ledger
from .messages import Message, MessageMeta, NothingCame, check_agreed, pack
from .transport import Incoming, Sent, Transport, tag_of


class Tracer:
    """Collects (lane, operation, start stamp, end stamp) and turns them into events on the host's clock."""

    def __init__(self, rank: int, device: Device) -> None:
        self.rank = rank
        self.device = device
        self._records: list[tuple[str, Op, Any, Any]] = []

    def add(self, lane: str, op: Op, start: Any, end: Any) -> None:
        self._records.append((lane, op, start, end))

    def events(self) -> list[Event]:
        """Everything recorded, in ms of the host's monotonic clock."""
        starts = self.device.times([start for _, _, start, _ in self._records])
        ends = self.device.times([end for *_, end in self._records])
        return [
            Event(self.rank, lane, op, start, end)
            for (lane, op, _, _), start, end in zip(self._records, starts, ends, strict=True)
        ]


class Board(Protocol):
    """Where a rank says what it is doing, so that its death can be placed."""

    def mark(self, op: Op, *, waits: bool = False) -> None: ...

    def clear(self) -> None: ...


@dataclass
class Value:
    """A stage's input, or the gradients of its output, on their way between two operations."""

    tree: Tree
    needs_gradient: list[bool]
    held: list[int] = field(default_factory=list)  # what the ledger is to release once it is used
    category: str = "communication"  # and what it counted as until then


Key = tuple[Kind, int, str]  # of messages that are to be alike: kind of send, sending stage, input signature


class Agreements:
    """What both ends of every boundary know of its messages before they come.

    The first message of a key is announced: what it looks like is told ahead of it, and holds for all that
    follow. Where structure or shape hangs on data that does not hold. A message that is unlike the others
    makes its step void; in the step that is then taken in its place every message is announced, and those
    keys whose messages differ are announced from then on. Both ends see the same messages and so know the
    same. All this lives as long as the stages do.
    """

    def __init__(self) -> None:
        self._metas: dict[Key, MessageMeta] = {}
        self._varying: set[Key] = set()
        self._seen: set[str] = set()
        self._some_are_announced = False
        self.announces_all = False

    def known(self, key: Key) -> MessageMeta | None:
        """What the next message of this key looks like, or None where it is announced."""
        return None if self.announces_all or key in self._varying else self._metas.get(key)

    def learn(self, key: Key, meta: MessageMeta) -> None:
        """From an announcement, on both ends.

        Absent gradients say nothing: where control flow hangs on data, the next micro-batch may have them.
        """
        if key[0] is Kind.SEND_B and None in meta.leaves:
            self._some_are_announced = True
        elif self._metas.setdefault(key, meta) != meta:
            self._varying.add(key)
            self._some_are_announced = True

    def begin(self, signatures: Sequence[str]) -> bool:
        """Whether a step with these inputs here has announcements: each then blocks the host until it comes.

        Every rank of a pipeline has seen the same micro-batches, so each knows without asking.
        """
        new = set(signatures) - self._seen
        self._seen |= new
        return bool(new) or self._some_are_announced or self.announces_all

    def doubt(self) -> None:
        """A step was given up: what it was to agree on may still be open."""
        self._seen.clear()


class Mailbox:
    """Sends and receives of one rank in one step of a lowered schedule."""

    def __init__(
        self,
        schedule: Schedule,
        signatures: Sequence[str],
        *,
        transport: Transport,
        agreements: Agreements,
        ledger: Ledger,
        tracer: Tracer,
        board: Board,
    ) -> None:
        self.rank = transport.rank
        self.schedule = schedule
        self.signatures = signatures
        self.transport = transport
        self.device = transport.device
        self.agreements = agreements
        self.ledger = ledger
        self.tracer = tracer
        self.board = board
        self.bytes_sent: dict[tuple[int, int], int] = {}
        self._routes = {op: self._route(op) for op in schedule.ops[self.rank] if op.kind in TRANSFERS}
        self._incoming: dict[Op, tuple[Incoming, MessageMeta, list[int]]] = {}
        self._outgoing: dict[Op, tuple[Message, list[int], Any]] = {}
        self._flags: dict[tuple[int, int], list[bool]] = {}  # what needs a gradient of a stage's output
        self._declined: set[Op] = set()  # receives for which word came that there is nothing

    def prepare(self, op: Op, value: Value) -> None:
        """Make a send's message ready, within the operation whose result it is: it can then leave at once."""
        if op.kind is Kind.SEND_B and not value.tree:
            return  # nothing at this boundary needs a gradient, and the other end knows
        route = self._routes[op]
        agreed = self.agreements.known(route.key)
        if agreed is not None and op.kind is Kind.SEND_B and any(g is None for g in value.tree):
            value.tree = agreed.with_zeros(value.tree, self.device.torch_device)
        tree = self.device.place(value.tree)
        message = pack(tree, needs_gradient=value.needs_gradient, where=route, agreed=agreed)
        keys = self.ledger.hold(_category(op), [message.flat])
        self._outgoing[op] = message, keys, self.device.compute.record()

    def send(self, op: Op) -> None:
        """Let a message go to the rank of the next or previous stage; nobody waits for it here."""
        if op not in self._outgoing:
            return
        message, keys, made = self._outgoing.pop(op)
        route = self._routes[op]
        known = self.agreements.known(route.key)
        if known is None:
            self.agreements.learn(route.key, message.meta)
            self.transport.tell(message.meta, route.peer, route.tag)
        elif known is not message.meta:  # agreed on since the message was made
            check_agreed(message.meta, known, route)
        self._let_go(op, message, made).held = keys

    def _let_go(self, op: Op, message: Message, made: Any) -> Sent:
        route = self._routes[op]
        if op.kind is Kind.SEND_F:
            self._flags[op.stage, op.microbatch] = message.meta.needs_gradient
        link = (self.rank, route.peer)
        self.bytes_sent[link] = self.bytes_sent.get(link, 0) + message.meta.num_bytes
        return self.transport.send(op, message, route.peer, route.tag, made)

    def post(self, op: Op) -> None:
        """Make ready for a message, unless none will come.

        Raises `NothingCame` where one was to be announced and the other end has given the step up.
        """
        if op.kind is Kind.RECV_B and not self._needs_gradient(op.stage, op.microbatch):
            return
        route = self._routes[op]
        meta = self.agreements.known(route.key)
        if meta is None:
            self.board.mark(op, waits=True)
            meta = self.transport.hear(route.peer, route.tag)
            if meta is None:
                self._declined.add(op)
                raise NothingCame("a step is taken by all ranks or by none", got="word that it was given up")
            self.agreements.learn(route.key, meta)
        if op.kind is Kind.RECV_F:
            self._flags[op.stage - 1, op.microbatch] = meta.needs_gradient
        incoming = self.transport.receive(meta, route.peer, route.tag)
        self._incoming[op] = incoming, meta, self.ledger.hold("communication", [incoming.flat])

    def pass_over(self, op: Op) -> None:
        """Keep to what the other end expects though this rank has given the step up.

        A message whose looks are known goes as zeros, of any other comes word that there is none.
        """
        if op.kind in RECEIVES and not self.expects(op) and op not in self._declined:
            with suppress(NothingCame):
                self.post(op)
        if op.kind is Kind.SEND_F:
            self._send_nothing(op)
        if op.kind is Kind.SEND_B and self._needs_gradient(op.stage - 1, op.microbatch):
            self._send_nothing(op)

    def _send_nothing(self, op: Op) -> None:
        route = self._routes[op]
        known = self.agreements.known(route.key)
        if known is None:
            self._flags.setdefault((op.stage, op.microbatch), [])
            self.transport.tell(None, route.peer, route.tag)
        else:
            zeros = self.device.empty(known.offsets[-1]).zero_()
            self._let_go(op, Message(known, zeros), self.device.compute.record())

    def _needs_gradient(self, stage: int, microbatch: int) -> bool:
        """Whether gradients come back for what this stage sends on, or has sent on."""
        flags = self._flags.get((stage, microbatch))
        if flags is None:  # it has not been sent yet, so that it is no announced one
            known = self.agreements.known((Kind.SEND_F, stage, self.signatures[microbatch]))
            flags = [] if known is None else known.needs_gradient
        return any(flags)

    def expects(self, op: Op) -> bool:
        """Whether `op` is a receive that has been posted and not been fetched."""
        return op in self._incoming

    def fetch(self, op: Op) -> Value:
        """The message of a posted receive, once it is there."""
        incoming, meta, keys = self._incoming.pop(op)
        self.transport.watch()
        self.board.mark(op, waits=True)
        start = self.device.stamp()
        received = incoming.wait()
        end = self.device.stamp()
        self.tracer.add(WAIT_LANE, op, start, end)
        self.tracer.add(COMM_LANE, op, end, end)
        return Value(meta.assemble(received), meta.needs_gradient, keys)

    def settle(self, *, wait: bool = False) -> None:
        """Let go of what has been sent; with `wait`, once all has left and what was posted has come."""
        for incoming, *_ in self._incoming.values() if wait else ():
            incoming.wait()
        for sent in self.transport.finish() if wait else self.transport.completed():
            self.ledger.release(_category(sent.op), sent.held)
            self.tracer.add(COMM_LANE, sent.op, sent.start, sent.end)

    def _route(self, op: Op) -> _Route:
        other = peer(op)
        send = op if op.kind in SENDS else other
        key: Key = send.kind, send.stage, self.signatures[send.microbatch]
        tag = tag_of(op, self.schedule.num_stages)
        return _Route(op, self.schedule.rank_of[other], tag, key, self.rank)


class _Route(NamedTuple):
    """What a transfer needs to know besides its tensors; `key` is that of what both ends have agreed on."""

    op: Op
    peer: int  # the rank of the other end
    tag: int
    key: Key
    rank: int

    def __str__(self) -> str:
        """Where a message is made, put into words only for an error."""
        return f"{self.op} on rank {self.rank}"


def _category(op: Op) -> str:
    """What a tensor under way counts as: an output may be saved for the backward as well, a gradient not."""
    return "outputs" if op.kind is Kind.SEND_F else "communication"
