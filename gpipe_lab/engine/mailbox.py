"""One rank's messages during a step: agreed on, sent, received, counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..plan.ops import SENDS, TRANSFERS, Kind, Op
from ..plan.schedule import Schedule, peer
from ..plan.trace import COMM_LANE, WAIT_LANE, Event
from .batch import Tree
from .device import Device
from .ledger import Ledger
from .messages import Message, MessageMeta, pack
from .transport import Incoming, Sent, Transport, tag_of


@dataclass
class Tracer:
    """Collects (lane, operation, start stamp, end stamp) and turns them into events on the host's clock."""

    rank: int
    device: Device
    _records: list[tuple[str, Op, Any, Any]] = field(default_factory=list)

    @contextmanager
    def record(self, lane: str, op: Op) -> Iterator[None]:
        start = self.device.stamp()
        yield
        self.add(lane, op, start, self.device.stamp())

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


class Agreements:
    """Which messages both ends of every boundary have agreed on, by transfer and input signature.

    It lives as long as the stages do. Every rank of a pipeline has seen the same micro-batches, so each
    knows without asking whether a step brings something new.
    """

    def __init__(self) -> None:
        self.metas: dict[tuple[Kind, int, str], MessageMeta] = {}
        self.seen: set[str] = set()
        self.is_open = False  # whether some boundary's gradients are told of with each message

    def settle(self, key: tuple[Kind, int, str], meta: MessageMeta) -> None:
        """Agree on what messages of this kind look like.

        Absent gradients settle nothing: where control flow hangs on data, the next micro-batch may have them.
        """
        if key[0] is Kind.SEND_B and None in meta.leaves:
            self.is_open = True
        else:
            self.metas[key] = meta

    def bring_news(self, signatures: Sequence[str]) -> bool:
        """Whether a step has inputs of a kind not seen before; they are from now on."""
        new = set(signatures) - self.seen
        self.seen |= new
        return bool(new)


class Mailbox:
    """Sends and receives of one rank in one step of a lowered schedule."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        signatures: Sequence[str],
        *,
        transport: Transport,
        agreements: Agreements,
        ledger: Ledger,
        tracer: Tracer,
        board: Board,
    ) -> None:
        self.rank = rank
        self.schedule = schedule
        self.signatures = signatures
        self.transport = transport
        self.device = transport.device
        self.agreements = agreements
        self.ledger = ledger
        self.tracer = tracer
        self.board = board
        self.bytes_sent: dict[tuple[int, int], int] = {}
        self._routes = {op: self._route(op) for op in schedule.ops[rank] if op.kind in TRANSFERS}
        self._incoming: dict[Op, tuple[Incoming, MessageMeta, list[int]]] = {}
        self._outgoing: dict[Op, tuple[Message, list[int], Any]] = {}

    def prepare(self, op: Op, value: Value) -> None:
        """Make a send's message ready, within the operation whose result it is: it can then leave at once."""
        if op.kind is Kind.SEND_B and not value.tree:
            return  # nothing at this boundary needs a gradient, and the other end knows
        agreed = self.agreements.metas.get(self._routes[op].key)
        if agreed is not None and op.kind is Kind.SEND_B and any(g is None for g in value.tree):
            value.tree = agreed.with_zeros(value.tree, self.device.torch_device)
        place = _Place(op, self.rank)
        tree = self.device.place(value.tree)
        message = pack(tree, needs_gradient=value.needs_gradient, where=place, agreed=agreed)
        keys = self.ledger.hold(_outgoing(op), [message.flat])
        self._outgoing[op] = message, keys, self.device.compute.record()

    def send(self, op: Op) -> None:
        """Let a message go to the rank of the next or previous stage; nobody waits for it here."""
        if op not in self._outgoing:
            return
        message, keys, made = self._outgoing.pop(op)
        to, tag, key = self._routes[op]
        if key not in self.agreements.metas:
            self.agreements.settle(key, message.meta)
            self.transport.tell(message.meta, to, tag)
        self.transport.send(op, message, to, tag, made).held = keys
        link = (self.rank, to)
        self.bytes_sent[link] = self.bytes_sent.get(link, 0) + message.meta.num_bytes

    def post(self, op: Op) -> None:
        """Make ready for a message, unless none will come."""
        if op.kind is Kind.RECV_B and not self._expects_gradients(op):
            return
        source, tag, key = self._routes[op]
        meta = self.agreements.metas.get(key)
        if meta is None:
            self.board.mark(op, waits=True)
            meta = self.transport.hear(source, tag)
            self.agreements.settle(key, meta)
        incoming = self.transport.receive(meta, source, tag)
        self._incoming[op] = incoming, meta, self.ledger.hold("communication", [incoming.flat])

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
        """Let go of what has been sent; with `wait`, of all of it."""
        for sent in self.transport.finish() if wait else self.transport.completed():
            self._note(sent)

    def _note(self, sent: Sent) -> None:
        self.ledger.release(_outgoing(sent.op), sent.held)
        self.tracer.add(COMM_LANE, sent.op, sent.start, sent.end)

    def _expects_gradients(self, op: Op) -> bool:
        sent = self.agreements.metas[Kind.SEND_F, op.stage, self.signatures[op.microbatch]]
        return any(sent.needs_gradient)

    def _route(self, op: Op) -> _Route:
        other = peer(op)
        send = op if op.kind in SENDS else other
        key = send.kind, send.stage, self.signatures[send.microbatch]
        return _Route(self.schedule.rank_of[other], tag_of(op, self.schedule.num_stages), key)


class _Route(NamedTuple):
    """What a transfer needs to know besides its tensors; `key` is that of what both ends have agreed on."""

    rank: int  # of the other end
    tag: int
    key: tuple[Kind, int, str]


class _Place(NamedTuple):
    """Where a message is made, put into words only for an error."""

    op: Op
    rank: int

    def __str__(self) -> str:
        return f"{self.op} on rank {self.rank}"


def _outgoing(op: Op) -> str:
    """What a tensor under way counts as: an output may be saved for the backward as well, a gradient not."""
    return "outputs" if op.kind is Kind.SEND_F else "communication"
