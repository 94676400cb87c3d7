"""The chat in the terminal: what is printed is what was answered, and every turn sees the ones before."""

import io
import sys

import pytest
from PIL import Image

from examples import chat
from tests.golden_cases import CHECKPOINT_V41


@pytest.fixture
def picture(tmp_path):
    Image.new("RGB", (40, 30), (200, 30, 30)).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def test_two_turns_about_an_image(picture, monkeypatch, capsys):
    asked, ask = [], chat.ask

    def spy(model, processor, messages, **options):
        asked.append([message["role"] for message in messages])
        return ask(model, processor, messages, **options)

    monkeypatch.setattr(chat, "ask", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is it?\n\nAnd now?\n"))
    assert chat.main([str(CHECKPOINT_V41), "--image", picture, "--new-tokens", "4"]) == 0
    assert asked == [["user"], ["user", "assistant", "user"]]
    said = capsys.readouterr().out
    assert said.startswith("> What is it?\n") and "\n> And now?\n" in said
    assert all(part.strip() for part in said.partition("> And now?\n")[::2])


def test_the_image_goes_with_the_first_question(monkeypatch):
    seen = []

    def answer(model, processor, messages, **options):
        seen.append([part["type"] for message in messages if message["role"] == "user" for part in message["content"]])
        return {"role": "assistant", "content": "yes"}

    class Processor:
        tokenizer = None

    monkeypatch.setattr(chat, "ask", answer)
    conversation = chat.talk(None, Processor, ["One?", "Two?"], "photo.png", new_tokens=1, thinks=False)
    assert seen == [["image", "text"], ["image", "text", "text"]]
    assert [message["role"] for message in conversation] == ["user", "assistant"] * 2


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is it?\n"))
    assert chat.main([str(CHECKPOINT_V41), "--image", str(tmp_path / "none.png")]) == 1
    assert "none.png" in capsys.readouterr().err
