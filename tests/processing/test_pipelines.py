"""transformers' pipelines with this processor and tokenizer. The model is a stand-in that says a fixed answer."""

import pytest
import torch
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.pipelines import ImageTextToTextPipeline, TextGenerationPipeline

ANSWER = (
    'hm</think>Let me see.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="id" string="true">5'
    '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="box" string="false">[1, 2]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls><｜end▁of▁sentence｜>"
)
TOOLS = [{"type": "function", "function": {"name": "look"}}]
MESSAGE = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "hm",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"id": "5", "box": [1, 2]}}}],
}


class StandInConfig(PreTrainedConfig):
    model_type = "dsv4_processing_stand_in"


class StandInModel(PreTrainedModel, GenerationMixin):
    config_class = StandInConfig
    main_input_name = "input_ids"

    def __init__(self, answer_ids):
        super().__init__(StandInConfig())
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.answer_ids = answer_ids
        self.post_init()

    def forward(self, input_ids=None, **inputs):
        raise NotImplementedError("only generate is called")

    def can_generate(self):
        return True

    def generate(self, input_ids=None, **inputs):
        self.seen = {"input_ids": input_ids, **inputs}
        answers = torch.tensor([self.answer_ids] * len(input_ids))
        return torch.cat([input_ids, answers], dim=1)


@pytest.fixture(scope="module")
def model(processor):
    return StandInModel(processor.tokenizer.encode(ANSWER, add_special_tokens=False))


def test_image_text_to_text(processor, model):
    parts = [{"type": "image", "image": Image.new("RGB", (50, 60))}, {"type": "text", "text": "what is <｜User｜>?"}]
    messages = [{"role": "user", "content": parts}]
    pipe = ImageTextToTextPipeline(model=model, processor=processor)
    chat = pipe(text=messages, tools=TOOLS)[0]["generated_text"]
    assert chat[-1] == MESSAGE
    expected = processor.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    for key, value in expected.items():
        assert torch.equal(model.seen[key], value), key
    history = [*messages, chat[-1], {"role": "tool", "content": "a cat"}]
    assert "Let me see." in processor.apply_chat_template(history, tools=TOOLS, add_generation_prompt=True)


def test_text_generation(processor, model):
    messages = [{"role": "user", "content": "hi"}]
    pipe = TextGenerationPipeline(model=model, tokenizer=processor.tokenizer)
    assert pipe(messages)[0]["generated_text"][-1] == MESSAGE
    expected = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert model.seen["input_ids"].tolist() == expected
