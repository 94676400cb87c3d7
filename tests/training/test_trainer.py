"""`Dsv4Trainer` and the factory inside transformers' Trainer: equality of the routes in, resume, refusals, settings."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from modeling_dsv4 import Dsv41ForCausalLM
from modeling_dsv4.training import (
    Dsv4Optimizer,
    Dsv4OptimizerFactory,
    Dsv4Trainer,
    RouterBiasCallback,
    VisionScheduleCallback,
)
from modeling_dsv4.training.trainer import parse_optim_args, refuse_flattening_backends, settings_from_arguments
from tests.modeling.tiny_model import new_model, some_ids

from .ranks import on_ranks
from .toy_model import ToyData, ToyModel


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "remove_unused_columns": False,
        **changes,
    }
    return TrainingArguments(**settings)


def train(folder, cls=Dsv4Trainer, dtype=torch.float32, resume=None, callbacks=None, model=None, rows=48, **options):
    changes = {k: options.pop(k) for k in list(options) if k in TrainingArguments.__dataclass_fields__}
    model = ToyModel().to(dtype) if model is None else model
    trainer = cls(model, arguments(folder, **changes), train_dataset=ToyData(rows), callbacks=callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_trains_and_the_factory_in_plain_trainer_gives_the_same_weights(tmp_path):
    ours = train(tmp_path)
    assert isinstance(ours.optimizer.optimizer, Dsv4Optimizer)
    plain = train(tmp_path, Trainer, optimizer_cls_and_kwargs=(Dsv4OptimizerFactory, {"lr": 5e-3}))
    assert_equal(weights(ours), weights(plain))


def test_it_learns(tmp_path):
    trainer = train(tmp_path, max_steps=80, rows=8, learning_rate=0.02)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.3 * losses[0], losses[::10]


def test_the_vision_rate_is_logged_beside_the_text_rate(tmp_path):
    log = train(tmp_path, max_steps=2, optimizer_settings={"vision_lr_scale": 0.25}).state.log_history[0]
    assert log["learning_rate_vision"] == pytest.approx(0.25 * log["learning_rate"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_at_a_checkpoint_equals_the_straight_run_bitwise(tmp_path, dtype):
    straight = train(tmp_path / "a", dtype=dtype, save_strategy="steps", save_steps=3, gradient_accumulation_steps=2)
    resumed = train(
        tmp_path / "b", dtype=dtype, resume=str(tmp_path / "a" / "checkpoint-3"), gradient_accumulation_steps=2
    )
    assert_equal(weights(straight), weights(resumed))


def test_resume_under_another_routing_is_refused(tmp_path):
    train(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    settings = {"rules": {r"q_b_proj": {"row_splits": None}}}
    with pytest.raises(ValueError, match="another routing"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-3"), optimizer_settings=settings)


def test_an_optimizer_of_the_callers_is_kept(tmp_path):
    model = ToyModel()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = train(tmp_path, model=model, max_steps=1, optimizers=(own, None))
    assert trainer.optimizer.optimizer is own
    other = train(tmp_path, max_steps=1, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}))
    assert isinstance(other.optimizer.optimizer, torch.optim.SGD)


def test_arguments_count_only_where_the_user_changed_them(tmp_path):
    assert settings_from_arguments(arguments(tmp_path)) == {"lr": 5e-3}
    changed = arguments(tmp_path, weight_decay=0.05, adam_beta2=0.99, optim_args="vision_lr_scale=0.2,lora=muon_b")
    assert settings_from_arguments(changed) == {
        "lr": 5e-3,
        "weight_decay": 0.05,
        "adamw": {"betas": (0.9, 0.99)},
        "vision_lr_scale": 0.2,
        "lora": "muon_b",
    }
    assert settings_from_arguments(arguments(tmp_path, adam_epsilon=1e-6))["adamw"] == {"eps": 1e-6}
    groups = Dsv4OptimizerFactory()(ToyModel(), report=False, **settings_from_arguments(changed)).param_groups
    assert {g["weight_decay"] for g in groups if g["algorithm"] == "muon"} == {0.05}
    assert {g["betas"] for g in groups if g["algorithm"] == "adamw"} == {(0.9, 0.99)}


def test_optim_args():
    assert parse_optim_args(None) == {}
    assert parse_optim_args(" ns_dtype=float32, sinkhorn_iters=5,master=None,nesterov=False") == {
        "ns_dtype": "float32",
        "sinkhorn_iters": 5,
        "master": None,
        "nesterov": False,
    }
    with pytest.raises(ValueError, match="'lora'"):
        parse_optim_args("lora")
    with pytest.raises(TypeError, match="vision_scale"):
        Dsv4OptimizerFactory()(ToyModel(), lr=1.0, report=False, vision_scale=0.1)


def test_pure_bfloat16_weights_are_warned_about(monkeypatch):
    from modeling_dsv4.training import trainer

    said = []
    monkeypatch.setattr(trainer.logger, "warning", said.append)
    Dsv4OptimizerFactory()(ToyModel().bfloat16(), lr=1e-3, report=False)
    assert len(said) == 1 and "master='auto'" in said[0]
    Dsv4OptimizerFactory()(ToyModel().bfloat16(), lr=1e-3, report=False, master="auto")
    Dsv4OptimizerFactory()(ToyModel(), lr=1e-3, report=False)
    assert len(said) == 1


def test_peft_adapters_train_and_the_load_is_counted_through_the_wrapper(tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        target_modules=["q_b_proj", "o_b_proj", "embed_tokens"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["lm_head"],
    )
    model = get_peft_model(ToyModel(), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    counter = RouterBiasCallback(speed=0.0)
    trainer = train(tmp_path, model=model, max_steps=3, callbacks=[counter], optimizer_settings={"lora": "muon_b"})
    names = [name for group in trainer.optimizer.param_groups for name in group["names"]]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == len(set(names)) == len(trained)
    heads = next(g for g in trainer.optimizer.param_groups if g.get("row_splits"))
    assert heads["names"] == [f"layers.{i}.self_attn.q_b_proj.lora_B.default.weight" for i in range(2)]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trained
    # Four rows of eight, six, ... tokens: padding is read from the arguments of PEFT's own forward.
    assert all(0 < load.sum() < 2 * 4 * 8 for load in counter.last_loads.values())


def state_of_accelerate(monkeypatch, **values):
    from accelerate import state

    class Fake(SimpleNamespace):
        pass

    def make():
        return Fake(**values)

    make._shared_state = {"something": True}
    monkeypatch.setattr(state, "AcceleratorState", make)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"distributed_type": "DistributedType.FSDP", "fsdp_plugin": SimpleNamespace(fsdp_version=1)},
            "FSDP1 flattens",
        ),
        (
            {"distributed_type": "DistributedType.DEEPSPEED", "deepspeed_plugin": SimpleNamespace(zero_stage=2)},
            "ZeRO stage 2 flattens",
        ),
        ({"distributed_type": "DistributedType.FSDP", "fsdp_plugin": SimpleNamespace(fsdp_version=2)}, None),
        ({"distributed_type": "DistributedType.DEEPSPEED", "deepspeed_plugin": SimpleNamespace(zero_stage=0)}, None),
    ],
)
def test_backends_that_flatten_are_refused(monkeypatch, values, message):
    state_of_accelerate(monkeypatch, **values)
    if message is None:
        refuse_flattening_backends(ToyModel())
    else:
        with pytest.raises(ValueError, match=message):
            refuse_flattening_backends(ToyModel())


def run_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    try:
        refuse_flattening_backends(FullyShardedDataParallel(ToyModel(), device_id=torch.device("cpu")))
    except ValueError as error:
        return str(error)


def test_fsdp1_modules_are_refused():
    assert all("FSDP1 flattens" in message for message in on_ranks(2, run_fsdp1))


# -- two ranks --------------------------------------------------------------------------------------------------------


def run_trainer_ddp(folder):
    folder = f"{folder}/ddp"
    straight = train(folder, save_strategy="steps", save_steps=3, per_device_train_batch_size=2)
    assert straight.args.world_size == 2
    after = weights(straight)
    resumed = train(folder + "2", resume=f"{folder}/checkpoint-3", per_device_train_batch_size=2)
    return after, all(torch.equal(after[name], w) for name, w in weights(resumed).items())


def test_trainer_on_two_ddp_ranks_resumes_bitwise(tmp_path):
    (first, equal), (second, again) = on_ranks(2, run_trainer_ddp, str(tmp_path))
    assert_equal(first, second)
    assert equal and again


def batches(steps):
    data = ToyData()
    for step in range(steps):
        rows = [data[(4 * step + i) % len(data)] for i in range(4)]
        yield {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def full_batch_steps(model, optimizer, share=slice(None)):
    """Ten steps on the mean of row losses, so that halves of a batch average to the whole."""
    for batch in batches(10):
        batch = {key: value[share] for key, value in batch.items()}
        rows = [model(**{k: v[i : i + 1] for k, v in batch.items()})["loss"] for i in range(len(batch["labels"]))]
        optimizer.zero_grad()
        torch.stack(rows).mean().backward()
        optimizer.step()


def run_fsdp2_training():
    model = ToyModel()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Dsv4OptimizerFactory()(model, lr=5e-3, report=False)
    rank = dist.get_rank()
    full_batch_steps(model, optimizer, slice(2 * rank, 2 * rank + 2))
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_fsdp2_training_equals_one_process():
    model = ToyModel()
    full_batch_steps(model, Dsv4OptimizerFactory()(model, lr=5e-3, report=False))
    for result in on_ranks(2, run_fsdp2_training):
        for name, p in model.named_parameters():
            assert (result[name] - p.detach()).abs().max() < 1e-5, name


def pretend_accelerator_fsdp2(layers=("Layer",)):
    """Accelerate starts FSDP for accelerators only: tell its shared state that this CPU process is one of FSDP2.

    `layers` names the classes to shard; `None` leaves it to accelerate, which asks the model.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=layers and list(layers),
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def run_accelerate_fsdp2():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    pretend_accelerator_fsdp2()
    model = ToyModel()
    model, optimizer = accelerator.prepare(model, Dsv4OptimizerFactory()(model, lr=5e-3, report=False))
    rank = dist.get_rank()
    full_batch_steps(model, optimizer, slice(2 * rank, 2 * rank + 2))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_the_optimizer_made_before_accelerate_shards_equals_one_process():
    model = ToyModel()
    full_batch_steps(model, Dsv4OptimizerFactory()(model, lr=5e-3, report=False))
    for result in on_ranks(2, run_accelerate_fsdp2):
        for name, p in model.named_parameters():
            assert (result[name] - p.detach()).abs().max() < 1e-5, name


def run_trainer_fsdp2(folder):
    def make(**changes):
        from accelerate.state import AcceleratorState, PartialState

        PartialState._shared_state.clear()
        AcceleratorState._shared_state.clear()
        args = arguments(folder, per_device_train_batch_size=2, **changes)
        callbacks = [RouterBiasCallback(), VisionScheduleCallback(4)]
        trainer = Dsv4Trainer(ToyModel(), args, train_dataset=ToyData(), callbacks=callbacks)
        pretend_accelerator_fsdp2()
        trainer.is_fsdp_enabled = True
        return trainer

    def whole(model):
        values = dict(model.named_parameters()) | dict(model.named_buffers())
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in values.items()}

    straight = make(save_strategy="steps", save_steps=3)
    straight.train()
    assert all(isinstance(p, DTensor) for p in straight.model.parameters())
    resumed = make()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return whole(straight.model), whole(resumed.model)


def test_trainer_under_fsdp2_resumes_bitwise_from_the_frozen_vision_phase(tmp_path):
    results = on_ranks(2, run_trainer_fsdp2, str(tmp_path))
    for straight, resumed in results:
        assert_equal(straight, resumed)
    assert_equal(results[0][0], results[1][0])
    assert any(b.any() for name, b in results[0][0].items() if "e_score_correction_bias" in name)


@pytest.mark.parametrize("shards", [None, pytest.param("300KB", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [Trainer, Dsv4Trainer])
def test_a_real_model_resumes_from_its_checkpoint(cls, shards, tmp_path, monkeypatch):
    """Checkpoints have released names, which Trainer reads with `load_state_dict`: nothing may stay untrained."""
    if shards:
        save = Dsv41ForCausalLM.save_pretrained
        monkeypatch.setattr(
            Dsv41ForCausalLM,
            "save_pretrained",
            lambda self, *args, **kw: save(self, *args, **kw, max_shard_size=shards),
        )
    data = [{"input_ids": ids, "labels": ids} for ids in (some_ids(1, 12, seed=seed)[0] for seed in range(16))]
    options = {"optimizer_cls_and_kwargs": (Dsv4OptimizerFactory, {"lr": 1e-2})} if cls is Trainer else {}

    def run(folder, steps, resume=None, **changes):
        settings = arguments(folder, max_steps=steps, lr_scheduler_type="constant", **changes)
        trainer = cls(new_model(seed=int(resume is not None)), settings, train_dataset=data, **options)
        trainer.train(resume_from_checkpoint=resume)
        for entry in trainer.state.log_history:
            assert entry.get("loss_lm", entry.get("loss")) == pytest.approx(entry.get("loss"), abs=1e-4)
        return weights(trainer)

    straight = run(tmp_path / "a", 4, save_strategy="steps", save_steps=2)
    before = weights(SimpleNamespace(model=new_model()))
    assert {name for name in before if torch.equal(straight[name], before[name])} == {
        n for n in before if ".indexer." in n
    }
    assert len(list((tmp_path / "a" / "checkpoint-2").glob("*.safetensors"))) > (3 if shards else 0)
    assert_equal(straight, run(tmp_path / "b", 4, resume=str(tmp_path / "a" / "checkpoint-2")))


def test_trl_takes_the_factory(tmp_path):
    """The tiny V4.1 under `SFTTrainer`: the losses of `Trainer`, and every weight that has a gradient moves."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = {"input_ids": [some_ids(1, 12, seed=seed)[0].tolist() for seed in range(4)]}
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), pad_token="a", eos_token="b"
    )
    settings = dict(optimizer_cls_and_kwargs=(Dsv4OptimizerFactory, {"lr": 1e-2}))
    before = weights(SimpleNamespace(model=new_model()))
    models = [new_model(), new_model()]
    for model in models:
        # TRL sums the loss in another order; no rounding of the cache may tip at that.
        model.config.get_text_config().cache_rounding = False
    options = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    config = trl.SFTConfig(str(tmp_path), disable_tqdm=True, gradient_checkpointing=False, bf16=False, **options)
    data = datasets.Dataset.from_dict(rows)
    under_trl = trl.SFTTrainer(models[0], config, train_dataset=data, processing_class=words, **settings)
    under_trl.train()
    assert isinstance(under_trl.optimizer.optimizer, Dsv4Optimizer)
    plain_config = TrainingArguments(str(tmp_path), disable_tqdm=True, gradient_checkpointing=False, **options)
    plain = Trainer(models[1], plain_config, train_dataset=data, data_collator=_labelled, **settings)
    plain.train()
    # The weights need not be the same bits.
    losses = [trainer.state.log_history[-1]["train_loss"] for trainer in (under_trl, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    after = weights(under_trl)
    unmoved = {name for name in after if torch.equal(after[name], before[name])}
    assert unmoved == {name for name in after if ".indexer." in name}  # the language-model loss never reaches indexers


def _labelled(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
