"""Weights shared by stages: gradients summed, saved once, still equal after training."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl

ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
WIDTH, VOCABULARY = 8, 11


class Head(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight if weight is not None else nn.Parameter(torch.zeros(VOCABULARY, WIDTH))

    def forward(self, x):
        return F.linear(self.norm(x), self.weight)


def test_tied_factories_of_other_shapes_are_refused(lab_of):
    model = [functools.partial(nn.Linear, 4, 4), functools.partial(nn.Linear, 4, 5)]
    x, y = torch.randn(4, 4), torch.randn(4, 5)
    with pytest.raises(gl.InputError, match="tied weights have one shape"):
        lab_of(2).run(
            gl.gpipe(2, 2), model, x, y, loss_fn=F.mse_loss, ties=[("0.weight", "1.weight")], warmup=False
        )


def make_model():
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(embedding, *middle, Head(embedding.weight)).double()


def make_batch(step):
    return (torch.randint(VOCABULARY, (6,), generator=torch.Generator().manual_seed(step)),) * 2


def train_in_one_process(num_steps, max_norm):
    model = make_model()
    optimizer = ADAM(model.parameters())
    losses = []
    for step in range(num_steps):
        ids, targets = make_batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_tied_embedding_and_head_train_as_in_one_process(lab_of, num_stages):
    losses, state = train_in_one_process(5, max_norm=0.5)
    pipe = lab_of(num_stages).pipeline(make_model(), loss_fn=F.cross_entropy, optimizer=ADAM, max_norm=0.5)
    runs = [pipe.step(gl.gpipe(num_stages, 3), *make_batch(step)) for step in range(5)]
    assert [run.loss for run in runs] == pytest.approx(losses, rel=1e-11)
    mine = pipe.state_dict()
    assert list(mine) == list(state)
    assert torch.equal(mine["0.weight"], mine["5.weight"])
    for name, value in state.items():
        assert torch.allclose(mine[name], value, rtol=1e-9, atol=1e-12), name


def embedding_faster(parameters):
    first = [p for name, p in parameters if name.startswith("0.")]
    others = [p for name, p in parameters if not name.startswith("0.")]
    groups = [{"params": p, "lr": lr} for p, lr in ((first, 0.5), (others, 0.01)) if p]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_every_copy_of_a_tied_weight_is_in_its_own_group(lab_of, tmp_path):
    """An optimizer's groups go by names, and a copy on another rank has another name in the model."""
    model = make_model()
    optimizer = embedding_faster(list(model.named_parameters()))
    scheduler = halving(optimizer)
    for step in range(4):
        ids, targets = make_batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), targets).backward()
        optimizer.step()
        scheduler.step()
    options = {"loss_fn": F.cross_entropy, "optimizer": embedding_faster, "scheduler": halving}
    for before, after in ((1, 4), (4, 1), (4, 2)):
        pipe = lab_of(before).pipeline(make_model(), **options)
        for step in range(2):
            pipe.step(gl.gpipe(before, 3), *make_batch(step))
        pipe.save_state(tmp_path)
        resumed = lab_of(after).pipeline(make_model(), **options)
        resumed.load_state(tmp_path)
        for step in range(2, 4):
            resumed.step(gl.gpipe(after, 3), *make_batch(step))
        state = resumed.state_dict()
        assert torch.equal(state["0.weight"], state["5.weight"])
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), (before, after, name)
        assert resumed.learning_rates()["0.weight"] == 0.5 * 0.5**4


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_tied_gradient_is_reported_once_under_its_first_name(lab_of, num_stages):
    model = make_model()
    ids, targets = make_batch(0)
    F.cross_entropy(model(ids), targets).backward()
    for make in (gl.gpipe, gl.one_f_one_b):
        for mode in ("never", "always"):
            run = lab_of(num_stages).run(
                make(num_stages, 3),
                make_model(),
                ids,
                targets,
                loss_fn=F.cross_entropy,
                checkpoint=mode,
                warmup=False,
            )
            reference = dict(model.named_parameters())
            assert set(run.gradients()) == set(reference)
            for name, gradient in run.gradients().items():
                assert torch.allclose(gradient, reference[name].grad, rtol=1e-11), name


def test_factories_are_tied_by_name(lab_of):
    factories = [
        functools.partial(nn.Embedding, VOCABULARY, WIDTH),
        *[functools.partial(nn.Linear, WIDTH, WIDTH)] * 2,
        Head,
    ]
    ids, targets = make_batch(0)
    ties = [("0.weight", "3.weight")]
    runs = []
    for num_stages in (1, 2, 4):
        pipe = lab_of(num_stages).pipeline(factories, loss_fn=F.cross_entropy, optimizer=ADAM, ties=ties)
        runs.append([pipe.step(gl.gpipe(num_stages, 3), ids, targets).loss for _ in range(4)])
        state = pipe.state_dict()
        assert torch.equal(state["0.weight"], state["3.weight"])
        assert state["0.weight"].abs().sum() > 0
    for losses in runs[1:]:
        assert losses == pytest.approx(runs[0], rel=1e-5)


def test_a_launched_program_between_steps_does_no_harm(lab_of):
    lab = lab_of(3)
    pipe = lab.pipeline(make_model(), loss_fn=F.cross_entropy, optimizer=ADAM)
    ids, targets = make_batch(0)
    first = pipe.step(gl.gpipe(3, 3), ids, targets).loss

    def program(context):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return total.item()

    assert lab.launch(program) == [3.0] * 3
    assert pipe.step(gl.gpipe(3, 3), ids, targets).loss < first


def test_names_that_are_not_there_are_refused(lab_of):
    modules, factories = [nn.Linear(2, 2), nn.Linear(2, 2)], [lambda: nn.Linear(2, 2)] * 2
    for model in (modules, factories, [modules[0], factories[1]]):
        for wrong in ("9.weight", "1.weights", "weight", "1"):
            with pytest.raises(gl.InputError, match="a tie names parameters") as caught:
                lab_of(2).pipeline(model, ties=[("0.weight", wrong)])
            assert caught.value.where == "ties" and repr(wrong) in caught.value.got and caught.value.remedy


def test_a_misspelt_name_of_a_module_is_refused_before_a_process_works(lab_of, monkeypatch):
    lab = lab_of(2)
    monkeypatch.setattr(lab, "call", None)
    with pytest.raises(gl.InputError, match=r"'1\.weights', of 1\.weight, 1\.bias"):
        lab.pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], ties=[("0.weight", "1.weights")])


def test_a_half_precision_tie_is_rounded_once(lab_of):
    ids = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(0))
    run = lab_of(3).run(
        gl.gpipe(3, 8), make_model().bfloat16(), ids, ids, loss_fn=F.cross_entropy, warmup=False
    )
    sums = [torch.zeros(VOCABULARY, WIDTH), torch.zeros(VOCABULARY, WIDTH)]
    for row in ids.split(1):
        model = make_model().bfloat16()
        model[-1].weight = nn.Parameter(
            model[-1].weight.detach().clone()
        )  # each use with a gradient of its own
        F.cross_entropy(model(row), row).backward()
        for total, use in zip(sums, (model[0], model[-1]), strict=True):
            total += use.weight.grad.float() / 8
    assert torch.equal(run.gradients()["0.weight"], (sums[0] + sums[1]).bfloat16())
    twice = sums[0].bfloat16() + sums[1].bfloat16()
    assert not torch.equal(run.gradients()["0.weight"], twice), "a test that could tell"
