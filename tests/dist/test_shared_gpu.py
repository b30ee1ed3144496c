"""Ranks that share a GPU, emulated: every message goes through the host, and nothing need be paced."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.device import EMULATE, plan_devices
from tests.comparing import distance, whole_batch


@pytest.fixture
def shared_lab(monkeypatch):
    monkeypatch.setenv(EMULATE, "shared")
    with gl.Lab(2) as lab:
        yield lab


def test_an_emulated_plan_says_what_it_is(monkeypatch):
    assert not plan_devices(2, "cpu").is_shared
    monkeypatch.setenv(EMULATE, "shared")
    plan = plan_devices(4)
    assert plan.is_shared and "emulated" in plan.reason and "no GPU is used" in plan.reason
    assert plan.label == "emulated shared GPU, gloo"


def test_shared_gpus_run_unpaced_and_say_shared(shared_lab):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()
    x, y = torch.randn(12, 6).double(), torch.randn(12, 6).double()
    loss, reference = whole_batch(model, x, y)
    for pace in (None, gl.Pace(forward_ms=1, backward_ms=2, link_ms=1)):
        run = shared_lab.run(gl.one_f_one_b(2, 4), model, x, y, loss_fn=F.mse_loss, pace=pace)
        assert distance(run.gradients(), reference) <= 1e-12
        assert run.loss == pytest.approx(loss, abs=1e-12)
        assert "shared GPU" in run.trace.device
        assert run.trace.source == ("measured" if pace is None else "measured, paced")
    with torch.no_grad():
        assert torch.allclose(shared_lab.run(gl.forward_only(2, 4), model, x, None).outputs(), model(x))


def test_ties_and_replicas_go_through_the_host(monkeypatch):
    monkeypatch.setenv(EMULATE, "shared")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
    model[3].weight = model[0].weight
    x, y = torch.randn(12, 6).double(), torch.randn(12, 6).double()
    _, reference = whole_batch(model, x, y)
    with gl.Lab(4) as lab:
        run = lab.run(gl.gpipe(2, 3), model, x, y, loss_fn=F.mse_loss, num_replicas=2)
    assert distance(run.gradients(), reference) <= 1e-12
