"""Pictures of cuts and knobs, and the panel of dials: what they say, what they refuse, and that Run runs."""

import pytest
import torch

import gpipe_lab as gl
from gpipe_lab.plan.errors import InputError
from gpipe_lab.view.runner import shared_lab

COSTS = [1.0, 3.0, 3.0, 8.0]


def test_a_cut_is_drawn_with_its_costliest_stage():
    picture = gl.plot_stage_costs(
        {"uniform": [2, 2], "by time": [3, 1]}, COSTS, title="Cuts", names="ab cd e f".split()
    )
    assert "uniform: stage 0 4 ms, layers: 2; stage 1 11 ms, layers: 2." in picture.alt
    assert "by time: stage 0 7 ms, layers: 3; stage 1 8 ms, layers: 1." in picture.alt
    words = {text.get_text() for axes in picture.axes for text in axes.texts}
    assert {"uniform", "by time", "11 ms", "8 ms"} <= words
    assert len(picture.png()) > 2000


def test_bytes_are_written_as_bytes():
    assert "2 KiB" in gl.plot_stage_costs({"one": [1, 1]}, [2048, 1024], title="Bytes", unit="B").alt


@pytest.mark.parametrize("sizes", [[2, 1], [4, 0], [5], []])
def test_a_cut_that_loses_a_layer_is_not_drawn(sizes):
    with pytest.raises(InputError, match="every layer"):
        gl.plot_stage_costs({"cut": sizes}, COSTS, title="Cut")


def test_arrows_say_what_they_do():
    arrows = [gl.Arrow("P", "bubble", "more"), gl.Arrow("M", "bubble", "less", "more work")]
    picture = gl.plot_arrows({"P": "stages", "M": "micro-batches"}, {"bubble": "idle"}, arrows, title="Knobs")
    assert picture.alt == "Knobs. P up: more bubble. M up: less bubble (more work)."
    with pytest.raises(InputError, match="from one box to another"):
        gl.plot_arrows({"P": ""}, {"bubble": ""}, [gl.Arrow("P", "speed", "more")], title="Knobs")
    with pytest.raises(InputError):
        gl.plot_arrows({"P": ""}, {"bubble": ""}, [gl.Arrow("P", "bubble", "up")], title="Knobs")


def draw(P, M):
    if M > 6:
        raise InputError("at most six micro-batches here", got=M)
    return gl.plot_schedule(gl.gpipe(P, M))


def measure(lab, P, M):
    layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    batch = torch.randn(M, 4)
    return lab.run(gl.gpipe(P, M), layers, batch, batch, loss_fn=torch.nn.functional.mse_loss, warmup=False)


def fails(lab, P, M):
    raise RuntimeError("no such run")


@pytest.fixture
def dials():
    panel = gl.Dials({"P": (1, 2, 4), "M": (1, 3, 8)}, draw, measure, ranks=lambda P, M: P)
    yield panel
    shared_lab.close()


def test_dials_draw_at_once_and_refuse_with_the_reason(dials):
    assert "P = 2, M = 3" in dials.at_once.value
    dials.set(M=7)
    assert dials.run_button.disabled
    assert "at most six micro-batches here (got 7)" in dials.status.value
    with pytest.raises(InputError):
        dials.run(wait=True)
    dials.set(M=4)
    assert not dials.run_button.disabled
    assert "P = 2, M = 4" in dials.at_once.value


@pytest.mark.dist
def test_run_measures_with_real_workers(dials):
    run = dials.run(wait=True)
    assert (run.trace.num_ranks, run.trace.source) == (2, "measured")
    assert "P = 2, M = 3" in dials.measured.value
    dials.set(P=1)
    dials.run_button.click()  # from code: in this cell
    assert "P = 1, M = 3" in dials.measured.value
    assert dials.stop_button.disabled
    dials.close()


@pytest.mark.dist
def test_a_failed_run_is_raised_and_shown():
    panel = gl.Dials({"P": (1, 1, 4), "M": (1, 3, 8)}, draw, fails, ranks=lambda P, M: P)
    with pytest.raises(RuntimeError, match="no such run"):
        panel.run(wait=True)
    assert "no such run" in panel.status.value
    panel.run_button.click()
    with pytest.raises(RuntimeError, match="no such run"):
        panel.close()


@pytest.mark.parametrize("wrong", [{}, {"P": (2, 1, 3)}, {"P": (1, 4, 3)}])
def test_dials_have_an_order(wrong):
    with pytest.raises(InputError, match="least, start, most"):
        gl.Dials(wrong, draw, measure, ranks=lambda **_: 1)
