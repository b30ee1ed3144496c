"""Where both ends match transfers by order, the order comes from what stages have been measured to cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.device import DevicePlan
from gpipe_lab.lab import pipeline
from tests.comparing import distance, whole_batch


@pytest.fixture
def costs(monkeypatch):
    """What each step was planned with, on a driver that takes its workers' links for NCCL's."""
    monkeypatch.setattr(DevicePlan, "matches_by_order", property(lambda self: True))
    seen = []

    def prepare_step(*args, costs, **options):
        seen.append(costs)
        return prepare(*args, costs=costs, **options)

    prepare = pipeline.prepare_step
    monkeypatch.setattr(pipeline, "prepare_step", prepare_step)
    return seen


def test_a_run_is_ordered_by_a_first_one(costs):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
    x, y = torch.randn(12, 6).double(), torch.randn(12, 6).double()
    _, reference = whole_batch(model, x, y)
    with gl.Lab(2, device="cpu") as lab:
        run = lab.run(gl.one_f_one_b(2, 4), model, x, y, loss_fn=F.mse_loss)
        assert distance(run.gradients(), reference) <= 1e-12
        assert costs[0] is None and all(ms > 0 for ms in costs[-1].forward)
        del costs[:]
        lab.run(gl.gpipe(2, 4), model, x, y, loss_fn=F.mse_loss, pace=gl.Pace(forward_ms=1, backward_ms=2))
        assert costs == [None]
        del costs[:]
        pipe = lab.pipeline(model, loss_fn=F.mse_loss)
        for _ in range(2):
            pipe.step(gl.gpipe(2, 4), x, y, update=False)
        assert costs[0] is None and len(costs[1].forward) == 2
