"""transformers' own common model tests on our classes.

They are in transformers' source distribution, not in its wheel, and are not copied here:

    pip install parameterized pytest-timeout
    pip download --no-deps --no-binary :all: --no-build-isolation transformers==5.24.0 && tar xzf transformers-5.24.0.tar.gz
    TRANSFORMERS_TESTS=transformers-5.24.0/tests pytest -o addopts= -W ignore tests/modeling/test_transformers_suite.py

Tests that ask for something that these models refuse on purpose are skipped, with the reason.
"""

import importlib
import os
import sys
import types
import unittest

import pytest
import torch
from transformers.models.auto import modeling_auto

from modeling_dsv4 import (
    Dsv4ForCausalLM,
    Dsv4Model,
    Dsv41Config,
    Dsv41ForCausalLM,
    Dsv41ForConditionalGeneration,
    Dsv41Model,
    Dsv41TextModel,
)
from tests.modeling import v4_models

FOLDER = os.environ.get("TRANSFORMERS_TESTS")
if not FOLDER:
    pytest.skip("TRANSFORMERS_TESTS does not name the tests of a transformers source", allow_module_level=True)
pytestmark = pytest.mark.slow

# Mixins that the source distribution leaves out.
ABSENT = {
    "generation.test_utils": ("GenerationTesterMixin",),
    "exporters.test_export": ("ExportTesterMixin", "ExportGenerateTesterMixin"),
}


def common_tests():
    """Import `test_modeling_common` of `FOLDER` as a package of another name than ours."""
    package = types.ModuleType("transformers_tests")
    package.__path__ = [FOLDER]
    sys.modules[package.__name__] = package
    for name, classes in ABSENT.items():
        for part in (name.split(".")[0], name):
            sys.modules.setdefault(f"{package.__name__}.{part}", types.ModuleType(part))
        for one in classes:
            setattr(sys.modules[f"{package.__name__}.{name}"], one, type(one, (), {}))
    settings = types.ModuleType("settings")
    settings.config_common_kwargs = {}
    sys.modules[f"{package.__name__}.utils"] = types.ModuleType("utils")
    sys.modules[f"{package.__name__}.utils.test_configuration_utils"] = settings
    return importlib.import_module(f"{package.__name__}.test_modeling_common")


upstream = common_tests()
# The suite finds out by these tables, which know class names, what has a loss.
for base in ("Dsv41TextModel", "Dsv41Model", "Dsv4Model"):
    modeling_auto.MODEL_MAPPING_NAMES[base] = base
for causal in ("Dsv41ForCausalLM", "Dsv4ForCausalLM"):
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[causal] = causal
modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES["deepseek_v41"] = "Dsv41ForConditionalGeneration"

TEXT = {
    "vocab_size": 99, "hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2,
    "max_position_embeddings": 512, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
    "compress_ratios": [0, 1], "kv_source_layer_ids": [1], "index_source_layer_ids": [1], "index_n_heads": 8,
    "index_head_dim": 32, "index_topk": 4, "candidate_source_layer_id": -1, "engram_layer_ids": [0],
    "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 16, "engram_num_embeddings": [400],
    "engram_pad_token_id": 0, "engram_compressed_vocab_size": 99, "num_nextn_predict_layers": 0,
}  # fmt: skip
VISION = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 16, "patch_size": 2,
    "downsample_ratio": 2, "max_image_tokens": 64, "min_pixels": 16,
}  # fmt: skip
V4 = {
    "vocab_size": 99, "num_hidden_layers": 2, "compress_ratios": [4, 16], "num_hash_layers": 0, "index_topk": 4,
    "sliding_window": 64, "pad_token_id": 0, "dtype": None,
}  # fmt: skip
IMAGE = 3  # low, so that a smaller vocabulary has it too

STRICT = "a checkpoint that lacks a tensor is refused, not filled with random values"
KEPT = "norms, routers and compressors that a file stores in float32 stay in float32, as the release computes them"
LAYOUT = "weights are saved in the released layout, under names that no mapping of transformers describes"
TOKEN_IDS = "the n-gram memory reads token ids, so inputs_embeds alone are refused"
SKIPPED = {
    "test_correct_missing_keys": STRICT,
    "test_model_weights_reload_no_missing_tied_weights": STRICT,
    "test_base_model_prefix_loads_base_weights": STRICT,
    "test_reverse_loading_mapping": LAYOUT,
    "test_keep_in_fp32_modules": KEPT,
}
TOWER = "the tower hands on its last state only"
COLLAPSED = "the hidden states of V4 are the streams collapsed aside, on no path to the output"
ENGRAM_SKIPPED = {"test_inputs_embeds": TOKEN_IDS, "test_inputs_embeds_matches_input_ids": TOKEN_IDS}


class Tester:
    """What the suite asks about a model."""

    is_training, batch_size, seq_length, pad_token_id = True, 5, 7, 0

    def __init__(self, config, images=0):
        self.get_config, self.images = config, images
        text = config().get_text_config()
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, key, getattr(text, key))

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(4, self.vocab_size - 2, (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.images:
            ids[:, 1:5] = IMAGE  # an image of 2 x 2 patches: start, one cell, newline, end
            grid = torch.full((self.batch_size, 2), 2)
            inputs |= {"pixel_values": torch.randn(4 * self.batch_size, 3, 2, 2), "image_grid_hw": grid}
        return self.get_config(), inputs


def v41_config(vision=None):
    return Dsv41Config(text_config=dict(TEXT), vision_config=vision, image_token_id=IMAGE, pad_token_id=0)


def skipping(reasons):
    """Decorate a suite to skip tests, with the reason of each."""

    def decorate(suite):
        for name, reason in (SKIPPED | reasons).items():
            setattr(suite, name, unittest.skip(reason)(getattr(suite, name)))
        return suite

    return decorate


class OnOurModels(upstream.ModelTesterMixin, upstream.GenerationTesterMixin):
    """What holds for all classes here."""

    has_attentions = False  # attention weights are never materialised
    test_all_params_have_gradient = False  # indexers select; the language-model loss never reaches them


@skipping(ENGRAM_SKIPPED)
class Dsv41TextSuite(OnOurModels, unittest.TestCase):
    all_model_classes = (Dsv41TextModel, Dsv41ForCausalLM)

    def setUp(self):
        self.model_tester = Tester(v41_config)


@skipping(ENGRAM_SKIPPED | {"test_get_image_features_hidden_states": TOWER})
class Dsv41ImageTextSuite(OnOurModels, unittest.TestCase):
    all_model_classes = (Dsv41Model, Dsv41ForConditionalGeneration)

    def setUp(self):
        self.model_tester = Tester(lambda: v41_config(dict(VISION)), images=1)


@skipping({"test_retain_grad_hidden_states_attentions": COLLAPSED})
class Dsv4Suite(OnOurModels, unittest.TestCase):
    all_model_classes = (Dsv4Model, Dsv4ForCausalLM)

    def setUp(self):
        self.model_tester = Tester(lambda: v4_models.tiny_config(**V4))
