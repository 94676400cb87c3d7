"""Processes that start at once: forks of one that has imported what they need, made before it has any thread."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
# Of all who ask: a test process has one server, and the first who asks starts it.
CONTEXT.set_forkserver_preload(
    [
        "accelerate",
        "convert.hub",
        "convert.released",
        "convert.tiny",
        "modeling_dsv4.training",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ]
)
