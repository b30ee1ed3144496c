"""The training command's config: what is read, and what is refused before any process starts."""

from dataclasses import fields
from pathlib import Path

import pytest

import gpipe_lab as gl
from gpipe_lab.train.config import SECTIONS, PipelineConfig, TrainConfig, TrainingConfig, read_config

EXAMPLE = Path(__file__).parents[2] / "data" / "train.toml"


def test_the_example_has_every_key_with_its_default():
    config = read_config(EXAMPLE)
    assert config.save.folder == "runs/gpt"
    text = EXAMPLE.read_text()
    for name, cls in SECTIONS.items():
        table = text.split(f"[{name}]")[1].split("\n[")[0]
        for field in fields(cls):
            assert f"\n{field.name} = " in table, (name, field.name)
            if (name, field.name) != ("save", "folder"):
                assert getattr(getattr(config, name), field.name) == field.default, field.name


def read(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return read_config(path)


def test_what_is_left_out_has_its_default(tmp_path):
    assert read(tmp_path, "") == TrainConfig()
    config = read(tmp_path, "[training]\nlearning_rate = 1\n")
    assert config.training == TrainingConfig(learning_rate=1.0)
    assert type(config.training.learning_rate) is float


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pipelines]\n", "pipelines"),
        ("pipeline = 3\n", "tables"),
        ("[pipeline]\nstages = 2\n", "one of schedule, num_ranks"),
        ("[pipeline]\nschedule = 'zigzag'\n", "one_f_one_b"),
        ("[pipeline]\ncheckpoint = 'sometimes'\n", "checkpoint"),
        ("[pipeline]\nnum_replicas = 0\n", "num_replicas is a whole number of at least 1"),
        ("[pipeline]\nnum_microbatches = 2.5\n", "num_microbatches is a whole number"),
        ("[pipeline]\nnum_microbatches = true\n", "num_microbatches is a whole number"),
        ("[model]\nwidth = 10\nnum_heads = 4\n", "width = 8"),
        ("[model]\ndropout = 2\n", "a number from 0 to 1"),
        ("[training]\nprecision = 'float16'\n", "bfloat16"),
        ("[training]\ntimeout_s = -1\n", "timeout_s"),
        ("[training\n", "a config is a TOML file"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path, text, words):
    with pytest.raises(gl.InputError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(gl.InputError, match=r"nowhere\.toml"):
        read_config(tmp_path / "nowhere.toml")


def test_ranks_are_those_of_the_job():
    assert PipelineConfig().ranks_per_replica(8) == 8
    assert PipelineConfig(num_replicas=2).ranks_per_replica(8) == 4
    assert PipelineConfig(num_ranks=4, num_replicas=2).ranks_per_replica(8) == 4
    for config in (PipelineConfig(num_ranks=3), PipelineConfig(num_replicas=3)):
        with pytest.raises(gl.InputError, match="a process for every rank"):
            config.ranks_per_replica(8)


def test_the_learning_rate_rises_and_falls():
    training = TrainingConfig(num_steps=100, warmup_steps=10)
    factors = [training.learning_rate_factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and max(factors) == factors[10] == pytest.approx(1.0)
    assert factors[100] == pytest.approx(0.1)
    assert sorted(factors[10:], reverse=True) == factors[10:]
    assert TrainingConfig(warmup_steps=0).learning_rate_factor(0) == 1.0
