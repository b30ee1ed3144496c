"""Lines against a setting."""

from io import BytesIO

import pytest
from PIL import Image

import gpipe_lab as gl
from gpipe_lab import plot_lines

LABELS = {"title": "Peak", "x_label": "M", "y_label": "bytes"}


def test_lines_and_marks_say_their_numbers():
    picture = plot_lines(
        {"fixed m": {1: 1024, 4: 4096}}, measured={"fixed m": {4: 4096}}, in_bytes=True, **LABELS
    )
    assert "fixed m (line): 1 KiB at 1, 4 KiB at 4." in picture.alt
    assert "fixed m (measured): 4 KiB at 4." in picture.alt
    (axes,) = picture.axes
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fixed m"]
    assert Image.open(BytesIO(picture.png())).size[0] > 600


def test_each_line_has_its_own_look():
    picture = plot_lines({name: {1: 1.0, 2: 2.0} for name in "abc"}, log_x=True, **LABELS)
    looks = {(line.get_color(), line.get_linestyle()) for line in picture.axes[0].lines}
    assert len(looks) == 3 and picture.axes[0].get_xscale() == "log"


@pytest.mark.parametrize("lines", [{}, {"empty": {}}])
def test_nothing_to_draw_is_refused(lines):
    with pytest.raises(gl.InputError, match="at least one"):
        plot_lines(lines, **LABELS)
