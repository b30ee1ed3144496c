"""The rules of streams, lifetimes and orders: the engine keeps them, and breaking any is noticed."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.device import CpuDevice
from gpipe_lab.engine.distributed import NcclTransport
from gpipe_lab.engine.emulated import BrokenRule, EmulatedDevice
from gpipe_lab.engine.executor import Step
from gpipe_lab.engine.loopback import Hang, LoopbackTransport, Whereabouts
from gpipe_lab.engine.mailbox import Mailbox
from gpipe_lab.engine.profile import profile_layers
from gpipe_lab.engine.stage import Objective
from gpipe_lab.engine.transport import StreamTransport, _OnStream
from gpipe_lab.plan.lowering import as_written
from gpipe_lab.plan.ops import RECEIVES, Kind
from gpipe_lab.plan.schedules import replicate
from tests.comparing import distance, whole_batch

from .running import run

WIDTH = 6


def make_model(num_layers=8):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*layers).double()


def make_batch(rows=16):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, WIDTH, generator=generator).double() for _ in range(2))


def check(schedule=None, *, seeds=range(3), **options):
    """Two steps, for several interleavings: gradients are one process's."""
    model, (x, y) = make_model(), make_batch()
    _, reference = whole_batch(model, x, y)
    for seed in seeds:
        found = run(schedule or gl.one_f_one_b(4, 8), model, x, y, seed=seed, steps=2, **options)
        assert distance(found.gradients, reference) <= 1e-12
        assert found.heard[-1] == 0, "a host waited for word of messages that were agreed on"


def peak_bytes(num_microbatches, make=gl.forward_only, *, num_stages=2):
    x, y = make_batch(2 * num_microbatches)
    schedule = make(num_stages, num_microbatches)
    found = run(schedule, make_model(2 * num_stages), x, y, steps=2)
    under_way = ("communication", "outputs")
    return max(found.run.memory.peak_bytes(0, category) for category in under_way)


def check_memory_is_flat():
    assert peak_bytes(8) == peak_bytes(24)
    assert peak_bytes(8, gl.gpipe) == peak_bytes(24, gl.gpipe)


# Mutants: each drops one wait, one lifetime, one order or one event.


def send_without_producer(monkeypatch):
    send = StreamTransport.send

    def mutant(self, op, message, to, tag, made):
        return send(self, op, message, to, tag, self.born)

    monkeypatch.setattr(StreamTransport, "send", mutant)
    opened = StreamTransport.open_links

    def note(self, schedule):
        opened(self, schedule)
        self.born = self.device.compute.record()

    monkeypatch.setattr(StreamTransport, "open_links", note)


def producer_noted_before_it_ran(monkeypatch):
    compute = Step._compute

    def mutant(self, op, index):
        self.mailbox.early = self.device.compute.record()
        compute(self, op, index)

    send = Mailbox.send

    def send_early(self, op):
        if op in self._outgoing:
            message, keys, _ = self._outgoing[op]
            self._outgoing[op] = message, keys, self.early
        send(self, op)

    monkeypatch.setattr(Step, "_compute", mutant)
    monkeypatch.setattr(Mailbox, "send", send_early)


def received_without_its_event(monkeypatch):
    monkeypatch.setattr(_OnStream, "wait", lambda self: self.meta.unpack(self.flat))


def receive_without_the_owner(monkeypatch):
    def mutant(self, meta, source, tag):
        link, flat = self._links[source], self.device.empty(meta.offsets[-1])
        with link:
            self._take(flat, source)
        return _OnStream(meta, flat, link.record(), self.device)

    monkeypatch.setattr(StreamTransport, "receive", mutant)


def receive_into_memory_of_the_link(monkeypatch):
    def mutant(self, meta, source, tag):
        link = self._links[source]
        with link:
            flat = self.device.empty(meta.offsets[-1])
            self._take(flat, source)
        return _OnStream(meta, flat, link.record(), self.device)

    monkeypatch.setattr(StreamTransport, "receive", mutant)


def sent_let_go_without_its_event(monkeypatch):
    def mutant(self):
        done, self._under_way = self._under_way, []
        return done

    monkeypatch.setattr(StreamTransport, "completed", mutant)


def sent_not_held_at_all(monkeypatch):
    send = StreamTransport.send

    def mutant(self, op, message, to, tag, made):
        sent = send(self, op, message, to, tag, made)
        sent.flat = None
        return sent

    monkeypatch.setattr(StreamTransport, "send", mutant)


def sent_held_until_the_step_ends(monkeypatch):
    completed = StreamTransport.completed
    monkeypatch.setattr(LoopbackTransport, "completed", lambda self: [])
    monkeypatch.setattr(StreamTransport, "finish", lambda self: completed(self))


def sent_changed_at_once(monkeypatch):
    send = Mailbox.send

    def mutant(self, op):
        message = self._outgoing.get(op, [None])[0]
        send(self, op)
        if message is not None:
            message.flat.zero_()

    monkeypatch.setattr(Mailbox, "send", mutant)


def links_opened_within_the_step(monkeypatch):
    def mutant(self, schedule):
        for pair in schedule.links:
            if self.rank in pair:
                (other,) = set(pair) - {self.rank}
                self._links[other] = self.device.stream()

    monkeypatch.setattr(StreamTransport, "open_links", mutant)


def pageable_batch(monkeypatch):
    pin = EmulatedDevice.pin

    def mutant(self, tree):
        pin(self, tree)
        return tree

    monkeypatch.setattr(EmulatedDevice, "pin", mutant)


def loss_read_in_the_step(monkeypatch):
    forward = Step._forward

    def mutant(self, op):
        forward(self, op)
        if op.microbatch in self.losses and self.losses[op.microbatch] > 1e9:
            raise RuntimeError("the loss has grown")

    monkeypatch.setattr(Step, "_forward", mutant)


def host_finishes_each_operation(monkeypatch):
    settle = Mailbox.settle

    def mutant(self, *, wait=False):
        if not wait:
            self.device.finish()
        settle(self, wait=wait)

    monkeypatch.setattr(Mailbox, "settle", mutant)


def times_read_in_the_step(monkeypatch):
    add = Step._compute

    def mutant(self, op, index):
        add(self, op, index)
        self.device.times([self.device.stamp()])

    monkeypatch.setattr(Step, "_compute", mutant)


def outputs_copied_in_the_step(monkeypatch):
    monkeypatch.setattr(EmulatedDevice, "copy_out", lambda self, tree: tree.cpu())


def recorded_before_the_transfer(monkeypatch):
    def mutant(self, meta, source, tag):
        link, flat = self._links[source], self.device.empty(meta.offsets[-1])
        link.wait(self.device.compute.record())
        arrived = link.record()
        with link:
            self._take(flat, source)
        return _OnStream(meta, flat, arrived, self.device)

    monkeypatch.setattr(StreamTransport, "receive", mutant)


def send_noted_done_before_it_is(monkeypatch):
    send = StreamTransport.send

    def mutant(self, op, message, to, tag, made):
        sent = send(self, op, message, to, tag, made)
        sent.end = sent.start
        return sent

    monkeypatch.setattr(StreamTransport, "send", mutant)


MUTANTS = [
    (send_without_producer, BrokenRule, "leaves once the compute stream has written it"),
    (producer_noted_before_it_ran, BrokenRule, "leaves once the compute stream has written it"),
    (received_without_its_event, BrokenRule, "is read once its event is waited for"),
    (recorded_before_the_transfer, BrokenRule, "is read once its event is waited for"),
    (receive_without_the_owner, BrokenRule, "once that has waited for its owner"),
    (receive_into_memory_of_the_link, BrokenRule, "let go once its owner has waited"),
    (sent_let_go_without_its_event, BrokenRule, "let go once its owner has waited|kept until it has left"),
    (send_noted_done_before_it_is, BrokenRule, "let go once its owner has waited|kept until it has left"),
    (sent_not_held_at_all, BrokenRule, "let go once its owner has waited|kept until it has left"),
    (sent_changed_at_once, BrokenRule, "not changed until it has left"),
    (links_opened_within_the_step, BrokenRule, "before the first step"),
    (pageable_batch, BrokenRule, "fetches what is pinned"),
    (loss_read_in_the_step, BrokenRule, "waits for nothing within a step"),
    (host_finishes_each_operation, BrokenRule, "waits for nothing within a step"),
    (times_read_in_the_step, BrokenRule, "waits for nothing within a step"),
]


@pytest.mark.parametrize("make", gl.SCHEDULES.values(), ids=gl.SCHEDULES)
def test_every_rule_is_kept(make):
    schedule = make(4, 8)
    if schedule.trains:
        check(schedule)


@pytest.mark.parametrize(("mutant", "error", "rule"), MUTANTS, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_rule_is_named(mutant, error, rule, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(error, match=rule):
        check()


def test_outputs_of_a_forward_are_copied_without_waiting(monkeypatch):
    x, _ = make_batch()
    model = make_model()
    found = run(gl.forward_only(4, 8), model, x, None, loss_fn=None)
    assert torch.equal(found.run.outputs(), torch.cat([model(part) for part in x.chunk(8)]).detach())
    outputs_copied_in_the_step(monkeypatch)
    with pytest.raises(BrokenRule, match="waits for nothing within a step"):
        run(gl.forward_only(4, 8), model, x, None, loss_fn=None)


def test_memory_under_way_does_not_grow_with_microbatches(monkeypatch):
    check_memory_is_flat()
    sent_held_until_the_step_ends(monkeypatch)
    with pytest.raises(AssertionError):
        check_memory_is_flat()


def swapped(kinds, rank=1):
    """Two neighbouring transfers of one rank in the wrong order."""

    def change(schedule):
        row = list(schedule.ops[rank])
        at = [i for i, op in enumerate(row) if op.kind in kinds]
        pairs = [(i, j) for i, j in pairwise(at) if row[i].kind is row[j].kind]
        i, j = pairs[len(pairs) // 2]
        row[i], row[j] = row[j], row[i]
        ops = tuple(tuple(row) if r == rank else ops for r, ops in enumerate(schedule.ops))
        return gl.Schedule(schedule.name, schedule.num_microbatches, schedule.stage_to_rank, ops)

    return change


def test_receives_in_another_order_are_noticed():
    with pytest.raises((AssertionError, BrokenRule, Hang)):
        check(gl.gpipe(4, 8), lowered=swapped(RECEIVES))


def test_transfers_in_no_common_order_are_named():
    """Transfers where one first writes them down: two ends of a link are not in the same order."""
    schedule = gl.one_f_one_b(4, 8)
    with pytest.raises((BrokenRule, Hang), match=r"(?s)rank \d.*SEND_.*the order|one order of transfers"):
        check(schedule, lowered=lambda lowered: as_written(schedule))


def test_a_hang_is_named_at_once(monkeypatch):
    """A message that never leaves: every rank is named with what it waits for."""
    put = LoopbackTransport._put

    def mutant(self, flat, to):
        if str(self.world.boards[self.rank].op) != "0SEND_F3":
            put(self, flat, to)

    monkeypatch.setattr(LoopbackTransport, "_put", mutant)
    with pytest.raises(Hang) as told:
        check(gl.gpipe(3, 4))
    assert all(f"rank {rank} in" in str(told.value) for rank in range(3))
    assert "rank 1 in 1RECV_F3 waits for a transfer" in str(told.value)
    assert "rank 1's 192 B from rank 0, issued in 1RECV_F3" in str(told.value)


def test_a_run_is_repeated_by_its_seed():
    x, y = make_batch()

    def order(seed):
        found = run(gl.one_f_one_b(4, 8), make_model(), x, y, seed=seed)
        return [(e.rank, e.lane, e.op) for e in found.run.trace.events]

    assert order(3) == order(3)
    assert any(order(seed) != order(3) for seed in range(4, 8))


def test_a_failure_on_one_rank_ends_all():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("a fault on purpose")

    x, y = make_batch()
    with pytest.raises(ValueError, match="on purpose"):
        run(gl.gpipe(3, 4), nn.Sequential(*make_model(5), Raises()), x, y)


def test_a_paced_run_may_wait():
    check(gl.gpipe(2, 2), pace=gl.Pace(forward_ms=0.1, backward_ms=0.2), seeds=[0])


def test_the_watchdog_sees_a_step_until_the_device_has_done_it(monkeypatch):
    """The board is cleared when times and losses have been read: what hangs on a device hangs there."""
    names = []

    def noted(cls, name):
        method = getattr(cls, name)

        def call(self, *args):
            names.append(name)
            return method(self, *args)

        monkeypatch.setattr(cls, name, call)

    noted(EmulatedDevice, "times")
    noted(LoopbackTransport, "finish")
    noted(Whereabouts, "clear")
    x, y = make_batch()
    run(gl.gpipe(1, 2), make_model(), x, y)
    assert names.index("finish") < names.index("times") < names.index("clear")
    assert names[names.index("finish") :].index("clear") > 1


def test_links_open_in_one_order_for_all_ranks():
    """Neighbours in the pipeline, also where it turns back or starts anew on the first rank."""
    assert gl.gpipe(3, 2).links == ((0, 1), (1, 2))
    assert gl.interleaved(3, 3, num_chunks=2).links == ((0, 1), (0, 2), (1, 2))
    assert gl.zero_bubble_v(3, 6).links == ((0, 1), (1, 2))
    assert replicate(gl.gpipe(2, 2), 2).links == ((0, 1), (2, 3))


def test_transfers_follow_the_costs_that_were_measured():
    """With a slow last stage, results come to exist in another order, and so transfers are issued."""
    schedule = gl.one_f_one_b(3, 6)
    slow = gl.Costs(forward=(1.0, 1.0, 9.0), backward=(2.0, 2.0, 18.0))
    measured = gl.lower(schedule, costs=gl.costs_of(gl.simulate(schedule, slow)))
    assert measured.ops == gl.lower(schedule, costs=slow).ops != gl.lower(schedule).ops
    check(schedule, seeds=[0], lowered=lambda lowered: measured)


def test_a_pace_does_not_hold_links_that_gpus_drive_by_themselves():
    transport = NcclTransport.__new__(NcclTransport)
    transport.link_ms = 0.0
    with pytest.raises(gl.InputError, match="NCCL's GPUs do that by themselves"):
        transport.link_ms = 5.0
    assert transport.link_ms == 0.0


def test_a_profile_places_target_and_loss():
    placed, moved = [], []

    class Noted(CpuDevice):
        def place(self, tree):
            placed.append(tree)
            return super().place(tree)

    class Loss(nn.MSELoss):
        def to(self, device):
            moved.append(device)
            return super().to(device)

    x, y = make_batch(4)
    device = Noted()
    found = profile_layers(make_model(2), "01", x, device, objective=Objective(Loss(), y, 1.0))
    assert len(found.layers) == 2
    assert any(tree is x for tree in placed) and any(tree is y for tree in placed)
    assert moved == [device.torch_device]


def test_a_rank_that_sums_is_one_that_waits(monkeypatch):
    """So that the watchdog blames the rank that the others wait for."""
    marks = []
    monkeypatch.setattr(Whereabouts, "mark", lambda self, op, *, waits=False: marks.append((op.kind, waits)))
    x, y = make_batch()
    run(gl.gpipe(2, 2), make_model(), x, y, num_replicas=2)
    sums = [waits for kind, waits in marks if kind is Kind.REDUCE]
    assert sums and all(sums)
