"""Gradients of weights, deferred or accumulated within their products, are autograd's.

Whatever layers do by themselves, under autocast too, and with no product or convolution done twice.
"""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpipe_lab.engine import weight_gradients
from gpipe_lab.engine.device import CpuDevice
from gpipe_lab.engine.ledger import Ledger
from gpipe_lab.engine.models import Block
from gpipe_lab.engine.stage import Stage, StepContext
from tests.layers import OwnFunction

WIDTH, NUM_MICROBATCHES = 6, 3
PLAIN = StepContext()


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


class KeepsItsGraph(torch.autograd.Function):
    """Differentiates in the backward what it computed in the forward, and halves what it finds."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        ctx.layer = layer
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = torch.tanh(layer(ctx.x))
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        wanted = (ctx.x, ctx.layer.weight, ctx.layer.bias)
        return *(found / 2 for found in torch.autograd.grad(ctx.y, wanted, gradient)), None


class ByKeptGraph(Around):
    def forward(self, x):
        return KeepsItsGraph.apply(x, self.inner.weight, self.inner.bias, self.inner)


class AsksInAHook(Around):
    """Scales the gradient that passes by with that of its weight."""

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        if torch.is_grad_enabled():
            total = self.inner(x.detach()).square().sum()

            def scaled(gradient):
                (slope,) = torch.autograd.grad(total, self.inner.weight, retain_graph=True)
                return gradient * slope.square().mean()

            y.register_hook(scaled)
        return y


class HookedAfterwards(Around):
    def forward(self, x):
        y = self.inner(x)
        if torch.is_grad_enabled() and not self.inner.weight._backward_hooks:
            self.inner.weight.register_hook(lambda gradient: 2 * gradient)
        return y


class Replaced(Around):
    """Its linear layer's forward is one of the instance's own."""

    def __init__(self):
        super().__init__()
        plain = self.inner.forward
        self.inner.forward = lambda x: 3 * plain(x)

    def forward(self, x):
        return self.inner(x)


class ShallowCopy(Around):
    """Fast weights: a copy of the layer with weights of its own."""

    def forward(self, x):
        fast = copy.copy(self.inner)
        fast._parameters = {name: (p * 2).detach().requires_grad_() for name, p in fast._parameters.items()}
        return fast(x) + self.inner(x)


class Rounded(nn.Parameter):
    """A weight that rounds itself wherever it is used, with a gradient that does not see it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = args
            weight = weight.as_subclass(torch.Tensor)
            return F.linear(x, weight + (weight.round() - weight).detach(), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def rounded():
    layer = nn.Linear(WIDTH, WIDTH).double()
    layer.weight = Rounded(layer.weight.detach())
    return layer


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = args
            return func(x, 2 * weight, bias)
        return func(*args, **(kwargs or {}))


class InAMode(Around):
    def forward(self, x):
        with Doubling():
            return self.inner(x)


class Keyword(Around):
    def forward(self, x):
        return self.inner(input=x)


class Hyper(Around):
    """A linear layer without a weight but for the time of its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(self.inner.weight.detach().clone())
        del self.inner.weight

    def forward(self, x):
        self.inner.weight = 2 * self.weight
        y = self.inner(x)
        del self.inner.weight
        return y


class Clamped(Around):
    """Changes its weight in place in every forward; its input gets no gradient."""

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-0.1, 0.1)
        return x + self.inner(x.detach())


class InPlace(Around):
    def forward(self, x):
        y = self.inner(x)
        y[..., 0] = 0
        return y.add_(x)


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x + F.linear(x, self.weight).unsqueeze(-1)


class NoFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)

    def forward(self, x):
        return x + self.up(self.down(x))


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
    "a function that keeps its graph": ByKeptGraph,
    "a hook that differentiates": AsksInAHook,
    "a hook": lambda: hooked(afterwards=False),
    "a hook after accumulation": lambda: hooked(afterwards=True),
    "a hook after the use": HookedAfterwards,
    "a forward of its own": Replaced,
    "a shallow copy": ShallowCopy,
    "a kind of weight": rounded,
    "a mode": InAMode,
    "a keyword": Keyword,
    "no weight": Hyper,
    "a weight that is clamped": Clamped,
    "in place": InPlace,
    "a vector": Vector,
    "no features": NoFeatures,
}


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(weight_gradients, "LARGE", 1)


def batch(shape=(2, 4, WIDTH), dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(NUM_MICROBATCHES)]


def by_autograd(layers, parts, *, step=PLAIN):
    """(gradients of the parameters, gradient of the last input)"""
    model = nn.Sequential(*layers)
    for part in parts:
        x = part.clone().requires_grad_()
        with torch.autocast("cpu", step.autocast) if step.autocast else nullcontext():
            y = model(x)
        y.backward(torch.ones_like(y))
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [*found, x.grad]


def by_stage(layers, parts, *, split, recompute=False, step=PLAIN):
    """All forwards, then all backwards, as in GPipe."""
    stage = Stage(0, layers, 0, CpuDevice(), Ledger(0))
    segments = [range(len(layers))] if recompute else None
    outputs = [
        stage.forward(m, part, [True], step, defer_weights=split, segments=segments).tree
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


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore:Initializing zero-element"
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_autograds(name, split, recompute, all_are_large):
    def build():
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, WIDTH), LAYERS[name](), nn.Linear(WIDTH, WIDTH)
        return [layer.double() for layer in layers]

    mine = by_stage(build(), batch(), split=split, recompute=recompute)
    assert_same(mine, by_autograd(build(), batch()))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [(WIDTH,), (0, WIDTH), (3, WIDTH), (2, 3, 4, WIDTH)])
def test_inputs_of_any_number_of_dimensions(shape, split, all_are_large):
    layers = [nn.Linear(WIDTH, 2 * WIDTH).double(), nn.Linear(2 * WIDTH, WIDTH).double()]
    expected = by_autograd(layers, batch(shape))
    for mine, theirs in zip(by_stage(layers, batch(shape), split=split), expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12)


def test_a_compiled_layer(all_are_large):
    layer = nn.Linear(WIDTH, WIDTH).double()
    mine = [g.clone() for g in by_stage([torch.compile(layer, backend="eager")], batch(), split=False)]
    layer.zero_grad()
    assert_same(mine, by_autograd([layer], batch()))


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
    with Watch((WIDTH, WIDTH)) as watch:
        for m in range(2):
            stage.forward(m, torch.ones(1, WIDTH), [True], StepContext())
            stage.backward(m, 0, [torch.ones(1, WIDTH)])
    assert "aten.add_.Tensor" in watch.seen and "aten.addmm.out" not in watch.seen


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


class CountProducts(TorchDispatchMode):
    """How many matrix products run; torch's own counter cannot follow a backward within a forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("make", [Twice, Force, Equilibrium])
def test_a_layer_that_differentiates_by_itself_multiplies_no_more_often(make, split, all_are_large):
    (part, *_), layer = batch(), make().double()
    with CountProducts() as plain:
        by_autograd([layer], [part])
    with CountProducts() as mine:
        by_stage([layer], [part], split=split)
    assert mine.count == plain.count > 0


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


def test_anomalies_are_not_seen_where_there_are_none(all_are_large):
    """Deterministic algorithms fill what is not written with NaN, which anomaly detection looks for."""
    layers = [nn.Linear(WIDTH, WIDTH).double()]
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            by_stage(layers, batch(), split=False)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_is_gone_with_its_last_reference(split, all_are_large):
    layer = nn.Linear(WIDTH, WIDTH).double()
    gone = weakref.ref(layer)
    gc.collect()
    gc.disable()
    try:
        by_stage([layer], batch(), split=split)
        del layer
        assert gone() is None
    finally:
        gc.enable()


class Residual(nn.Module):
    """A block as in a ResNet or a MobileNet: convolutions, batch norm, and a sum with its input."""

    def __init__(self, width, groups=1):
        super().__init__()
        self.conv_1 = nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 1, padding="valid")

    def forward(self, x):
        return F.relu(self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x))))) + x)


class Ways(nn.Module):
    """One weight in a linear layer and in a product by hand, and in double precision beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.exact = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return F.linear(x, self.weight) + x @ self.weight + self.exact(x.double()).float()


class NoAutocast(Around):
    """A layer that leaves autocast for its own product, as numerically delicate ones do."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class ConvForce(nn.Module):
    """Differentiates through convolutions in its forward, with a graph of that."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        with torch.enable_grad():
            at = x if x.requires_grad else x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.conv(at).tanh().sum(), at, create_graph=True)
        return x - slope


AUTOCAST = {
    "linear": ([nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)], (2, 4, WIDTH)),
    "residual": ([nn.Conv2d(3, 4, 3, stride=2), Residual(4), Residual(4, groups=4)], (3, 3, 9, 9)),
    "conv1d": ([nn.Conv1d(4, 6, 3), nn.GELU(), nn.Conv1d(6, 4, 3, dilation=2)], (3, 4, 12)),
    "conv3d": ([nn.Conv3d(2, 4, 2), nn.Tanh(), nn.Conv3d(4, 2, 2)], (2, 2, 5, 5, 5)),
    "transposed": ([nn.ConvTranspose1d(4, 4, 3), nn.Conv1d(4, 4, 3, bias=False)], (3, 4, 8)),
    "classifier": ([nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(100, WIDTH)], (3, 3, 7, 7)),
    "attention": ([Block(8, 2), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)], (3, 4, 8)),
    "one weight in two ways": ([Ways(), Ways()], (2, 4, WIDTH)),
    "without autocast inside": ([nn.Linear(WIDTH, WIDTH), NoAutocast()], (2, 4, WIDTH)),
    "a force through a convolution": ([nn.Conv1d(4, 4, 1), ConvForce()], (2, 4, 7)),
    "checkpointed": ([Checkpointed(False), Checkpointed(True)], (2, 4, WIDTH)),
}
SUMMED_IN_BF16 = (
    "one weight in two ways",
    "a force through a convolution",
)  # by autograd, and here in float32


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_of_every_product_is_torchs(name, split, recompute, all_are_large):
    """The same casts, so the same bits."""
    layers, shape = AUTOCAST[name]
    torch.manual_seed(0)
    parts = batch(shape, torch.float32)
    cast = StepContext(autocast=torch.bfloat16)
    expected = by_autograd(copy.deepcopy(layers), parts, step=cast)
    mine = by_stage(copy.deepcopy(layers), parts, split=split, recompute=recompute, step=cast)
    for found, wanted in zip(mine, expected, strict=True):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted) or (
            name in SUMMED_IN_BF16 and (found - wanted).norm() <= 2**-8 * wanted.norm()
        )


class ByHand(nn.Module):
    """A product that does not go through a linear layer: all of its backward comes at once."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return x @ self.weight


class Scaled(nn.Module):
    """A linear layer whose weight is computed, so its gradient has further to go."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.linear(x, self.weight * self.scale)


SPLIT = {
    "linear": ([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False)], (5, 6)),
    "linear with a frozen bias": ([nn.Linear(6, 6)], (5, 6)),
    "attention": ([Block(8, 2), Block(8, 2)], (3, 4, 8)),
    "conv1d": ([nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 4, 3, stride=2)], (3, 4, 11)),
    "conv2d": ([nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.GELU(), nn.Conv2d(8, 4, 1)], (2, 4, 7, 7)),
    "conv3d": ([nn.Conv3d(2, 3, 2, dilation=2)], (2, 2, 5, 5, 5)),
    "conv2d, padding by name": ([nn.Conv2d(4, 4, 3, padding="same")], (2, 4, 5, 5)),
    "norms": ([nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)], (5, 6)),
    "by hand": ([ByHand(6), nn.Linear(6, 6)], (5, 6)),
    "computed weight": ([Scaled(6), nn.Linear(6, 6)], (5, 6)),
    "no weights": ([nn.Tanh()], (5, 6)),
    "multihead attention": ([nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)], (3, 4, 8)),
}


def both_parts(stage, x, given, *, split, segments=None):
    """(gradient of the input, gradients of the weights, FLOPs of the backward and of its second part)."""
    for p in stage.layers.parameters():
        p.grad = None
    stage.forward(0, x, [True], StepContext(), defer_weights=split, segments=segments)
    with FlopCounterMode(display=False) as first:
        if segments is not None:
            stage.recompute(0, 0)
        (gradient,) = stage.backward(0, 0, [given])
    with FlopCounterMode(display=False) as second:
        if split:
            stage.backward_weight(0)
    flops = first.get_total_flops(), second.get_total_flops()
    return gradient, [p.grad for p in stage.layers.parameters()], flops


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_and_flops_are_those_of_the_whole_backward(name):
    torch.manual_seed(0)
    layers, shape = SPLIT[name]
    stage = Stage(0, [layer.double() for layer in layers], 0, CpuDevice(), Ledger(0))
    if "frozen" in name:
        stage.layers[0].bias.requires_grad_(False)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        given = torch.randn_like(nn.Sequential(*stage.layers)(x))
    whole, weights, (flops, none) = both_parts(stage, x, given, split=False)
    for segments in (None, [range(len(layers))]):
        halves, split_weights, (first, second) = both_parts(stage, x, given, split=True, segments=segments)
        assert torch.allclose(halves, whole, rtol=1e-12)
        for mine, theirs in zip(split_weights, weights, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.allclose(mine, theirs, rtol=1e-12)
        if segments is None:
            assert first + second == flops and none == 0
    assert stage.ledger.totals["deferred"] == stage.ledger.totals["saved"] == 0


NOT_SPLIT = {
    "linear": set(),
    "attention": set(),
    "conv1d": set(),
    "norms": set(),
    "no weights": set(),
    "by hand": {"0.weight"},
    "computed weight": {"0.weight"},
    "conv2d, padding by name": {"0.weight"},
    "multihead attention": {"0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight"},
}


def unsplit_names(layers, x, *, segments=None, repeats=1):
    """The weights of `layers` whose gradients a split backward did not put off."""
    stage = Stage(0, layers, 0, CpuDevice(), Ledger(0))
    for _ in range(repeats):
        stage.begin(training=True)
        stage.layers.zero_grad()  # as the engine does: earlier steps' gradients are set aside
        for m in range(2):
            output = stage.forward(m, x, [True], StepContext(), segments=segments, defer_weights=True)
            if segments is not None:
                stage.recompute(m, 0)
            stage.backward(m, 0, [torch.ones_like(output.tree)])
            stage.backward_weight(m)
    names = {id(p): name for name, p in stage.layers.named_parameters()}
    return {names[id(weight)] for weight in stage.unsplit}


@pytest.mark.parametrize("name", NOT_SPLIT)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_not_split_is_known(name, checkpointed):
    layers, shape = SPLIT[name]
    segments = [range(len(layers))] if checkpointed else None
    layers = [layer.double() for layer in layers]
    x = torch.randn(shape, dtype=torch.float64)
    for repeats in (1, 2):
        assert unsplit_names(layers, x, segments=segments, repeats=repeats) == NOT_SPLIT[name]


def test_a_function_of_ones_own_is_not_split():
    assert unsplit_names([OwnFunction(6), nn.Linear(6, 6)], torch.randn(5, 6)) == {"0.weight"}


def test_ties_within_a_stage_are_split():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    assert unsplit_names([first, second], torch.randn(5, 6)) == set()


def test_the_first_part_leaves_half_of_a_linear_layer_to_the_second():
    stage = Stage(0, [nn.Linear(8, 8)], 0, CpuDevice(), Ledger(0))
    x = torch.randn(4, 8)
    _, _, (first, second) = both_parts(stage, x, torch.randn(4, 8), split=True)
    assert first == second == 2 * 4 * 8 * 8


def test_what_is_put_off_is_counted_until_it_is_done():
    ledger = Ledger(0)
    stage = Stage(0, [nn.Linear(8, 8)], 0, CpuDevice(), ledger)
    stage.forward(0, torch.randn(4, 8), [True], StepContext(), defer_weights=True)
    assert ledger.totals["saved"] == 4 * 8 * 4
    stage.backward(0, 0, [torch.randn(4, 8)])
    assert ledger.totals["saved"] == 0
    assert ledger.totals["deferred"] == 2 * 4 * 8 * 4  # the layer's input and its output's gradient
    stage.backward_weight(0)
    assert ledger.totals["deferred"] == 0
