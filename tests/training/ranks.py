"""Run a function on several ranks in fresh processes and hand back what each returned."""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.processes import CONTEXT


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(rank, world_size, port, backend, function, args, folder):
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def on_ranks(world_size: int, function, *args, backend: str = "gloo") -> list:
    """Return [function(*args) on rank 0, 1, ...]; `function` must be importable, its result of tensors and plain values."""
    with tempfile.TemporaryDirectory() as folder:
        job = (world_size, _free_port(), backend, function, args, folder)
        mp.start_processes(_main, job, nprocs=world_size, join=True, start_method=CONTEXT.get_start_method())
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
