"""What is checked on a machine with a GPU: plain functions, so that they run without pytest too.

Each returns the figures it measured and raises where a rule is broken.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
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
    """Ranks that share GPUs, or have one each: gradients equal a CPU process's, for every mode."""
    x, y = make_batch()
    reference = on_one_process(x, y)
    worst = 0.0
    with gl.Lab(4, device="cuda") as lab:
        for make in (gl.naive, gl.gpipe, gl.one_f_one_b):
            for mode in ("never", "always", "except_last", "every:1"):
                pace = gl.Pace(forward_ms=1, backward_ms=2)
                run = lab.run(make(4, 8), make_model(), x, y, loss_fn=F.mse_loss, checkpoint=mode, pace=pace)
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
            return run.memory.peak_bytes(0, "saved"), run.memory.peak_bytes(0)

        one, _ = saved(1)
        eight, total = saved(8)
        (allocated,) = lab.call(_peak_allocated, [()])
    assert eight == 8 * one, (eight, one)
    assert total <= allocated, (total, allocated)
    return {"saved by one": one, "saved by eight": eight, "ledger peak": total, "allocator peak": allocated}


def _peak_allocated(context):
    return torch.cuda.max_memory_allocated()


class Watched(nn.Module):
    """Turns any hidden wait for the GPU into an error between the first forward and the last backward."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        torch.cuda.set_sync_debug_mode(self.mode)
        return x


def check_no_synchronize_inside_an_unpaced_step():
    """From the first layer's first forward on, nothing in the step waits for the device."""
    x, y = make_batch()
    layers = [Watched("error"), *make_model()]
    with gl.Lab(1, device="cuda") as lab:
        try:
            lab.run(gl.gpipe(1, 4), layers, x, y, loss_fn=F.mse_loss, warmup=False)
        except gl.RankFailed as error:
            # Reading the losses off at the end is the one wait there is.
            assert "item" in error.traceback or "times" in error.traceback, error
            assert "in _compute" not in error.traceback, error
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
    pace = gl.Pace(forward_ms=1, backward_ms=2)
    with gl.Lab(2, device="cuda") as lab:
        layers = list(make_model())
        try:
            lab.run(gl.gpipe(2, 4), [*layers, _Raises()], x, y, loss_fn=F.mse_loss, pace=pace)
        except gl.RankFailed as error:
            named = str(error).splitlines()[0]
        run = lab.run(gl.gpipe(2, 4), layers, x, y, loss_fn=F.mse_loss, pace=pace)
    assert "rank 1" in named, named
    return {"named": named[:90], "next loss": run.loss}


class _Raises(nn.Module):
    def forward(self, x):
        raise ValueError("a fault on purpose")


def check_two_gpus_overlap():
    """With two GPUs: NCCL, a GPU a rank, unpaced; parity and the bubble from the trace."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "needs two GPUs"}
    x, y = make_batch(256)
    with gl.Lab(2, device="cuda") as lab:
        run = lab.run(gl.gpipe(2, 8), make_model(), x, y, loss_fn=F.mse_loss, repeats=5)
    far = distance(run.gradients(), on_one_process(x, y))
    assert far <= 1e-12, far
    return {"relative distance": far, "bubble": run.trace.bubble_fraction}


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
