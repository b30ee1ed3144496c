"""The check of a machine: here in its short form, and part by part where there is a GPU."""

import json
import subprocess
import sys

import pytest

from gpipe_lab.tools import check
from gpipe_lab.tools.check import FAILS, HOLDS, NOT_HERE, PARTS, places

GPU_PLACES = [place for place in places() if place.device == "cuda"]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU_PLACES, reason="no GPU that torch can see")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("place", GPU_PLACES, ids=lambda place: place.title)
def test_on_gpu(place, part):
    try:
        print(PARTS[part](place, short=True))
    except check.NotHere as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.skipif(bool(GPU_PLACES), reason="there is a GPU: its parts are tested one by one")
def test_the_short_form_holds_without_a_notebook_s_packages(tmp_path):
    """As a person starts it, where neither Jupyter nor matplotlib nor pandas is installed."""
    missing = ("IPython", "ipywidgets", "jupyter", "matplotlib", "pandas")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "from gpipe_lab.__main__ import main\n"
        "sys.exit(main(['check', '--short', '--out', 'record.json']))"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    command = [sys.executable, "-c", path + code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "verdict: all that was checked holds; not checked for want of GPUs: NCCL, shared GPU" in done.stdout
    )
    record = json.loads((tmp_path / "record.json").read_text())
    assert "torch" in record["machine"]["origin"] and record["machine"]["gpus"] == []
    found = {row["part"]: row["verdict"] for row in record["findings"]}
    assert found.pop("everything") == found.pop("no waiting") == NOT_HERE
    assert set(found.values()) == {HOLDS} and len(found) == 6
    assert len(next(row for row in record["findings"] if row["part"] == "parity")["figures"]) == 8


def test_what_fails_is_told_and_the_other_parts_still_run(tmp_path, monkeypatch, capsys):
    def wrong(place, *, short):
        raise AssertionError("3 is not 4")

    def right(place, *, short):
        return "as it should be", {"figure": 4}

    monkeypatch.setattr(check, "PARTS", {"first": wrong, "second": right})
    assert check.check(tmp_path / "record.json") == 1
    printed = capsys.readouterr().out
    assert "AssertionError: 3 is not 4" in printed and "as it should be" in printed
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["verdict"].startswith("1 parts fail: first")
    assert {row["part"]: row["verdict"] for row in record["findings"][-2:]} == {
        "first": FAILS,
        "second": HOLDS,
    }


def test_a_wrong_gradient_is_noticed():
    """Parity's own measure: one weight's gradient off by a thousandth of it."""
    model, (x, y) = check.model(), check.batch()
    assert check.far(_gradients(model, x, y), model, x, y) == 0.0
    off = _gradients(model, x, y)
    off["3.0.weight"] *= 1.001
    assert check.far(off, model, x, y) > 1e-5


def _gradients(model, x, y):
    model.zero_grad()
    check.F.mse_loss(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.skipif(bool(GPU_PLACES), reason="there is a GPU")
def test_the_sanitizer_is_for_gpus(tmp_path, capsys):
    assert check.check(tmp_path / "record.json", sanitize=True) == 1
    assert "there is none here" in capsys.readouterr().out
