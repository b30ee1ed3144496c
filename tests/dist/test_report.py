"""A page from a model and a batch: proposed, run for real within the limit, and whole in one file."""

from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl


class Page(HTMLParser):
    """What a page refers to, and the words of its pictures."""

    def __init__(self, text):
        super().__init__()
        self.links, self.alts, self.headings, self.words = [], [], [], []
        self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("src", "href") if name in attrs]
        if tag == "img":
            self.alts.append(attrs.get("alt", ""))
        self._in_heading = tag in ("h1", "h2")

    def handle_data(self, data):
        if self._in_heading and data.strip():
            self.headings.append(data)
        self._in_heading = False
        self.words.append(data)


def tiny_report(tmp_path, **options):
    inputs, targets = gl.tiny_batch(8)
    chosen = {"num_ranks": 2, "microbatch_sizes": (2,), "repeats": 1, "device": "cpu"} | options
    return gl.report(
        gl.tiny_gpt(2), inputs, targets, loss_fn=gl.next_token_loss, path=tmp_path / "page.html", **chosen
    )


@pytest.mark.dist
def test_the_page_holds_everything_and_says_where_it_comes_from(tmp_path):
    found = tiny_report(tmp_path)
    text = found.path.read_text()
    page = Page(text)
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.alts) == 4 and all(len(alt) > 80 for alt in page.alts)
    headings = ["In short", "The cut", "What ran", "Predicted beside measured", "Memory", "Alternatives"]
    assert set(headings) <= set(page.headings)
    words = " ".join(page.words)
    for part in (found.device, "simulated from measured layers", "measured", "error explained", "rejected"):
        assert part in words, part
    assert str(found.plan.setting) in words
    assert len(text) < 400_000
    rows = found.frame()
    assert list(rows.columns) == ["predicted", "measured", "error (%)"]
    assert rows.loc["makespan (ms)", "measured"] == found.trace.makespan_ms > 0


@pytest.mark.dist
@pytest.mark.parametrize(
    ("schedule", "mode"),
    [("gpipe", "never"), ("gpipe", "always"), ("one_f_one_b", "every:1"), ("zero_bubble_h1", "never"),
     ("interleaved", "always")],
)  # fmt: skip
def test_predicted_bytes_hold_what_the_ledger_counts(tmp_path, schedule, mode):
    """Weights, kept inputs and what is saved to the byte; the peak from above, and not by much.

    A split backward also keeps output gradients for its W, which no formula here counts.
    """
    is_split = schedule == "zero_bubble_h1"
    found = tiny_report(tmp_path, schedules=(schedule,), checkpoints=(mode,))
    assert (found.plan.setting.schedule, found.plan.setting.checkpoint) == (schedule, mode)
    for rank in found.memory.ranks:
        predicted, measured = found.plan.memory, found.memory
        assert predicted.peak_bytes(rank, "parameters") == measured.peak_bytes(rank, "parameters")
        assert measured.peak_bytes(rank) <= (1.1 if is_split else 1) * predicted.peak_bytes(rank)
        assert predicted.peak_bytes(rank) < 1.4 * measured.peak_bytes(rank)
        if mode == "never" and not is_split:
            kept = ("saved", "deferred")
            assert predicted.peak_bytes(rank, kept) == measured.peak_bytes(rank, kept)
        elif mode != "never" and schedule != "interleaved":
            assert predicted.peak_bytes(rank, "boundary") == measured.peak_bytes(rank, "boundary")


@pytest.mark.dist
def test_the_least_that_fits_is_named_and_runs(tmp_path):
    with pytest.raises(gl.InputError, match="the least that fits") as caught:
        tiny_report(tmp_path, memory_limit=1000)
    assert not (tmp_path / "page.html").exists()
    least = int(caught.value.remedy.removeprefix("memory_limit=").split(",")[0])
    found = tiny_report(tmp_path, memory_limit=least)
    assert found.memory.limit_bytes == least
    assert all(found.memory.peak_bytes(rank) <= least for rank in found.memory.ranks)
    assert "needs" in " ".join(Page(found.path.read_text()).words)


@pytest.mark.dist
def test_more_ranks_than_cores_run_paced_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("gpipe_lab.reporting.available_cores", lambda: 1)
    needed = tiny_report(tmp_path, schedules=("gpipe",), checkpoints=("never",), num_ranks=1).plan.peak_bytes
    found = tiny_report(
        tmp_path, schedules=("gpipe",), checkpoints=("never",), memory_limit=int(0.8 * needed)
    )
    assert found.plan.setting.num_stages == 2
    assert found.trace.source == "measured, paced"
    assert "paced" in " ".join(Page(found.path.read_text()).words)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"loss_fn": None}, "a training step has a loss"),
        ({"targets": None}, "a training step has a loss"),
        ({"num_ranks": 0}, "num_ranks is"),
        ({"repeats": 0}, "repeats is"),
        ({"memory_limit": "much"}, "a size is"),
        ({"microbatch_sizes": (3,)}, "micro-batch sizes divide"),
        ({"microbatch_sizes": ()}, "at least one micro-batch size"),
        ({"path": "no/such/folder/page.html"}, "a folder that exists"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_what_cannot_be_reported_is_refused_before_a_process_starts(tmp_path, options, rule, monkeypatch):
    monkeypatch.setattr("gpipe_lab.reporting.Lab", None)
    given = {
        "model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "inputs": torch.randn(8, 4),
        "targets": torch.randn(8, 4), "loss_fn": F.mse_loss, "path": tmp_path / "page.html",
    } | options  # fmt: skip
    with pytest.raises(gl.InputError, match=rule):
        gl.report(given.pop("model"), given.pop("inputs"), given.pop("targets"), **given)
