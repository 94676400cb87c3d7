"""`Dsv4Optimizer`: hybrid Muon, the Sinkhorn-balanced update and AdamW in one `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .adamw_step import AdamWStep
from .group_options import ALL_OPTIONS, OPTIONS, complete_group, momentum_dtype, working_dtype
from .muon_step import MuonStep
from .newton_schulz import describe_splits, full_float32_products
from .sharding import ShardLayout, is_dtensor, local_part, parameters_with_gradient
from .sinkhorn_step import SinkhornStep

_STEPS = {"muon": MuonStep, "sinkhorn": SinkhornStep, "adamw": AdamWStep}


class Dsv4Optimizer(torch.optim.Optimizer):
    r"""The optimizer of DeepSeek-V4 / V4.1: each parameter group names the algorithm that updates it.

    Implements V4.1 §2.5 (head-wise Muon, Algorithm 1, decay rules) and the V4 report §2.4 (hybrid Newton–Schulz).
    Differs from the source: momentum is an exponential mean, as in `torch.optim.Muon` (the same update: both rules are
    scale-free). One object, so schedulers, `Accelerator.prepare`, `optimizer.pt` and DCP work as with any optimizer.

    A parameter whose gradient is None is skipped whole (no decay of weight or momentum); a zero gradient is a gradient.
    DTensor parameters (FSDP2, tensor and expert parallel) are updated where they lie, see `sharding`.

    Args:
        params (iterable of parameters, of `(name, parameter)` pairs, or of groups `dict`):
            Usually `build_param_groups(model)`. Group options beside `lr`, by algorithm:
            muon — `momentum, nesterov, rms, ns_coefficients, ns_dtype ("auto" | "bfloat16" | "float32" | "float64"),
            row_splits (rows of each block, or None), eps, idle_threshold, chunk_bytes, compile`;
            sinkhorn — `momentum, nesterov, rms, sinkhorn_iters, mask_threshold, eps, rows, chunk_bytes, keep_bytes,
            compile`;
            adamw — `betas, eps`; all — `weight_decay, master`; muon and sinkhorn — `momentum_dtype`.
        lr (`float`, *optional*, defaults to 1e-3):
            For groups without `lr`; multiplied by the group's `lr_scale` if it has one.
        algorithm (`"muon" | "sinkhorn" | "adamw"`, *optional*):
            For groups that name none.
        options:
            Any group option, as the default of all groups whose algorithm has it. `chunk_bytes` (1 GiB) bounds the
            working memory of Muon's chunks and of Sinkhorn's row blocks; Sinkhorn also keeps the squared update between
            its passes where that takes at most `keep_bytes` (4 GiB), and forms it anew in each pass where not.
            `compile` runs the inner functions under torch.compile where no kernel does the work: on a CUDA device,
            kernels take the Sinkhorn step of whole matrices and Newton–Schulz in bfloat16. Of the others, off by default:
            `master="auto"` keeps a float32 copy of bfloat16 / float16 weights in the state (pure-bfloat16 weights hardly
            move at fine-tuning rates: 2 % of the elements change in a step at lr 1e-5); `master="stochastic"` rounds
            bfloat16 weights stochastically instead (no memory). `rows="touched"` (sinkhorn; departs from the paper)
            updates only rows with a gradient. `idle_threshold` (muon, expert banks; departs from the paper) gives no
            update to experts whose momentum norm is at most that multiple of the mean over experts.

    Raises:
        ValueError: for an unknown algorithm, an option outside its range, a meta or non-floating parameter.
        TypeError: for an option that no algorithm has.
    """

    def __init__(self, params: Iterable, lr: float = 1e-3, *, algorithm: str | None = None, **options: Any):
        unknown = set(options) - ALL_OPTIONS
        if unknown:
            raise TypeError(f"Dsv4Optimizer: unknown options {sorted(unknown)}; accepted: {sorted(ALL_OPTIONS)}")
        super().__init__(params, {"lr": lr, "algorithm": algorithm, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options of its algorithm that it lacks are filled in, `names` too."""
        group = dict(param_group)
        params = group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if params and isinstance(params[0], tuple):
            group.setdefault("names", [name for name, _ in params])
        first = sum(len(g["params"]) for g in self.param_groups)
        group.setdefault("names", [f"param_{first + i}" for i in range(len(params))])
        group["names"], group["params"] = list(group["names"]), params
        if len(group["names"]) != len(params):
            raise ValueError(f"group has {len(group['names'])} names for {len(params)} parameters")
        group = complete_group(group, self.defaults)
        for name, p in zip(group["names"], (p[1] if isinstance(p, tuple) else p for p in params), strict=True):
            _refuse_unusable(name, p)
        super().add_param_group(group)
        for key in set(self.defaults) - {"lr", "algorithm"} - set(OPTIONS[group["algorithm"]]):
            self.param_groups[-1].pop(key, None)

    def __repr__(self) -> str:
        """Name every group in one line: torch's own form would print every parameter name."""
        lines = [
            f"  {g['algorithm']}: {len(g['params'])} parameters, lr {float(g['lr']):g}, weight_decay {g['weight_decay']:g}, "
            f"blocks {describe_splits(g.get('row_splits'))}"
            for g in self.param_groups
        ]
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Perform one step; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = parameters_with_gradient(self.param_groups)
        with full_float32_products():
            for group in self.param_groups:
                entries = []
                for name, p in zip(group["names"], group["params"], strict=True):
                    if p in present:
                        entries.append((name, p, self._state_of(group, name, p)))
                    elif is_dtensor(p) and p.requires_grad:
                        # Sharded checkpoints are read into the state of a fresh optimizer, which has every entry.
                        self._state_of(group, name, p, count=False)
                if entries:
                    _STEPS[group["algorithm"]](group).run(entries)
        return loss

    def _state_of(self, group: dict[str, Any], name: str, p: torch.nn.Parameter, count: bool = True) -> dict[str, Any]:
        """Return a parameter's state, made at first use: never in `__init__`, since FSDP2 replaces the parameters."""
        state = self.state[p]
        if not state:
            _refuse_unusable(name, p)
            self._init_state(group, p, state)
        if count and group["algorithm"] != "adamw" and "step" in state:
            state["step"] += 1
        return state

    @staticmethod
    def _init_state(group: dict[str, Any], p: torch.nn.Parameter, state: dict[str, Any]) -> None:
        low_precision = p.dtype != working_dtype(p)
        if group["algorithm"] == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, dtype=working_dtype(p))
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=working_dtype(p))
        else:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=momentum_dtype(group, p))
            if group.get("rows") == "touched" or group["master"] == "stochastic":
                state["step"] = torch.zeros((), dtype=torch.float32)
            if group.get("rows") == "touched":
                rows = torch.zeros(local_part(p).shape[0], dtype=torch.int32, device=local_part(p).device)
                state["row_steps"] = ShardLayout(p).row_vector(rows)
        if group["master"] == "auto" and low_precision:
            state["master"] = p.detach().to(working_dtype(p))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit: torch's own rule would cast the state to the weights' dtype.

        Raises:
            ValueError: if the saved routing (which parameter is updated how) differs from this optimizer's.
        """
        _refuse_other_routing(state_dict["param_groups"], self.param_groups)
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, p in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, torch.Tensor):
                    device = value.device if key == "step" else p.device
                    self.state[p][key] = value.detach().to(device, copy=True)


def _refuse_unusable(name: str, p: torch.Tensor) -> None:
    if p.is_meta:
        raise ValueError(f"{name}: a meta parameter has no values to optimise; materialise the model first")
    if p.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}: dtype {p.dtype} cannot be optimised; train adapters, or load with dequantize=True in float32"
        )


def _refuse_other_routing(saved: list[dict], ours: list[dict]) -> None:
    if not saved or not ours or len(saved[0]) == 0:
        return
    saved_hash, our_hash = saved[0].get("routing"), ours[0].get("routing")
    if saved_hash is None or our_hash is None or saved_hash == our_hash:
        return

    def table(groups: list[dict]) -> dict[str, str]:
        return {
            name: f"{group.get('algorithm')}, row_splits {group.get('row_splits')}"
            for group in groups
            for name in group.get("names", [])
        }

    before, now = table(saved), table(ours)
    changed = [
        f"  {name}: saved {before.get(name, 'absent')}; now {now.get(name, 'absent')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    raise ValueError(
        f"the saved optimizer state was made with another routing ({saved_hash} instead of {our_hash}); "
        f"{len(changed)} parameters differ" + ("" if changed else " in their order") + ":\n" + "\n".join(changed[:50])
    )
