"""config.json of a folder that `convert released` writes."""

from __future__ import annotations

import copy

from .checkpoint_folder import CheckpointFolder
from .inventory import RELEASED_QUANTIZATION

# Keys that saving changes, or that a part which the source lacks brings back with it.
NOT_COMPARED = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "quantization_config",
                "engram_token_map_sha256", "num_nextn_predict_layers", "vision_config")  # fmt: skip


def released_config(
    source: CheckpointFolder, base: CheckpointFolder | None, *, is_packed: bool, floats: list[str]
) -> tuple[dict, list[str]]:
    r"""Return the content of config.json, and a line for every setting that differs from that of `base`.

    Args:
        source, base (`CheckpointFolder`): see `to_released`. With a base its file is taken, with the settings of the
            source that differ; else the source's, completed by the released quantization.
        is_packed (`bool`): whether any tensor is written in FP8 or FP4.
        floats (`list[str]`): quantised modules, by their released names, that are written as floats.
    """
    if base is not None:
        content = copy.deepcopy(base.config_dict)
        changes = _take_changes(content, base.config.to_diff_dict(), source.config.to_diff_dict())
    else:
        content, changes = copy.deepcopy(source.config_dict), []
        if "quantization_config" not in content:
            _complete(content, is_packed)
    if is_packed and floats:
        listed = {*content["quantization_config"].get("modules_to_not_convert", ()), *floats}
        content["quantization_config"]["modules_to_not_convert"] = sorted(listed)
    return content, changes


def _take_changes(content: dict, before: dict, after: dict, path: str = "") -> list[str]:
    """Write into `content` what differs between two configurations, and say so."""
    changes = []
    for key in sorted((before.keys() - after.keys() - {*NOT_COMPARED}) & content.keys()):  # absent: the default
        changes.append(f"{path}{key}: {before[key]!r} -> the default")
        del content[key]
    for key, value in after.items():
        old = before.get(key)
        if key in NOT_COMPARED or value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and isinstance(content.get(key), dict):
            changes += _take_changes(content[key], old, value, f"{path}{key}.")
        elif not (key == "compress_ratios" and value == old[: len(value)]):  # draft stages follow the layers
            changes.append(f"{path}{key}: {old!r} -> {value!r}")
            content[key] = value
    return changes


def _complete(content: dict, is_packed: bool) -> None:
    """Give the configuration of a float model the keys of a released one."""
    content.pop("auto_map", None)
    for part in (content, content.get("text_config"), content.get("vision_config")):
        for key in ("dtype", "torch_dtype"):
            if part and key in part:
                part[key] = "bfloat16"
    if is_packed:
        content["quantization_config"] = copy.deepcopy(RELEASED_QUANTIZATION[content["model_type"]])
        if content["model_type"] == "deepseek_v4":
            content["expert_dtype"] = "fp4"
