"""A model whose layers lie on several devices: what layers hand on travels with `device_map`."""

import dataclasses

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device

from modeling_dsv4 import Dsv4Cache
from tests.modeling import tiny_model as v41
from tests.modeling import v4_models as v4

MODELS = {"v41": v41.shared_model, "v4": v4.small_model}
SECOND_HALF = 4  # first layer on the second device: inside a run of layers that share entries


def _tensors(value):
    """Yield every tensor inside nested tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


@pytest.mark.parametrize("name", MODELS)
def test_everything_that_layers_hand_on_can_be_moved(name):
    """accelerate moves a layer's arguments by `send_to_device`: nothing may stay behind."""
    model, seen = MODELS[name](torch.float32), []
    layer = model.model.layers[SECOND_HALF]
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args))
    ids, mask = v41.some_ids(2, 21, seed=1), torch.ones(2, 21, dtype=torch.long)
    mask[0, :3] = 0
    v41.run(model, ids, attention_mask=mask, use_cache=False)
    hook.remove()
    moved = list(_tensors(send_to_device(seen[0], "meta")))
    assert len(moved) == len(list(_tensors(seen[0]))) > 10
    assert {str(tensor.device) for tensor in moved} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kv_format", ["float", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_on_two_devices(name, kv_format):
    """A padded prompt, single tokens, a reordered and cropped cache: equal to the model on one device."""
    whole = MODELS[name](torch.float64)
    split = type(whole)(whole.config).to(torch.float64).eval()
    split.load_state_dict(whole.state_dict())
    places = {module: 0 for module, _ in split.named_children()} | {
        f"model.{m}": 0 for m, _ in split.model.named_children()
    }
    del places["model"], places["model.layers"]
    layers = len(split.model.layers)
    last = ["model.norm", "lm_head", *(["model.hc_head"] if hasattr(split.model, "hc_head") else [])]
    places |= {f"model.layers.{i}": int(i >= SECOND_HALF) for i in range(layers)} | dict.fromkeys(last, 1)
    split = dispatch_model(split, places, skip_keys=split._skip_keys_device_placement)
    ids, mask = v41.some_ids(2, 24, seed=1), torch.ones(2, 21, dtype=torch.long)
    mask[0, :3] = 0
    found = []
    for model, device in ((whole, "cpu"), (split, "cuda:0")):
        cache = Dsv4Cache(model.config, kv_format)
        logits = [model(ids[:, :21].to(device), attention_mask=mask.to(device), cache=cache).logits]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.crop(-2)
        for token in range(21, 24):
            longer = torch.ones(2, cache.columns + 1, dtype=torch.long)
            longer[1, :3] = 0
            logits.append(
                model(ids[:, token : token + 1].to(device), attention_mask=longer.to(device), cache=cache).logits
            )
        real = mask.bool().to(logits[0].device)
        found.append(torch.cat([logits[0][real], *[step[:, -1] for step in logits[1:]]]).detach().cpu())
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=0)
