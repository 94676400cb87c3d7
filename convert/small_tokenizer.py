"""A tokenizer small enough for tests: byte-level BPE with 384 tokens, and the control tokens of the release.

It is trained in place on the text below, so nothing has to be shipped. The text repeats words in other cases, with and
without accents and spaces: many tokens then share a compressed id, as in the real vocabulary.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 384

# Ids 0, 1, ... in this order; special, normalized as in the released file. Ids 0 to 2 are the released ones.
CONTROL_TOKENS = {
    "<｜begin▁of▁sentence｜>": (True, False),
    "<｜end▁of▁sentence｜>": (True, False),
    "<｜▁pad▁｜>": (True, False),
    "<｜System｜>": (False, True),
    "<｜User｜>": (False, True),
    "<｜Assistant｜>": (False, True),
    "<｜latest_reminder｜>": (False, True),
    "<think>": (False, True),
    "</think>": (False, True),
    "｜DSML｜": (False, True),
    "<｜deepseek_image｜>": (False, False),
}
BOS, EOS = list(CONTROL_TOKENS)[:2]
SYSTEM_ID, IMAGE_ID = (list(CONTROL_TOKENS).index(token) for token in ("<｜System｜>", "<｜deepseek_image｜>"))

TRAINING_TEXT = """
The river runs past the old mill, and the mill runs when the river is high. THE RIVER, the river, The River.
A reader writes a letter; the letter reaches another reader. A READER, A LETTER, a letter, a reader, Letter.
Seven or eight stones: one stone, two stones, three stones. Stone stone STONE, stones Stones STONES.
The café by the river serves crème and naïve poems. The cafe by the river serves creme and naive poems. Café, cafe.
Über the hill, uber the hill; señor, senor; façade, facade; élan, elan; Élan, Elan.
def count(words, limit=10): return [word for word in words if len(word) < limit]
for index in range(10): print(index, index * index, "and", index + 1)
0 1 2 3 10 11 12 20 100 1000 10000 3.5 2.25 1,000
河水流过磨坊，读者写信。信写给读者，读者读信。
Ｒｅａｄｅｒ ｒｅａｄｅｒ reader, ﬁnd ﬂow, find flow, ① ② 1 2
When\tthe tab\tmeets the  double  space,\tthe space\n\nwins.
"""


def small_tokenizer_files() -> dict[str, str]:
    """Return the small tokenizer's files by name: `tokenizer.json` and `tokenizer_config.json`; the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(keepends=True), trainer)
    content = json.loads(tokenizer.to_str())
    for entry in content["added_tokens"]:  # the trainer makes all of them special
        entry["special"], entry["normalized"] = CONTROL_TOKENS[entry["content"]]
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {"tokenizer.json": content, "tokenizer_config.json": config}
    return {name: json.dumps(text, ensure_ascii=False, indent=2) + "\n" for name, text in files.items()}
