"""DeepSeek-V4 in float64, row by row and token by token: the slow oracle of the V4 family.

Written from the checkpoint contract (spec_v4, numbered items below); it shares no code with the package. Maths that V4
has in common with V4.1 (Sinkhorn, sink attention, YaRN, experts) comes from the other files of this folder.

    rounding          item 2 (window and compressed KV: FP8 on the unrotated channels) and item 9 (index queries, keys)
    linear_rounding   item 1: the FP8 rounding of the inputs of FP8 and FP4 linears, one scale per 128 channels
"""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from . import attention, experts, formats, mhc
from .text_model import load_config, rms_norm

KV_BLOCK, LINEAR_BLOCK, CSA_RATIO = 64, 128, 4


def load_checkpoint(folder):
    """Return every tensor of a released-layout folder under its released name, float64 with scales folded in.

    Scales are E8M0 bytes, or float32 (the -Base builds, whose experts are FP8 tiles like the dense matrices).
    """
    tile = load_config(folder)["quantization_config"]["weight_block_size"]
    raw = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        raw.update(load_file(str(shard)))
    weights = {}
    for name, tensor in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix(".weight") + ".scale")
        weights[name] = _to_float64(tensor, scale, tile)
    return weights


def _to_float64(tensor, scale, tile):
    if scale is None:
        return tensor.numpy() if tensor.dtype == torch.int64 else tensor.to(torch.float64).numpy()
    if scale.dtype == torch.float32:
        scale = scale.double().numpy()
    else:
        scale = formats.decode_e8m0(scale.view(torch.uint8).numpy())
    codes = tensor.view(torch.uint8).numpy()
    if tensor.dtype == torch.int8:
        return formats.decode_e2m1(formats.unpack_fp4(codes)) * np.repeat(scale, 32, axis=-1)
    rows, columns = codes.shape
    wide = np.repeat(np.repeat(scale, tile[0], axis=0), tile[1], axis=1)[:rows, :columns]
    return formats.decode_e4m3(codes) * wide


def round_fp8(x, block):
    """Return x [..., D] after a round trip through E4M3, one power-of-two scale per block; the last may be short."""
    x = np.asarray(x).astype(np.float32)
    parts = []
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block]
        largest = np.maximum(np.abs(part).max(-1, keepdims=True), np.float32(1e-4))
        scale = np.float32(2.0) ** formats.exponent_up(largest * np.float32(1 / 448)).astype(np.float32)
        parts.append(formats.decode_e4m3(formats.encode_e4m3(part / scale)) * scale.astype(np.float64))
    return np.concatenate(parts, axis=-1)


def round_kv(x, rotary):
    """Item 2: the channels before the rotary ones, 64 to a scale."""
    return np.concatenate([round_fp8(x[..., :-rotary], KV_BLOCK), x[..., -rotary:]], axis=-1)


def hadamard(x):
    """Item 9: multiply the last axis by the Hadamard matrix, H[i, j] = (-1)^popcount(i & j) / sqrt(D)."""
    width = x.shape[-1]
    matrix = np.array([[(-1) ** bin(i & j).count("1") for j in range(width)] for i in range(width)])
    return x @ matrix * width**-0.5


def rotate(x, position, freqs, inverse=False):
    """Return x [..., d], its last channels rotated; the angle is a float32 product, its cosine and sine are float32."""
    result = np.array(x, dtype=np.float64)
    start = result.shape[-1] - 2 * len(freqs)
    for i, f in enumerate(freqs):
        angle = float(np.float32(position) * f)
        cos, sin = float(np.float32(math.cos(angle))), float(np.float32(math.sin(angle))) * (-1 if inverse else 1)
        a, b = result[..., start + 2 * i].copy(), result[..., start + 2 * i + 1].copy()
        result[..., start + 2 * i], result[..., start + 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return result


def rotate_rows(x, positions, freqs):
    """Return x [S, ..., d] with every row at its own position."""
    return np.array([rotate(row, p, freqs) for row, p in zip(x, positions, strict=True)]).reshape(x.shape)


class Row:
    """One unpadded row of tokens; `record` collects what the layers produce."""

    def __init__(self, weights, config, ids, rounding, linear_rounding):
        self.weights, self.config, self.ids, self.length = weights, config, np.asarray(ids), len(ids)
        self.rounding = rounding
        self.round_input = (lambda x: round_fp8(x, LINEAR_BLOCK)) if linear_rounding else (lambda x: x)
        self.eps, self.rotary = config["rms_norm_eps"], config["qk_rope_head_dim"]
        self.record = {}

    def linear(self, name, x):
        return self.round_input(x) @ self.weights[name + ".weight"].T

    def plain(self, name, x):
        return x @ self.weights[name + ".weight"].T

    def norm(self, name, x):
        return rms_norm(x, self.weights[name + ".weight"], self.eps)

    def run(self):
        """Run the backbone; return the record."""
        streams = np.repeat(self.weights["embed.weight"][self.ids][:, None, :], self.config["hc_mult"], axis=1)
        for layer in range(self.config["num_hidden_layers"]):
            streams = self.block(f"layers.{layer}", layer, streams)
            self.record[f"streams.{layer}"] = streams
        hidden = self.norm("norm", self.head_collapse("", streams))
        self.record["final_hidden"] = hidden
        self.record["logits"] = self.plain("head", hidden)
        return self.record

    def predict_after_next(self, streams):
        """Item 12: logits [S - 1, V] of token i + 2 from the streams of position i and the embedding of token i + 1."""
        embeds = self.weights["embed.weight"][self.ids[1:]]
        self.length -= 1
        entering = self.linear("mtp.0.e_proj", self.norm("mtp.0.enorm", embeds))[:, None]
        entering = entering + self.linear("mtp.0.h_proj", self.norm("mtp.0.hnorm", streams[:-1]))
        streams = self.block("mtp.0", self.config["num_hidden_layers"], entering)
        return self.plain("head", self.norm("mtp.0.norm", self.head_collapse("mtp.0.", streams)))

    def ratio(self, layer):
        return self.config["compress_ratios"][layer] if layer < self.config["num_hidden_layers"] else 0

    def head_collapse(self, prefix, streams):
        """Item 5: the learned collapse after the last layer."""
        fn, base, scale = (self.weights[f"{prefix}hc_head_{part}"] for part in ("fn", "base", "scale"))
        result = []
        for h in streams:
            flat = h.reshape(-1)
            u = fn @ flat / math.sqrt(np.mean(flat * flat) + self.eps)
            result.append(mhc.collapse(h, mhc.sigmoid(u * scale + base) + self.config["hc_eps"]))
        return np.array(result)

    def block(self, name, layer, streams):
        streams = self.site(f"{name}.hc_attn", f"{name}.attn_norm", streams, self.attend, f"{name}.attn", layer)
        return self.site(f"{name}.hc_ffn", f"{name}.ffn_norm", streams, self.feed_forward, f"{name}.ffn", layer)

    def site(self, name, norm, streams, sublayer, sub_name, layer):
        """Item 4: a site reads with the mix that it predicts itself from the same streams."""
        fn, base, scale = (self.weights[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        options = {
            "iterations": self.config["hc_sinkhorn_iters"],
            "hc_eps": self.config["hc_eps"],
            "norm_eps": self.eps,
        }
        made = [mhc.coefficients(h, fn, base, scale, **options) for h in streams]
        x = np.array([mhc.collapse(h, pre) for h, (pre, _, _) in zip(streams, made, strict=True)])
        output = sublayer(sub_name, layer, self.norm(norm, x))
        return np.array([mhc.expand(h, y, post, comb)
                         for h, y, (_, post, comb) in zip(streams, output, made, strict=True)])  # fmt: skip

    def attend(self, name, layer, x):
        config, ratio, positions = self.config, self.ratio(layer), np.arange(self.length)
        freqs = attention.frequencies(config, ratio > 0)
        latent = self.norm(f"{name}.q_norm", self.linear(f"{name}.wq_a", x))
        queries = self.linear(f"{name}.wq_b", latent).reshape(self.length, -1, config["head_dim"])
        queries = queries / np.sqrt(np.mean(queries**2, axis=-1, keepdims=True) + self.eps)  # item 3
        queries = rotate_rows(queries, positions, freqs)
        window = self.kept(rotate_rows(self.norm(f"{name}.kv_norm", self.linear(f"{name}.wkv", x)), positions, freqs))
        entries, selected = self.compressed(name, layer, ratio, x, latent, freqs)
        output = []
        for t in range(self.length):
            seen = window[max(0, t - config["sliding_window"] + 1) : t + 1]
            if ratio:
                seen = np.concatenate([seen, entries[selected[t]]])
            heads = attention.attend(queries[t], seen, self.weights[f"{name}.attn_sink"], config["head_dim"] ** -0.5)
            heads = rotate(heads, t, freqs, inverse=True)
            low = attention.grouped_output(heads, self.weights[f"{name}.wo_a.weight"], config["o_groups"])
            output.append(self.linear(f"{name}.wo_b", low))
        return np.array(output)

    def kept(self, x):
        return round_kv(x, self.rotary) if self.rounding else x

    def compressed(self, name, layer, ratio, x, latent, freqs):
        """Entries [C, d] of a layer and, per token, the positions that it attends (items 6 to 9)."""
        if not ratio:
            return None, None
        entries = self.kept(self.pooled(f"{name}.compressor", ratio, x, freqs))
        self.record[f"compressed_kv.{layer}"] = entries
        visible = [attention.visible_count(t, ratio) for t in range(self.length)]
        if ratio != CSA_RATIO:
            return entries, [list(range(count)) for count in visible]
        config, heads, width = self.config, self.config["index_n_heads"], self.config["index_head_dim"]
        keys = self.indexed(self.pooled(f"{name}.indexer.compressor", ratio, x, freqs))
        queries = self.linear(f"{name}.indexer.wq_b", latent).reshape(self.length, heads, width)
        queries = self.indexed(rotate_rows(queries, np.arange(self.length), freqs))
        weights = self.plain(f"{name}.indexer.weights_proj", x) * (width**-0.5 * heads**-0.5)
        selected = []
        for t, count in enumerate(visible):
            scores = attention.index_scores(queries[t], keys[:count], weights[t])
            selected.append(sorted(attention.best(scores, config["index_topk"])))
        self.record[f"topk.{layer}"] = selected
        return entries, selected

    def indexed(self, x):
        x = hadamard(x)
        return formats.round_mxfp4(x) if self.rounding else x

    def pooled(self, name, ratio, x, freqs):
        """Items 6 and 7: one entry per complete group, at the position of the group's first token."""
        values, gates = self.plain(f"{name}.wkv", x), self.plain(f"{name}.wgate", x)
        places = self.weights[f"{name}.ape"]
        entries, overlaps = [], ratio == CSA_RATIO
        width = values.shape[1] // (2 if overlaps else 1)
        for j in range(self.length // ratio):
            own = range(j * ratio, (j + 1) * ratio)
            part = slice(width, None) if overlaps else slice(None)
            sources = [(values[t, part], gates[t, part] + places[t - own[0], part]) for t in own]
            if overlaps and j > 0:  # the group before takes part with the first half of the channels
                before = [(values[t, :width], gates[t, :width] + places[t % ratio, :width])
                          for t in range(own[0] - ratio, own[0])]  # fmt: skip
                sources = before + sources
            share = mhc.softmax(np.array([gate for _, gate in sources]), axis=0)
            entries.append((share * np.array([value for value, _ in sources])).sum(0))
        entries = self.norm(f"{name}.norm", np.array(entries).reshape(-1, width))
        return rotate_rows(entries, np.arange(len(entries)) * ratio, freqs)

    def feed_forward(self, name, layer, x):
        """Item 11: hash routing in the first layers, else the best scores; then the shared expert."""
        config, output, ids, shares = self.config, np.zeros_like(x), [], []
        count, factor, limit = config["num_experts_per_tok"], config["routed_scaling_factor"], config["swiglu_limit"]
        gate = self.weights[f"{name}.gate.weight"]
        for t in range(self.length):
            if layer < config["num_hash_layers"]:
                chosen = self.weights[f"{name}.gate.tid2eid"][self.ids[t]].astype(int).tolist()
                scores = np.sqrt(np.logaddexp(0.0, gate @ x[t]))[chosen]
                weights = scores / scores.sum() * factor
            else:
                chosen, weights = experts.route(x[t], gate, self.weights[f"{name}.gate.bias"], count, factor)
            for e, weight in sorted(zip(chosen, weights, strict=True)):
                output[t] += experts.expert(
                    x[t], *self.matrices(f"{name}.experts.{e}"), limit, weight, self.round_input
                )
            output[t] += experts.expert(
                x[t], *self.matrices(f"{name}.shared_experts"), limit, round_input=self.round_input
            )
            ids.append(chosen)
            shares.append(weights)
        self.record[f"router_idx.{layer}"], self.record[f"router_w.{layer}"] = np.array(ids), np.array(shares)
        return output

    def matrices(self, name):
        return tuple(self.weights[f"{name}.{w}.weight"] for w in ("w1", "w2", "w3"))


def forward(weights, config, ids, *, rounding=True, linear_rounding=False, mtp=False):
    """Run one unpadded row of token ids [S].

    Args:
        weights (`dict`): from `load_checkpoint`.
        config (`dict`): config.json.
        ids (sequence of int).
        rounding, linear_rounding (bool): see the head of this file.
        mtp (bool): also run the MTP layer.

    Returns:
        `dict`: `logits` [S, V], `final_hidden` [S, D] (normalised), `streams.i` [S, N, D], `router_idx.i` and
        `router_w.i` [S, k], `compressed_kv.i` [C, d], `topk.i` (ascending positions per token); with `mtp`,
        `mtp_logits` [S - 1, V].
    """
    row = Row(weights, config, ids, rounding, linear_rounding)
    record = row.run()
    if mtp:
        record["mtp_logits"] = row.predict_after_next(record[f"streams.{config['num_hidden_layers'] - 1}"])
    return record
