"""Layers with state, with random numbers of their own, or in place, and odd things over a boundary."""

import collections
import copy
import functools
import math
import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if all this were defined in a cell

MODES = ["never", "always", "every:1", "except_last"]
M = 4


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2)]


def linear():
    return nn.Linear(6, 6).double()


def one_process(model):
    """Gradients of the same micro-batches, one after the other; the model stays as it is."""
    model = nn.Sequential(*copy.deepcopy(list(model))).train()
    x, y = batch()
    for part, target in zip(x.chunk(M), y.chunk(M), strict=True):
        (F.mse_loss(model(part), target) / M).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, model


def assert_equal_to_one_process(lab, model, *, modes=MODES):
    expected, _ = one_process(model)
    for mode in modes:
        for make in (gl.gpipe, gl.one_f_one_b):
            run = lab.run(
                make(lab.num_ranks, M), model, *batch(), loss_fn=F.mse_loss, warmup=False, checkpoint=mode
            )
            assert distance(run.gradients(), expected) <= 1e-12, (mode, make)


class Counts(nn.Module):
    """Scales by the number of calls so far, which it keeps in a buffer, anew or in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.ones((), dtype=torch.float64))
        self.linear = linear()

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return self.linear(x) * self.calls.item()


def test_a_layer_with_state_is_recomputed_with_the_state_of_its_forward(lab_of):
    model = [Counts(True), linear(), Counts(False), linear()]
    assert_equal_to_one_process(lab_of(2), model)
    for mode in MODES:
        pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
        pipe.step(gl.gpipe(2, M), *batch(), update=False, checkpoint=mode)
        assert pipe.state_dict()["0.calls"] == 1 + M, "moved once for each micro-batch, never in a recompute"


def test_spectral_and_instance_norm(lab_of):
    instance_norm = nn.InstanceNorm1d(2, track_running_stats=True).double()
    model = [
        nn.Sequential(nn.Unflatten(1, (2, 3)), instance_norm, nn.Flatten(1)),
        nn.utils.spectral_norm(linear()),
        linear(),
    ]
    assert_equal_to_one_process(lab_of(2), model)
    _, trained = one_process(model)
    for mode in MODES:
        pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
        pipe.step(gl.gpipe(2, M), *batch(), update=False, checkpoint=mode)
        state = pipe.state_dict()
        for name in ("0.1.running_mean", "0.1.running_var", "1.weight_u"):
            assert torch.allclose(state[name], trained.state_dict()[name], rtol=1e-12, atol=1e-14), (
                name,
                mode,
            )


def test_repeats_start_from_the_same_state(lab_of):
    model = [Counts(True), linear()]
    runs = [
        lab_of(2).run(gl.gpipe(2, M), model, *batch(), loss_fn=F.mse_loss, repeats=n, warmup=warm_up)
        for n, warm_up in [(1, False), (1, True), (3, False)]
    ]
    assert len({run.loss for run in runs}) == 1


class Draws(nn.Module):
    """Random by Python's and numpy's generators, as layer drop often is."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return x + self.linear(x) * random.random() * np.random.rand()


def test_pythons_and_numpys_random_numbers_are_keyed_as_torchs(lab_of):
    model = [Draws() for _ in range(4)]
    runs = [
        lab_of(p).run(make(p, M), model, *batch(), loss_fn=F.mse_loss, warmup=False, checkpoint=mode)
        for p in (1, 2)
        for make in (gl.gpipe, gl.one_f_one_b)
        for mode in MODES
    ]
    assert len({run.loss for run in runs}) == 1
    for run in runs:
        assert distance(run.gradients(), runs[0].gradients()) <= 1e-12


class Triples(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.mul_(3.0) if self.in_place else x * 3.0


def test_an_in_place_layer_after_a_stage_on_the_same_rank(lab_of):
    """Stages 1 and 2 of the V are on rank 1, and pass on what they make without a message."""
    schedule = gl.zero_bubble_v(2, M)

    def model(last_of_stage_1, in_place):
        return [linear(), last_of_stage_1, Triples(in_place), linear()]

    torch.manual_seed(0)
    keeps_no_output = model(linear(), True)
    run = lab_of(2).run(schedule, keeps_no_output, *batch(), loss_fn=F.mse_loss, warmup=False)
    keeps_no_output[2] = Triples(False)
    assert distance(run.gradients(), one_process(keeps_no_output)[0]) <= 1e-12
    with pytest.raises(gl.RankFailed, match="modified in place"):  # as in one process: tanh needs its output
        lab_of(2).run(schedule, model(nn.Tanh(), True), *batch(), loss_fn=F.mse_loss, warmup=False)


Pair = collections.namedtuple("Pair", "left right")


class Makes(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = linear()

    def forward(self, x):
        y = self.linear(x)
        match self.kind:
            case "named tuple":
                return Pair(y, x)
            case "defaultdict":
                return collections.defaultdict(list, left=y, right=x)
            case "sorted":
                return y.sort(dim=1)
            case "conjugated":
                return torch.complex(y, x).conj()
            case "negated":
                return torch.complex(x, y).conj().imag
            case "views":
                return y, y[:, :2], y.t(), y[:1].expand(3, 6), y.sum(), y[:0]


class Takes(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = linear()

    def forward(self, value):
        match self.kind:
            case "named tuple":
                assert isinstance(value, Pair)
                return self.linear(value.left) + value.right
            case "defaultdict":
                return self.linear(value["left"]) + value["right"]
            case "sorted":
                return self.linear(value.values) + value.indices
            case "conjugated":
                return self.linear(value.real) * value.imag
            case "negated":
                return self.linear(value)
            case "views":
                y, part, turned, wide, total, nothing = value
                return self.linear(y) * part.sum() + turned.t() + wide.mean() + total + nothing.sum()


@pytest.mark.parametrize("kind", ["named tuple", "defaultdict", "sorted", "conjugated", "negated", "views"])
def test_what_crosses_a_boundary(lab_of, kind):
    assert_equal_to_one_process(lab_of(2), [linear(), Makes(kind), Takes(kind), linear()])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


def test_the_norm_of_complex_gradients(lab_of):
    model = [Complex(), linear()]
    expected, _ = one_process(model)
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
    run = pipe.step(gl.gpipe(2, M), *batch(), update=False)
    assert distance(pipe.gradients(), expected) <= 1e-12
    assert run.grad_norm == pytest.approx(math.sqrt(sum(g.abs().square().sum() for g in expected.values())))


def test_a_loss_without_a_gradient_is_refused(lab_of):
    model = [linear(), linear()]
    for mode in MODES:
        with pytest.raises(gl.RankFailed, match=r"detach\(\)"):
            lab_of(2).run(
                gl.gpipe(2, M),
                model,
                *batch(),
                loss_fn=lambda output, target: F.mse_loss(output.detach(), target),
                warmup=False,
                checkpoint=mode,
            )
    for layer in model:
        layer.requires_grad_(False)
    run = lab_of(2).run(gl.gpipe(2, M), model, *batch(), loss_fn=F.mse_loss, warmup=False)
    assert run.gradients() == {}, "a frozen model has none to give"


def test_sparse_gradients_are_refused(lab_of):
    model = [nn.Embedding(5, 6, sparse=True).double(), linear()]
    ids, (_, y) = torch.arange(8) % 5, batch()
    with pytest.raises(gl.RankFailed, match="sparse=False"):
        lab_of(2).run(gl.gpipe(2, M), model, ids, y, loss_fn=F.mse_loss, warmup=False)


class Skips:
    """What a stash and pop model passes activations by, outside its layers' outputs."""

    def __init__(self):
        self.kept = {}
        self.calls = 0


class Stash(nn.Linear):
    def __init__(self, skips):
        super().__init__(4, 4)
        self.skips = skips

    def forward(self, x):
        self.skips.kept["x"] = x
        return super().forward(x)


class Pop(Stash):
    def forward(self, x):
        return nn.Linear.forward(self, x) + self.skips.kept.pop("x", 0)


class Configured(Stash):
    def forward(self, x):
        return nn.Linear.forward(self, x) * self.skips.kept["scale"]


class Drawing(nn.Linear):
    def __init__(self, generator):
        super().__init__(4, 4)
        self.generator = generator

    def forward(self, x):
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


class CountingBuffer(nn.Linear):
    def __init__(self, count):
        super().__init__(4, 4)
        self.register_buffer("count", count)

    def forward(self, x):
        if self.training:
            self.count += 1
        return super().forward(x)


class Counted(Stash):
    def forward(self, x):
        self.skips["calls"] += 1
        return nn.Linear.forward(self, x) * self.skips["calls"]


def by_hook():
    kept = {}
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    first.register_forward_hook(lambda module, inputs, output: kept.update(x=output))
    last.register_forward_hook(lambda module, inputs, output: output + kept.get("x", 0))
    return [first, last]


def shared_by(kinds, make):
    shared = make()
    return [kind(shared) for kind in kinds]


CHANGING = {
    "an object": lambda: shared_by([Stash, Pop], Skips),
    "an object that functions take along": lambda: shared_by(
        [functools.partial(functools.partial, kind) for kind in (Stash, Pop)], Skips
    ),
    "a dict that looks like settings": lambda: shared_by([Counted] * 2, lambda: {"calls": 0}),
    "hooks": by_hook,
    "a generator": lambda: shared_by([Drawing] * 2, torch.Generator),
    "a buffer": lambda: shared_by([CountingBuffer] * 2, lambda: torch.zeros(1)),
    "one layer": lambda: [Stash(Skips())] * 2,
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_stages_share_and_a_forward_changes_is_refused(lab_of, name):
    x = torch.randn(4, 4)
    for num_stages in (2, 1):
        lab = lab_of(num_stages)
        pipe = lab.pipeline(CHANGING[name](), loss_fn=F.mse_loss)
        step = functools.partial(pipe.step, gl.gpipe(num_stages, 2), x, x, update=False)
        if num_stages == 1:
            step()
            continue
        with pytest.raises(gl.InputError, match="each rank changes its own copy"):
            step()
        with pytest.raises(gl.InputError, match="each rank changes its own copy"):
            lab.run(gl.gpipe(2, 2), CHANGING[name](), x, x, loss_fn=F.mse_loss, warmup=False)


def test_what_stages_share_and_nobody_changes_is_as_in_one_process(lab_of):
    skips = Skips()
    skips.kept["scale"] = 0.5
    mask = torch.ones(1)
    model = nn.Sequential(
        Configured(skips), CountingBuffer(mask), Configured(skips), CountingBuffer(mask)
    ).eval()
    x = torch.randn(4, 4)
    model[1].kept = skips
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
    F.mse_loss(model(x), x).backward()
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(gl.gpipe(2, 2), x, x, update=False)
        pipe.load_state_dict(pipe.state_dict())  # changes buffers, and that is right
        gradients = pipe.gradients()
        for key, parameter in model.named_parameters():
            assert torch.allclose(gradients[key], parameter.grad, rtol=1e-5, atol=1e-7), key


def doubled_gradient():
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


def test_hooks_that_a_function_registers_are_kept(lab_of):
    x = torch.randn(6, 4)
    for make in (gl.gpipe, gl.zero_bubble_h1):
        runs = [
            lab_of(2).run(
                make(2, 3),
                [first, functools.partial(nn.Linear, 4, 4)],
                x,
                x,
                loss_fn=F.mse_loss,
                warmup=False,
            )
            for first in (functools.partial(nn.Linear, 4, 4), doubled_gradient)
        ]
        plain, hooked = (run.gradients() for run in runs)
        assert torch.allclose(hooked["0.weight"], 2 * plain["0.weight"], rtol=1e-6)
        assert torch.equal(hooked["0.bias"], plain["0.bias"])
