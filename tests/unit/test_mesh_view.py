"""Pictures of ranks and their groups, and of layers on stages."""

from io import BytesIO

import pytest
from PIL import Image

import gpipe_lab as gl


def test_a_mesh_shows_every_rank_and_says_its_groups():
    picture = gl.plot_mesh(8, 4, ranks_per_node=4)
    assert {text.get_text() for text in picture.axes[0].texts} >= {str(rank) for rank in range(32)}
    assert "8 replicas × 4 stages" in picture.alt
    assert "data groups 0-4-8-12-16-20-24-28" in picture.alt and "pipeline groups 0-1-2-3" in picture.alt
    assert "tensor" not in picture.alt
    assert Image.open(BytesIO(picture.png())).size[0] > 600


def test_a_mesh_with_tensor_groups():
    assert "tensor groups 0-1, 2-3" in gl.plot_mesh(2, 2, 2).alt


def test_a_cut_names_every_stage():
    picture = gl.plot_cut(32, 4)
    assert "stage 0: layers 0 to 7, " in picture.alt and "stage 3: layers 24 to 31." in picture.alt
    assert len(picture.axes[0].patches) == 32 + 4
    assert Image.open(BytesIO(picture.png())).size[0] > 600
    with pytest.raises(gl.InputError):
        gl.plot_cut(3, 4)
