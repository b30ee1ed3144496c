"""What is checked on a machine with a GPU: plain functions, so that they run without pytest too.

Each returns the figures it measured and raises where a rule is broken.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.executor import Step
from tests.comparing import distance

WIDTH = 256


def make_model(num_layers=8, dtype=torch.float64):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*blocks).to(dtype)


def make_batch(rows=32, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, WIDTH, generator=generator, dtype=dtype) for _ in range(2))


def on_one_process(x, y):
    model = make_model()
    F.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check_parity_on_shared_gpu():
    """Ranks that share GPUs, or have one each: gradients equal a CPU process's, for every mode, unpaced."""
    return _parity(4, (gl.naive, gl.gpipe, gl.one_f_one_b))


def _parity(num_ranks, makers):
    x, y = make_batch()
    reference = on_one_process(x, y)
    worst = 0.0
    with gl.Lab(num_ranks, device="cuda") as lab:
        for make in makers:
            for mode in ("never", "always", "except_last", "every:1"):
                run = lab.run(make(num_ranks, 8), make_model(), x, y, loss_fn=F.mse_loss, checkpoint=mode)
                worst = max(worst, distance(run.gradients(), reference))
        where = lab.device_plan.reason
    assert worst <= 1e-12, worst
    return {"devices": where, "largest relative distance": worst}


def check_one_rank_alone():
    """One rank with a GPU of its own, unpaced: parity, and events on the GPU's clock in order."""
    x, y = make_batch()
    with gl.Lab(1, device="cuda") as lab:
        run = lab.run(gl.gpipe(1, 8), make_model(), x, y, loss_fn=F.mse_loss, repeats=3)
    far = distance(run.gradients(), on_one_process(x, y))
    assert far <= 1e-12, far
    events = run.trace.computations
    assert all(e.duration_ms >= 0 for e in events)
    assert all(a.end_ms <= b.start_ms + 1e-3 for a, b in pairwise(events))
    return {"relative distance": far, "makespan ms": run.trace.makespan_ms}


def check_ledger_to_the_byte():
    """Saved bytes on the GPU are M times one micro-batch's, and no more than the allocator's peak."""
    with gl.Lab(1, device="cuda") as lab:

        def saved(num_microbatches):
            x, y = make_batch(4 * num_microbatches)
            run = lab.run(gl.gpipe(1, num_microbatches), make_model(), x, y, loss_fn=F.mse_loss)
            return run.memory.peak_bytes(0, "saved"), run.memory.peak_bytes(0), run.allocator_peaks[0]

        one, *_ = saved(1)
        eight, total, allocated = saved(8)
    assert eight == 8 * one, (eight, one)
    assert total <= allocated, (total, allocated)
    return {"saved by one": one, "saved by eight": eight, "ledger peak": total, "allocator peak": allocated}


def _watch(context):
    """A job: from now on whatever waits for the GPU within an operation of a step is an error there."""
    compute = Step._compute

    def watched(self, op, index):
        torch.cuda.set_sync_debug_mode("error")
        try:
            compute(self, op, index)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Step._compute = watched


class ReadsANumber(nn.Module):
    def forward(self, x):
        return x * (1.0 + 0.0 * x.sum().item())


def check_no_synchronize_inside_an_unpaced_step():
    """No operation of a step waits for the device; one that does is noticed."""
    x, y = make_batch()
    with gl.Lab(1, device="cuda") as lab:
        lab.call(_watch, [()])
        run = lab.run(gl.gpipe(1, 4), make_model(), x, y, loss_fn=F.mse_loss)
        far = distance(run.gradients(), on_one_process(x, y))
        assert far <= 1e-12, far
        try:
            lab.run(gl.gpipe(1, 4), [ReadsANumber(), *make_model()], x, y, loss_fn=F.mse_loss)
        except gl.RankFailed as error:
            assert "synchroniz" in str(error), error
        else:
            raise AssertionError("a layer that waits for the GPU went unnoticed")
    return {"waits inside operations": 0}


def check_virtual_card():
    """A memory limit is enforced on the GPU, and names the rank and the operation."""
    x, y = make_batch(64)
    with gl.Lab(1, device="cuda", memory_limit="5MiB") as lab:
        try:
            lab.run(gl.gpipe(1, 8), make_model(), x, y, loss_fn=F.mse_loss)
        except gl.RankFailed as error:
            assert "out of memory on rank 0" in str(error), error
            return {"refused": str(error).splitlines()[0][:90]}
    raise AssertionError("nothing was refused")


def check_failure_leaves_the_gpu_free():
    """A rank that dies on the GPU is named, and the next run works."""
    x, y = make_batch()
    with gl.Lab(2, device="cuda") as lab:
        layers = list(make_model())
        try:
            lab.run(gl.gpipe(2, 4), [*layers, _Raises()], x, y, loss_fn=F.mse_loss)
        except gl.RankFailed as error:
            named = str(error).splitlines()[0]
        run = lab.run(gl.gpipe(2, 4), layers, x, y, loss_fn=F.mse_loss)
    assert "rank 1" in named, named
    return {"named": named[:90], "next loss": run.loss}


class _Raises(nn.Module):
    def forward(self, x):
        raise ValueError("a fault on purpose")


def check_two_gpus_over_nccl():
    """With two GPUs: a GPU a rank; every schedule and mode."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    return _parity(2, [make for name, make in gl.SCHEDULES.items() if name != "forward_only"])


def check_two_gpus_overlap():
    """With two GPUs, unpaced: the bubble from the trace, and memory that does not grow with M."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    with gl.Lab(2, device="cuda") as lab:

        def measured(num_microbatches):
            x, y = make_batch(32 * num_microbatches)
            schedule = gl.one_f_one_b(2, num_microbatches)
            return lab.run(schedule, make_model(), x, y, loss_fn=F.mse_loss, repeats=5)

        few, many = measured(8), measured(32)
    peaks = {run.trace.schedule.num_microbatches: run.memory.peak_bytes(0) for run in (few, many)}
    assert peaks[8] == peaks[32], peaks
    return {"bubble": few.trace.bubble_fraction, "peaks": peaks, "allocator": many.allocator_peaks}


def check_links_are_not_held_on_nccl():
    """A pace that holds links is refused where GPUs hand over by themselves."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    x, y = make_batch()
    pace = gl.Pace(forward_ms=1, backward_ms=2, link_ms=1)
    with gl.Lab(2, device="cuda") as lab:
        try:
            lab.run(gl.gpipe(2, 4), make_model(), x, y, loss_fn=F.mse_loss, pace=pace)
        except gl.InputError as error:
            return {"refused": str(error).splitlines()[0]}
    raise AssertionError("nothing was refused")


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
