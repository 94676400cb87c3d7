"""The data collator: labels, padding, flattening, images, conversations."""

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_dsv4.training import Dsv4DataCollator
from processing_dsv4 import Dsv41ImageProcessor, Dsv41Processor
from processing_dsv4.prompt_constants import BOS, CHAT_CONTROL_TOKENS, EOS, PAD

IGNORED = -100


@pytest.fixture(scope="module")
def processor():
    """A processor over bytes and control tokens, so that the test needs no real tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False) for token in CHAT_CONTROL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    images = Dsv41ImageProcessor(patch_size=4, downsample_ratio=2, max_image_tokens=64, min_pixels=64)
    return Dsv41Processor(images, tokenizer)


def example(ids, learned=()):
    return {"input_ids": ids, "assistant_masks": [int(index in learned) for index in range(len(ids))]}


def test_padding(processor):
    pad = processor.tokenizer.pad_token_id
    features = [example([5, 6, 7], {1, 2}), example([8], {0})]
    out = Dsv4DataCollator(processor)(features)
    assert out["input_ids"].tolist() == [[5, 6, 7], [8, pad, pad]]
    assert out["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED]]
    assert out["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert all(value.dtype == torch.int64 for value in out.values())
    left = Dsv4DataCollator(processor, padding_side="left", pad_to_multiple_of=4)(features)
    assert left["input_ids"].tolist() == [[pad, 5, 6, 7], [pad, pad, pad, 8]]
    assert left["labels"].tolist() == [[IGNORED, IGNORED, 6, 7], [IGNORED] * 3 + [8]]


def test_flattening(processor):
    features = [example([5, 6, 7], {0, 1, 2}), example([8, 9], {0, 1})]
    out = Dsv4DataCollator(processor, flatten=True)(features)
    assert out["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert out["labels"].tolist() == [[IGNORED, 6, 7, IGNORED, 9]]
    assert "attention_mask" not in out
    padded = Dsv4DataCollator(processor, flatten=True, pad_to_multiple_of=8)(features)
    assert padded["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert padded["labels"].tolist()[0][5:] == [IGNORED] * 3


def test_both_forms_teach_the_same(processor):
    """What the model predicts (labels shifted by one) is the same multiset of (context, token) in both forms."""
    features = [example(list(range(10, 10 + n)), set(range(0, n, 2))) for n in (1, 2, 5, 8)]
    padded = Dsv4DataCollator(processor)(features)
    flat = Dsv4DataCollator(processor, flatten=True)(features)

    def taught(ids, labels):
        return sorted((int(a), int(b)) for a, b in zip(ids[:-1], labels[1:], strict=True) if b != IGNORED)

    rows = [
        pair for ids, labels in zip(padded["input_ids"], padded["labels"], strict=True) for pair in taught(ids, labels)
    ]
    assert sorted(rows) == taught(flat["input_ids"][0], flat["labels"][0])
    assert len(rows) == 3 + 2


def test_sources_of_labels(processor):
    given = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[IGNORED, 9]])}
    assert Dsv4DataCollator(processor)([given])["labels"].tolist() == [[IGNORED, 9]]
    everything = Dsv4DataCollator(processor.tokenizer, learn="all")([{"input_ids": [5, 6]}])
    assert everything["labels"].tolist() == [[5, 6]]
    masked = {"input_ids": [2, 5, 6], "attention_mask": [0, 1, 1], "assistant_masks": [0, 1, 1]}
    assert Dsv4DataCollator(processor)([masked])["input_ids"].tolist() == [[5, 6]]


def test_cutting(processor):
    out = Dsv4DataCollator(processor, max_length=2)([example([5, 6, 7], {1, 2})])
    assert out["input_ids"].tolist() == [[5, 6]] and out["labels"].tolist() == [[IGNORED, 6]]


def conversation(*images, answer="yes"):
    parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "?"}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer, "reasoning_content": "hm"}]


@pytest.mark.parametrize("flatten", [False, True])
def test_conversations_with_images(processor, flatten):
    pictures = [Image.new("RGB", size) for size in ((20, 30), (40, 10), (8, 8))]
    features = [
        {"messages": conversation(pictures[0], pictures[1])},
        {"messages": conversation()},
        {"messages": conversation(pictures[2], answer="a rather longer answer")},
    ]
    out = Dsv4DataCollator(processor, flatten=flatten)(features)
    alone = [processor.image_processor(picture, return_tensors="pt") for picture in pictures]
    for key in ("pixel_values", "image_grid_hw", "image_unshuffle_index"):
        assert torch.equal(out[key], torch.cat([one[key] for one in alone]))
    is_image = out["input_ids"] == processor.image_token_id
    assert (out["labels"][is_image] == IGNORED).all() and is_image.any()
    rows = out["labels"].tolist() if not flatten else [out["labels"][0].tolist()]
    learned = [processor.tokenizer.decode([token for token in row if token != IGNORED]) for row in rows]
    expected = [f"hm</think>{answer}{EOS}" for answer in ("yes", "yes", "a rather longer answer")]
    assert learned == (["".join(expected)] if flatten else expected)
    if flatten:
        starts = (out["position_ids"][0] == 0).nonzero().flatten().tolist()
        assert [out["input_ids"][0, at].item() for at in starts] == [processor.tokenizer.bos_token_id] * 3


def test_chat_options(processor):
    feature = {"messages": conversation(), "tools": [{"type": "function", "function": {"name": "f"}}]}
    text = processor.tokenizer.decode(Dsv4DataCollator(processor)([feature])["input_ids"][0])
    assert '"name": "f"' in text and "hm" in text
    plain = Dsv4DataCollator(processor, chat_options={"enable_thinking": False})([{"messages": conversation()}])
    assert "hm" not in processor.tokenizer.decode(plain["input_ids"][0])


def test_processed_examples_equal_conversations(processor):
    messages = conversation(Image.new("RGB", (20, 30)))
    features = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, keep_last_reasoning=True
    )
    first, second = (Dsv4DataCollator(processor)([item]) for item in (dict(features), {"messages": messages}))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("features", "options", "match"),
    [
        ([], {}, "empty"),
        ([{"labels": [1]}], {}, r"features\[0\].*labels"),
        ([{"input_ids": [1, 2]}], {}, "assistant_masks"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "labels has 1"),
        ([example([]) | {"labels": []}], {}, "no tokens"),
        ([{"input_ids": [[1], [2]]}], {"learn": "all"}, "one row"),
        ([{"messages": []}], {}, "messages is empty"),
    ],
)
def test_refused_features(processor, features, options, match):
    with pytest.raises(ValueError, match=match):
        Dsv4DataCollator(processor, **options)(features)


def test_refused_images(processor):
    with pytest.raises(ValueError, match="pixel_values"):
        Dsv4DataCollator(processor, learn="all")([{"input_ids": [processor.image_token_id]}])
    with pytest.raises(ValueError, match="cut an image"):
        Dsv4DataCollator(processor, max_length=100)([{"messages": conversation(Image.new("RGB", (20, 30)))}])
    with pytest.raises(ValueError, match="processor"):
        Dsv4DataCollator(processor.tokenizer)([{"messages": conversation()}])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"learn": "some"}, "learn"),
        ({"padding_side": "top"}, "padding_side"),
        ({"max_length": 0}, "max_length"),
        ({"pad_to_multiple_of": 1.5}, "pad_to_multiple_of"),
    ],
)
def test_refused_options(processor, options, match):
    with pytest.raises(ValueError, match=match):
        Dsv4DataCollator(processor, **options)
    with pytest.raises(ValueError, match="pad token"):
        Dsv4DataCollator(object())
    with pytest.raises(ValueError, match="return_tensors"):
        Dsv4DataCollator(processor)([], return_tensors="np")
