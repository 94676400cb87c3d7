"""What training asks of the real model: every parameter routed, loads counted without padding, vision that can freeze."""

import pytest
import torch

import modeling_dsv4
from modeling_dsv4.training import Dsv4Optimizer, build_param_groups
from modeling_dsv4.training.router_load import RouterLoadCounter
from tests.golden_cases import CHECKPOINT_V41, load_case

FLOAT = modeling_dsv4.Dsv4QuantizationConfig(dequantize=True)


@pytest.fixture
def model():
    return modeling_dsv4.Dsv41ForConditionalGeneration.from_pretrained(
        CHECKPOINT_V41, dtype=torch.float32, quantization_config=FLOAT
    ).train()


def test_every_parameter_is_in_one_group_and_one_step_moves_the_loss(model):
    groups = build_param_groups(model, report=False)
    routed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(routed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    optimizer = Dsv4Optimizer(groups)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    ids = torch.as_tensor(load_case("text_17")["input_ids"]).long()
    losses = []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(model, side):
    """The model shifts rows inside, so the loads must follow its own mask, not the caller's columns."""
    ids = torch.as_tensor(load_case("text_17")["input_ids"]).long()
    pads = torch.full((1, 5), 2)
    padded = torch.cat([pads, ids] if side == "left" else [ids, pads], dim=1)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)][:: 1 if side == "left" else -1], dim=1)
    loads = []
    for inputs in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        counter = RouterLoadCounter(model)
        counter.attach()
        model(**inputs)
        loads.append({name: load.clone() for name, load in counter.loads.items()})
        counter.detach()
    for name, alone in loads[0].items():
        assert int(alone.sum()) == ids.numel() * model.config.text_config.num_experts_per_tok
        assert torch.equal(alone, loads[1][name]), name


def test_frozen_vision_trains_only_its_norm_and_the_projector(model):
    case = load_case("image")
    inputs = {
        "input_ids": torch.as_tensor(case["input_ids"]).long(),
        "attention_mask": torch.as_tensor(case["attention_mask"]).long(),
        "pixel_values": torch.as_tensor(case["pixel_values"]),
        "image_grid_hw": torch.as_tensor(case["image_grid_hws"]).long(),
    }
    model.model.vision_tower.freeze_vision = True
    frozen = model(**inputs).logits
    frozen.square().mean().backward()
    trained = {n for n, p in model.model.vision_tower.named_parameters() if p.grad is not None}
    assert trained == {"norm.weight"}
    assert model.model.multi_modal_projector.linear_1.weight.grad is not None
    model.model.vision_tower.freeze_vision = False
    model(**inputs).logits.square().mean().backward()
    assert all(p.grad is not None for p in model.model.vision_tower.parameters())
