"""What `Dsv4Trainer` logs beside the loss: its parts, loads of experts, sizes of updates; and the plot of it."""

import sys

import pytest
import torch

from modeling_dsv4.training import Dsv4Trainer, MtpScheduleCallback, TrainingReportCallback
from modeling_dsv4.training.report import draw_logs
from tests.modeling.tiny_model import IMAGE, new_model, some_ids
from tests.modeling.v4_models import load, with_mtp

from .test_trainer import arguments


def rows(count, image=True):
    data = []
    for seed in range(count):
        ids = some_ids(1, 12 + seed, seed=seed)[0]
        labels = ids.clone()
        labels[: 3 * (seed % 3)] = -100
        if image:
            ids[4:7], labels[4:7] = IMAGE, -100
        data.append({"input_ids": ids, "labels": labels})
    return data


def collate(rows):
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = (pad([row[k] for row in rows], True, fill) for k, fill in (("input_ids", 0), ("labels", -100)))
    mask = pad([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], True, 0)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def logs_of(folder, model, data, callbacks=(), **settings):
    settings = {"max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", **settings}
    trainer = Dsv4Trainer(
        model,
        arguments(folder, **settings),
        train_dataset=data,
        data_collator=collate,
        callbacks=list(callbacks),
        optimizer_settings={"report": False},
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_parts_add_up_to_the_loss(accumulation, tmp_path):
    model = new_model()
    model.config.text_config.balance_loss_weight = 0.1
    options = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    logs = logs_of(tmp_path, model, rows(8), max_steps=2, logging_steps=2, **options)
    assert len(logs) == 1 and logs[0]["loss_balance"] > 0.01
    assert logs[0]["loss_lm"] + logs[0]["loss_balance"] == pytest.approx(logs[0]["loss"], abs=1e-4)


def test_loads_and_updates(tmp_path):
    report = TrainingReportCallback()
    logs = logs_of(tmp_path, new_model(), rows(16), [report], max_steps=3)
    for entry in logs:
        assert 1 <= entry["expert_load_text"] <= 8 and 1 <= entry["expert_load_image"] <= 8
        assert "loss_balance" not in entry and entry["loss_lm"] == pytest.approx(entry["loss"], abs=1e-4)
        # 0.18 and the decay of the weights; less where gradients lack ranks: few tokens, rows without a token.
        assert 0.1 < entry["update_rms_muon"] < 0.2 and 0.1 < entry["update_rms_sinkhorn"] < 0.2
        assert 0.1 < entry["update_rms_adamw"] < 1.1


def test_the_load_of_a_router_that_sends_all_to_two_experts(tmp_path):
    model = new_model()
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias[:2] += 1e3
    entry = logs_of(tmp_path, model, rows(4, image=False), [TrainingReportCallback()], max_steps=1)[0]
    assert entry["expert_load_text"] == 4 and "expert_load_image" not in entry  # 2 of 8 experts take everything


def test_the_weight_of_the_mtp_loss_falls_when_the_rate_decays(tmp_path):
    model = load(with_mtp().write(tmp_path / "mtp"))
    before = model.config.mtp_loss_weight
    settings = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}}
    options = settings | {"max_steps": 4, "learning_rate": 1e-9}
    same_row = rows(1, image=False) * 16
    logs = logs_of(tmp_path / "out", model, same_row, [MtpScheduleCallback()], **options)
    weights = [entry["loss_mtp"] for entry in logs]
    assert before == 0.3 and weights[1] / weights[2] == pytest.approx(3, rel=1e-3)
    assert weights[0] == pytest.approx(weights[1], rel=1e-3) and weights[3] == pytest.approx(weights[2], rel=1e-3)
    assert model.config.mtp_loss_weight == 0.1
    with pytest.raises(ValueError, match="no next-next-token loss"):
        logs_of(tmp_path / "other", new_model(), rows(4), [MtpScheduleCallback(start=1)])


def test_the_plot(tmp_path, caplog, monkeypatch):
    history = [{"step": s, "loss": 1 / s, "loss_lm": 0.9 / s, "expert_load_text": 2.0} for s in (1, 2, 3)]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw_logs(history, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists() and "pip install matplotlib" in caplog.text
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the plot, is an optional extra")
    draw_logs(history, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
