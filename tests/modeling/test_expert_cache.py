"""Unpacked experts that are kept: the same bytes, within a budget, never stale."""

import copy
import pickle

import pytest
import torch

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM
from modeling_dsv4.expert_cache import UnpackedExperts
from modeling_dsv4.moe import Dsv4PackedExperts
from tests.released_folders import small_folder

CPU = torch.device("cpu")
IDS = torch.arange(20, 37)[None]
MATRIX = 4 * 4 * 4  # bytes of a float32 matrix of the tests below


def source(value=0):
    return [torch.full((4, 4), value, dtype=torch.int8)]


def unpacked_of(cache, packed, made, dtype=torch.float32):
    """Ask for `packed` in floats; `made` counts how often it was unpacked."""
    return cache.get(packed, CPU, dtype, lambda: made.append(1) or packed[0].to(dtype))


def test_least_recently_used_matrices_leave_first():
    cache, made = UnpackedExperts(2 * MATRIX), []
    a, b, c = source(1), source(2), source(3)
    for packed in (a, b, a, c):  # c pushes b out, which was used before a
        assert torch.equal(unpacked_of(cache, packed, made), packed[0].float())
    assert [cache.holds(packed, CPU, torch.float32) for packed in (a, b, c)] == [True, False, True]
    assert len(made) == 3 and cache.nbytes == 2 * MATRIX
    unpacked_of(cache, b, made)
    assert not cache.holds(a, CPU, torch.float32) and len(made) == 4


@pytest.mark.parametrize(("max_bytes", "kept"), [(0, 0), (MATRIX - 1, 0), (MATRIX, 1)])
def test_nothing_beyond_the_bound_is_kept(max_bytes, kept):
    cache, made = UnpackedExperts(max_bytes), []
    packed = source()
    unpacked_of(cache, packed, made)
    unpacked_of(cache, packed, made)
    assert len(made) == 2 - kept and cache.nbytes == kept * MATRIX


def test_dtypes_are_kept_apart():
    cache, made = UnpackedExperts(1 << 20), []
    packed = source(5)
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16):
            assert unpacked_of(cache, packed, made, dtype).dtype == dtype
    assert len(made) == 2


def test_a_changed_or_replaced_source_is_unpacked_anew():
    cache, made = UnpackedExperts(1 << 20), []
    packed = source(1)
    unpacked_of(cache, packed, made)
    packed[0].fill_(2)
    assert (unpacked_of(cache, packed, made) == 2).all()
    assert (unpacked_of(cache, source(3), made) == 3).all()
    assert len(made) == 3 and cache.nbytes == 2 * MATRIX


def test_copies_are_empty_and_share_one_budget():
    cache = UnpackedExperts(MATRIX)
    unpacked_of(cache, source(), [])
    for twin in (*copy.deepcopy([cache, cache]), pickle.loads(pickle.dumps(cache))):
        assert (twin.max_bytes, twin.nbytes) == (MATRIX, 0)
    first, second = copy.deepcopy([cache, cache])
    assert first is second


def test_a_matrix_made_in_inference_mode_serves_autograd():
    cache = UnpackedExperts(1 << 20)
    with torch.inference_mode():
        matrix = unpacked_of(cache, source(1), [])
    x = torch.ones(4, 4, requires_grad=True)
    (x @ matrix).sum().backward()
    assert x.grad.any()


# ---- in a model ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder().write(tmp_path_factory.mktemp("small") / "ckpt")


def load(folder, **options):
    config = Dsv4QuantizationConfig(**options)
    return Dsv41ForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def banks(model):
    return [module for module in model.modules() if isinstance(module, Dsv4PackedExperts)]


def test_results_do_not_depend_on_the_budget(folder):
    found = []
    for size in (0, 40_000, "1GB"):  # nothing, a few matrices, all
        model = load(folder, expert_cache_size=size)
        caches = {id(bank.unpacked) for bank in banks(model)}
        assert len(caches) == 1 and len(banks(model)) == 4
        tokens = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=2)
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = model(IDS, inputs_embeds=x).logits
        logits.square().sum().backward()
        cache = banks(model)[0].unpacked
        assert cache.nbytes <= cache.max_bytes and bool(cache.nbytes) == bool(size)
        found.append((tokens, logits, x.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert found[0][2].any()


def test_changed_bytes_are_seen(folder):
    model = load(folder)
    with torch.no_grad():
        before = model(IDS).logits
        for name in banks(model)[0].host_names():
            if name.endswith("down_proj.weight"):
                banks(model)[0].host_tensor(name).zero_()
        assert not torch.equal(model(IDS).logits, before)
        model.load_state_dict(load(folder).state_dict())
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("size", [-1, True, "much", None, 1.5, "0"])
def test_wrong_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"expert_cache_size is .*; accepted: bytes >= 0, or a text as '4GB'"):
        Dsv4QuantizationConfig(expert_cache_size=size)


def test_the_setting_is_not_written_to_a_folder(folder, tmp_path):
    model = load(folder, expert_cache_size="3MB")
    assert banks(model)[0].unpacked.max_bytes == 3_000_000
    model.save_pretrained(tmp_path)
    assert "expert_cache_size" not in (tmp_path / "config.json").read_text()
