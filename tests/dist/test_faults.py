"""A rank that fails in the middle of a step: named, everyone stopped, and the next run works."""

import gc
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.faults import TOLD, fail

pytestmark = pytest.mark.alone  # how soon a failure is named


class Faulty(nn.Module):
    """Fails on one micro-batch, recognised by its first number, in its forward or its backward."""

    def __init__(self, fault, microbatch, in_backward):
        super().__init__()
        self.fault, self.microbatch, self.in_backward = fault, microbatch, in_backward

    def forward(self, x):
        return _Fail.apply(x, self)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.microbatch = int(x.detach()[0, 0])
        if not layer.in_backward and ctx.microbatch == layer.microbatch:
            fail(layer.fault)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.layer.in_backward and ctx.microbatch == ctx.layer.microbatch:
            fail(ctx.layer.fault)
        return gradient, None


class KeepsFirst(nn.Module):
    """A layer that hands on the micro-batch's number in its first column."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.cat([x[:, :1], self.linear(x)[:, 1:]], 1)


def make_model(rank, fault="none", microbatch=0, in_backward=False, num_stages=3):
    torch.manual_seed(0)
    faulty = Faulty(fault, microbatch, in_backward)
    return [nn.Sequential(KeepsFirst(), faulty if s == rank else nn.Identity()) for s in range(num_stages)]


def make_batch(num_microbatches=4, rows=2):
    x = torch.randn(num_microbatches * rows, 4)
    x[:, 0] = torch.arange(num_microbatches).repeat_interleave(rows)
    return x, torch.randn(num_microbatches * rows, 4)


@pytest.fixture(scope="module")
def lab():
    with gl.Lab(3, device="cpu") as made:
        yield made


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("fault", ["exception", "exit", "kill"])
def test_a_failed_rank_is_named_and_the_next_run_works(lab, fault, rank, in_backward):
    x, y = make_batch()
    make = (gl.gpipe, gl.one_f_one_b)[(rank + in_backward) % 2]
    began = time.monotonic()
    with pytest.raises(gl.RankFailed) as caught:
        lab.run(make(3, 4), make_model(rank, fault, 2, in_backward), x, y, loss_fn=F.mse_loss, warmup=False)
    took = time.monotonic() - began
    assert took < 3, took
    assert caught.value.rank == rank
    assert caught.value.op == gl.Op(gl.Kind.B if in_backward else gl.Kind.F, rank, 2)
    text = str(caught.value)
    assert f"rank {rank}" in text and f"stage {rank}" in text and "micro-batch 2" in text
    assert TOLD[fault] in text
    run = lab.run(make(3, 4), make_model(None), x, y, loss_fn=F.mse_loss, warmup=False)
    assert run.loss > 0


@pytest.mark.parametrize("rank", range(3))
def test_a_hanging_rank_can_be_stopped(lab, rank):
    x, y = make_batch()
    threading.Timer(0.5, lab.stop).start()
    began = time.monotonic()
    with pytest.raises(gl.RunStopped):
        lab.run(gl.gpipe(3, 4), make_model(rank, "hang", 1), x, y, loss_fn=F.mse_loss, warmup=False)
    assert time.monotonic() - began < 2.5
    assert lab.run(gl.gpipe(3, 4), make_model(None), x, y, loss_fn=F.mse_loss, warmup=False).loss > 0


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("rank", range(3))
def test_a_hanging_rank_is_found_by_the_watchdog_with_its_stack(lab, rank, in_backward):
    x, y = make_batch()
    lab.watchdog_s = 0.6
    began = time.monotonic()
    with pytest.raises(gl.RankFailed, match="hangs") as caught:
        lab.run(
            gl.one_f_one_b(3, 4),
            make_model(rank, "hang", 1, in_backward),
            x,
            y,
            loss_fn=F.mse_loss,
            warmup=False,
        )
    assert time.monotonic() - began < 3
    assert caught.value.op == gl.Op(gl.Kind.B if in_backward else gl.Kind.F, rank, 1)
    assert "time.sleep(3600)" in caught.value.traceback
    assert lab.run(gl.gpipe(3, 4), make_model(None), x, y, loss_fn=F.mse_loss, warmup=False).loss > 0
    lab.watchdog_s = 120


def test_a_hang_in_one_replica_is_not_blamed_on_another_that_waits_to_add_up(lab_of):
    """Two replicas of two ranks: those of the first have done all, and wait for the second's gradients."""
    lab, (x, y) = lab_of(4), make_batch()
    model = make_model(0, "hang", 2, num_stages=2)  # micro-batch 2 is the second replica's first
    lab.watchdog_s = 0.6
    with pytest.raises(gl.RankFailed, match="hangs") as caught:
        lab.run(gl.gpipe(2, 2), model, x, y, loss_fn=F.mse_loss, num_replicas=2, warmup=False)
    assert caught.value.rank == 2
    assert caught.value.op == gl.Op(gl.Kind.F, 0, 2)


def test_the_watchdog_leaves_a_slow_run_alone(lab):
    x, y = make_batch()
    lab.watchdog_s = 0.5
    pace = gl.Pace(forward_ms=100, backward_ms=200)  # longer than the limit in all, not between operations
    assert (
        lab.run(gl.gpipe(3, 4), make_model(None), x, y, loss_fn=F.mse_loss, pace=pace, warmup=False).loss > 0
    )
    lab.watchdog_s = 120


def test_the_original_error_is_the_cause(lab):
    x, y = make_batch()
    with pytest.raises(gl.RankFailed) as caught:
        lab.run(gl.gpipe(3, 4), make_model(1, "exception", 0), x, y, loss_fn=F.mse_loss, warmup=False)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in fail" in str(caught.value)  # the rank's own traceback


def test_a_loss_that_is_not_one_number_is_refused(lab):
    x, y = make_batch()
    with pytest.raises(gl.RankFailed, match="a loss is one number"):
        lab.run(gl.gpipe(3, 4), make_model(None), x, y, loss_fn=lambda a, b: (a - b).square(), warmup=False)


class Wrapped:
    def __init__(self, x):
        self.x = x


class Wraps(nn.Module):
    def forward(self, x):
        return Wrapped(x)


def test_what_cannot_cross_a_boundary_is_named(lab):
    x, y = make_batch()
    with pytest.raises(gl.RankFailed, match="Wrapped"):
        lab.run(
            gl.gpipe(3, 4), [Wraps(), nn.Identity(), nn.Identity()], x, y, loss_fn=F.mse_loss, warmup=False
        )


@pytest.mark.slow
def test_five_hundred_runs_in_a_row_leave_nothing_behind(lab):
    import psutil

    x, y = make_batch()

    def state(context):
        gc.collect()  # what waits for it is not left behind
        process = psutil.Process()
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    def run(times):
        for _ in range(times):
            lab.run(gl.gpipe(3, 4), make_model(None), x, y, loss_fn=F.mse_loss, warmup=False)
        return [*lab.call(state, [()] * 3), state(None)]

    before = run(100)  # caches and pools have filled
    after = run(400)
    for (fds, threads, rss), (more_fds, more_threads, more_rss) in zip(before, after, strict=True):
        assert more_fds <= fds and more_threads <= threads
        assert more_rss - rss < 400 * 20_000, "more than 20 kB a run"
    print([(b[2] - a[2]) / 400 for a, b in zip(before, after, strict=True)], "bytes a run")
