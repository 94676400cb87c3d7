"""The pictures of `make demo`: the photographs, the counts it prints, and how it treats what is missing."""

import sys

import numpy as np
import pytest

from examples import image_demo
from tests import golden_cases as golden


@pytest.fixture(scope="module")
def results():
    return image_demo.ask_all(golden.CHECKPOINT_V41, new_tokens=3)


def test_the_photographs_are_real_ones():
    pictures = image_demo.photographs()
    assert set(image_demo.PHOTOGRAPHS) <= set(pictures)
    for name in image_demo.PHOTOGRAPHS:
        assert pictures[name].size == (640, 427) and pictures[name].mode == "RGB"
        assert len(np.unique(np.asarray(pictures[name]).reshape(-1, 3), axis=0)) > 10_000  # no drawing


def test_counts_and_times(results):
    """640 x 427 pixels shrink to 17 x 12 patches of 4, so to 9 x 6 cells of 2 x 2: 6 * (9 + 1) + 2 tokens of at most 64."""
    assert [result.name for result in results] == list(image_demo.PHOTOGRAPHS)
    for result in results:
        assert result.grid == (12, 17) and result.image_tokens == 62
        assert result.text_tokens > len(result.question) // 4
        assert min(result.process, result.encode, result.answer) > 0
    assert results[0].text != results[1].text


def test_the_table(results):
    lines = image_demo.picture_table(results).splitlines()
    for line, result in zip(lines[1:3], results, strict=True):
        assert line.startswith(f"{result.name} ") and "640x427" in line and line.count(" ms") == 3
        prompt = result.text_tokens + result.image_tokens
        assert line.split("=")[0].split()[-1] == str(prompt)
        assert line.split("=")[1].split()[:3] == [str(result.text_tokens), "+", str(result.image_tokens)]
    assert sum(line.startswith("  -> ") for line in lines) == 2


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    assert image_demo.main([str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert image_demo.main([str(golden.CHECKPOINT_V41)]) == 1
    assert "pip install scikit-learn" in capsys.readouterr().err
