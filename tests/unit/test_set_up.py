"""What uv is told of pip's settings."""

import runpy
from pathlib import Path

import pytest

uv_options = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "uv_options.py"))["uv_options"]
BEST = "--index-strategy=unsafe-best-match"


@pytest.mark.parametrize(
    ("listed", "options"),
    [
        ("", [BEST]),
        ("global.cert='/ca.crt'\nglobal.find-links='/wheels'", ["--find-links=/wheels", BEST]),
        (
            r"global.find-links='\n/wheels\nhttps://w.example/torch'",
            ["--find-links=/wheels", "--find-links=https://w.example/torch", BEST],
        ),
        (
            ":env:.index-url='https://a.example/simple'\nglobal.index-url='https://b.example/simple'\n"
            "install.constraint='c.txt'",
            ["--default-index=https://a.example/simple", "--constraint=c.txt", BEST],
        ),
        ("global.extra-index-url='file:///a file:///b'", ["--index=file:///a", "--index=file:///b", BEST]),
    ],
)
def test_pips_settings_reach_uv(listed, options):
    assert uv_options(listed) == options
