"""The processor: token ids, images in conversations, masks, batches, answers, loading and saving."""

import copy
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoProcessor, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from transformers.tokenization_utils_base import TruncationStrategy

import processing_dsv4
from processing_dsv4 import Dsv41Processor, image_sources, register
from processing_dsv4.prompt_constants import IMAGE

from .conftest import GOLDENS, golden_lines

PROMPTS = golden_lines("prompts_public.jsonl")
USER = {"role": "user", "content": "x"}
IMAGE_ID = 129264
PACKAGE = Path(processing_dsv4.__file__).parent


def picture(width, height, color=(90, 120, 30)):
    return Image.new("RGB", (width, height), color)


def with_pictures(case):
    """The messages of a golden with real images of the stated sizes in place of its URLs."""
    messages = json.loads(json.dumps(case["hf"]["messages"]))
    sizes = iter(case.get("image_sizes", []))
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image":
                del part["url"]
                part["image"] = picture(*next(sizes))
    return messages


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case["id"])
def test_golden_ids(case, processors):
    processor = processors[case["version"]]
    hf = case["hf"]
    assert processor.apply_chat_template(hf["messages"], tools=hf["tools"], **hf["kwargs"]) == case["prompt"]
    out = processor.apply_chat_template(
        with_pictures(case), tools=hf["tools"], tokenize=True, return_dict=True, **hf["kwargs"]
    )
    ids = out["input_ids"][0]
    assert out["attention_mask"] == [[1] * len(ids)]
    counts = case.get("image_token_counts", [])
    if counts:
        assert len(ids) == case["expanded_length"]
        digest = hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
        assert digest == case["expanded_ids_sha256"]
        assert len(out["image_grid_hw"]) == len(counts)
    collapsed, position, rest = [], 0, iter(counts)
    while position < len(ids):
        collapsed.append(ids[position])
        position += next(rest) if ids[position] == IMAGE_ID else 1
    assert collapsed == case["input_ids"]


def test_forms_of_results(processor):
    assert isinstance(processor.apply_chat_template([USER]), str)
    assert processor.apply_chat_template([[USER], [USER]]) == [processor.apply_chat_template([USER])] * 2
    ids = processor.apply_chat_template([USER], tokenize=True)
    assert isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0][0], int)
    tensors = processor.apply_chat_template([USER], tokenize=True, return_dict=True, return_tensors="pt")
    assert torch.equal(tensors["input_ids"], torch.tensor(ids))
    assert set(tensors) == {"input_ids", "attention_mask"}
    arrays = processor.apply_chat_template([USER], tokenize=True, return_tensors="np")
    assert isinstance(arrays, np.ndarray)


def test_batches_are_padded_left(processor):
    long = {"role": "user", "content": "a much longer question than the other one"}
    alone = [processor.apply_chat_template([m], tokenize=True)[0] for m in (USER, long)]
    out = processor.apply_chat_template([[USER], [long]], tokenize=True, return_dict=True, return_tensors="pt")
    pads = len(alone[1]) - len(alone[0])
    assert out["input_ids"].tolist() == [[2] * pads + alone[0], alone[1]]
    assert out["attention_mask"].tolist() == [[0] * pads + [1] * len(alone[0]), [1] * len(alone[1])]
    right = processor.apply_chat_template(
        [[USER], [long]], tokenize=True, return_dict=True, processor_kwargs={"padding": True, "padding_side": "right"}
    )
    assert right["input_ids"][0] == alone[0] + [2] * pads
    multiple = processor.apply_chat_template([USER], tokenize=True, padding=True, pad_to_multiple_of=64)
    assert len(multiple[0]) % 64 == 0 and multiple[0][-len(alone[0]) :] == alone[0]
    ragged = processor.apply_chat_template([[USER], [long]], tokenize=True)
    assert ragged == alone
    full = processor.apply_chat_template([USER], tokenize=True, padding="max_length", max_length=100)
    assert len(full[0]) == 100


def image_messages(source):
    return [{"role": "user", "content": [{"type": "image", **source}, {"type": "text", "text": "what?"}]}]


def test_sources_of_images(processor, monkeypatch):
    """The same picture by every route that transformers and OpenAI have for one."""
    path = GOLDENS / "images" / "grad_100x37.png"
    data = path.read_bytes()
    pixels = np.asarray(Image.open(path).convert("RGB"))
    import base64

    text = base64.b64encode(data).decode()
    monkeypatch.setattr(image_sources, "load_image", lambda url: Image.open(path).convert("RGB"))
    sources = [
        {"image": Image.open(path)},
        {"image": pixels},
        {"image": torch.from_numpy(pixels.copy()).permute(2, 0, 1)},
        {"image": data},
        {"bytes": data},
        {"image": str(path)},
        {"path": path},
        {"url": str(path)},
        {"url": "https://a.example/b.png"},
        {"base64": text},
        {"image": f"data:image/png;base64,{text}"},
    ]
    outs = [
        processor.apply_chat_template(image_messages(s), tokenize=True, return_dict=True, return_tensors="pt")
        for s in sources
    ]
    for url in (f"data:image/png;base64,{text}", "https://a.example/b.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        outs.append(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))
    beside = processor.apply_chat_template(
        image_messages({}), tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"images": [data]}
    )
    for out in [*outs, beside]:
        assert set(out) == {"input_ids", "attention_mask", "pixel_values", "image_grid_hw", "image_unshuffle_index"}
        for key, value in outs[0].items():
            assert torch.equal(out[key], value), key


def test_no_image_is_opened_for_text(processor):
    messages = image_messages({"url": "https://nowhere.invalid/x.png"})
    assert IMAGE in processor.apply_chat_template(messages)


def test_images_follow_the_order_of_the_prompt(processor):
    """Results are re-sorted, and so are their images."""
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": {}}} for i in ("a", "b")]

    def result(call_id, image):
        return {"role": "tool", "tool_call_id": call_id, "content": [{"type": "image", "image": image}]}

    tall, wide = picture(300, 900), picture(900, 300)
    messages = [USER, {"role": "assistant", "tool_calls": calls}, result("b", wide), result("a", tall)]
    out = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    rows_columns = out["image_grid_hw"].tolist()
    assert rows_columns[0][0] > rows_columns[0][1] and rows_columns[1][0] < rows_columns[1][1]
    batch = processor.apply_chat_template(
        [messages, image_messages({"image": tall})], tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert batch["image_grid_hw"].tolist() == [*rows_columns, rows_columns[0]]
    assert (batch["input_ids"] == IMAGE_ID).sum().item() == _image_tokens(batch["image_grid_hw"])


def _image_tokens(grids) -> int:
    return sum(-(-int(rows) // 3) * (-(-int(columns) // 3) + 1) + 2 for rows, columns in grids)


def test_details_of_parts(processor):
    messages = image_messages({"image": picture(1344, 1344), "detail": "low"})
    out = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert out["image_grid_hw"].tolist() == [[39, 39]]
    out = processor.apply_chat_template(
        image_messages({"image": picture(1344, 1344)}),
        tokenize=True,
        return_dict=True,
        processor_kwargs={"detail": "low"},
    )
    assert np.asarray(out["image_grid_hw"]).tolist() == [[39, 39]]


def test_typed_placeholders_are_text(processor):
    part = {"type": "text", "text": f"see {IMAGE}{IMAGE}"}
    messages = [{"role": "user", "content": [part, {"type": "image", "image": picture(20, 20)}]}]
    out = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert (out["input_ids"] == IMAGE_ID).sum().item() == _image_tokens(out["image_grid_hw"]) == 184
    assert processor.apply_chat_template([{"role": "user", "content": IMAGE}], tokenize=True)[0].count(IMAGE_ID) == 0


def test_token_types(processor):
    out = processor.apply_chat_template(
        image_messages({"image": picture(20, 20)}), tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"return_mm_token_type_ids": True},
    )  # fmt: skip
    assert torch.equal(out["mm_token_type_ids"], (out["input_ids"] == IMAGE_ID).long())


@pytest.mark.parametrize(
    ("messages", "options", "error", "match"),
    [
        (image_messages({}), {"tokenize": True}, ValueError, "1 image parts"),
        ([USER], {"tokenize": True, "processor_kwargs": {"images": ["a"]}}, ValueError, "1 images"),
        (image_messages({"image": b""}), {"tokenize": True}, ValueError, "empty"),
        (
            [{"role": "user", "content": [{"type": "image", "image": b"x"}] * 601}],
            {"tokenize": True},
            ValueError,
            "601 images",
        ),
        ([USER], {"documents": [{"title": "a", "text": "b"}]}, ValueError, "documents"),
        ([USER], {"thinking": False}, TypeError, "thinking"),
        ([USER], {"return_assistant_tokens_mask": True}, ValueError, "return_dict"),
        ([USER], {"tokenize": True, "return_offsets_mapping": True}, ValueError, "return_offsets_mapping"),
        ([USER], {"tokenize": True, "padding": "longer"}, ValueError, "padding"),
        ([USER], {"tokenize": True, "padding": "max_length"}, ValueError, "max_length"),
        ([], {}, ValueError, "empty"),
        ("hello", {}, TypeError, "messages"),
    ],
)
def test_refused_arguments(processor, messages, options, error, match):
    with pytest.raises(error, match=match):
        processor.apply_chat_template(messages, **options)


def test_a_tokenizer_that_is_put_in_later_encodes(processor):
    changed = copy.deepcopy(processor)
    changed.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 7}, unk_token="x")))
    assert set(changed.apply_chat_template([USER], tokenize=True)[0]) == {7}


def test_truncation(processor):
    ids = processor.apply_chat_template([USER], tokenize=True)[0]
    assert processor.apply_chat_template([USER], tokenize=True, truncation=True, max_length=5)[0] == ids[:5]
    for off in (False, "do_not_truncate", TruncationStrategy.DO_NOT_TRUNCATE):
        assert processor.apply_chat_template([USER], tokenize=True, truncation=off, max_length=5)[0] == ids
    messages = image_messages({"image": picture(20, 20)})
    with pytest.raises(ValueError, match="cut an image"):
        processor.apply_chat_template(messages, tokenize=True, truncation=True, max_length=50)


def test_assistant_mask(processor):
    """1 for what the assistant wrote, in thinking, with tools and after images; never for headers and results."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"q": "é <｜User｜>"}}}
    messages = [
        *image_messages({"image": picture(20, 20)}),
        {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "image", "image": picture(30, 20)}]},
        {"role": "assistant", "content": "<｜ref｜>cat<｜/ref｜>"},
        USER,
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]

    def spans(**options):
        out = processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            add_generation_prompt=True,
            **options,
        )
        ids, mask = out["input_ids"][0], out["assistant_masks"][0]
        assert len(ids) == len(mask)
        found, current = [], []
        for token, flag in zip([*ids, 0], [*mask, 0], strict=True):
            if flag:
                current.append(token)
            elif current:
                found.append(processor.tokenizer.decode(current))
                current = []
        return found

    written = (
        'look\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="q" string="true">é <｜User｜>'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜>"
    )
    last = "<｜ref｜>cat<｜/ref｜><｜end▁of▁sentence｜>"
    assert spans(tools=tools) == ["hm</think>" + written, "</think>" + last]
    assert spans() == spans(enable_thinking=False) == [written, last]
    assert spans(keep_last_reasoning=True) == [written, "</think>" + last]
    with pytest.raises(ValueError, match="continue_final_message"):
        processor.apply_chat_template(
            messages[:2],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            continue_final_message=True,
        )


def test_mask_of_the_template_agrees(processor):
    """transformers' own mask, by the `generation` blocks of the template, marks the same tokens."""
    messages = [
        USER,
        {"role": "assistant", "content": "y", "reasoning_content": "r"},
        USER,
        {"role": "assistant", "content": "z"},
    ]
    options = {
        "tokenize": True,
        "return_dict": True,
        "return_assistant_tokens_mask": True,
        "keep_last_reasoning": True,
    }
    ours = processor.apply_chat_template(messages, **options)
    theirs = processor.tokenizer.apply_chat_template(messages, **options)
    assert ours["input_ids"][0] == theirs["input_ids"] and ours["assistant_masks"][0] == theirs["assistant_masks"]


def test_mask_with_a_custom_template(processor):
    template = "{{ messages[0].content }}<think>{% generation %}{{ messages[1].content }}{% endgeneration %}<think>"
    messages = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "some answer"}]
    out = processor.apply_chat_template(
        [messages, messages[:1] + [{"role": "assistant", "content": "no"}]],
        chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, padding=True,
        return_tensors="pt",
    )  # fmt: skip
    for ids, mask, expected in zip(out["input_ids"], out["assistant_masks"], ("some answer", "no"), strict=True):
        assert processor.tokenizer.decode(ids[mask.bool()]) == expected


def test_message_objects(processor):
    @dataclass
    class Message:
        role: str
        content: str

    class Model:
        def model_dump(self):
            return dict(USER)

    class Chat:
        messages = [USER]

    expected = processor.apply_chat_template([USER])
    for conversation in ([Message("user", "x")], [Model()], Chat()):
        assert processor.apply_chat_template(conversation) == expected
    assert processor.apply_chat_template([Chat(), Chat()]) == [expected] * 2


def test_custom_templates(processor):
    template = "{{ messages[0].content }}|{{ add_generation_prompt }}|{{ enable_thinking is defined }}"
    assert processor.apply_chat_template([USER], chat_template=template, add_generation_prompt=True) == "x|True|False"
    assert processor.apply_chat_template([USER], chat_template=template, enable_thinking=False) == "x|False|True"
    custom = Dsv41Processor(tokenizer=processor.tokenizer, chat_template="{{ messages[0].content }}!")
    assert custom.apply_chat_template([USER]) == "x!"
    assert custom.apply_chat_template([USER], chat_template=processor.chat_template) == (
        processor.apply_chat_template([USER])
    )
    assert custom.apply_chat_template([USER], tokenize=True)[0] == processor.tokenizer.encode(
        "x!", add_special_tokens=False
    )


def test_conversation_is_not_changed(processor):
    messages = image_messages({"image": picture(20, 20)})
    before = json.dumps(messages, default=str)
    processor.apply_chat_template(messages, tokenize=True)
    assert json.dumps(messages, default=str) == before


# -- plain strings -------------------------------------------------------------------------------------------------


def test_strings(processor):
    text = processor.apply_chat_template(image_messages({"image": "unused"}), add_generation_prompt=True)
    out = processor(images=picture(20, 20), text=text, return_tensors="pt")
    chat = processor.apply_chat_template(
        image_messages({"image": picture(20, 20)}),
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
        return_tensors="pt",
    )
    for key in chat:
        assert torch.equal(out[key], chat[key]), key
    assert processor(text="hello")["input_ids"] == [processor.tokenizer.encode("hello")]
    assert set(processor(images=picture(20, 20))) == {"pixel_values", "image_grid_hw", "image_unshuffle_index"}
    options = {"padding": True, "return_tensors": "pt", "return_special_tokens_mask": True}
    batch = processor(text=["a", "a longer text"], **options)
    assert batch["input_ids"][0, 0] == 2 and batch["attention_mask"][0, 0] == 0
    assert torch.equal(batch["special_tokens_mask"], (batch["input_ids"] == 2).long())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "text, images"),
        ({"text": "a", "videos": ["v"]}, "videos"),
        ({"text": IMAGE}, "1 image tokens"),
        ({"text": "a", "images": picture(20, 20)}, "0 image tokens"),
        ({"text": [3]}, "text"),
        ({"text": "a b c", "return_overflowing_tokens": True}, "return_overflowing_tokens"),
        ({"text": "a b c", "return_length": True}, "return_length"),
    ],
)
def test_refused_strings(processor, arguments, match):
    with pytest.raises(ValueError, match=match):
        processor(**arguments)


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden_lines("parser_public.jsonl"), ids=lambda case: case["name"])
def test_golden_answers(case, processors):
    processor = processors[case["version"]]
    expected = json.loads(json.dumps(case["parsed"]))
    for call, decoded in zip(expected.get("tool_calls", []), case["arguments_decoded"], strict=True):
        if decoded is not None:
            call["function"]["arguments"] = decoded
    tools = case["request"].get("tools")
    output = processor.tokenizer.encode(case["output_with_eos"], add_special_tokens=False)
    prompt = processor.tokenizer.encode(case["prompt"], add_special_tokens=False)
    assert processor.parse_response(case["output"], prefix=case["prompt"], tools=tools) == expected
    assert processor.parse_response(output, prefix=prompt) == expected
    padded = torch.tensor([[*output, 2, 2], [2, 2, *output]])
    assert processor.parse_response(padded[:1], prefix=torch.tensor([[2, *prompt]])) == [expected]
    assert processor.parse_response([case["output"]] * 2, prefix=case["prompt"]) == [expected] * 2
    stream = processor.get_response_parser(prefix=prompt)
    for letter in case["output_with_eos"]:
        stream.feed(letter)
    assert stream.finalize() == expected


def test_answers_continue_the_conversation(processor):
    """What parse_response returns goes back into apply_chat_template, and gives the model's own tokens again."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = processor.apply_chat_template([USER], tools=tools, add_generation_prompt=True)
    answer = (
        'hm</think>Wait.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">2>&1'
        '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">[1, 2]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        "</｜DSML｜ calls><｜end▁of▁sentence｜>"
    )
    message = processor.parse_response(answer, prefix=prompt)
    history = [USER, message, {"role": "tool", "content": "ok"}]
    assert processor.apply_chat_template(history, tools=tools).startswith(prompt + answer)


def test_typed_spellings_do_not_move_the_start(processor):
    """By token ids, also a continued answer that quotes a header is read right."""
    messages = [USER, {"role": "assistant", "content": "as in <｜Assistant｜><think>: ", "reasoning_content": "r"}]
    prompt = processor.apply_chat_template(messages, tokenize=True, continue_final_message=True)
    assert processor.parse_response("more", prefix=prompt[0])["content"] == "more"


def test_refused_answers(processor):
    with pytest.raises(ValueError, match="prefix"):
        processor.parse_response("x")
    with pytest.raises(ValueError, match="2 responses but 3 prefixes"):
        processor.parse_response(["a", "b"], prefix=["", "", ""])
    assert processor.parse_response("x", prefix="") == {"role": "assistant", "content": "x"}
    template = {"start_anchor": "A", "fields": {"content": {"content": "text"}}}
    assert processor.parse_response("x", template, prefix="A") == {"content": "x"}


# -- sizes, loading, saving ----------------------------------------------------------------------------------------


def test_sizes_for_serving(processor):
    sizes = [(1, 1), (480, 640), (200, 3000), (1344, 1344)]
    data = processor._get_num_multimodal_tokens(image_sizes=sizes)
    assert data["num_image_tokens"] == [184, 206, 367, 994]
    images = processor.image_processor([picture(width, height) for height, width in sizes], return_tensors="pt")
    assert data["num_image_patches"] == images["image_grid_hw"].prod(-1).tolist()
    assert processor._get_num_multimodal_tokens(sizes[3:], detail="low")["num_image_tokens"] == [184]
    assert processor._get_num_multimodal_tokens().num_image_tokens is None


def test_released_folder(released_folder, processor):
    assert processor.chat_format == "v41" and processor.image_token_id == IMAGE_ID
    assert (processor.tokenizer.pad_token_id, processor.tokenizer.padding_side) == (2, "left")
    assert processor.image_processor.patch_size == 14
    with pytest.raises((OSError, ValueError), match="nothing"):
        Dsv41Processor.from_pretrained(released_folder / "nothing")


def test_released_folder_of_v4(tmp_path, v4_tokenizer_folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((v4_tokenizer_folder / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    loaded = Dsv41Processor.from_pretrained(tmp_path)
    assert loaded.chat_format == "v4"
    assert "[Unsupported Image]" in loaded.apply_chat_template(image_messages({}))
    ids = loaded.apply_chat_template(image_messages({}), tokenize=True, return_dict=True)
    assert set(ids) == {"input_ids", "attention_mask"}


def test_saving(tmp_path, processor):
    processor.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text(encoding="utf-8") == processor.chat_template
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded) is Dsv41Processor
    assert loaded.to_dict() == processor.to_dict()
    assert loaded.chat_template == processor.chat_template
    out = loaded.apply_chat_template([USER], tokenize=True)
    assert out == processor.apply_chat_template([USER], tokenize=True)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    for file in tmp_path.iterdir():
        if file.is_file():
            assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_bad_arguments(processor):
    with pytest.raises(ValueError, match="chat_format"):
        Dsv41Processor(tokenizer=processor.tokenizer, chat_format="v5")
    with pytest.raises(ValueError, match="tokenizer"):
        Dsv41Processor()


def test_auto_classes_on_a_released_folder(released_folder):
    """With a registered config class, AutoProcessor opens a folder that has no processor files."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "deepseek_v41" not in CONFIG_MAPPING:

        class StandInConfig(PreTrainedConfig):
            model_type = "deepseek_v41"

        AutoConfig.register("deepseek_v41", StandInConfig)
    register()
    register()
    assert type(AutoProcessor.from_pretrained(released_folder)) is Dsv41Processor


def test_remote_code(tmp_path, processor):
    """A saved folder works in a fresh process that cannot import this package."""
    folder = tmp_path / "hub folder"
    processor.save_pretrained(folder)
    script = (
        "import json, sys\n"
        "from transformers import AutoProcessor, AutoImageProcessor\n"
        "p = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert 'processing_dsv4' not in sys.modules\n"
        "i = AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "assert i.patch_size == 14 and type(i).__name__ == 'Dsv41ImageProcessor'\n"
        "messages = [{'role': 'user', 'content': 'x <think>'}]\n"
        "print(json.dumps(p.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)))\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    messages = [{"role": "user", "content": "x <think>"}]
    assert json.loads(done.stdout.splitlines()[-1]) == processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True
    )


def test_files_travel_as_remote_code():
    """transformers' own scanner finds every file from the processor, and nothing but allowed packages."""
    entry = str(PACKAGE / "processing_deepseek_v41.py")
    found = {Path(file).name for file in get_relative_import_files(entry)} | {Path(entry).name}
    assert found == {file.name for file in PACKAGE.glob("*.py")} - {"__init__.py"}
    for file in PACKAGE.glob("*.py"):
        assert set(get_imports(file)) <= {"torch", "transformers", "numpy", "PIL", "huggingface_hub"} | set(
            sys.stdlib_module_names
        )
        assert "__file__" not in file.read_text(encoding="utf-8")
