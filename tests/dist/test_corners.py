"""What is rare in a model and must be right all the same: backwards that are not split, absent gradients."""

import copy
import dataclasses
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.device import CpuDevice
from gpipe_lab.engine.layer_state import init_seed
from gpipe_lab.lab.model import cut
from tests.layers import OwnFunction

M = 4
MODES = ["never", "always", "except_last"]


def batch(rows=8, width=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)]


def linear():
    return nn.Linear(6, 6).double()


@pytest.mark.parametrize("make", [gl.zero_bubble_h1, gl.zero_bubble_v])
def test_the_trace_says_which_backwards_were_not_split(lab_of, make):
    torch.manual_seed(0)
    layers = [linear(), OwnFunction(6, torch.float64), linear(), linear()]
    expected = one_process(layers)
    for mode in MODES:
        run = lab_of(2).run(make(2, M), layers, *batch(), loss_fn=F.mse_loss, warmup=False, checkpoint=mode)
        (stage,) = {stage for stage, _ in run.trace.unsplit}
        assert run.trace.unsplit == ((stage, "1.weight"),)
        assert run.trace.notes[0].startswith(f"Stage {stage}: I did the full backward of 1.weight")
        assert_equal(run.gradients(), expected)
    whole = lab_of(2).run(gl.gpipe(2, M), layers, *batch(), loss_fn=F.mse_loss, warmup=False)
    assert whole.trace.notes == (), "nothing was to be split"


def test_a_compiled_layer_under_a_split_backward(lab_of, capsys):
    torch.manual_seed(0)
    plain = [linear(), linear()]
    expected = one_process(plain)
    layers = [plain[0], torch.compile(plain[1], backend="eager")]
    run = lab_of(2).run(gl.zero_bubble_h1(2, M), layers, *batch(), loss_fn=F.mse_loss, warmup=False)
    assert_equal({n.replace("_orig_mod.", ""): g for n, g in run.gradients().items()}, expected)
    assert {name for _, name in run.trace.unsplit} <= {"1._orig_mod.weight"}
    assert capsys.readouterr().err == ""


class Picks(nn.Module):
    """The most likely classes: whole numbers, through which nothing can be differentiated."""

    def forward(self, x):
        return x.argmax(1)


class Looks(nn.Module):
    """An argmax and an embedding in one layer: it takes floats that need a gradient and gives none back."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 6).double()

    def forward(self, x):
        return self.table(x.argmax(1))


class Both(nn.Module):
    """Two branches with weights of their own, and a mask."""

    def __init__(self):
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, x):
        return self.left(x), self.right(x), x > 0


class Uses(nn.Module):
    """Differentiates through some of its inputs only."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.linear = linear()

    def forward(self, value):
        left, right, mask = value
        values = {"left": left, "right": right}
        used = sum(v if name in self.names else v.detach() for name, v in values.items())
        return self.linear(used) * mask


ABSENT = {
    "an integer stage": lambda: [linear(), Picks(), nn.Embedding(6, 6).double(), linear()],
    "argmax and embedding together": lambda: [linear(), linear(), Looks(), linear()],
    "at the end": lambda: [linear(), linear(), linear(), Looks()],
    "one of two outputs": lambda: [linear(), Both(), Uses("left"), linear()],
    "none of two outputs": lambda: [linear(), Both(), Uses(), linear()],
    "a frozen first stage": lambda: [linear().requires_grad_(False), linear(), linear(), linear()],
    "a frozen layer after trained ones": lambda: [
        linear(),
        linear().requires_grad_(False),
        Looks(),
        linear(),
    ],
}


@pytest.mark.parametrize("name", ABSENT)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_the_loss_does_not_reach_has_no_gradient(lab_of, name, num_ranks):
    torch.manual_seed(0)
    layers = ABSENT[name]()
    expected = one_process(layers)
    assert len(expected) < sum(1 for layer in layers for _ in layer.parameters())
    schedules = [gl.gpipe(num_ranks, M), gl.one_f_one_b(num_ranks, M), gl.zero_bubble_h1(num_ranks, M)]
    if num_ranks == 2:
        schedules += [gl.zero_bubble_v(2, M), gl.interleaved(2, M, num_chunks=2)]
    for schedule in schedules:
        for mode, strict in (("never", False), ("never", True), ("always", False), ("except_last", False)):
            run = lab_of(num_ranks).run(
                schedule, layers, *batch(), loss_fn=F.mse_loss, checkpoint=mode, strict=strict, warmup=False
            )
            assert_equal(run.gradients(), expected)


class Sometimes(nn.Module):
    """Differentiates through its input for some micro-batches only; which ones hangs on the data."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.linear = linear()

    def forward(self, x):
        passes = bool(x[0, 0] < 0) == self.first
        return self.linear(x if passes else x.detach())


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_there_for_some_microbatches_only(lab_of, first):
    torch.manual_seed(0)
    layers = [nn.Identity(), linear(), nn.Identity(), Sometimes(first)]
    expected = one_process(layers)
    for make in (gl.gpipe, gl.one_f_one_b):
        run = lab_of(4).run(make(4, M), layers, *batch(), loss_fn=F.mse_loss, repeats=2)
        assert_equal(run.gradients(), expected)


def test_micro_batches_that_do_not_count_give_zeros(lab_of):
    layers = [linear(), linear()]
    x = batch()[0]
    targets = torch.full((8,), -100)
    targets[6:] = 2
    for mode in MODES:
        run = lab_of(2).run(
            gl.gpipe(2, M), layers, x, targets, loss_fn=F.cross_entropy, warmup=False, checkpoint=mode
        )
        whole = nn.Sequential(*copy.deepcopy(layers))
        F.cross_entropy(whole(x), targets).backward()
        assert_equal(run.gradients(), {name: p.grad for name, p in whole.named_parameters()})


class Turns(nn.Module):
    """(rows, length, classes) as (rows, classes, length): its gradient lies transposed."""

    def forward(self, x):
        return x.unflatten(1, (2, 3)).transpose(1, 2)


@pytest.mark.parametrize("counted", [{0}, {M - 1}, {0, 2}])
def test_micro_batches_that_do_not_count_before_a_transposing_layer(lab_of, counted):
    layers = [linear(), linear(), nn.Sequential(Turns()), nn.Sequential(nn.Identity())]
    x = batch()[0]
    targets = torch.full((8, 2), -100)
    for m in counted:
        targets[2 * m] = torch.tensor([2, 0])
    whole = nn.Sequential(*copy.deepcopy(layers))
    F.cross_entropy(whole(x), targets).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for num_ranks in (2, 4):
        for mode in MODES:
            for make in (gl.gpipe, gl.zero_bubble_h1):
                schedule = make(num_ranks, M)
                pipe = lab_of(num_ranks).pipeline(layers, loss_fn=F.cross_entropy)
                for _ in range(2):
                    pipe.zero_grad()
                    pipe.step(schedule, x, targets, checkpoint=mode, update=False)
                    assert_equal(pipe.gradients(), expected)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_tied_weight_without_gradients_stays_without(lab_of, frozen):
    first, last = linear(), linear()
    last.weight = first.weight
    first.weight.requires_grad_(not frozen)
    layers = [first, linear(), last, Looks()]
    expected = one_process(layers)
    run = lab_of(4).run(gl.gpipe(4, M), layers, *batch(), loss_fn=F.mse_loss, warmup=False)
    assert_equal(run.gradients(), expected)
    pipe = lab_of(4).pipeline(layers, loss_fn=F.mse_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    pipe.step(gl.gpipe(4, M), *batch())
    assert torch.equal(pipe.state_dict()["0.weight"], first.weight), "weight decay moves what has a gradient"


def weight_norm():
    return nn.utils.parametrizations.weight_norm(linear())


def spectral_norm():
    return nn.utils.parametrizations.spectral_norm(linear())


def orthogonal():
    return nn.utils.parametrizations.orthogonal(linear())


@pytest.mark.parametrize("build", [weight_norm, spectral_norm, orthogonal])
def test_a_parametrized_layer_comes_from_a_function(lab_of, build):
    with pytest.raises(gl.InputError, match="remedy: a function that builds it there: lambda") as caught:
        lab_of(2).run(
            gl.gpipe(2, M), [linear(), nn.Sequential(build())], *batch(), loss_fn=F.mse_loss, warmup=False
        )
    assert caught.value.where == "layer '1'"
    for num_ranks, make in [(2, gl.gpipe), (2, gl.zero_bubble_h1), (4, gl.one_f_one_b)]:
        model = [linear, build, linear, build]
        pipe = lab_of(num_ranks).pipeline(model, loss_fn=F.mse_loss, seed=3)
        layers = []
        for position, factory in enumerate(model):
            CpuDevice().seed(init_seed(3, position))
            layers.append(factory())
        alone = [linear, build, linear, build]
        for mode in MODES:
            run = lab_of(num_ranks).run(
                make(num_ranks, M), alone, *batch(), loss_fn=F.mse_loss, warmup=False, seed=3, checkpoint=mode
            )
            assert_equal(run.gradients(), one_process(layers))
        assert set(run.gradients()) <= set(pipe.state_dict())


def test_a_layer_that_cannot_be_pickled_is_told_how_to_travel(lab_of):
    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.double().lock = threading.Lock()

    with pytest.raises(gl.InputError, match="functions that build its layers"):
        lab_of(2).run(gl.gpipe(2, M), [Locked(), linear()], *batch(), loss_fn=F.mse_loss, warmup=False)
    assert (
        lab_of(2).run(gl.gpipe(2, M), [Locked, linear], *batch(), loss_fn=F.mse_loss, warmup=False).loss > 0
    )


def my_schedule(num_ranks, num_microbatches):
    return dataclasses.replace(gl.one_f_one_b(num_ranks, num_microbatches), name="mine")


def test_a_function_runs_as_the_value_that_it_makes(lab_of):
    layers = [linear() for _ in range(4)]
    value = lab_of(4).run(my_schedule(4, M), layers, *batch(), loss_fn=F.mse_loss, warmup=False)
    for made_by in (my_schedule, lambda p, m: my_schedule(p, m)):
        run = lab_of(4).run(made_by, layers, *batch(), loss_fn=F.mse_loss, warmup=False, num_microbatches=M)
        assert run.loss == value.loss and run.trace.schedule == value.trace.schedule
        assert all(torch.equal(run.gradients()[n], g) for n, g in value.gradients().items())
    two = lab_of(4).run(
        my_schedule, layers, *batch(), loss_fn=F.mse_loss, warmup=False, num_microbatches=2, num_replicas=2
    )
    assert two.trace.schedule == gl.replicate(my_schedule(2, 2), 2)
    pipe = lab_of(4).pipeline(layers, loss_fn=F.mse_loss)
    assert pipe.step(my_schedule, *batch(), num_microbatches=M, update=False).loss == value.loss
    with pytest.raises(ZeroDivisionError):
        lab_of(4).run(
            lambda p, m: 1 / 0, layers, *batch(), loss_fn=F.mse_loss, warmup=False, num_microbatches=M
        )


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "told"),
    [
        (my_schedule, None, "num_microbatches=8"),
        (my_schedule, 0, "at least 1"),
        (lambda p, m: "gpipe", 4, "a str"),
        (lambda p, m: None, 4, "a NoneType"),
        (lambda p, m: gl.gpipe(p + 1, m), 4, r"\(3, 4\)"),
        (lambda p, m: gl.gpipe(p, m + 1), 4, r"\(2, 5\)"),
        (gl.gpipe(2, 4), 8, "leave out num_microbatches"),
        (lambda p, m: dataclasses.replace(gl.gpipe(p, m), ops=gl.gpipe(p, m).ops[::-1]), 4, "rule"),
    ],
)
def test_what_makes_no_fitting_schedule_is_refused(lab_of, schedule, num_microbatches, told, monkeypatch):
    lab = lab_of(2)
    monkeypatch.setattr(lab, "call", None)
    layers = [linear(), linear()]
    with pytest.raises(gl.InputError, match=told) as caught:
        lab.run(
            schedule, layers, *batch(), loss_fn=F.mse_loss, warmup=False, num_microbatches=num_microbatches
        )
    assert caught.value.rule and caught.value.got and caught.value.where and caught.value.remedy


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "without affine weights": lambda: nn.BatchNorm1d(6, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_that_two_stages_would_share_are_refused(lab_of, name):
    norm = NORMS[name]().double()
    layers = [nn.Sequential(linear(), norm), nn.Sequential(linear(), nn.Sequential(norm))]
    for refused in (lambda: lab_of(2).pipeline(layers), lambda: cut(layers, 2)):
        with pytest.raises(gl.InputError, match="a layer with running statistics is on one stage") as caught:
            refused()
        assert "stages 0 and 1" in caught.value.got and "tied" in caught.value.remedy
    assert len(cut(layers, 1)) == 1
    norm.eval()
    assert len(cut(layers, 2)) == 2, "statistics that do not move may be shared"


def test_the_remedy_for_a_shared_batch_norm_works(lab_of):
    torch.manual_seed(0)
    first, second = nn.BatchNorm1d(6).double(), nn.BatchNorm1d(6).double()
    second.weight, second.bias = first.weight, first.bias
    layers = [nn.Sequential(linear(), first), nn.Sequential(linear(), second)]
    run = lab_of(2).run(gl.gpipe(2, M), layers, *batch(), loss_fn=F.mse_loss, warmup=False)
    assert_equal(run.gradients(), one_process(layers))


def test_a_loss_of_ones_own_is_weighted_by_rows_unless_told(lab_of):
    layers = [linear(), linear()]
    x = batch()[0]
    targets = torch.tensor(
        [1, -100, -100, -100, 2, 3, -100, 0]
    )  # micro-batches with 1, 0, 2 and 1 that count

    def own(output, target):
        return F.cross_entropy(output, target, ignore_index=-100)

    def grads(weights):
        model = nn.Sequential(*copy.deepcopy(layers))
        for part, target, weight in zip(x.chunk(M), targets.chunk(M), weights, strict=True):
            if weight and (target != -100).any():
                (own(model(part), target) * weight / sum(weights)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    some = x[4:], targets[4:]  # each of its micro-batches has something that counts
    by_rows = lab_of(2).run(gl.gpipe(2, 2), layers, *some, loss_fn=own, warmup=False)
    model = nn.Sequential(*copy.deepcopy(layers))
    for part, target in zip(some[0].chunk(2), some[1].chunk(2), strict=True):
        (own(model(part), target) / 2).backward()
    assert_equal(by_rows.gradients(), {name: p.grad for name, p in model.named_parameters()})
    weighted = lab_of(2).run(
        gl.gpipe(2, M),
        layers,
        x,
        targets,
        loss_fn=own,
        warmup=False,
        loss_weight=lambda target: (target != -100).sum(),
    )
    assert_equal(weighted.gradients(), grads([1, 0, 2, 1]))
    whole = nn.Sequential(*copy.deepcopy(layers))
    own(whole(x), targets).backward()
    assert_equal(weighted.gradients(), {name: p.grad for name, p in whole.named_parameters()})


def one_process(layers, inputs=None):
    """The gradients of plain torch on the same micro-batches; parameters without one are left out."""
    model = nn.Sequential(*copy.deepcopy(list(layers))).train()
    x, y = batch() if inputs is None else inputs
    for part, target in zip(x.chunk(M), y.chunk(M), strict=True):
        (F.mse_loss(model(part), target) / M).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(mine, theirs):
    assert set(mine) == set(theirs)
    for name, gradient in theirs.items():
        assert torch.allclose(mine[name], gradient, rtol=1e-11, atol=1e-14), name
