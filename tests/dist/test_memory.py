"""The measured ledger, to the byte, and virtual cards."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl

WIDTH = 16
ROWS = 4  # of a micro-batch
BOUNDARY = ROWS * WIDTH * 4


class Block(nn.Module):
    """Saves its input (for the Linear) and the tanh's output; the second of those is the next one's input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def make_model(num_layers=8):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_layers)])


def measure(lab, schedule, **options):
    x = torch.randn(ROWS * schedule.num_microbatches, WIDTH)
    return lab.run(schedule, make_model(), x, x, loss_fn=F.mse_loss, **{"warmup": False} | options).memory


@pytest.fixture(scope="module")
def saved_by_one(lab_of):
    """saved_by_one(P): what one micro-batch saves on each stage, from a run with just one."""

    @functools.cache
    def get(num_stages):
        report = measure(lab_of(num_stages), gl.gpipe(num_stages, 1))
        return [report.peak_bytes(rank, "saved") for rank in range(num_stages)]

    return get


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 5), (2, 2), (2, 8), (4, 1), (4, 5), (4, 8)])
def test_gpipe_saves_m_times_one_microbatch(lab_of, saved_by_one, num_stages, num_microbatches):
    one = saved_by_one(num_stages)
    report = measure(lab_of(num_stages), gl.gpipe(num_stages, num_microbatches))
    for rank in range(num_stages):
        assert one[rank] > 0
        assert report.peak_bytes(rank, "saved") == num_microbatches * one[rank]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 1), (2, 5), (4, 2), (4, 5), (4, 8)])
def test_1f1b_saves_min_p_minus_k_and_m(lab_of, saved_by_one, num_stages, num_microbatches):
    one = saved_by_one(num_stages)
    report = measure(lab_of(num_stages), gl.one_f_one_b(num_stages, num_microbatches))
    for rank in range(num_stages):
        assert report.peak_bytes(rank, "saved") == min(num_stages - rank, num_microbatches) * one[rank]


def test_what_one_microbatch_saves_is_what_its_layers_keep(saved_by_one):
    """A stage of two blocks keeps its input and both tanh outputs; the last one also the loss's target."""
    one = saved_by_one(4)
    assert one[:3] == [3 * BOUNDARY] * 3
    assert one[3] == 4 * BOUNDARY


@pytest.mark.parametrize("num_microbatches", [1, 5, 8])
@pytest.mark.parametrize("make", [gl.gpipe, gl.one_f_one_b])
def test_checkpointing_keeps_boundaries_and_one_recomputed_microbatch(
    lab_of, saved_by_one, make, num_microbatches
):
    num_stages = 4
    one = saved_by_one(num_stages)
    schedule = make(num_stages, num_microbatches)
    report = measure(lab_of(num_stages), schedule, checkpoint="always")
    for rank, in_flight in enumerate(gl.peak_in_flight(schedule)):
        kept = [m.bytes["boundary"] + m.bytes["recomputed"] + m.bytes["saved"] for m in report.moments(rank)]
        assert max(kept) == in_flight * BOUNDARY + (one[rank] - BOUNDARY)
        assert report.peak_bytes(rank, "saved") == 0
        assert report.peak_bytes(rank, "boundary") == in_flight * BOUNDARY


def test_every_k_keeps_the_inputs_of_segments_and_recomputes_one_segment_at_a_time(lab_of):
    report = measure(lab_of(1), gl.gpipe(1, 4), checkpoint="every:2")  # 8 layers: 4 segments of 2
    assert report.peak_bytes(0, "boundary") == 4 * 4 * BOUNDARY
    assert report.peak_bytes(0, "recomputed") <= 3 * BOUNDARY  # two tanh outputs, and the loss's target


def test_everything_is_freed_at_the_end_of_the_step(lab_of):
    for mode in ("never", "always", "every:1"):
        report = measure(lab_of(4), gl.gpipe(4, 4), checkpoint=mode, warmup=True)
        for rank in range(4):
            before, *_, last = (moment.bytes for moment in report.moments(rank))  # a warm-up step came first
            held = ("boundary", "recomputed", "saved", "deferred")
            assert {name: last[name] for name in held} == dict.fromkeys(held, 0)
            held += ("outputs", "communication")  # until it is noted that they are sent
            assert {name: before[name] for name in held} == dict.fromkeys(held, 0)


def test_memory_is_on_the_trace_s_clock(lab_of):
    """What is held changes where an operation of the same rank starts or ends."""
    x = torch.randn(ROWS * 4, WIDTH)
    run = lab_of(2).run(gl.gpipe(2, 4), make_model(), x, x, loss_fn=F.mse_loss, warmup=False)
    times = {(e.rank, e.op, at) for e in run.trace.computations for at in (e.start_ms, e.end_ms)}
    rows = {(row.rank, row.op, row.time_ms) for row in run.memory.rows if row.op is not None}
    assert rows and rows <= times


def test_parameters_and_gradients_are_counted_once(lab_of):
    report = measure(lab_of(4), gl.gpipe(4, 4))
    weights = 2 * (WIDTH * WIDTH + WIDTH) * 4
    for rank in range(4):
        assert report.peak_bytes(rank, "parameters") == weights
        assert report.peak_bytes(rank, "gradients") == weights


def test_each_storage_counts_once_and_views_count_whole():
    from gpipe_lab.engine.ledger import Ledger

    ledger = Ledger(0)
    x = torch.randn(10, 10)
    saved = ledger.hold("saved", [x, x[:1], x.t()])
    assert ledger.totals["saved"] == 400
    boundary = ledger.hold("boundary", [x[2:]])  # the earlier category takes it over
    assert (ledger.totals["saved"], ledger.totals["boundary"]) == (0, 400)
    ledger.release("boundary", boundary)
    assert (ledger.totals["saved"], ledger.totals["boundary"]) == (400, 0)
    ledger.release("saved", saved)
    assert ledger.total == 0


def test_the_high_point_of_an_operation_is_its_own():
    """An operation that only releases was highest at its start, whatever an earlier one held."""
    from gpipe_lab.engine.ledger import Ledger
    from gpipe_lab.plan.ops import Kind, Op

    ledger = Ledger(0)
    ledger.begin(0.0)
    ledger.start(Op(Kind.F, 0, 0), 0, 1.0)
    first = ledger.hold("saved", [torch.zeros(1000)])
    second = ledger.hold("saved", [torch.ones(500)])
    ledger.snapshot(2.0)
    for index, keys in enumerate((first, second), start=1):
        ledger.start(Op(Kind.B, 0, 0), index, 1.0 + 2 * index)
        ledger.release("saved", keys)
        ledger.snapshot(2.0 + 2 * index)
    rows = ledger.memory_rows([stamp for _, stamp, *_ in ledger.rows])
    saved = [(row.time_ms, row.bytes) for row in rows if row.category == "saved"]
    assert saved == [(0.0, 0), (2.0, 6000), (4.0, 2000), (6.0, 0)]
    assert [sum(totals) for _, _, totals, _ in ledger.rows] == [0, 6000, 6000, 2000, 2000, 0]


def test_a_tensor_changed_after_it_was_saved_is_refused():
    from gpipe_lab.engine.ledger import Ledger

    x = torch.randn(3, requires_grad=True)
    with Ledger(0).saving("saved"):
        y = x.exp()
        loss = (y * 2).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_virtual_card_does_not_fit_on_one_but_on_four():
    x = torch.randn(64, WIDTH)
    limit = 20_000
    with gl.Lab(1, device="cpu", memory_limit=limit) as lab:
        with pytest.raises(gl.RankFailed, match=r"out of memory on rank 0 in 0F\d") as failure:
            lab.run(gl.gpipe(1, 8), make_model(), x, x, loss_fn=F.mse_loss)
        assert "limit 20,000 B" in str(failure.value) and "saved" in str(failure.value)
        lab.resize(4)
        run = lab.run(gl.one_f_one_b(4, 8), make_model(), x, x, loss_fn=F.mse_loss)
        assert run.memory.limit_bytes == limit
        assert max(run.memory.peak_bytes(rank) for rank in range(4)) <= limit


def test_optimizer_state_is_counted(lab_of):
    x = torch.randn(8, WIDTH)
    pipe = lab_of(2).pipeline(
        make_model(), loss_fn=F.mse_loss, optimizer=functools.partial(torch.optim.Adam, lr=0.1)
    )
    pipe.step(gl.gpipe(2, 2), x, x)
    second = pipe.step(gl.gpipe(2, 2), x, x)
    weights = 4 * (WIDTH * WIDTH + WIDTH) * 4
    steps = 8 * 4  # Adam keeps a counter of 4 bytes for each of 8 tensors
    assert second.memory.peak_bytes(0, "optimizer") == 2 * weights + steps
