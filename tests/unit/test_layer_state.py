"""What layers keep beside their weights: a schedule in flight is as one micro-batch at a time."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_lab.engine.device import CpuDevice
from gpipe_lab.engine.layer_state import LayerState
from gpipe_lab.engine.ledger import Ledger
from gpipe_lab.engine.stage import Objective, Stage, StepContext

WIDTH, M = 4, 3
BOTH = pytest.mark.parametrize("recompute", [False, True])


def microbatches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, WIDTH, generator=generator, dtype=torch.float64) for _ in range(M)]


def linear():
    return nn.Linear(WIDTH, WIDTH).double()


def in_flight(layers, *, recompute, split=False, num_steps=1):
    """All forwards before the first backward; (stage, its outputs, gradients of inputs and weights)."""
    stage = Stage(0, copy.deepcopy(layers), 0, CpuDevice(), Ledger(0))
    segments = [range(i, i + 1) for i in range(len(layers))] if recompute else None
    for _ in range(num_steps):
        stage.begin(training=True)
        stage.layers.zero_grad()
        outputs = [
            stage.forward(m, x, [True], StepContext(), segments=segments, defer_weights=split).tree
            for m, x in enumerate(microbatches())
        ]
        given = [2 * output for output in outputs]  # of a sum of squares
        gradients = []
        for m in reversed(range(M)):
            for segment in reversed(range(len(segments or [0]))):
                if recompute:
                    stage.recompute(m, segment)
                is_last = segment == len(segments or [0]) - 1
                (gradient,) = stage.backward(m, segment, [given[m]] if is_last else None)
            gradients.insert(0, gradient)
            if split:
                stage.backward_weight(m)
        stage.end()
    return stage, outputs, gradients + [p.grad for p in stage.layers.parameters()]


def one_at_a_time(layers):
    """The same in one process: (model, outputs, gradients of inputs and weights)."""
    model = nn.Sequential(*copy.deepcopy(layers))
    outputs, gradients = [], []
    for part in microbatches():
        x = part.clone().requires_grad_()
        y = model(x)
        outputs.append(y.detach().clone())
        y.square().sum().backward()
        gradients.append(x.grad)
    return model, outputs, gradients + [p.grad for p in model.parameters()]


def assert_equal(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Static(nn.Module):
    """Writes what it returns into memory of its own, as layers made for CUDA graphs do."""

    def __init__(self, kept_as, form):
        super().__init__()
        self.inner = linear()
        self.form = form
        memory = torch.empty(5, WIDTH, dtype=torch.float64)
        match kept_as:
            case "a buffer":
                self.register_buffer("memory", memory)
            case "an attribute":
                self.memory = memory
            case "in a list":
                self.all = [memory]
            case "in a dict":
                self.all = {"out": memory}
        self.kept_as = kept_as

    def forward(self, x):
        y = self.inner(x)
        memory = getattr(self, "memory", None)
        if memory is None:
            memory = self.all["out"] if self.kept_as == "in a dict" else self.all[0]
        memory.detach_().copy_(y)
        return {"itself": memory, "a view": memory[:, :]}[self.form]


@BOTH
@pytest.mark.parametrize("form", ["itself", "a view"])
@pytest.mark.parametrize("kept_as", ["a buffer", "an attribute", "in a list", "in a dict"])
def test_a_layer_that_returns_its_own_memory(kept_as, form, recompute):
    """The next layer saves it, and the next micro-batch overwrites it."""
    torch.manual_seed(0)
    for layers in ([linear(), Static(kept_as, form)], [Static(kept_as, form), linear()]):
        _, outputs, gradients = in_flight(layers, recompute=recompute)
        _, expected, wanted = one_at_a_time(layers)
        assert_equal(outputs, expected)
        assert_equal(gradients, wanted)


def test_predictions_of_a_layer_that_returns_its_own_memory():
    torch.manual_seed(0)
    stage = Stage(0, [Static("a buffer", "itself")], 0, CpuDevice(), Ledger(0))
    stage.begin(training=False)
    step = StepContext(training=False, gradients=False)
    outputs = [stage.forward(m, x, [False], step).tree for m, x in enumerate(microbatches())]
    assert_equal(outputs, [stage.layers[0].inner(x) for x in microbatches()])


def test_what_a_layer_makes_anew_is_not_copied():
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, x):
            nonlocal made
            made = x * self.scale
            return made

    made = None
    stage = Stage(0, [Notes()], 0, CpuDevice(), Ledger(0))
    output = stage.forward(0, microbatches()[0], [True], StepContext())
    assert output.tree.data_ptr() == made.data_ptr()


class Moves(nn.Module):
    """Its output hangs on what earlier micro-batches have left in it."""

    def __init__(self, kept_as):
        super().__init__()
        self.inner, self.kept_as = linear(), kept_as
        start = torch.ones((), dtype=torch.float64)
        match kept_as:
            case "a buffer in place" | "a buffer anew":
                self.register_buffer("mean", start)
            case "a tensor in place" | "a tensor anew":
                self.mean = start
            case "a number":
                self.mean = 1.0
            case "None at first":
                self.mean = None
            case "torch's generator":
                self.generator = torch.Generator().manual_seed(5)
            case "Python's generator":
                self.generator = random.Random(5)
            case "numpy's generator":
                self.generator = np.random.default_rng(5)

    def forward(self, x):
        match self.kept_as:
            case "a buffer in place" | "a tensor in place":
                self.mean.mul_(0.5).add_(x.detach().mean())
                scale = self.mean.clone()
            case "a buffer anew" | "a tensor anew":
                scale = self.mean = 0.5 * self.mean + x.detach().mean()
            case "a number":
                scale = self.mean = 0.5 * self.mean + x.detach().mean().item()
            case "None at first":
                scale = self.mean = x.detach().mean() if self.mean is None else self.mean + 1
            case "torch's generator":
                scale = torch.rand((), dtype=x.dtype, generator=self.generator)
            case _:
                scale = self.generator.random()
        return self.inner(x) * scale


KEPT_AS = [
    *(
        "a buffer in place",
        "a buffer anew",
        "a tensor in place",
        "a tensor anew",
        "a number",
        "None at first",
    ),
    *("torch's generator", "Python's generator", "numpy's generator"),
]


@pytest.mark.parametrize("split", [False, True])
@BOTH
@pytest.mark.parametrize("kept_as", KEPT_AS)
def test_a_recompute_finds_what_the_forward_found(kept_as, recompute, split):
    torch.manual_seed(0)
    layers = [Moves(kept_as), nn.Sequential(linear(), Moves(kept_as)), linear()]
    stage, outputs, gradients = in_flight(layers, recompute=recompute, split=split)
    model, expected, wanted = one_at_a_time(layers)
    assert_equal(outputs, expected)
    assert_equal(gradients, wanted)
    if not kept_as.endswith("generator"):
        assert stage.layers[0].mean == model[0].mean, "moved once a micro-batch, never in a recompute"


@pytest.mark.parametrize("kept_as", KEPT_AS)
def test_a_state_is_restored(kept_as):
    layer, (x, *_) = Moves(kept_as), microbatches()
    start = LayerState(layer.modules())
    first = layer(x)
    layer(x)
    start.restore()
    assert torch.equal(layer(x), first)


class Norm(nn.Module):
    """A batch norm, perhaps within a checkpoint of its own, as in a DenseNet that saves memory."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.inner, self.norm = linear(), nn.BatchNorm1d(WIDTH).double()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        def run(x):
            return torch.tanh(self.norm(self.inner(x)))

        if self.use_reentrant is None or not (torch.is_grad_enabled() and x.requires_grad):
            return run(x)
        return checkpoint(run, x, use_reentrant=self.use_reentrant)


def statistics_of(model, layers):
    """What one process's running statistics are, of all rows at once, as each norm of `layers` saw them."""
    expected = copy.deepcopy(model)
    for norm, rows in layers.items():
        dict(expected.named_modules())[norm](torch.cat(rows))
    return {
        name: value for name, value in expected.state_dict().items() if "running" in name or "num" in name
    }


def seen_by_norms(layers):
    """(a fresh model, by name of a norm, its inputs in plain torch)"""
    model = nn.Sequential(*copy.deepcopy(layers))
    fresh, seen = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d) and module.training:
            module.register_forward_pre_hook(
                lambda _, x, name=name: seen.setdefault(name, []).append(x[0].detach())
            )
    for x in microbatches():
        model(x)
    return fresh, seen


@pytest.mark.parametrize("split", [False, True])
@BOTH
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_statistics_move_once_a_step_where_a_layer_checkpoints_itself(use_reentrant, recompute, split):
    torch.manual_seed(0)
    layers = [linear(), Norm(use_reentrant), nn.Sequential(Norm(use_reentrant), linear())]
    stage, _, gradients = in_flight(layers, recompute=recompute, split=split)
    assert_equal(gradients, one_at_a_time(layers)[2])
    expected = statistics_of(*seen_by_norms(layers))
    found = stage.layers.state_dict()
    assert len(expected) == 6
    assert_equal([found[name] for name in expected], expected.values())


@BOTH
def test_a_norm_in_eval_keeps_its_statistics(recompute):
    torch.manual_seed(0)
    layers = [linear(), Norm(), nn.Sequential(nn.Dropout(0.5), linear()), Norm()]
    layers[1].norm.eval()
    layers[2].eval()
    with torch.no_grad():
        layers[1].norm.running_mean.add_(0.5)
    given = [module.training for module in nn.ModuleList(layers).modules()]
    stage, outputs, gradients = in_flight(layers, recompute=recompute, num_steps=2)
    assert [module.training for module in stage.layers.modules()] == given
    _, expected, wanted = one_at_a_time(layers)
    assert_equal(outputs, expected)
    assert_equal(gradients, wanted)
    assert all(
        torch.equal(stage.layers[1].norm.state_dict()[k], v) for k, v in layers[1].norm.state_dict().items()
    )
    assert stage.layers[3].norm.num_batches_tracked == 2
    stage.begin(training=False)
    assert not any(module.training for module in stage.layers.modules())


def penalised(output, target):
    """A loss with a gradient of its own: a penalty on the slope of a critic."""
    (slope,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
    return F.mse_loss(output, target) + slope.square().mean()


@pytest.mark.parametrize("segments", [None, [range(3)], [range(2), range(2, 3)]])
def test_a_loss_that_differentiates(segments):
    torch.manual_seed(0)
    layers, (x, y, _) = [linear(), nn.Tanh(), linear()], microbatches()
    stage = Stage(0, copy.deepcopy(layers), 0, CpuDevice(), Ledger(0))
    output = stage.forward(
        0, x, [True], StepContext(), objective=Objective(penalised, y, 0.5), segments=segments
    )
    loss = output.loss
    for segment in reversed(range(len(segments or [0]))):
        if segments is not None:
            loss = stage.recompute(0, segment) or loss
        (gradient,) = stage.backward(0, segment)
    model, leaf = nn.Sequential(*layers), x.clone().requires_grad_()
    expected = penalised(model(leaf), y)
    (0.5 * expected).backward()
    assert loss == expected
    assert_equal(
        [gradient, *(p.grad for p in stage.layers.parameters())],
        [leaf.grad, *(p.grad for p in model.parameters())],
    )


def by_jvp(layer, x):
    return torch.func.jvp(lambda x: layer(x).sin(), (x,), (torch.ones_like(x),))[1]


def by_jacfwd(layer, x):
    return torch.func.vmap(torch.func.jacfwd(lambda row: layer(row).sin()))(x).sum(1)


def by_dual_numbers(layer, x):
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))).sin()
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def by_grad(layer, x):
    return torch.func.vmap(torch.func.grad(lambda row: layer(row).sin().sum()))(x)


def by_vjp(layer, x):
    return torch.func.vjp(lambda x: layer(x).sin(), x)[1](torch.ones_like(x))[0]


def by_jacrev(layer, x):
    return torch.func.vmap(torch.func.jacrev(lambda row: layer(row).sin()))(x).sum(1)


class Differentiates(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = linear(), how

    def forward(self, x):
        return x + self.how(self.inner, x)


@pytest.mark.parametrize("split", [False, True])
@BOTH
@pytest.mark.parametrize("how", [by_jvp, by_jacfwd, by_dual_numbers])
def test_forward_mode_differentiation_within_a_layer(how, recompute, split):
    torch.manual_seed(0)
    layers = [linear(), Differentiates(how), linear()]
    _, outputs, gradients = in_flight(layers, recompute=recompute, split=split)
    _, expected, wanted = one_at_a_time(layers)
    assert_equal(outputs, expected)
    assert_equal(gradients, wanted)


@BOTH
@pytest.mark.parametrize("how", [by_grad, by_vjp, by_jacrev])
def test_torch_funcs_reverse_mode_is_refused(how, recompute):
    with pytest.raises(ValueError, match=r"layer 1\nremedy: torch\.autograd\.grad"):
        in_flight([linear(), Differentiates(how), linear()], recompute=recompute)
    layer, (x, *_) = Differentiates(how), microbatches()
    stage = Stage(0, [layer], 0, CpuDevice(), Ledger(0))
    step = StepContext(training=False, gradients=False)
    assert torch.equal(stage.forward(0, x, [False], step).tree, layer(x)), "without a backward it runs"
