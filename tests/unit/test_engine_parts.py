"""The engine's pure parts, without processes."""

import threading
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine import models as corpus_module
from gpipe_lab.engine.batch import flatten, merge, microbatch_sizes, signature, split, unflatten
from gpipe_lab.engine.device import CpuDevice
from gpipe_lab.engine.distributed import Meeting
from gpipe_lab.engine.executor import segment_layers
from gpipe_lab.engine.layer_state import layer_seed
from gpipe_lab.engine.ledger import Ledger, OutOfMemory
from gpipe_lab.engine.mailbox import Tracer
from gpipe_lab.engine.messages import BoundaryChanged, check_agreed, dense, pack
from gpipe_lab.engine.stage import Objective, Stage, StepContext
from gpipe_lab.engine.transport import tag_of
from gpipe_lab.plan.lowering import lower
from gpipe_lab.plan.ops import TRANSFERS, Kind, Op, peer
from gpipe_lab.plan.schedules import one_f_one_b
from gpipe_lab.train.world import require_same_devices

Pair = namedtuple("Pair", "left right")

trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(trees)
@settings(deadline=None, derandomize=True)
def test_any_nesting_is_put_together_as_it_was(tree):
    leaves, spec = flatten(tree)
    rebuilt = unflatten(leaves, spec)
    assert rebuilt == tree and type(rebuilt) is type(tree)


@given(st.integers(1, 200), st.integers(1, 40))
@settings(deadline=None, derandomize=True)
def test_microbatch_sizes_are_even_and_complete(rows, num_microbatches):
    if rows < num_microbatches:
        with pytest.raises(ValueError, match="at least one row"):
            microbatch_sizes(rows, num_microbatches)
        return
    sizes = microbatch_sizes(rows, num_microbatches)
    assert sum(sizes) == rows and len(sizes) == num_microbatches
    assert max(sizes) - min(sizes) <= 1


def test_split_makes_copies_and_merge_undoes_it():
    batch = {"x": torch.randn(10, 3), "y": (torch.arange(10), 5)}
    parts = split(batch, 4)
    assert [len(part["x"]) for part in parts] == [3, 3, 2, 2]
    assert parts[0]["x"].untyped_storage().nbytes() == 3 * 3 * 4
    merged = merge(parts)
    assert torch.equal(merged["x"], batch["x"]) and torch.equal(merged["y"][0], batch["y"][0])
    assert signature(parts[0]) == signature(parts[1]) != signature(parts[2])


def test_outputs_of_microbatches_make_one():
    parts = [(torch.ones(2, 3), torch.tensor(5.0), "a"), (torch.zeros(1, 3), torch.tensor(7.0), "a")]
    rows, losses, name = merge(parts)
    assert rows.shape == (3, 3) and torch.equal(losses, torch.tensor([5.0, 7.0])) and name == "a"


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(2, 3), torch.ones(2, 4)],
        [torch.ones(2), torch.tensor(1.0)],
        [(torch.ones(2), None), (torch.ones(2), torch.ones(2))],
        [(torch.ones(2), 1.5), (torch.ones(2), 2.5)],
        [{"a": torch.ones(2)}, {"b": torch.ones(2)}],
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(parts):
    with pytest.raises(ValueError, match="num_microbatches=1"):
        merge(parts)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(5, 1).expand(5, 3),
        torch.randn(10)[::2],
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.arange(6) > 2,
        torch.randn(4, dtype=torch.bfloat16),
        torch.randn(2, 2, dtype=torch.complex64),
    ],
)
def test_a_message_is_one_row_of_bytes_for_any_tensors(tensor):
    one = pack(tensor, needs_gradient=[False], where="")
    assert one.flat.dtype is torch.uint8 and one.flat.shape == (tensor.nbytes,)
    (received,) = one.meta.unpack(one.flat)
    assert torch.equal(received, tensor) and received.stride() == dense(tensor).stride()
    several = pack((tensor, torch.arange(3, dtype=torch.int16), tensor), needs_gradient=[False] * 3, where="")
    assert several.meta.num_bytes == 2 * tensor.nbytes + 6
    parts = several.meta.unpack(several.flat.clone())
    assert torch.equal(parts[0], tensor) and torch.equal(parts[2], tensor)
    assert parts[1].tolist() == [0, 1, 2]
    before = parts[0]._version
    parts[1].add_(1)  # tensors of one message are modified in place without a word to the others
    assert parts[0]._version == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    ],
)
def test_what_is_not_dense_is_not_sent_and_makes_no_batch(tensor):
    for refused in (
        lambda: pack((tensor, 1), needs_gradient=[True], where="0F0"),
        lambda: merge([tensor, tensor]),
    ):
        with pytest.raises(ValueError, match="are dense and have values"):
            refused()


def test_a_changed_message_says_which_fields_differ():
    agreed = pack({"a": torch.zeros(2, 3), "n": 1}, needs_gradient=[True], where="").meta
    changed = pack({"a": torch.zeros(2, 3).double(), "n": 2}, needs_gradient=[True], where="").meta
    with pytest.raises(
        BoundaryChanged, match=r"dtype: torch.float64 instead of torch.float32; value 1: 2 inst"
    ):
        check_agreed(changed, agreed, "here")
    with pytest.raises(BoundaryChanged, match="nesting"):
        check_agreed(pack((torch.zeros(1),), needs_gradient=[False], where="").meta, agreed, "here")


def test_every_transfer_has_its_own_tag_and_both_ends_the_same():
    schedule = lower(one_f_one_b(4, 6))
    transfers = [op for op in schedule.rank_of if op.kind in TRANSFERS]
    tags = {op: tag_of(op, 4) for op in transfers}
    assert all(tags[op] == tags[peer(op)] for op in transfers)
    assert len(set(tags.values())) == len(transfers) / 2


def test_segments_hold_every_layer_once():
    for num_layers in range(1, 10):
        for every in range(1, 10):
            segments = segment_layers(num_layers, -(-num_layers // every), every)
            assert [layer for segment in segments for layer in segment] == list(range(num_layers))
            assert max(map(len, segments)) <= every


def test_seeds_differ_by_everything_that_keys_them():
    keys = [(s, t, layer, m) for s in range(3) for t in range(3) for layer in range(12) for m in range(12)]
    assert len({layer_seed(*key) for key in keys}) == len(keys)


def test_the_ledger_may_be_used_from_several_threads():
    ledger = Ledger(0)

    def work():
        for _ in range(300):
            tensor = torch.empty(100)
            ledger.release("saved", ledger.hold("saved", [tensor]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.total == 0


def test_a_limit_names_what_is_held():
    ledger = Ledger(2, limit_bytes=1000)
    ledger.hold("parameters", [torch.empty(100)])
    with pytest.raises(OutOfMemory, match=r"rank 2 .*limit 1,000 B .*parameters 400 B, saved 800 B"):
        ledger.hold("saved", [torch.empty(200)])


def test_a_snapshot_keeps_the_highest_point_within_an_operation():
    ledger = Ledger(0)
    ledger.begin(0.0)
    ledger.start(Op(Kind.B, 0, 0), 3, 1.0)
    ledger.release("saved", ledger.hold("saved", [torch.empty(100)]))
    ledger.snapshot(2.0)
    rows = ledger.memory_rows([stamp for _, stamp, *_ in ledger.rows])
    assert [(r.time_ms, r.bytes, r.op_index) for r in rows if r.category == "saved"] == [
        (0.0, 0, 0),
        (1.0, 400, 3),
        (2.0, 0, 3),
    ]


class LateDevice(CpuDevice):
    """Runs behind its host like a GPU: a stamp is a ticket whose time is known only when all is over."""

    def __init__(self):
        self.issued = []
        self.is_over = False

    def stamp(self):
        self.issued.append(len(self.issued))
        return self.issued[-1]

    def times(self, stamps):
        assert self.is_over, "nothing may read a time while the step runs"
        return [100.0 + 10.0 * ticket for ticket in stamps]


def test_times_are_read_only_when_the_step_is_over():
    device = LateDevice()
    tracer, ledger = Tracer(0, device), Ledger(0)
    stage = Stage(0, [nn.Linear(4, 4)], 0, device, ledger)
    x = torch.randn(2, 4)
    ledger.begin(device.stamp())
    for index, kind in enumerate((Kind.F, Kind.B)):
        op = Op(kind, 0, 0)
        start = device.stamp()
        ledger.start(op, index, start)
        if kind is Kind.F:
            stage.forward(0, x, [False], StepContext(), objective=Objective(F.mse_loss, x, 1.0))
        else:
            stage.backward(0)
        end = device.stamp()
        ledger.snapshot(end)
        tracer.add("compute", op, start, end)
    device.is_over = True
    events = tracer.events()
    assert [e.start_ms for e in events] == [110.0, 130.0]
    rows = ledger.memory_rows(device.times([stamp for _, stamp, *_ in ledger.rows]))
    assert {row.time_ms for row in rows} <= {100.0, 110.0, 120.0, 130.0, 140.0}
    assert max(r.bytes for r in rows if r.category == "saved") > 0


def test_a_stage_gives_what_autograd_gives():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    stage = Stage(1, list(layers), 3, CpuDevice(), Ledger(0))
    x = torch.randn(6, 4, dtype=torch.float64)
    given = torch.randn(6, 3, dtype=torch.float64)
    for segments in (None, [range(0, 3)], [range(0, 2), range(2, 3)]):
        layers.zero_grad()
        output = stage.forward(0, x, [True], StepContext(), segments=segments)
        assert output.needs_gradient == [True] and not output.tree.requires_grad
        for segment in reversed(range(len(segments or [0]))):
            if segments is not None:
                stage.recompute(0, segment)
            gradients = stage.backward(0, segment, [given] if segment == len(segments or [0]) - 1 else None)
        mine = [p.grad.clone() for p in layers.parameters()]
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        layers(leaf).backward(given)
        assert torch.allclose(gradients[0], leaf.grad, rtol=1e-13)
        assert all(
            torch.allclose(a, p.grad, rtol=1e-13) for a, p in zip(mine, layers.parameters(), strict=True)
        )


def test_the_corpus_is_text_and_its_batches_are_shifted_by_one():
    text = corpus_module.corpus(10_000)
    assert text.dtype == torch.int64 and int(text.max()) < corpus_module.VOCABULARY
    assert "import" in bytes(text.to(torch.uint8)).decode()
    inputs, targets = corpus_module.batch(text, 3, rows=5, length=7)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = corpus_module.batch(text, 3, rows=5, length=7)
    assert torch.equal(inputs, again)
    other, _ = corpus_module.batch(text, 4, rows=5, length=7)
    assert not torch.equal(inputs, other)


def test_what_is_saved_is_freed_with_its_graph_and_not_by_the_garbage_collector():
    """An operation that saves its own output would hold itself in a circle, were it not packed detached."""
    import gc

    ledger = Ledger(0)
    gc.disable()
    try:
        with ledger.saving("saved"):
            y = torch.randn(100, requires_grad=True).exp()
        assert ledger.totals["saved"] == 400
        del y
        assert ledger.totals["saved"] == 0
    finally:
        gc.enable()


def test_of_repeated_runs_the_one_with_the_median_makespan_is_shown():
    from gpipe_lab.lab.run import Run, middle
    from gpipe_lab.plan.memory import MemoryReport
    from gpipe_lab.plan.simulate import Costs, simulate

    def run(forward):
        trace = simulate(one_f_one_b(2, 2), Costs(forward=forward))
        return Run(0.0, trace, MemoryReport((), "measured"), {}, (trace.makespan_ms,))

    chosen = middle([run(forward) for forward in (9.0, 1.0, 4.0, 2.0, 3.0)])
    assert chosen.trace == run(3.0).trace
    assert chosen.makespans_ms == tuple(run(f).trace.makespan_ms for f in (9.0, 1.0, 4.0, 2.0, 3.0))


def test_hosts_with_other_devices_are_refused_before_a_link_opens():
    store = dist.HashStore()
    store.set("devices of rank 1", "cpu")
    require_same_devices(Meeting(store, 0, 2), "cpu")
    store.set("devices of rank 1", "cuda")
    with pytest.raises(gl.InputError, match="cpu on rank 0, cuda on rank 1"):
        require_same_devices(Meeting(store, 0, 2), "cpu")


def test_what_another_category_takes_over_within_an_operation_is_seen():
    ledger, tensor = Ledger(0), torch.zeros(16)
    ledger.begin(0.0)
    ledger.start(Op(Kind.F, 0, 0), 0, 1.0)
    keys = ledger.hold("outputs", [tensor])
    saved = ledger.hold("saved", [tensor])  # counts as saved, which comes before outputs
    ledger.release("outputs", keys)
    ledger.snapshot(2.0)
    ledger.start(Op(Kind.F, 0, 1), 1, 3.0)
    boundary = ledger.hold("boundary", [tensor])  # takes the storage over from "saved"
    ledger.release("saved", saved)
    ledger.release("boundary", boundary)
    again = ledger.hold("deferred", [tensor])
    ledger.snapshot(4.0)
    ledger.release("deferred", again)
    rows = ledger.memory_rows([0.0, 1.0, 2.0, 3.0, 4.0][: len(ledger.rows)])
    assert {row.category for row in rows if row.bytes} >= {"outputs", "saved", "deferred"}
