"""The V4.1 text model in float64, row by row and token by token: the slow oracle of the package.

Written from the checkpoint contract (sections 3 to 8); it shares no code with the package. Weights are read under their
released names. Nothing is rounded except what the options ask for:

    rounding          the released rounding of window KV, compressed KV, index queries and keys
    linear_rounding   the FP8 rounding of the inputs of FP8 / FP4 linears as well
    moved             single codes to put on the other side of their rounding tie (to explain a difference of one code)
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from . import attention, engram, experts, formats, mhc

# What is rounded where: cache part -> format.
FORMATS = {"window": "fp8", "compressed": "nvfp4", "index_keys": "mxfp4", "index_queries": "mxfp4"}
ROUND = {"fp8": formats.round_fp8, "nvfp4": formats.round_nvfp4, "mxfp4": formats.round_mxfp4}


def load_config(folder):
    """Return the parsed config.json of a checkpoint folder."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def load_checkpoint(folder):
    """Return every tensor of a released-layout folder as float64 under its released name, scales folded in."""
    config = load_config(folder)
    tile = tuple(config["quantization_config"]["weight_block_size"])
    raw = {}
    for shard in sorted(Path(folder).glob("*.safetensors")):
        raw.update(load_file(str(shard)))
    weights = {}
    for name, tensor in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix(".weight") + ".scale") if name.endswith(".weight") else None
        weights[name] = _to_float64(name, tensor, scale, tile)
    return weights


def _to_float64(name, tensor, scale, tile):
    if scale is None:
        return tensor.to(torch.float64).numpy()
    codes, scale_codes = tensor.view(torch.uint8).numpy(), scale.view(torch.uint8).numpy()
    if tensor.dtype == torch.int8:
        return formats.dequantize_fp4_rows(codes, scale_codes)
    if name.endswith("engram.embed.weight"):
        return formats.dequantize_fp8_rows(codes, scale_codes)
    return formats.dequantize_fp8_tiles(codes, scale_codes, tile)


def rms_norm(x, weight, eps):
    """Return weight * x / sqrt(mean(x^2) + eps) along the last axis."""
    return weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def source_of(layer, sources):
    """Return the last of the source layers that is not after this layer."""
    return max(s for s in sources if s <= layer)


class Row:
    """One unpadded row of tokens on its way through the layers; `record` collects what the layers produce."""

    def __init__(self, weights, config, length, image_mask, rounding, linear_rounding, moved, window_floors=None):
        self.weights, self.config, self.length = weights, config, length
        self.image_mask = np.zeros(length, dtype=bool) if image_mask is None else image_mask
        self.rounding, self.moved, self.window_floors = rounding, moved, window_floors
        self.round_input = formats.round_fp8 if linear_rounding else lambda x: x
        self.eps = config["rms_norm_eps"]
        self.record = {}
        self.compressed, self.keys, self.selected = {}, {}, {}
        self.candidates = None

    def linear(self, name, x):
        """Apply an FP8 linear to x [..., I]."""
        return self.round_input(x) @ self.weights[name + ".weight"].T

    def cached(self, part, layer, x):
        """Return what a cache part hands back for x [S, ..., D]: rounded, unless rounding is off."""
        if not self.rounding:
            return x
        x = np.array(x)
        for moved_part, moved_layer, index in self.moved:
            if (moved_part, moved_layer) == (part, layer):
                tie = formats.nearest_tie(x, FORMATS[part])[index]
                self.record.setdefault("moved_by", []).append(abs(x[index] - tie))
                x[index] = tie * (1 - 1e-6) if abs(x[index]) > abs(tie) else tie * (1 + 1e-6)
        return ROUND[FORMATS[part]](x)

    def norm(self, name, x):
        """Apply the RMSNorm of this name."""
        return rms_norm(x, self.weights[name + ".weight"], self.eps)

    def run(self, embeddings, hashes):
        """Run all layers on embeddings [S, D] and n-gram rows [S, layers, rows]; return the record."""
        n = self.config["hc_mult"]
        streams = np.repeat(embeddings[:, None, :], n, axis=1)
        mix = np.array([mhc.first_mix(n) for _ in range(self.length)])
        for layer in range(self.config["num_hidden_layers"]):
            self.record[f"layer_input.{layer}"] = self.collapsed(streams, mix)
            streams, mix = self.layer(layer, streams, mix, hashes)
            self.record[f"streams.{layer}"], self.record[f"pre_mix.{layer}"] = streams, mix
        hidden = self.norm("norm", self.collapsed(streams, mix))
        self.record["final_hidden"] = hidden
        self.record["logits"] = hidden @ self.weights["head.weight"].T
        return self.record

    def collapsed(self, streams, mix):
        """Return the sublayer inputs [S, D]."""
        return np.array([mhc.collapse(streams[t], mix[t]) for t in range(self.length)])

    def layer(self, layer, streams, mix, hashes):
        """Run one layer: Engram if it has one, the attention site, the expert site."""
        if layer in self.config["engram_layer_ids"]:
            rows = hashes[:, self.config["engram_layer_ids"].index(layer)]
            streams = self.engram(layer, streams, rows)
        streams, mix = self.site(
            f"layers.{layer}.hc_attn", f"layers.{layer}.attn_norm", streams, mix, self.attend, layer
        )
        return self.site(f"layers.{layer}.hc_ffn", f"layers.{layer}.ffn_norm", streams, mix, self.feed_forward, layer)

    def site(self, name, norm, streams, mix, sublayer, layer):
        """Run one mHC site; the sublayer reads with the mix it was handed, and the site's own mix is handed on."""
        fn, base, scale = (self.weights[f"{name}_{part}"] for part in ("fn", "base", "scale"))
        options = {
            "iterations": self.config["hc_sinkhorn_iters"],
            "hc_eps": self.config["hc_eps"],
            "norm_eps": self.eps,
        }
        made = [mhc.coefficients(streams[t], fn, base, scale, **options) for t in range(self.length)]
        self.record[f"comb.{name}"] = np.array([m for _, _, m in made])
        output = sublayer(layer, self.norm(norm, self.collapsed(streams, mix)))
        new = [mhc.expand(streams[t], output[t], post, comb) for t, (_, post, comb) in enumerate(made)]
        return np.array(new), np.array([pre for pre, _, _ in made])

    def engram(self, layer, streams, rows):
        """Add the gated n-gram memory to every stream; image tokens get none."""
        name = f"layers.{layer}.engram"
        n, width = streams.shape[1:]
        memory = self.weights[f"{name}.embed.weight"][rows].reshape(self.length, -1)
        projected = self.linear(f"{name}.wkv", memory)
        q_weight, k_weight = self.weights[f"{name}.q_weight"], self.weights[f"{name}.k_weight"]
        result = streams.copy()
        for t in range(self.length):
            if not self.image_mask[t]:
                key, value = projected[t, : n * width].reshape(n, width), projected[t, n * width :]
                result[t] = engram.gated(streams[t], key, value, q_weight, k_weight, self.eps)
        self.record[f"engram_out.{layer}"] = result
        return result

    def attend(self, layer, x):
        """Return the attention output [S, D] of a layer for its normalised input x [S, D]."""
        name, config = f"layers.{layer}.attn", self.config
        ratio, positions = config["compress_ratios"][layer], np.arange(self.length)
        freqs = attention.frequencies(config, ratio > 0)
        latent = self.norm(f"{name}.q_norm", self.linear(f"{name}.wq_a", x))
        queries = self.linear(f"{name}.wq_b", latent).reshape(self.length, -1, config["head_dim"])
        queries = attention.rotate_all(queries, positions, freqs)
        window = attention.rotate_all(self.norm(f"{name}.kv_norm", self.linear(f"{name}.wkv", x)), positions, freqs)
        window = self.cached("window", layer, window)
        selected = self.select(layer, x, latent, freqs) if ratio else [[]] * self.length
        output = np.zeros_like(x)
        behind_cut = self.window_floors is not None and layer > max(config["kv_source_layer_ids"])
        for t in range(self.length):
            first = max(0, t - config["sliding_window"] + 1)
            entries = window[max(first, self.window_floors[t]) if behind_cut else first : t + 1]
            if ratio:
                source = source_of(layer, config["kv_source_layer_ids"])
                entries = np.concatenate([entries, self.compressed[source][selected[t]]])
            heads = attention.attend(
                queries[t], entries, self.weights[f"{name}.attn_sink"], config["head_dim"] ** -0.5
            )
            heads = attention.rotate(heads, t, freqs, inverse=True)
            low = attention.grouped_output(heads, self.weights[f"{name}.wo_a.weight"], config["o_groups"])
            output[t] = self.linear(f"{name}.wo_b", low)
        self.record[f"attn_out.{layer}"] = output
        return output

    def select(self, layer, x, latent, freqs):
        """Return the compressed positions of every token, made by this layer or by its index source."""
        config = self.config
        if layer in config["kv_source_layer_ids"]:
            self.compress(layer, x, freqs)
        if config["index_topk"] is None:  # dense: every visible entry
            ratio = config["compress_ratios"][layer]
            return [list(range(attention.visible_count(t, ratio))) for t in range(self.length)]
        if layer in config["index_source_layer_ids"]:
            self.selected[layer] = self.index(layer, x, latent, freqs)
        return self.selected[source_of(layer, config["index_source_layer_ids"])]

    def compress(self, layer, x, freqs):
        """Make the compressed entries and index keys of a KV-source layer; entry j stands at its group's first token."""
        name, ratio = f"layers.{layer}.attn", self.config["compress_ratios"][layer]
        latents = x @ self.weights[f"{name}.compressor.wkv.weight"].T
        if ratio > 1:
            latents = attention.pool_groups(latents, x @ self.weights[f"{name}.compressor.wgate.weight"].T, ratio)
        latents = self.norm(f"{name}.compressor.norm", latents)
        positions = np.arange(len(latents)) * ratio
        self.compressed[layer] = self.cached("compressed", layer, attention.rotate_all(latents, positions, freqs))
        self.record[f"compressed_kv.{layer}"] = self.compressed[layer]
        if self.config["index_topk"] is not None:
            keys = self.norm(f"{name}.indexer.k_norm", latents @ self.weights[f"{name}.indexer.wk.weight"].T)
            self.keys[layer] = self.cached("index_keys", layer, attention.rotate_all(keys, positions, freqs))
            self.record[f"index_keys.{layer}"] = self.keys[layer]

    def index(self, layer, x, latent, freqs):
        """Score and select for an index-source layer; the candidate source also sets the candidates."""
        name, config = f"layers.{layer}.attn.indexer", self.config
        source = source_of(layer, config["kv_source_layer_ids"])
        ratio, heads, width = config["compress_ratios"][layer], config["index_n_heads"], config["index_head_dim"]
        queries = self.linear(f"{name}.wq_b", latent).reshape(self.length, heads, width)
        queries = self.cached("index_queries", layer, attention.rotate_all(queries, np.arange(self.length), freqs))
        weights = x @ self.weights[f"{name}.weights_proj.weight"].T * (width**-0.5 * heads**-0.5)
        restricted = config["candidate_source_layer_id"] in range(source, layer)
        selected, candidates = [], []
        for t in range(self.length):
            visible = attention.visible_count(t, ratio)
            scores = attention.index_scores(queries[t], self.keys[source][:visible], weights[t])
            if layer == config["candidate_source_layer_id"]:
                sizes = config["candidate_block_size"], config["candidate_topk_blocks"]
                candidates.append(attention.candidate_positions(scores, *sizes))
            if restricted:
                keep = np.isin(np.arange(visible), self.candidates[t])
                scores = np.where(keep, scores, -np.inf)
            selected.append(sorted(attention.best(scores, config["index_topk"])))
        if candidates:
            self.candidates = candidates
            self.record[f"candidates.{layer}"] = candidates
        self.record[f"topk.{layer}"] = selected
        return selected

    def feed_forward(self, layer, x):
        """Return the expert output [S, D]: routed experts in ascending id, then the shared one."""
        name, config = f"layers.{layer}.ffn", self.config
        limit = config["swiglu_limit"]
        output, ids, weights = np.zeros_like(x), [], []
        for t in range(self.length):
            bias = self.weights[f"{name}.gate.bias_vl" if self.image_mask[t] else f"{name}.gate.bias"]
            count, factor = config["num_experts_per_tok"], config["routed_scaling_factor"]
            chosen, chosen_weights = experts.route(x[t], self.weights[f"{name}.gate.weight"], bias, count, factor)
            for e, weight in sorted(zip(chosen, chosen_weights, strict=True)):
                output[t] += experts.expert(
                    x[t], *self.matrices(f"{name}.experts.{e}"), limit, weight, self.round_input
                )
            shared = self.matrices(f"{name}.shared_experts")
            output[t] += experts.expert(x[t], *shared, limit, round_input=self.round_input)
            ids.append(chosen)
            weights.append(chosen_weights)
        self.record[f"router_idx.{layer}"], self.record[f"router_w.{layer}"] = np.array(ids), np.array(weights)
        self.record[f"ffn_out.{layer}"] = output
        return output

    def matrices(self, name):
        """Return (w1, w2, w3) of one expert."""
        return tuple(self.weights[f"{name}.{w}.weight"] for w in ("w1", "w2", "w3"))


def forward(
    weights,
    text_config,
    input_ids,
    *,
    attention_mask=None,
    image_mask=None,
    image_embeds=None,
    token_map=None,
    rounding=True,
    linear_rounding=False,
    moved=(),
    window_floors=None,
):
    """Run the text model on [B, S] token ids, each row alone and without its padding.

    Args:
        weights (`dict`): from `load_checkpoint`.
        text_config (`dict`): `text_config` of config.json.
        input_ids (array [B, S], int).
        attention_mask (array [B, S], *optional*): 0 = padding, on either side.
        image_mask (array [B, S] bool, *optional*): positions of image spans, delimiters included.
        image_embeds (array [B, S, D], *optional*): embeddings that replace those of the tokens where `image_mask` is true.
        rounding (bool): the released rounding of the cache parts.
        linear_rounding (bool): FP8 rounding of the inputs of FP8 / FP4 linears.
        moved (sequence of (part, layer, index)): codes of the only row to take from the other side of their tie; `part` is a
            key of `FORMATS`, `index` a full index into the rounded array of the row.
        window_floors (sequence of S int, *optional*): the position before which the window of a query holds nothing in the
            layers after the last KV source (contract section 13, variant [V]); logits of queries that such a run leaves out
            have no meaning.
        token_map (list, *optional*): compressed token ids (`engram.build_token_map`); None: ids are used as they are.

    Returns:
        `dict`: per token, padding filled with 0 (values) or -1 (indices): `logits` [B, S, V]; `final_hidden` [B, S, D]
        (normalised); `layer_input.i`, `attn_out.i`, `ffn_out.i` [B, S, D]; `streams.i`, `engram_out.i` [B, S, N, D];
        `pre_mix.i` [B, S, N]; `comb.<site>` [B, S, N, N]; `router_idx.i`, `router_w.i` [B, S, k];
        `engram_hash` [B, S, layers, rows]; `topk.i` [B, S, index_topk] sorted, -1 = none.
        Per row, as lists: `compressed_kv.i` [C, c], `index_keys.i` [C, d], `candidates.i` (positions per token), `moved_by`
        (how far each moved code was from its tie).
    """
    input_ids = np.asarray(input_ids)
    mask = np.ones(input_ids.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    images = None if image_mask is None else np.asarray(image_mask).astype(bool)
    result = {}
    for b, ids in enumerate(input_ids):
        at = np.flatnonzero(mask[b])
        image_row = None if images is None else images[b, at]
        embeddings = weights["embed.weight"][ids[at]]
        if image_row is not None and image_embeds is not None:
            embeddings = np.where(image_row[:, None], np.asarray(image_embeds)[b, at], embeddings)
        hashes = (
            engram.row_ids(ids[at], text_config, token_map, image_row) if text_config["engram_layer_ids"] else None
        )
        row = Row(weights, text_config, len(at), image_row, rounding, linear_rounding, moved, window_floors)
        record = row.run(embeddings, hashes)
        if hashes is not None:
            record["engram_hash"] = hashes
        _place(result, record, b, at, input_ids.shape, text_config["index_topk"])
    return result


def _place(result, record, b, at, shape, topk):
    """Put the record of one row into the arrays of the batch."""
    for key, value in record.items():
        kind = key.split(".")[0]
        if kind in ("compressed_kv", "index_keys", "candidates", "moved_by"):
            result.setdefault(key, []).append(value)
            continue
        if kind == "topk":
            value = np.array([chosen + [-1] * (topk - len(chosen)) for chosen in value])
        if key not in result:
            fill = -1 if value.dtype.kind == "i" else 0
            result[key] = np.full((*shape, *value.shape[1:]), fill, dtype=value.dtype)
        result[key][b, at] = value
