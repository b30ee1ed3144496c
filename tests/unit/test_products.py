"""Gradients of weights, put off or added up at once, are autograd's, whatever layers do by themselves."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpipe_lab.engine import at_once
from gpipe_lab.engine.ledger import Ledger
from gpipe_lab.engine.stage import Stage, StepContext
from gpipe_lab.engine.streams import CpuDevice

WIDTH, NUM_MICROBATCHES = 6, 3


class Around(nn.Module):
    """A linear layer that is used in an unusual way."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class Force(Around):
    """Differentiates an energy with regard to its input, as models of molecules do."""

    def forward(self, x):
        with torch.enable_grad():
            at = x if x.requires_grad else x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.inner(at)).sum(), at, create_graph=True)
        return x - slope


class WantsWeight(Around):
    """Looks at a gradient of its own weight."""

    def forward(self, x):
        with torch.enable_grad():
            y = torch.tanh(self.inner(x))
            (slope,) = torch.autograd.grad(y.sum(), self.inner.weight, create_graph=True)
        return y * slope.square().mean()


class Checkpointed(Around):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(lambda x: torch.relu(self.inner(x)), x, use_reentrant=self.use_reentrant)


class Vmapped(Around):
    def forward(self, x):
        return torch.vmap(lambda row: torch.tanh(self.inner(row)))(x)


class Swapped(Around):
    def forward(self, x):
        return torch.func.functional_call(self.inner, {"weight": self.inner.weight * 2}, (x,))


class Twice(Around):
    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class Equilibrium(Around):
    """A fixed point, whose backward solves an equation in a hook, by way of a graph made in the forward."""

    def forward(self, x):
        def step(z):
            return torch.tanh(0.3 * self.inner(z) + x)

        with torch.no_grad():
            z = step(step(x))
        start = z.clone().requires_grad_()
        with torch.enable_grad():
            again = step(start)

        def solve(gradient):
            found = gradient
            for _ in range(3):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
            return found

        z = step(z)
        if z.requires_grad:
            z.register_hook(solve)
        return z


class Implicit(torch.autograd.Function):
    """Runs a layer in the forward, and again in the backward for the gradients that it returns."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        with torch.no_grad():
            return torch.tanh(layer(x))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = torch.tanh(ctx.layer(x))
        wanted = (x, ctx.layer.weight, ctx.layer.bias)
        return *torch.autograd.grad(y, wanted, gradient), None


class ByFunction(Around):
    def forward(self, x):
        return Implicit.apply(x, self.inner.weight, self.inner.bias, self.inner)


def hooked(*, afterwards):
    layer = nn.Linear(WIDTH, WIDTH)

    def double(weight):
        weight.grad *= 2

    if afterwards:
        layer.weight.register_post_accumulate_grad_hook(double)
    else:
        layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


def frozen(name):
    layer = nn.Linear(WIDTH, WIDTH)
    getattr(layer, name).requires_grad_(False)
    return layer


LAYERS = {
    "a linear layer": lambda: nn.Linear(WIDTH, WIDTH),
    "without a bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "a frozen bias": lambda: frozen("bias"),
    "a frozen weight": lambda: frozen("weight"),
    "a force": Force,
    "its weight's gradient": WantsWeight,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "vmap": Vmapped,
    "another weight": Swapped,
    "used twice": Twice,
    "an equilibrium": Equilibrium,
    "a function of its own": ByFunction,
    "a hook": lambda: hooked(afterwards=False),
    "a hook afterwards": lambda: hooked(afterwards=True),
}


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(at_once, "LARGE", 1)


def batch(shape=(2, 4, WIDTH), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(NUM_MICROBATCHES)]


def by_autograd(layers, parts):
    for part in parts:
        x = part.clone().requires_grad_()
        y = nn.Sequential(*layers)(x)
        y.backward(torch.ones_like(y))
    found = [p.grad for p in nn.Sequential(*layers).parameters()]
    for p in nn.Sequential(*layers).parameters():
        p.grad = None
    return [*found, x.grad]


def by_stage(layers, parts, *, split, recompute=False):
    """All forwards, then all backwards, as in GPipe."""
    stage = Stage(0, layers, 0, CpuDevice(), Ledger(0))
    segments = [range(len(layers))] if recompute else None
    outputs = [
        stage.forward(m, part, [True], StepContext(), defer_weights=split, segments=segments).tree
        for m, part in enumerate(parts)
    ]
    for m, output in enumerate(outputs):
        if recompute:
            stage.recompute(m, 0)
        (gradient,) = stage.backward(m, 0, [torch.ones_like(output)])
        if split:
            stage.backward_weight(m)
    assert stage.ledger.totals["deferred"] == stage.ledger.totals["saved"] == 0
    return [*(p.grad for p in stage.layers.parameters()), gradient]


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_autograds(name, split, recompute, all_are_large):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double(), LAYERS[name]().double(), nn.Linear(WIDTH, WIDTH).double()]
    expected = by_autograd(layers, batch())
    assert_same(by_stage(layers, batch(), split=split, recompute=recompute), expected)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [(WIDTH,), (0, WIDTH), (3, WIDTH), (2, 3, 4, WIDTH)])
def test_inputs_of_any_number_of_dimensions(shape, split, all_are_large):
    layers = [nn.Linear(WIDTH, 2 * WIDTH).double(), nn.Linear(2 * WIDTH, WIDTH).double()]
    expected = by_autograd(layers, batch(shape))
    for mine, theirs in zip(by_stage(layers, batch(shape), split=split), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12)


@pytest.mark.parametrize("split", [False, True])
def test_complex_weights(split, all_are_large):
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.complex128) for _ in range(2)]
    parts = batch(dtype=torch.complex128)
    assert_same(by_stage(layers, parts, split=split), by_autograd(layers, parts))


class Watch(TorchDispatchMode):
    """Notes which operations make or change a matrix of a weight's shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.seen = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and tuple(result.shape) == self.shape:
            self.seen.append(str(func))
        return result


@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_is_added_within_the_product(split, all_are_large):
    stage = Stage(0, [nn.Linear(WIDTH, 2 * WIDTH)], 0, CpuDevice(), Ledger(0))
    parts = [part.float() for part in batch()]
    for m, part in enumerate(parts):
        stage.forward(m, part, [True], StepContext(), defer_weights=split)
    for m in range(NUM_MICROBATCHES):
        with Watch((2 * WIDTH, WIDTH)) as watch:
            stage.backward(m, 0, [torch.ones(2, 4, 2 * WIDTH)])
            if split:
                stage.backward_weight(m)
        written = [name for name in watch.seen if "detach" not in name and "expand" not in name]
        assert written == (["aten.mm.default"] if m == 0 else ["aten.addmm.out"])


def test_small_weights_are_left_to_autograd():
    stage = Stage(0, [nn.Linear(WIDTH, WIDTH)], 0, CpuDevice(), Ledger(0))
    output = stage.layers[0](torch.ones(1, WIDTH))
    assert output.grad_fn.name().startswith("Addmm")


@pytest.mark.parametrize("split", [False, True])
def test_flops_are_counted_once(split, all_are_large):
    stage = Stage(0, [nn.Linear(WIDTH, WIDTH)], 0, CpuDevice(), Ledger(0))
    for m in range(2):
        with FlopCounterMode(display=False) as counter:
            stage.forward(m, torch.ones(4, WIDTH), [True], StepContext(), defer_weights=split)
            stage.backward(m, 0, [torch.ones(4, WIDTH)])
            if split:
                stage.backward_weight(m)
        assert counter.get_total_flops() == 3 * 2 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize("split", [False, True])
def test_a_weight_changed_before_its_backward_is_told_of(split, all_are_large):
    stage = Stage(0, [nn.Linear(WIDTH, WIDTH)], 0, CpuDevice(), Ledger(0))
    stage.forward(0, torch.ones(4, WIDTH), [True], StepContext(), defer_weights=split)
    with torch.no_grad():
        stage.layers[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        stage.backward(0, 0, [torch.ones(4, WIDTH)])


def test_autocast_saves_no_more_than_without(all_are_large):
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    ledger = Ledger(0)
    with ledger.saving("saved"), torch.autocast("cpu", torch.bfloat16):
        kept = nn.Sequential(*layers)(torch.ones(64, WIDTH).requires_grad_())
    assert kept.requires_grad and ledger.totals["saved"] > 0
    stage = Stage(0, layers, 0, CpuDevice(), Ledger(0))
    stage.forward(0, torch.ones(64, WIDTH), [True], StepContext(autocast=torch.bfloat16))
    assert stage.ledger.totals["saved"] == ledger.totals["saved"]
