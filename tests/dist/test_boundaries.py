"""What crosses between stages may change with the data, and a step that breaks a rule leaves no trace."""

import functools

import pytest
import torch
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance

SGD = functools.partial(torch.optim.SGD, lr=0.1)
M = 4


class Masks(nn.Module):
    """As in transformers: the mask is None for a micro-batch in which nothing is masked."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        mask = x > 1.5
        return torch.tanh(self.linear(x)), mask if mask.any() else None


class UsesMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value):
        x, mask = value
        y = torch.tanh(self.linear(x))
        return (y if mask is None else y.masked_fill(mask, 0.0)), mask


class Positive(nn.Module):
    """Only the rows with a positive sum go on: the shape hangs on data, forward and backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x[x.sum(1) > 0])


class First(nn.Module):
    def forward(self, value):
        return value[0] if isinstance(value, tuple) else value


def masking():
    torch.manual_seed(0)
    return nn.Sequential(Masks(), UsesMask(), UsesMask(), First()).double()


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), Positive(), nn.Tanh(), nn.Linear(5, 5)).double()


def sum_of_squares(y, target):
    return y.square().sum() + 0 * target.sum()


def batch(seed, *, masked=()):
    """Rows in which the micro-batches named are masked; each micro-batch has two rows."""
    x = torch.rand(2 * M, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.4
    for m in masked:
        x[2 * m] += 2.0
    return x


def one_process(model, batches):
    """The weights after a step of SGD on each batch, and each step's gradients."""
    optimizer = SGD(list(model.named_parameters()))
    gradients = []
    for x in batches:
        optimizer.zero_grad()
        for part in x.split(2):
            sum_of_squares(model(part), part).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return model.state_dict(), gradients


def pipeline(lab, model, **options):
    return lab.pipeline(model, loss_fn=sum_of_squares, loss_reduction="sum", optimizer=SGD, **options)


MIXES = {
    "from the first step": [(0, 2), (1,), ()],
    "after steady steps": [(), (), (3,), (0,)],
    "in an order of its own": [(0, 1, 2, 3), (), (1, 2)],
}


@pytest.mark.parametrize("make", [gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_mask_that_is_there_or_not(lab_of, make, mode, mix):
    batches = [batch(seed, masked=masked) for seed, masked in enumerate(mix)]
    weights, gradients = one_process(masking(), batches)
    pipe = pipeline(lab_of(4), masking())
    for x, expected in zip(batches, gradients, strict=True):
        pipe.step(make(4, M), x, x, checkpoint=mode)
        assert distance(pipe.gradients(), expected) <= 1e-12
    assert distance(pipe.state_dict(), weights) <= 1e-12
    torch.testing.assert_close(pipe.predict(x, num_microbatches=M), masking_output(weights, x))


def masking_output(weights, x):
    model = masking()
    model.load_state_dict(weights)
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(2)])


@pytest.mark.parametrize("strict", [False, True])
def test_rows_that_are_dropped_by_what_is_in_them(lab_of, strict):
    batches = [batch(seed) for seed in range(4)]
    weights, gradients = one_process(dropping(), batches)
    pipe = pipeline(lab_of(4), dropping())
    for x, expected in zip(batches, gradients, strict=True):
        pipe.step(gl.one_f_one_b(4, M), x, x, strict=strict)
        assert distance(pipe.gradients(), expected) <= 1e-12
    assert distance(pipe.state_dict(), weights) <= 1e-12


def test_gradients_of_earlier_steps_stay_when_a_step_is_taken_again(lab_of):
    steady, masked = batch(0), batch(1, masked=(2,))
    (_, [first]), (_, [second]) = one_process(masking(), [steady]), one_process(masking(), [masked])
    pipe = pipeline(lab_of(4), masking())
    pipe.step(gl.gpipe(4, M), steady, steady, update=False)
    pipe.step(gl.gpipe(4, M), masked, masked, update=False)
    assert distance(pipe.gradients(), {name: first[name] + second[name] for name in first}) <= 1e-12


def test_only_the_boundary_that_changes_is_announced_from_then_on(lab_of):
    """The others have their receives posted ahead again: their messages need no word beforehand."""
    lab = lab_of(4)
    pipe = pipeline(lab, nn.Sequential(*masking()[:2], First(), nn.Linear(5, 5, dtype=torch.float64)))
    for masked in ((), (1,), ()):
        x = batch(5, masked=masked)
        pipe.step(gl.gpipe(4, M), x, x)
    announced = lab.call(_announced, [(pipe._key,)] * 4)
    assert announced == [{0}, {0, 1}, {1}, set()]


def _announced(context, key):
    return {stage for _, stage, _ in context.state[key].agreements._varying}


class Refuses(nn.Module):
    """Breaks a rule where it is told to by its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        y = self.linear(x)
        return {"no": object(), "y": y} if (x > 90).any() else {"y": y}


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, value):
        return self.norm(self.linear(value["y"]))


def refusing():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), Refuses(), Takes()).double()


def identity(model):
    """Its first layers hand on what they are given, so that an input decides what the third is given."""
    with torch.no_grad():
        for layer in model[:2]:
            layer.weight.copy_(torch.eye(5))
            layer.bias.zero_()
    return model


@pytest.mark.parametrize("make", [gl.gpipe, gl.one_f_one_b, gl.zero_bubble_h1])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_refused_step_loses_nothing(lab_of, make, has_stepped):
    """Weights, statistics, gradients and the ledger are as before it, and the next step is right."""
    lab = lab_of(4)
    good = [batch(seed) for seed in range(3)]
    bad = good[1].clone()
    bad[4:6] = 100.0
    pipe = pipeline(lab, identity(refusing()))
    if has_stepped:
        pipe.step(make(4, M), good[0], good[0], update=False)
    before, held = pipe.state_dict(), lab.call(_held, [(pipe._key,)] * 4)
    gradients = pipe.gradients()
    with pytest.raises(gl.RankFailed, match="nesting") as failed:
        pipe.step(make(4, M), bad, bad)
    assert (failed.value.rank, str(failed.value.op)) == (2, "2F2")
    assert isinstance(failed.value.__cause__, gl.InputError)
    after = pipe.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert lab.call(_held, [(pipe._key,)] * 4) == held
    assert all(torch.equal(pipe.gradients()[name], g) for name, g in gradients.items())
    steps = good if has_stepped else good[1:]
    for x in steps[has_stepped:]:
        pipe.step(make(4, M), x, x, update=False)
    other = pipeline(lab, identity(refusing()))
    for x in steps:
        other.step(make(4, M), x, x, update=False)
    assert distance(pipe.gradients(), other.gradients()) <= 1e-12
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in pipe.state_dict().items())


def _held(context, key):
    return context.state[key].ledger.totals


def test_a_refused_prediction_loses_nothing(lab_of):
    pipe = pipeline(lab_of(4), identity(refusing()))
    x = batch(0)
    before = pipe.predict(x, num_microbatches=M)
    with pytest.raises(gl.RankFailed, match="2F1"):
        pipe.predict(torch.cat([x[:2], x[2:4] + 100, x[4:]]), num_microbatches=M)
    assert torch.equal(pipe.predict(x, num_microbatches=M), before)


def test_a_loss_that_is_no_number_loses_nothing(lab_of):
    def loss(y, target):
        return y.sum() if target.sum() < 100 else y

    pipe = lab_of(2).pipeline(dropping(), loss_fn=loss, loss_reduction="sum", optimizer=SGD)
    x = batch(0)
    pipe.step(gl.gpipe(2, M), x, x)
    before = pipe.state_dict()
    with pytest.raises(gl.RankFailed, match="a loss is one number"):
        pipe.step(gl.gpipe(2, M), x, x + 100)
    assert all(torch.equal(pipe.state_dict()[name], value) for name, value in before.items())


def refuses_nan(y, target):
    if target.isnan().any():
        raise gl.InputError("targets are numbers", got="nan")
    return (y - target).square().mean()


def test_a_refused_step_leaves_nothing_that_is_counted(lab_of):
    """What a forward was in the middle of goes with the step, not with the next collection of garbage."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(8, 64)
    pipe = lab_of(2).pipeline(model, loss_fn=refuses_nan)

    def held_at_first():
        memory = pipe.step(gl.gpipe(2, 4), x, x, update=False).memory
        pipe.zero_grad()
        return [memory.moments(rank)[0].bytes for rank in (0, 1)]

    held_at_first()
    before = held_at_first()
    with pytest.raises(gl.RankFailed, match="targets are numbers"):
        pipe.step(gl.gpipe(2, 4), x, torch.full_like(x, float("nan")), update=False)
    pipe.zero_grad()
    assert held_at_first() == before
