"""Bugs that shipped: torch's own pipeline shows them, this engine does not."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import gpipe_lab as gl
from gpipe_lab.course.bugs import batch, official_model, official_symptoms

SGD = functools.partial(torch.optim.SGD, lr=1.0)


def one_process(rows):
    return F.mse_loss(official_model()(batch(8)[0][:rows]), batch(8)[1][:rows]).item()


def test_torch_shows_the_symptoms(lab_of):
    """If this fails with a newer torch, the bug has been mended there: the chapter then has to say so."""
    first, last = lab_of(2).launch(official_symptoms)
    assert first.times_m == pytest.approx(4) and last.times_m == pytest.approx(4)
    assert first.two_steps == pytest.approx(1.25) and last.two_steps == pytest.approx(1.25)
    assert not torch.allclose(first.tied, last.tied)
    assert abs(last.evaluated - one_process(4)) > 1e-3 and last.rows == 8
    assert (first.statistics, last.statistics) == (5, 5)


def test_this_engine_does_not(lab_of):
    lab, schedule, (x, y) = lab_of(2), gl.gpipe(2, 4), batch(8)
    pipe = lab.pipeline(official_model(), loss_fn=F.mse_loss)
    norms = [pipe.step(schedule, x, y, update=False).grad_norm for _ in range(2)]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-12)
    pipe.evaluate(x, y, num_microbatches=4)
    assert pipe.evaluate(x[:4], y[:4], num_microbatches=4) == pytest.approx(one_process(4), rel=1e-12)
    trained = lab.pipeline(official_model(tied=True), loss_fn=F.mse_loss, optimizer=SGD)
    trained.step(schedule, x, y)
    state = trained.state_dict()
    assert torch.equal(state["0.0.weight"], state["1.0.weight"])
    normed = lab.pipeline(official_model(batch_norm=True), loss_fn=F.mse_loss)
    normed.step(schedule, x, y, update=False)
    assert normed.state_dict()["0.1.num_batches_tracked"] == 1
