"""The three callbacks inside Trainer, on one process and on two DDP ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from modeling_dsv4.training import QatScheduleCallback, RouterBiasCallback, VisionScheduleCallback
from modeling_dsv4.training.callbacks import decay_start

from .ranks import on_ranks
from .test_trainer import arguments, train
from .toy_model import EXPERTS, IMAGE_TOKEN, TOP_K, ToyModel

# -- router biases ----------------------------------------------------------------------------------------------------


def biases(model):
    return {name: b.clone() for name, b in model.named_buffers() if "e_score_correction_bias" in name}


class Recorder(TrainerCallback):
    """Keeps the loads of every step, and what the biases were."""

    def __init__(self, callback):
        self.callback, self.loads, self.biases = callback, [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.loads.append({k: v.clone() for k, v in self.callback.last_loads.items()})
        self.biases.append(biases(model))


def test_biases_follow_the_loads_of_each_step(tmp_path):
    callback = RouterBiasCallback(speed=1e-2)
    recorder = Recorder(callback)
    trainer = train(tmp_path, callbacks=[callback, recorder], gradient_accumulation_steps=2, max_steps=4)
    expected = {name: torch.zeros(EXPERTS) for name in biases(trainer.model)}
    for loads, after in zip(recorder.loads, recorder.biases, strict=True):
        for name, load in loads.items():
            for part, suffix in zip(load.double(), ("", "_vl"), strict=True):
                bias = expected[f"{name}.e_score_correction_bias{suffix}"]
                bias += 1e-2 * torch.sign(part.mean() - part).float()
        assert after.keys() == expected.keys()
        for name, bias in expected.items():
            torch.testing.assert_close(after[name], bias, rtol=0, atol=1e-7)
    # Two micro-batches of four rows; evaluation between would not show.
    text = {int(load[0].sum()) for load in recorder.loads[0].values()}
    assert len(text) == 1 and 0 < text.pop() < 2 * 4 * 8 * TOP_K
    assert callback.counter._handles == []


def test_biases_are_saved_with_the_model_and_resume_exactly(tmp_path):
    straight = train(tmp_path, callbacks=[RouterBiasCallback()], save_strategy="steps", save_steps=3)
    resumed = train(tmp_path / "b", callbacks=[RouterBiasCallback()], resume=str(tmp_path / "checkpoint-3"))
    left, right = biases(straight.model), biases(resumed.model)
    assert any(b.any() for b in left.values()) and all(torch.equal(left[name], right[name]) for name in left)


def test_evaluation_between_steps_does_not_count(tmp_path):
    loads = []
    for strategy in ("no", "steps"):
        recorder = Recorder(RouterBiasCallback())
        options = {"eval_strategy": strategy, "eval_steps": 1} if strategy == "steps" else {}
        from .toy_model import ToyData

        train(tmp_path, callbacks=[recorder.callback, recorder], max_steps=3, eval_dataset=ToyData(8), **options)
        loads.append(recorder.loads)
    for one, other in zip(*loads, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_skipped_step_changes_no_bias():
    model = ToyModel()
    callback = RouterBiasCallback()
    callback.on_train_begin(None, None, None, model=model)
    ids = torch.randint(0, 31, (2, 8))
    model(ids, labels=ids)["loss"].backward()
    callback.on_optimizer_step(None, None, None, optimizer=SimpleNamespace(step_was_skipped=True))
    assert not any(b.any() for b in biases(model).values())
    assert not any(load.any() for load in callback.counter.loads.values())
    model(ids, labels=ids)["loss"].backward()
    callback.on_optimizer_step(None, None, None, optimizer=SimpleNamespace(step_was_skipped=False))
    assert any(b.any() for b in biases(model).values())
    # No image token was there: the image biases stay.
    assert not any(b.any() for name, b in biases(model).items() if name.endswith("_vl"))


def run_router_ddp(folder):
    recorder = Recorder(RouterBiasCallback())
    trainer = train(
        f"{folder}/{dist.get_rank()}",
        callbacks=[recorder.callback, recorder],
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_steps=3,
    )
    return biases(trainer.model), recorder.loads[0]


def test_two_ranks_share_their_loads(tmp_path):
    (first, loads), (second, again) = on_ranks(2, run_router_ddp, str(tmp_path))
    assert any(b.any() for b in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(loads[name], again[name]) for name in loads)
    # 2 ranks x 2 micro-batches x 2 rows = the 8 rows that one process takes with batches of 4.
    recorder = Recorder(RouterBiasCallback())
    train(tmp_path / "one", callbacks=[recorder.callback, recorder], gradient_accumulation_steps=2, max_steps=1)
    for name, load in recorder.loads[0].items():
        assert loads[name].sum() == load.sum()
        assert torch.equal(loads[name].sum(1), load.sum(1))


def test_a_negative_speed_is_refused():
    with pytest.raises(ValueError, match="speed"):
        RouterBiasCallback(speed=-1)


# -- vision schedule --------------------------------------------------------------------------------------------------


class VisionWatch(TrainerCallback):
    """Which vision parameters have a gradient when the step is taken, and their values after it."""

    def __init__(self):
        self.gradients, self.values = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        model = getattr(model, "module", model)
        self.gradients.append({n for n, p in model.named_parameters() if "vision" in n and p.grad is not None})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model = getattr(model, "module", model)
        self.values.append({n: p.detach().clone() for n, p in model.named_parameters()})


BODY = {
    "vision_tower.patch_embed.weight",
    "vision_tower.patch_embed.bias",
    "vision_tower.layers.0.weight",
    "vision_tower.layers.0.bias",
}
NORM = {"vision_tower.norm.weight"}


def assert_schedule(watch, start):
    assert [g == (NORM if step < start else BODY | NORM) for step, g in enumerate(watch.gradients)] == [True] * len(
        watch.gradients
    )
    for step in range(1, len(watch.values)):
        before, after = watch.values[step - 1], watch.values[step]
        moved = {name for name in BODY | NORM if not torch.equal(before[name], after[name])}
        assert moved == (NORM if step < start else BODY | NORM)


@pytest.mark.parametrize("declares", [True, False])
def test_the_body_joins_at_the_step_the_norm_and_projector_train_always(tmp_path, declares):
    model = ToyModel()
    if not declares:
        del model.vision_tower.freeze_vision
        type(model.vision_tower).forward, saved = plain_vision_forward, type(model.vision_tower).forward
    try:
        watch = VisionWatch()
        train(
            tmp_path,
            model=model,
            callbacks=[VisionScheduleCallback(3), watch],
            lr_scheduler_type="constant",
            max_steps=5,
        )
    finally:
        if not declares:
            type(model.vision_tower).forward = saved
    assert_schedule(watch, 3)
    assert all(p.requires_grad for p in model.parameters())
    assert not getattr(model.vision_tower, "freeze_vision", False)


def plain_vision_forward(self, pixels):
    return self.norm(self.layers[0](self.patch_embed(pixels)))


def test_decay_start_is_read_from_the_schedule(tmp_path):
    watch = VisionWatch()
    train(
        tmp_path,
        callbacks=[VisionScheduleCallback(), watch],
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 2},
        max_steps=6,
    )
    assert [len(g) for g in watch.gradients] == [1] * 4 + [5] * 2
    with pytest.raises(ValueError, match="num_decay_steps"):
        decay_start(arguments(tmp_path), TrainerState())


def test_resume_in_either_phase_equals_the_straight_run(tmp_path):
    options = {"lr_scheduler_type": "constant", "max_steps": 6}
    straight = train(tmp_path, callbacks=[VisionScheduleCallback(3)], save_strategy="steps", save_steps=2, **options)
    for step in (2, 4):
        folder = str(tmp_path / f"checkpoint-{step}")
        resumed = train(tmp_path / "b", callbacks=[VisionScheduleCallback(3)], resume=folder, **options)
        for p, q in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(p, q)


def run_vision_ddp(folder):
    watch = VisionWatch()
    trainer = train(
        f"{folder}/{dist.get_rank()}",
        callbacks=[VisionScheduleCallback(2), watch],
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=True,
        max_steps=4,
    )
    assert trainer.args.world_size == 2
    return watch.gradients, watch.values


def test_ddp_ranks_stay_equal_through_the_switch(tmp_path):
    results = on_ranks(2, run_vision_ddp, str(tmp_path))
    watches = [SimpleNamespace(gradients=gradients, values=values) for gradients, values in results]
    for watch in watches:
        assert_schedule(watch, 2)
    for one, other in zip(watches[0].values, watches[1].values, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def ddp_arguments(tmp_path, **changes):
    from transformers.training_args import ParallelMode

    values = {
        "parallel_mode": ParallelMode.DISTRIBUTED,
        "ddp_find_unused_parameters": None,
        "gradient_checkpointing": False,
        "lr_scheduler_kwargs": None,
        **changes,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("changes", "declares", "message"),
    [
        ({}, False, "needs a model with `freeze_vision`"),
        ({"ddp_find_unused_parameters": False}, True, "ddp_find_unused_parameters=True"),
        ({"gradient_checkpointing": True}, True, "ddp_find_unused_parameters=True"),
        ({}, True, None),
        ({"ddp_find_unused_parameters": True, "gradient_checkpointing": True}, True, None),
    ],
)
def test_what_ddp_would_get_wrong_is_refused(tmp_path, changes, declares, message):
    model = ToyModel()
    if not declares:
        del model.vision_tower.freeze_vision
    callback = VisionScheduleCallback(3)
    call = lambda: callback.on_train_begin(  # noqa: E731
        ddp_arguments(tmp_path, **changes), TrainerState(), TrainerControl(), model=model
    )
    if message is None:
        call()
        assert model.vision_tower.freeze_vision
    else:
        with pytest.raises(ValueError, match=message):
            call()


def test_wrong_starts_and_models_without_vision_are_refused(tmp_path):
    for start in (-1, "later"):
        with pytest.raises(ValueError, match="start"):
            VisionScheduleCallback(start)
    args = SimpleNamespace(**vars(ddp_arguments(tmp_path)), lr_scheduler_type="linear")
    with pytest.raises(ValueError, match="no trainable vision tower"):
        VisionScheduleCallback(3).on_train_begin(args, TrainerState(), None, model=torch.nn.Linear(2, 2))


# -- QAT schedule -----------------------------------------------------------------------------------------------------


def test_config_values_switch_at_their_steps_and_are_final_between_steps(tmp_path):
    model = ToyModel()
    between = []

    class Between(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            text = model.config.text_config
            between.append((text.cache_rounding, text.candidate_source_layer_id))

    train(
        tmp_path,
        model=model,
        callbacks=[
            QatScheduleCallback(2),
            QatScheduleCallback(3, {"candidate_source_layer_id": -1}),
            Between(),
        ],
        gradient_accumulation_steps=2,
        max_steps=5,
    )
    per_step = [(False, -1), (False, -1), (True, -1), (True, 1), (True, 1)]
    assert model.seen_config == [values for values in per_step for _ in range(2)]
    assert between == [(True, 1)] * 5
    assert (model.config.text_config.cache_rounding, model.config.text_config.candidate_source_layer_id) == (True, 1)


def test_a_resumed_run_starts_in_the_right_phase(tmp_path):
    train(tmp_path, callbacks=[QatScheduleCallback(4)], save_strategy="steps", save_steps=3, max_steps=6)
    model = ToyModel()
    train(
        tmp_path, model=model, callbacks=[QatScheduleCallback(4)], resume=str(tmp_path / "checkpoint-3"), max_steps=6
    )
    assert [rounding for rounding, _ in model.seen_config] == [False, True, True]


def test_unknown_attributes_and_negative_steps_are_refused():
    with pytest.raises(ValueError, match="start_step"):
        QatScheduleCallback(-1)
    with pytest.raises(ValueError, match="weight_rounding"):
        QatScheduleCallback(1, {"weight_rounding": False}).on_train_begin(None, None, None, model=ToyModel())


def test_image_tokens_are_there():
    # The schedules above need images in every batch.
    from .toy_model import ToyData

    assert all((row["input_ids"] == IMAGE_TOKEN).any() for row in ToyData(8).rows)
