"""The panel as a learner has it: in JupyterLab, by keyboard, in light and dark.

The tests share one page and go on from one another, in this order.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import Lab, until

pytestmark = pytest.mark.slow

STOP_S = 2.0


def picture(lab: Lab, source: str) -> Any:
    """The chart of the panel, "simulated" or "measured"."""
    return lab.page.locator(f"img[alt^='Gantt chart.'][alt*='; {source}']").first


def status(lab: Lab) -> str:
    return lab.page.locator(".jp-OutputArea [role=status], .jp-OutputArea [role=alert]").last.inner_text()


def slider(lab: Lab, name: str) -> Any:
    return lab.page.locator(".widget-slider", has_text=name).locator(".noUi-handle")


def box(lab: Lab, name: str) -> Any:
    return lab.page.get_by_label(f"{name}, as a number")


def button(lab: Lab, name: str) -> Any:
    return lab.page.locator(f".jp-OutputArea-output button:text-is('{name}')")


def wait_for(lab: Lab, source: str, *words: str) -> str:
    """Until the chart says all `words`; its alt text."""

    def said() -> str | None:
        chart = picture(lab, source)
        alt = chart.get_attribute("alt") if chart.count() else None
        return alt if alt is not None and all(word in alt for word in words) else None

    return until(said, f"the {source} chart says {words}")


def test_the_first_view_is_simple(lab: Lab) -> None:
    for name in ("P stages", "M micro-batches", "schedule"):
        assert lab.page.get_by_text(name, exact=True).first.is_visible()
    for name in ("Run", "Stop", "Costs", "Memory", "Look closer", "Race", "Save"):
        assert button(lab, name).is_visible()
    assert not lab.page.get_by_text("checkpoint", exact=True).first.is_visible(), "folded"
    lab.screenshot("first_light")


def test_controls_and_picture_are_in_view_together(lab: Lab) -> None:
    """P, M, schedule and Run in one row, the chart right under them, all of it on the screen."""
    row = [slider(lab, "P stages"), slider(lab, "M micro-batches"), button(lab, "Run")]
    row.append(lab.page.locator(".widget-dropdown", has_text="schedule").first)
    middles = [place["y"] + place["height"] / 2 for place in (part.bounding_box() for part in row)]
    assert max(middles) - min(middles) < 12
    row[0].evaluate("element => element.scrollIntoView({block: 'start'})")
    middles = [place["y"] + place["height"] / 2 for place in (part.bounding_box() for part in row)]
    chart = picture(lab, "simulated").bounding_box()
    assert 0 < chart["y"] - max(middles) < 160
    assert min(middles) > 0 and chart["y"] + chart["height"] <= lab.page.viewport_size["height"]


def test_a_slider_moved_by_keyboard_changes_the_picture_at_once(lab: Lab) -> None:
    before = picture(lab, "simulated").get_attribute("src")
    slider(lab, "P stages").focus()
    took = []
    for p in (4, 5, 4):
        start = time.monotonic()
        lab.page.keyboard.press("ArrowRight" if p > 3 + len(took) else "ArrowLeft")
        wait_for(lab, "simulated", f"P = {p}, M = 4")
        took.append(1000 * (time.monotonic() - start))
    assert picture(lab, "simulated").get_attribute("src") != before
    print(f"key press to picture: {', '.join(f'{ms:.0f}' for ms in took)} ms")


def test_a_number_out_of_reach_is_moved_and_said_so(lab: Lab) -> None:
    field = box(lab, "P stages")
    field.fill("12")
    field.press("Enter")
    lab.page.get_by_text("8 is the most here; 12 was asked for").wait_for()
    wait_for(lab, "simulated", "P = 8, M = 4")
    field.fill("3")
    field.press("Enter")
    wait_for(lab, "simulated", "P = 3, M = 4")


def test_run_measures_and_shows_it_on_the_same_axis(lab: Lab) -> None:
    button(lab, "Run").focus()
    lab.page.keyboard.press("Enter")
    alt = wait_for(lab, "measured, paced", "gpipe, P = 3, M = 4")
    assert "Memory, measured" in alt and "rank 2" in alt
    until(lambda: "error explained" in status(lab), "the status explains the difference")
    lab.screenshot("run_light")


def test_stop_ends_a_run_within_two_seconds(lab: Lab) -> None:
    field = box(lab, "M micro-batches")
    field.fill("32")
    field.press("Enter")
    lab.page.locator(".widget-dropdown", has_text="schedule").locator("select").select_option("naive")
    wait_for(lab, "simulated", "naive, P = 3, M = 32")
    button(lab, "Run").click()
    until(lambda: "Measuring" in status(lab), "the run measures")
    assert lab.page.locator(".widget-hprogress").first.is_visible()
    start = time.monotonic()
    button(lab, "Stop").click()
    until(lambda: "Stopped" in status(lab), "the panel says so")
    took = time.monotonic() - start
    print(f"stopped in {took:.2f} s")
    assert took < STOP_S
    assert button(lab, "Stop").is_disabled() and button(lab, "Run").is_enabled()


def unfold(lab: Lab, name: str) -> None:
    button(lab, name).focus()
    lab.page.keyboard.press("Space")


def test_sections_unfold_by_keyboard_one_at_a_time(lab: Lab) -> None:
    unfold(lab, "Memory")
    lab.page.get_by_text("checkpoint", exact=True).first.wait_for()
    lab.page.locator(".widget-dropdown", has_text="schedule").first.locator("select").select_option("gpipe")
    box(lab, "M micro-batches").fill("6")
    lab.page.keyboard.press("Enter")
    wait_for(lab, "simulated", "gpipe, P = 3, M = 6", "Memory, simulated")
    unfold(lab, "Look closer")
    alt = wait_for(lab, "simulated", "gpipe, P = 3, M = 6", "Critical path")
    assert "rank 0 F0" in alt and "Memory, simulated" not in alt
    assert not lab.page.get_by_text("checkpoint", exact=True).first.is_visible()
    lab.page.get_by_text(re.compile("rank 0 computes forward of micro-batch 0")).first.wait_for()

    def line_at() -> float | None:
        """Where the line is; None while it is being drawn."""
        place = lab.page.locator(".gl-moment").first.bounding_box()
        return place["x"] if place else None

    at = until(line_at, "the moment is marked")
    slider(lab, "time (ms)").focus()
    for _ in range(20):
        lab.page.keyboard.press("PageUp")
    until(lambda: (line_at() or 0) > at + 20, "the line moves")
    lab.screenshot("closer_light")


def test_a_limit_is_enforced_and_the_error_stands_where_the_learner_looks(lab: Lab) -> None:
    unfold(lab, "Memory")
    lab.page.get_by_text("memory limit on every rank").click()
    field = box(lab, "limit (KiB)")
    field.fill("256")
    field.press("Enter")
    wait_for(lab, "simulated", "Limit 256 KiB")
    button(lab, "Run").click()
    alert = lab.page.get_by_role("alert").filter(has_text="Does not fit")
    alert.first.wait_for()
    assert "out of memory on rank 0 in 0F1" in alert.first.inner_text()
    assert "limit 262,144 B" in alert.first.inner_text()
    lab.screenshot("limit_light")


def test_a_race_with_ones_own_schedule(lab: Lab) -> None:
    unfold(lab, "Race")
    race = lab.page.locator("img[alt^='Race on one time axis']").first
    race.wait_for()
    alt = race.get_attribute("alt")
    assert "mine" in alt and "does not fit into 256 KiB" in alt
    lab.screenshot("race_light")


def test_the_race_is_run_for_real_on_request(lab: Lab) -> None:
    """Every lane by real workers under the same limit: who fits is measured, and said."""
    unfold(lab, "Memory")
    field = box(lab, "limit (KiB)")
    field.fill("736")
    field.press("Enter")
    wait_for(lab, "simulated", "Limit 736 KiB")
    unfold(lab, "Race")
    button(lab, "Run the race").click()
    until(lambda: "The race is run." in status(lab), "all lanes are run")
    pictures = lab.page.locator("img[alt^='Race on one time axis']")
    until(lambda: pictures.count() == 2, "the measured race stands under the simulated one")
    simulated, measured = (pictures.nth(i).get_attribute("alt") for i in (0, 1))
    assert "measured, paced" in measured and "measured" not in simulated
    assert "gpipe: 120 ms" in simulated and simulated.count("does not fit") == 1
    for lane in ("mine", "one_f_one_b", "zero_bubble_h1"):
        assert f"{lane}: " in simulated and f"{lane}: " in measured
    assert "gpipe: " not in measured and lab.page.get_by_text("gpipe: out of memory").first.is_visible()
    lab.screenshot("race_run_light")


def test_files_are_saved(lab: Lab, tmp_path: Path) -> None:
    button(lab, "Save").click()
    button(lab, "Prepare files").click()
    stem = "gpipe_p3_m6_simulated"
    found = {}
    for end in (".png", ".svg", ".csv", ".perfetto.json"):
        link = lab.page.get_by_role("link", name=f"{stem}{end}")
        link.wait_for()
        with lab.page.expect_download() as download:
            link.click()
        assert download.value.suggested_filename == f"{stem}{end}"
        download.value.save_as(tmp_path / end)
        found[end] = (tmp_path / end).read_bytes()
    assert found[".png"].startswith(b"\x89PNG") and b"<svg" in found[".svg"]
    assert found[".csv"].decode().splitlines()[0].startswith("rank,lane,op")
    assert len(json.loads(found[".perfetto.json"])["traceEvents"]) > 36


CONTRAST = """element => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  let behind = element, paper = [255, 255, 255];
  while (behind) {
    const [r, g, b, alpha = 1] = parse(getComputedStyle(behind).backgroundColor);
    if (alpha > 0.9) { paper = [r, g, b]; break; }
    behind = behind.parentElement;
  }
  const [ink, back] = [light(parse(getComputedStyle(element).color)), light(paper)];
  return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
}"""


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_every_text_is_legible(lab: Lab, theme: str) -> None:
    lab.command("apputils:change-theme", theme=theme)
    dark = "false" if "Dark" in theme else "true"
    lab.page.wait_for_selector(f"body[data-jp-theme-light='{dark}']", state="attached")
    time.sleep(0.5)  # colours change over a moment
    lab.screenshot(f"all_{'dark' if 'Dark' in theme else 'light'}")
    output = lab.page.locator(".jp-OutputArea-output .widget-vbox").first
    texts = output.locator("[role=status], [role=alert], li, summary, span, .widget-label, button, p, th, td")
    seen = [(t, t.inner_text()) for t in texts.all() if t.is_visible() and not t.is_disabled()]
    pale = {text[:60]: round(ratio, 1) for t, text in seen if text and (ratio := t.evaluate(CONTRAST)) < 4.5}
    assert len(seen) > 20 and pale == {}
    for chart in output.locator("img").all():
        assert chart.evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"


def test_the_page_complained_of_nothing(lab: Lab) -> None:
    assert lab.problems == []


def test_nothing_is_left_behind_when_the_kernel_ends(lab: Lab) -> None:
    unfold(lab, "Memory")
    lab.page.get_by_text("memory limit on every rank").click()
    until(lambda: "Limit" not in (picture(lab, "simulated").get_attribute("alt") or ""), "no limit is drawn")
    button(lab, "Run").click()
    wait_for(lab, "measured, paced", "P = 3, M = 6")
    assert len(lab.processes()) >= 5, "kernel, server of workers, three workers"
    lab.page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")
    until(lambda: not lab.processes(), "all that the kernel started has ended", seconds=15)
