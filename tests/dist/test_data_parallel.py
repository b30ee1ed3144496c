"""Replicas of a pipeline share a batch: gradients, loss, masks and statistics as in one process."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance, whole_batch

ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
SHAPES = [(2, 2), (4, 2), (1, 3)]  # ranks of a pipeline, replicas
SCHEDULES = ["naive", "gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_v"]
MODES = ["never", "always", "except_last", "every:2"]


def make_model(dropout=0.0):
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(6)]
    return nn.Sequential(nn.Linear(5, 8), *inner, nn.Linear(8, 3)).double()


def make_batch(rows):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (5, 3))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_replicas"), SHAPES)
def test_equal_to_one_process(lab_of, name, num_ranks, num_replicas):
    model = make_model()
    x, y = make_batch(13)  # uneven over replicas and over micro-batches
    loss, reference = whole_batch(model, x, y)
    schedule = gl.SCHEDULES[name](num_ranks, 4 if num_ranks > 1 else 3)
    for mode in MODES if "zero_bubble" not in name else MODES[:3]:
        run = lab_of(num_ranks * num_replicas).run(
            schedule,
            model,
            x,
            y,
            loss_fn=F.mse_loss,
            checkpoint=mode,
            num_replicas=num_replicas,
            warmup=False,
        )
        assert distance(run.gradients(), reference) <= 1e-12, mode
        assert run.loss == pytest.approx(loss, rel=1e-12)


def test_bytes_and_events_of_the_sums(lab_of):
    model = make_model()
    run = lab_of(4).run(
        gl.gpipe(2, 2), model, *make_batch(8), loss_fn=F.mse_loss, num_replicas=2, warmup=False
    )
    sizes = [8 * sum(p.numel() for p in part.parameters()) for part in (model[:4], model[4:])]
    assert run.bytes_reduced == {(0, 2): sizes[0], (1, 3): sizes[1]}
    boundary = 4 * 8 * 8  # 4 rows a replica, 8 wide, 8 bytes each
    assert run.bytes_sent == dict.fromkeys([(0, 1), (1, 0), (2, 3), (3, 2)], boundary)
    sums = [e for e in run.trace.events if e.op.kind is gl.Kind.REDUCE]
    assert sorted(e.rank for e in sums) == [0, 1, 2, 3]
    last = {rank: max(e.end_ms for e in run.trace.computations if e.rank == rank) for rank in range(4)}
    assert all(e.start_ms >= last[e.rank] for e in sums)
    assert run.trace.num_ranks == 4
    assert {e.op.microbatch for e in run.trace.computations if e.rank >= 2} == {2, 3}


def test_a_schedule_of_replicas_runs_as_it_is(lab_of):
    model, batch = make_model(), make_batch(8)
    given = gl.replicate(gl.gpipe(2, 2), 2)
    by_value = lab_of(4).run(given, model, *batch, loss_fn=F.mse_loss, warmup=False)
    loss, reference = whole_batch(model, *batch)
    assert by_value.loss == pytest.approx(loss, rel=1e-12)
    assert distance(by_value.gradients(), reference) <= 1e-12


def test_two_replicas_draw_the_masks_of_one_pipeline(lab_of):
    model = make_model(dropout=0.5)
    x, y = make_batch(12)
    many = lab_of(2).run(gl.one_f_one_b(2, 6), model, x, y, loss_fn=F.mse_loss, seed=3, warmup=False)
    both = lab_of(4).run(
        gl.one_f_one_b(2, 3), model, x, y, loss_fn=F.mse_loss, seed=3, num_replicas=2, warmup=False
    )
    assert distance(both.gradients(), many.gradients()) <= 1e-14  # a different mask would give about 1
    assert both.loss == pytest.approx(many.loss, rel=1e-14)


class Recorder(nn.Module):
    """Adds what dropout leaves of ones: its output shows the mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return F.dropout(torch.ones_like(x), 0.5, training=True) + 0 * self.weight


def test_masks_are_bitwise_those_of_one_pipeline(lab_of):
    model = nn.Sequential(nn.Identity(), Recorder())
    x = torch.zeros(8, 50, dtype=torch.float64)
    one, two = (
        lab_of(n).pipeline(model, num_replicas=n // 2).predict(x, num_microbatches=8 // n) for n in (2, 4)
    )
    assert torch.equal(one, two)
    assert not torch.equal(two[:4], two[4:])  # replicas differ from each other


def test_a_token_weighted_loss_is_weighted_over_all_replicas(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7)).double()
    ids = torch.randint(7, (9,))
    targets = ids.clone()
    targets[:5] = -100  # the first replica has hardly any token that counts, and whole micro-batches of none
    loss, reference = whole_batch(model, ids, targets, F.cross_entropy)
    run = lab_of(4).run(
        gl.gpipe(2, 2), model, ids, targets, loss_fn=F.cross_entropy, num_replicas=2, warmup=False
    )
    assert run.loss == pytest.approx(loss, rel=1e-12)
    assert distance(run.gradients(), reference) <= 1e-12


def test_a_parameter_without_gradients_stays_without(lab_of):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle = nn.Parameter(torch.ones(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x)

    model = nn.Sequential(Unused(), nn.Linear(3, 3))
    model[1].weight.requires_grad_(False)
    x = torch.ones(4, 3)
    run = lab_of(4).run(gl.gpipe(2, 2), model, x, x, loss_fn=F.mse_loss, num_replicas=2, warmup=False)
    assert set(run.gradients()) == {"0.linear.weight", "0.linear.bias", "1.bias"}


def train(lab, model, num_replicas, num_stages, batch, *, steps=4, **options):
    pipe = lab.pipeline(model, num_replicas=num_replicas, loss_fn=options.pop("loss_fn"), **options)
    schedule = gl.one_f_one_b(num_stages, 6 // num_replicas)
    runs = [pipe.step(schedule, *batch) for _ in range(steps)]
    return runs, pipe


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_training_follows_one_pipeline(lab_of, max_norm):
    batch = make_batch(12)
    options = {"loss_fn": F.mse_loss, "optimizer": ADAM, "max_norm": max_norm}
    one, alone = train(lab_of(2), make_model(0.2), 1, 2, batch, **options)
    two, both = train(lab_of(4), make_model(0.2), 2, 2, batch, **options)
    assert [run.loss for run in two] == pytest.approx([run.loss for run in one], rel=1e-12)
    assert [run.grad_norm for run in two] == pytest.approx([run.grad_norm for run in one], rel=1e-12)
    theirs = alone.state_dict()
    for name, value in both.state_dict().items():
        assert torch.allclose(value, theirs[name], rtol=1e-9, atol=1e-12), name
    assert both.evaluate(*batch, num_microbatches=2) == pytest.approx(alone.evaluate(*batch), rel=1e-9)


def test_steps_without_update_add_up(lab_of):
    pipe = lab_of(4).pipeline(make_model(), loss_fn=F.mse_loss, num_replicas=2)
    x, y = make_batch(8)
    pipe.step(gl.gpipe(2, 2), x, y, update=False)
    once = pipe.gradients()
    pipe.step(gl.gpipe(2, 2), x, y, update=False)
    assert all(torch.equal(g, 2 * once[name]) for name, g in pipe.gradients().items())


class Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


def make_tied():
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), Tied(embedding.weight)).double()


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 2), (2, 3), (1, 2)])
def test_tied_weights_stay_equal_on_every_rank(lab_of, num_stages, num_replicas):
    ids = torch.arange(12) % 11
    options = {"loss_fn": F.cross_entropy, "optimizer": ADAM, "max_norm": 0.5}
    runs, pipe = train(
        lab_of(num_stages * num_replicas), make_tied(), num_replicas, num_stages, (ids, ids), **options
    )
    model = make_tied()
    optimizer = ADAM(model.parameters())
    for run in runs:
        loss, _ = whole_batch(model, ids, ids, F.cross_entropy)
        assert run.loss == pytest.approx(loss, rel=1e-10)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    held = lab_of(num_stages * num_replicas).launch(tied_copies, pipe._key)
    copies = [copy for rank in held for copy in rank]
    assert len(copies) == 2 * num_replicas
    assert all(torch.equal(copies[0], copy) for copy in copies)
    if num_stages == 2:
        ties = {(2 * r, 2 * r + 1): 11 * 8 * 8 for r in range(num_replicas)}
        assert ties.items() <= runs[0].bytes_reduced.items()


def tied_copies(context, key):
    found = dict(context.state[key]._named(lambda layer: layer.named_parameters()))
    return [found[name].detach().clone() for name in ("0.weight", "3.weight") if name in found]


def test_batch_norm_statistics_are_those_of_the_whole_batch(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = make_batch(13)
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    pipe = lab_of(4).pipeline(model, loss_fn=F.mse_loss, optimizer=frozen, num_replicas=2)
    for _ in range(2):
        pipe.step(gl.gpipe(2, 3), x, y, checkpoint="always")
        model(x)
    for name, value in pipe.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-12), name


class Branch(nn.Module):
    """Runs its norm on micro-batches whose first number is positive, once or twice."""

    def __init__(self, uses):
        super().__init__()
        self.norm, self.last, self.uses = nn.BatchNorm1d(8), nn.Linear(8, 3), uses

    def forward(self, x):
        for _ in range(self.uses if x[0, 0] > 0 else 0):
            x = self.norm(x)
        return self.last(x)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("in_use", [{0}, {3}, {0, 3}, set()])
def test_a_norm_in_a_branch_that_a_replica_skips(lab_of, in_use, uses):
    """Its statistics are those of the rows that came by, wherever they did; twice used, they move twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Branch(uses)).double()
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (8, 3))
    x[::2, 0] = -x[::2, 0].abs()
    for m in in_use:
        x[2 * m, 0] *= -1
    pipe = lab_of(4).pipeline(model, loss_fn=F.mse_loss, num_replicas=2)
    pipe.step(gl.gpipe(2, 2), x, y, update=False)
    norm = model[1].norm
    parts = [part for m, part in enumerate(x.split(2)) if m in in_use]
    for _ in range(uses if parts else 0):
        norm(torch.cat(parts))  # the statistics of what came by in this use
        parts = [F.batch_norm(part, None, None, training=True, eps=norm.eps) for part in parts]
    state = pipe.state_dict()
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(state[f"1.norm.{name}"], value, rtol=1e-12, atol=1e-14)


class Averages(nn.Module):
    """Buffers of several kinds that move with the rows, in place or anew, as those of a codebook do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5, 2).t())
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("late", None)
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x):
        rows = x.detach()
        self.mean.mul_(0.5).add_(rows.mean(0))
        self.largest = torch.maximum(self.largest, rows.max())
        self.count[rows.argmax() % 3] += 1
        self.seen[int(rows.sum() > 0)] = True
        self.late = rows.sum(0)
        return self.linear(x) * self.mean.mean()


def test_replicas_take_on_the_first_ones_buffers(lab_of):
    """As under DistributedDataParallel: all go on from what the rows of the first one have left."""
    torch.manual_seed(0)
    model = nn.Sequential(Averages(), nn.Linear(3, 3)).double()
    lab = lab_of(4)
    pipe = lab.pipeline(model, loss_fn=F.mse_loss, num_replicas=2)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    for step in range(3):
        x, y = (torch.randn(8, n, dtype=torch.float64) for n in (5, 3))
        pipe.step(gl.gpipe(2, 2), x, y, update=False)
        if step:
            second[0].load_state_dict(first[0].state_dict(), strict=False)
            second[0].late = first[0].late
        for replica, rows in ((first, x[:4]), (second, x[4:])):
            for part, target in zip(
                rows.split(2), (y[:4] if replica is first else y[4:]).split(2), strict=True
            ):
                (F.mse_loss(replica(part), target) / 4).backward()
        by_rank = lab.call(_buffers, [(pipe._key,)] * 4)
        expected = {f"0.{name}": value for name, value in first[0].named_buffers()}
        for found in (by_rank[0], by_rank[2]):
            assert set(found) == set(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
    both = {
        name: p.grad + q.grad
        for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True)
    }
    assert distance(pipe.gradients(), both) <= 1e-12


def _buffers(context, key):
    return dict(context.state[key]._named(lambda layer: layer.named_buffers()))


class Keeps(nn.Module):
    """A buffer whose shape hangs on the rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(0))

    def forward(self, x):
        self.kept = x.detach()[x[:, 0] > 0]
        return x


def test_a_buffer_whose_shape_differs_between_replicas_is_refused(lab_of):
    x, y = make_batch(8)
    x[:, 0] = torch.tensor([-1.0, -1, -1, -1, -1, -1, 1, 1])
    model = nn.Sequential(Keeps(), nn.Linear(5, 3).double())
    with pytest.raises(gl.RankFailed, match="one shape and dtype on all replicas") as failed:
        lab_of(4).run(gl.gpipe(2, 2), model, x, y, loss_fn=F.mse_loss, num_replicas=2, warmup=False)
    assert "(0, 5) torch.float64, (2, 5) torch.float64" in str(failed.value)
    assert "'0.kept'" in str(failed.value)


def test_half_precision_is_summed_over_replicas_in_float32(lab_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)).bfloat16()
    x, y = (t.bfloat16() for t in make_batch(16))
    one = lab_of(2).run(gl.gpipe(2, 8), model, x, y, loss_fn=F.mse_loss, warmup=False)
    two = lab_of(4).run(gl.gpipe(2, 4), model, x, y, loss_fn=F.mse_loss, num_replicas=2, warmup=False)
    assert two.bytes_reduced == {(0, 2): 4 * 48, (1, 3): 4 * 27}
    for name, gradient in two.gradients().items():
        assert gradient.dtype == torch.bfloat16
        error = (gradient.float() - one.gradients()[name].float()).abs().max()
        assert error <= 2**-8 * gradient.float().abs().max()  # one rounding, not one a replica


def test_shapes_are_agreed_on_in_each_replica_by_itself(lab_of):
    pipe = lab_of(4).pipeline(make_model(), loss_fn=F.mse_loss, num_replicas=2)
    for rows in (5, 6, 7, 8, 9, 5):  # sizes wander from one replica to the other
        x, y = make_batch(rows)
        assert pipe.step(gl.one_f_one_b(2, 2), x, y, update=False, strict=rows == 9).loss > 0


def test_misfits_are_refused(lab_of):
    x, y = make_batch(8)
    with pytest.raises(gl.InputError, match=r"3 x 2 = 6 ranks, a lab of 4"):
        lab_of(4).run(gl.gpipe(2, 2), make_model(), x, y, loss_fn=F.mse_loss, num_replicas=3, warmup=False)
    with pytest.raises(gl.InputError, match="a stage on every rank"):
        lab_of(4).pipeline(make_model(), num_replicas=3)
    with pytest.raises(gl.InputError, match="every micro-batch of every replica"):
        lab_of(4).run(gl.gpipe(2, 5), make_model(), x, y, loss_fn=F.mse_loss, num_replicas=2, warmup=False)


def test_a_failure_names_the_rank_and_the_microbatch(lab_of):
    class Picky(nn.Module):
        def forward(self, x):
            if (x > 99).any():
                raise ValueError("no such number")
            return x

    x = torch.ones(8, 2)
    x[7] = 100
    model = nn.Sequential(Picky(), nn.Linear(2, 2))
    with pytest.raises(gl.RankFailed, match=r"rank 2 failed in 0F3.*no such number") as caught:
        lab_of(4).run(gl.gpipe(2, 2), model, x, x, loss_fn=F.mse_loss, num_replicas=2, warmup=False)
    assert caught.value.rank == 2
