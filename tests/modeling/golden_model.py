"""The model on the golden checkpoint, and what it computes on the way, in the form that `golden_cases` compares.

Hooks read the residual streams, the routers and the n-gram rows; everything is moved back to the caller's columns.
"""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM, attention
from modeling_dsv4.cache_storage import CacheCodec
from tests import golden_cases as golden
from tests.reference import formats, text_model, vision


def load_model(dtype=torch.float32, *, dequantize=True, quantize_activations=None, rounding=True):
    """Load the golden checkpoint as a text model of its own, in evaluation mode."""
    config = Dsv4QuantizationConfig(dequantize=dequantize, quantize_activations=quantize_activations)
    model = Dsv41ForCausalLM.from_pretrained(golden.CHECKPOINT_V41, dtype=dtype, quantization_config=config)
    model.config.text_config.cache_rounding = rounding
    return model.eval()


@cache
def float_model():
    """The dequantised float32 model, shared by tests that put back what they change."""
    return load_model()


@contextmanager
def rounding(model, enabled):
    """Switch the rounding of cached values for a while."""
    text = model.config.get_text_config()
    before, text.cache_rounding = text.cache_rounding, enabled
    try:
        yield model
    finally:
        text.cache_rounding = before


@cache
def oracle_weights():
    """The checkpoint as float64 arrays under released names."""
    return text_model.load_checkpoint(golden.CHECKPOINT_V41)


def image_embeds(model, case):
    """Embeddings `[B, S, H]` of a case with images, from the oracle's vision tower: the text model takes them as they are."""
    types, config = case["vision_token_types"], text_model.load_config(golden.CHECKPOINT_V41)["vision_config"]
    features = vision.features_of(oracle_weights(), config, case["pixel_values"], case["image_grid_hws"])
    spans = vision.span_embeddings(oracle_weights(), types, features)
    embeds = model.get_input_embeddings()(torch.as_tensor(case["input_ids"]).long())
    return torch.where(torch.as_tensor(types >= 0)[..., None], torch.as_tensor(spans).to(embeds), embeds)


def model_inputs(model, case):
    """Arguments of `forward` for a golden case."""
    inputs = {
        "input_ids": torch.as_tensor(case["input_ids"]).long(),
        "attention_mask": torch.as_tensor(case["attention_mask"]),
    }
    if "pixel_values" in case:
        inputs["inputs_embeds"] = image_embeds(model, case)
    return inputs


@torch.no_grad()
def outputs_of(model, case, **options):
    """Run a case and return the arrays that `golden_cases.compare_case` knows."""
    record, mask = {}, torch.as_tensor(case["attention_mask"]).bool()
    # Inside the model the real tokens of a row come first.
    back = torch.argsort(torch.argsort(~mask, dim=-1, stable=True), dim=-1)
    rows = torch.arange(len(mask))[:, None]

    def keep(name, value):
        record[name] = value.unflatten(0, mask.shape)[rows, back] if len(value) == mask.numel() else value[rows, back]

    def of_layer(index):
        def hook(module, args, output):
            keep(f"streams.{index}", output.streams)
            keep(f"pre_mix.{index}", output.pre)

        return hook

    def of_router(index):
        def hook(module, args, output):
            keep(f"router_logits.{index}", output[0])
            keep(f"router_w.{index}", output[1])
            keep(f"router_idx.{index}", output[2])

        return hook

    def of_hash(module, args, output):
        keep("engram_hash", torch.stack(list(output.values()), dim=2))

    text = model.model
    handles = [text.ngram_hash.register_forward_hook(of_hash)]
    for index, layer in enumerate(text.layers):
        handles.append(layer.register_forward_hook(of_layer(index)))
        handles.append(layer.mlp.gate.register_forward_hook(of_router(index)))
    try:
        out = model(
            **model_inputs(model, case), output_selections=True, output_hidden_states=True, output_router_logits=True,
            use_cache=False, **options,
        )  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    record["logits"], record["final_hidden"] = out.logits, out.hidden_states[-1]
    record |= {f"topk.{layer}": chosen for layer, chosen in out.selections.items()}
    record = {
        name: value.float().numpy() if value.is_floating_point() else value.numpy() for name, value in record.items()
    }
    record["output"] = out
    return record


def rms(values):
    """Root mean square of an array."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


# ---- rounding ties -----------------------------------------------------------------------------------------------------

FORMATS = {"window": "fp8", "compressed": "nvfp4", "index": "mxfp4"}
FLOAT32_NOISE = 5e-7  # values near 1 after a few layers of float32


class RoundingProbe:
    r"""Watches every value that is rounded on its way to a cache, and can put one of them across its rounding tie.

    A site is (layer, part, call in the layer, index into the rounded tensor).

    Args:
        model: run without a cache while the probe is active.
        moved: site whose code is taken from the other side of the tie.
    """

    def __init__(self, model, moved=None):
        self.model, self.moved = model, moved
        self.near: list[tuple[float, tuple]] = []  # distance to the tie, site; of its call alone if one is moved
        self._layer, self._calls = None, {}

    def __enter__(self):
        self._patch, self._inner = pytest.MonkeyPatch(), attention.cache_codecs
        self._patch.setattr(attention, "cache_codecs", self._codecs)
        self._hooks = [
            layer.self_attn.register_forward_pre_hook(lambda *_, index=index: setattr(self, "_layer", index))
            for index, layer in enumerate(self.model.model.layers)
        ]
        return self

    def __exit__(self, *exception):
        self._patch.undo()
        for hook in self._hooks:
            hook.remove()

    def _codecs(self, config, kv_format="float"):
        codecs = self._inner(config, kv_format)
        return {part: CacheCodec(self._rounded(part, codec.rounded)) for part, codec in codecs.items()}

    def _rounded(self, part, rounded):
        def call(x):
            number = self._calls[self._layer, part] = self._calls.get((self._layer, part), -1) + 1
            if self.moved is not None and self.moved[:3] != (self._layer, part, number):
                return rounded(x)
            values = x.detach().double().numpy()
            tie = formats.nearest_tie(values, FORMATS[part])
            distance = np.abs(values - tie)
            for at in map(tuple, np.argwhere(distance < FLOAT32_NOISE).tolist()):
                site = (self._layer, part, number, at)
                self.near.append((float(distance[at]), site))
                if site == self.moved:
                    x = x.clone()
                    x[at] = float(tie[at] * (1 - 1e-6 if abs(values[at]) > abs(tie[at]) else 1 + 1e-6))
            return rounded(x)

        return call


def holds(name, mode, case):
    """Return a function that says whether an output keeps to the rule of this case."""

    def check(output):
        try:
            golden.assert_case(name, mode, case, output)
        except AssertionError:
            return False
        return True

    return check


def single_flip_that_explains(model, case, check):
    r"""Find the one code whose other side of the tie makes the case hold.

    Args:
        model, case: as in `outputs_of`.
        check: from `holds`.

    Returns:
        (distance to the tie, site) with distance < `FLOAT32_NOISE`, or `None`.
    """
    with RoundingProbe(model) as probe:
        outputs_of(model, case)
    for distance, site in sorted(probe.near):
        with RoundingProbe(model, moved=site):
            if check(outputs_of(model, case)):
                return distance, site
    return None
