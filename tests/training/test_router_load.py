"""Counting picks: the bias rule against stored cases, and what is and is not counted."""

import pytest
import torch

from modeling_dsv4.training.router_load import RouterLoadCounter, bias_update

from .goldens import cases, tensor
from .toy_model import EXPERTS, IMAGE_TOKEN, TOP_K, Router, ToyData, ToyModel


@pytest.mark.parametrize("case", cases("bias"), ids=lambda c: c["id"])
def test_stored_cases(case):
    before, counts = tensor(case, "b0"), tensor(case, "counts").to(torch.int64)
    torch.testing.assert_close(
        before + bias_update(counts, case["speed"]).double(), tensor(case, "b"), rtol=0, atol=1e-9
    )


def test_equal_and_absent_loads_change_nothing_even_when_the_mean_is_no_float():
    load = torch.full((2, 7), 2**25 + 1, dtype=torch.int64)
    load[1] = 0
    assert not bias_update(load, 1e-3).any()


def batch(rows=4):
    data = ToyData()
    return {key: torch.stack([data[i][key] for i in range(rows)]) for key in data[0]}


def counted(model, inputs, passes=1, **forward):
    counter = RouterLoadCounter(model)
    counter.attach()
    for _ in range(passes):
        model(**inputs, **forward)["loss"].backward()
    counter.detach()
    return counter


def test_every_real_token_is_counted_once_in_its_modality():
    model, inputs = ToyModel(), batch()
    counter = counted(model, inputs)
    real = inputs["attention_mask"].bool()
    image = (inputs["input_ids"] == IMAGE_TOKEN) & real
    assert set(counter.loads) == {"layers.0.mlp.gate", "layers.1.mlp.gate"}
    for load in counter.loads.values():
        assert load.shape == (2, EXPERTS)
        assert load[0].sum() == TOP_K * (real & ~image).sum()
        assert load[1].sum() == TOP_K * image.sum() > 0


def test_the_counts_are_the_picks():
    model, inputs = ToyModel(), batch()
    picks = []
    model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: picks.append(output[2]))
    counter = counted(model, inputs)
    expected = torch.zeros(2, EXPERTS, dtype=torch.int64)
    tokens = zip(inputs["input_ids"].flatten(), inputs["attention_mask"].flatten(), picks[0], strict=True)
    for token, real, chosen in tokens:
        for expert in chosen:
            expected[int(token == IMAGE_TOKEN), expert] += int(real)
    assert torch.equal(counter.loads["layers.0.mlp.gate"], expected)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_checkpointing_counts_once(kind):
    plain = counted(ToyModel(), batch()).loads
    recomputed = counted(ToyModel(checkpointing=kind), batch()).loads
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_micro_batches_add_up_and_reset_starts_again():
    once = counted(ToyModel(), batch()).loads
    counter = counted(ToyModel(), batch(), passes=3)
    assert all(torch.equal(counter.loads[name], 3 * once[name]) for name in once)
    counter.reset()
    assert not any(load.any() for load in counter.loads.values())


def test_evaluation_and_generation_do_not_count():
    model, inputs = ToyModel(), batch()
    counter = RouterLoadCounter(model)
    counter.attach()
    model.eval()
    model(**inputs)
    model.train()
    with torch.no_grad():
        model(**inputs)
    model.layers[0].mlp.gate(torch.randn(5, 16))  # a router on its own, outside a forward of the model
    assert not any(load.any() for load in counter.loads.values())
    counter.detach()
    model(**inputs)
    assert not any(load.any() for load in counter.loads.values())


def test_a_forward_that_raises_leaves_nothing_on():
    model = ToyModel()
    counter = RouterLoadCounter(model)
    counter.attach()
    with pytest.raises(IndexError):
        model(torch.tensor([[1000]]))
    model.layers[0].mlp.gate(torch.randn(5, 16))
    assert not any(load.any() for load in counter.loads.values())


def test_masks_may_come_by_position_and_a_token_mask_wins():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = MaskedRouter()

        def forward(self, x, attention_mask):
            mask = torch.tensor([True, False, True])
            return self.gate(x, torch.tensor([False, False, True]), mask)

    class MaskedRouter(Router):
        def forward(self, x, image_mask=None, token_mask=None):
            return super().forward(x, image_mask)

    model = Outer()
    counter = RouterLoadCounter(model)
    counter.attach()
    model(torch.randn(3, 16), torch.tensor([[1, 1, 1, 0]]))
    assert counter.loads["gate"].sum(1).tolist() == [TOP_K, TOP_K]


def test_a_mask_of_another_size_is_refused():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Router()

        def forward(self, x, attention_mask):
            return self.gate(x)

    model = Outer()
    counter = RouterLoadCounter(model)
    counter.attach()
    with pytest.raises(ValueError, match="3 tokens, but the padding mask has 4"):
        model(torch.randn(3, 16), torch.tensor([[1, 1, 1, 0]]))


def test_one_modality_counts_all_tokens_as_text():
    model = ToyModel()
    for layer in model.layers:
        layer.mlp.gate = Router(modalities=1)
    counter = counted(model, batch())
    for load in counter.loads.values():
        assert load.shape == (1, EXPERTS) and load.sum() == TOP_K * batch()["attention_mask"].sum()


def test_unfit_routers_are_refused():
    with pytest.raises(ValueError, match="nothing to balance"):
        RouterLoadCounter(torch.nn.Linear(2, 2))
    model = ToyModel()
    gate = model.layers[0].mlp.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    with pytest.raises(ValueError, match="bfloat16"):
        RouterLoadCounter(model)
    del gate.e_score_correction_bias
    gate.register_parameter("e_score_correction_bias", torch.nn.Parameter(torch.zeros(EXPERTS)))
    with pytest.raises(ValueError, match="is a Parameter"):
        RouterLoadCounter(model)
