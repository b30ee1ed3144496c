"""Cases that other engines got wrong in public, where no other test of ours has just that case."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine import device
from tests.comparing import distance, whole_batch
from tests.pairwise import pairwise

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def make_model(num_layers=12):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_layers)]).double()


def make_batch(rows=12):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(2))


def is_allowed(setting):
    return setting["name"] != "interleaved" or setting["num_microbatches"] % setting["num_ranks"] == 0


EVERY = {"name": list(gl.SCHEDULES), "num_ranks": range(1, 7), "num_microbatches": range(1, 7)}


@pytest.mark.parametrize("setting", pairwise(EVERY, is_allowed), ids=lambda s: "-".join(map(str, s.values())))
def test_every_schedule_runs_with_every_p_and_every_m_up_to_six(lab_of, setting):
    model, (x, y) = make_model(), make_batch()
    loss, reference = whole_batch(model, x, y)
    num_ranks = setting["num_ranks"]
    schedule = gl.SCHEDULES[setting["name"]](num_ranks, setting["num_microbatches"])
    run = lab_of(num_ranks).run(schedule, model, x, y, loss_fn=F.mse_loss, warmup=False)
    assert run.loss == pytest.approx(loss, rel=1e-12)
    if schedule.trains:
        assert distance(run.gradients(), reference) <= 1e-12


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_seven_layers_are_all_placed_and_trained(lab_of, num_stages):
    model, (x, y) = make_model(7), make_batch()
    loss, reference = whole_batch(model, x, y)
    run = lab_of(num_stages).run(gl.gpipe(num_stages, 3), model, x, y, loss_fn=F.mse_loss, warmup=False)
    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert distance(run.gradients(), reference) <= 1e-12


def test_the_norm_of_the_gradients_does_not_hang_on_m(lab_of):
    model, (x, y) = make_model(), make_batch()
    _, reference = whole_batch(model, x, y)
    expected = sum(g.square().sum().item() for g in reference.values()) ** 0.5
    pipe = lab_of(3).pipeline(model, loss_fn=F.mse_loss)
    for num_microbatches in range(1, 13):
        pipe.zero_grad()
        run = pipe.step(gl.one_f_one_b(3, num_microbatches), x, y, update=False)
        assert run.grad_norm == pytest.approx(expected, rel=1e-12)


def test_every_rank_knows_the_loss(lab_of, monkeypatch):
    lab, (x, y) = lab_of(4), make_batch()
    pipe = lab.pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    replies, call = [], lab.call

    def note(function, args, **options):
        found = call(function, args, **options)
        replies.extend(step for (step,) in found)
        return found

    monkeypatch.setattr(lab, "call", note)
    loss, _ = whole_batch(make_model(), x, y)
    pipe.step(gl.gpipe(4, 3), x, y)
    assert [known for _, known, _ in replies] == pytest.approx([loss] * 4, rel=1e-12)
    assert len({(known, norm) for _, known, norm in replies}) == 1


@pytest.mark.parametrize("make", [gl.one_f_one_b, gl.zero_bubble_h1])
def test_the_peak_does_not_grow_with_m(lab_of, make):
    """At one size of micro-batch: weight gradients are summed, not piled up."""

    def peaks(num_microbatches):
        x, y = make_batch(2 * num_microbatches)
        run = lab_of(3).run(make(3, num_microbatches), make_model(), x, y, loss_fn=F.mse_loss, warmup=False)
        categories = ("gradients", "saved", "deferred")
        return [[run.memory.peak_bytes(rank, c) for c in categories] for rank in range(3)]

    assert peaks(6) == peaks(18)


def test_what_w_keeps_is_visible_with_checkpointing_too(lab_of):
    x, y = make_batch()
    layer_bytes = 2 * 6 * 8 * 2  # the input of a linear layer and its output's gradient, two rows each
    for mode in ("never", "always"):
        schedule = gl.zero_bubble_h2(3, 6)
        run = lab_of(3).run(schedule, make_model(), x, y, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)
        for rank, ops in enumerate(schedule.ops):
            waiting, most = 0, 0
            for op in ops:
                waiting += {gl.Kind.I: 1, gl.Kind.W: -1}.get(op.kind, 0)
                most = max(most, waiting)
            assert run.memory.peak_bytes(rank, "deferred") == most * 4 * layer_bytes, (mode, rank)


@pytest.mark.parametrize("mode", ["never", "always", "except_last"])
def test_batch_norm_commits_every_step_whatever_the_batch(lab_of, mode):
    """A batch that micro-batches do not divide: one commit a step, of all of its rows."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
    for step, rows in enumerate((5, 7, 9), start=1):
        x, y = make_batch(rows)
        pipe.step(gl.gpipe(2, 2), x, y, update=False, checkpoint=mode)
        model.train()(x)
        state = pipe.state_dict()
        assert state["1.num_batches_tracked"] == step
        assert torch.allclose(state["1.running_mean"], model[1].running_mean, rtol=1e-12)
        assert torch.allclose(state["1.running_var"], model[1].running_var, rtol=1e-12)


@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "cuda"), (3, "shared_cuda"), (5, "shared_cuda")])
def test_more_ranks_than_gpus_share_them_and_say_so(monkeypatch, num_ranks, kind):
    monkeypatch.setattr(device, "num_gpus", lambda: 2)
    plan = device.plan_devices(num_ranks)
    assert plan.kind == kind
    assert plan.device_names == tuple(f"cuda:{rank % 2}" for rank in range(num_ranks))
    assert (f"{num_ranks} ranks share 2 GPUs" in plan.reason) == (kind == "shared_cuda")
    assert ("shared GPU" in plan.label) == (kind == "shared_cuda")
