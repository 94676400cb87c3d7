"""Models with drafters, and a drafter that proposes what a test plans."""

from contextlib import contextmanager
from functools import cache

import torch

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM, Dsv41ForConditionalGeneration
from modeling_dsv4.dspark import DraftBlock
from tests import golden_cases as golden
from tests.modeling import image_models, tiny_model

DRAFTER = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 5, "dspark_noise_token_id": 9, "dspark_target_layer_ids": [2, 4],
    "dspark_markov_rank": 8, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip


@cache
def golden_drafter():
    """The golden checkpoint in float32 with its drafter; tests put back what they change."""
    options = Dsv4QuantizationConfig(dequantize=True)
    return Dsv41ForCausalLM.from_pretrained(
        golden.CHECKPOINT_V41, dtype=torch.float32, quantization_config=options, use_mtp=True
    ).eval()


@cache
def drafting_model(block=5, dtype=torch.float64, seed=0):
    """A tiny model with a drafter of wide random weights; shared, not to be changed."""
    torch.manual_seed(seed)
    backbone = tiny_model.new_model(torch.float64, seed, **tiny_model.FIVE_LAYERS)
    config = tiny_model.tiny_config(**tiny_model.FIVE_LAYERS, **DRAFTER | {"dspark_block_size": block})
    model = Dsv41ForCausalLM(config, use_mtp=True).to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mtp." in name and parameter.ndim > 1 and "hc" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.load_state_dict(backbone.state_dict(), strict=False)
    return model.to(dtype)


@cache
def drafting_image_model():
    """A small image model with a drafter, float64, no rounding; shared, not to be changed."""
    config = image_models.tiny_config()
    text = config.text_config
    for key, value in (DRAFTER | {"dspark_target_layer_ids": [1, 3], "dspark_noise_token_id": 5}).items():
        setattr(text, key, value)
    torch.manual_seed(0)
    model = Dsv41ForConditionalGeneration(config, use_mtp=True).double()
    model.config.text_config.cache_rounding = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@contextmanager
def planned(model, sequences, wrong=lambda length, step: False):
    r"""Let the drafter propose the known continuation of every row, except where it shall be wrong.

    Args:
        sequences (list of `torch.Tensor` `[T]`, without padding): what plain decoding gives for each row.
        wrong: from the tokens a row has processed and the step of the draft to whether the draft is wrong there.
    """
    drafter = model.drafter
    vocab = model.config.get_text_config().vocab_size
    proposed = type(drafter).propose

    def propose(self, tokens, cache, embed, head, choose):
        real = proposed(self, tokens, cache, embed, head, lambda step, logits: logits.argmax(-1))
        drafts = []
        for step in range(self.block_size):
            places = [
                min(n + 1 + step, len(row) - 1) for n, row in zip(cache.lengths.tolist(), sequences, strict=True)
            ]
            target = torch.stack([row[place] for row, place in zip(sequences, places, strict=True)])
            mistaken = torch.tensor([wrong(int(n), step) for n in cache.lengths])
            target = torch.where(mistaken, (target + 1) % vocab, target)
            drafts.append(choose(step, torch.nn.functional.one_hot(target, vocab).double() * 1e4))
        return DraftBlock(torch.stack(drafts, 1), real.confidence)

    type(drafter).propose = propose
    try:
        yield
    finally:
        type(drafter).propose = proposed
