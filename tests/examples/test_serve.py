"""The server: chats, images and streams over HTTP, and the refusal where what it needs is not installed."""

import base64
import io
import json

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils.import_utils import is_serve_available

from examples import serve
from tests.golden_cases import CHECKPOINT_V41

needs_server = pytest.mark.skipif(
    not is_serve_available(), reason="fastapi, uvicorn and openai (transformers[serving]) are optional packages"
)
QUESTION = {"role": "user", "content": "What is it?"}


@pytest.fixture(scope="module")
def client():
    from fastapi.testclient import TestClient

    return TestClient(serve.build_app(CHECKPOINT_V41))


def chat(client, *messages, **options):
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4} | options)
    assert answer.status_code == 200, answer.text
    return answer


@needs_server
def test_a_chat_is_answered_as_generate_answers_it(client):
    found = chat(client, QUESTION).json()["choices"][0]
    processor = AutoProcessor.from_pretrained(CHECKPOINT_V41)
    model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT_V41, dtype="auto").eval()
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([QUESTION], enable_thinking=False, **options)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
    expected = processor.parse_response(output, prefix=inputs["input_ids"][0])
    assert found["message"]["content"] == expected["content"].strip() and found["finish_reason"] == "length"


@needs_server
def test_an_image_and_a_stream(client):
    png = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    with_image, without = (chat(client, message).json() for message in ({"role": "user", "content": parts}, QUESTION))
    assert with_image["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"] + 8
    lines = chat(client, QUESTION, stream=True).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert said.strip() == without["choices"][0]["message"]["content"] != ""  # what is not streamed comes stripped


@needs_server
def test_transformers_own_loader_knows_only_its_own_classes():
    from transformers.cli.serving.model_manager import ModelManager

    with pytest.raises(AttributeError, match="module transformers has no attribute DeepseekV41ForCausalLM"):
        ModelManager(device="cpu", trust_remote_code=True, force_model=str(CHECKPOINT_V41))


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    assert serve.main([str(CHECKPOINT_V41)]) == 1
    assert "transformers[serving]" in capsys.readouterr().err
