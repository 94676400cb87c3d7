"""Train a small V4.1 with `Dsv4Trainer` as a user does: alone, or under FSDP2 where a launcher starts several processes.

`python -m tests.training.fsdp_run FOLDER NAME` or
`torchrun --nproc-per-node 2 -m tests.training.fsdp_run FOLDER FULL_STATE_DICT SHARDED_STATE_DICT` write what a test
compares to FOLDER/NAME.pt; sharded, once for each form of checkpoint.
"""

import os
import sys

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from modeling_dsv4.training import Dsv4Trainer, RouterBiasCallback
from tests.modeling.tiny_model import new_model, some_ids

RANKS = int(os.environ.get("WORLD_SIZE", 1))
STEPS, BATCH = 10, 4


def trainer(folder, kind, seed=0):
    """A Trainer that keeps a checkpoint of the middle and shards the layers if there are several processes."""
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": kind}} if RANKS > 1 else {}
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH // RANKS, learning_rate=1e-3, save_steps=STEPS // 2,
        logging_steps=1, report_to=[], disable_tqdm=True, full_determinism=True, **fsdp,
    )  # fmt: skip
    # In float64 no rounding tips a choice of entries or experts, so that sums in another order can be compared.
    model = new_model(torch.float64, seed)
    model.config.text_config.cache_rounding = False
    rows = [{"input_ids": ids, "labels": ids} for ids in some_ids(STEPS * BATCH, 20)]
    settings = {"report": False, "muon": {"ns_dtype": "float64"}}
    return Dsv4Trainer(model, args, train_dataset=rows, callbacks=[RouterBiasCallback()], optimizer_settings=settings)


def whole(model):
    """Every parameter and buffer in full, on the CPU."""
    values = model.state_dict()
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone() for n, t in values.items()}


def train(folder, kind):
    """Train; if sharded, save the model and train another one from the middle. Return what a test compares."""
    straight = trainer(f"{folder}/straight", kind)
    straight.train()
    losses = [entry["loss"] for entry in straight.state.log_history if "loss" in entry]
    result = {"weights": whole(straight.model), "losses": losses}
    if RANKS > 1:
        assert all(isinstance(p, DTensor) for p in straight.model.parameters())
        straight.save_model(f"{folder}/saved")
        resumed = trainer(f"{folder}/resumed", kind, seed=1)
        resumed.train(resume_from_checkpoint=f"{folder}/straight/checkpoint-{STEPS // 2}")
        result["resumed"] = whole(resumed.model)
    return result


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        result = train(f"{sys.argv[1]}/{kind}", kind)
        if int(os.environ.get("RANK", 0)) == 0:
            torch.save(result, f"{sys.argv[1]}/{kind}.pt")
