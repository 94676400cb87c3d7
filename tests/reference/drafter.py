"""The DSpark drafter of V4.1 in float64, one block at a time (contract section 12), and the losses that train it.

A block is the known token and noise tokens. Its stages see the entries of the `sliding_window` tokens before the block and
the whole block; the same features feed all stages.
"""

import numpy as np

from . import attention, experts, formats, mhc
from .text_model import rms_norm


def features_of(streams, targets):
    """Return what the drafter reads [S, targets * D] of `streams` {layer: [S, N, D] after it}: means that enter targets."""
    return np.concatenate([streams[layer - 1].mean(axis=1) for layer in targets], axis=-1)


class Block:
    """One draft of one row: `features` [S, targets * D], the known `token` at position `first`, noise behind it."""

    def __init__(self, weights, config, features, token, first, *, rounding=True, start=0):
        self.weights, self.config, self.first = weights, config, first
        self.eps, self.rounding = config["rms_norm_eps"], rounding
        self.seen = np.arange(max(start, first - config["sliding_window"]), first)
        self.origin = start  # position 0 of the document that the block belongs to
        self.size = config["dspark_block_size"]
        self.freqs = attention.frequencies(config, False)
        main = features[self.seen] @ weights["mtp.0.main_proj.weight"].T
        self.main = rms_norm(main, weights["mtp.0.main_norm.weight"], self.eps)
        ids = [token] + [config["dspark_noise_token_id"]] * (self.size - 1)
        self.last = f"mtp.{config['num_nextn_predict_layers'] - 1}"
        self.states = self.run(weights["embed.weight"][ids])
        self.base = self.norm(f"{self.last}.norm", self.states) @ weights["head.weight"].T

    def norm(self, name, x):
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def run(self, embeddings):
        """Return the collapsed states [K, D] before the last norm."""
        streams = np.repeat(embeddings[:, None, :], self.config["hc_mult"], axis=1)
        mix = np.array([mhc.first_mix(self.config["hc_mult"]) for _ in embeddings])
        for stage in range(self.config["num_nextn_predict_layers"]):
            streams, mix = self.site(f"mtp.{stage}", "attn", streams, mix, self.attend)
            streams, mix = self.site(f"mtp.{stage}", "ffn", streams, mix, self.feed_forward)
        return np.array([mhc.collapse(s, m) for s, m in zip(streams, mix, strict=True)])

    def site(self, name, kind, streams, mix, sublayer):
        fn, base, scale = (self.weights[f"{name}.hc_{kind}_{part}"] for part in ("fn", "base", "scale"))
        options = {
            "iterations": self.config["hc_sinkhorn_iters"],
            "hc_eps": self.config["hc_eps"],
            "norm_eps": self.eps,
        }
        made = [mhc.coefficients(s, fn, base, scale, **options) for s in streams]
        inputs = np.array([mhc.collapse(s, m) for s, m in zip(streams, mix, strict=True)])
        output = sublayer(f"{name}.{kind}", self.norm(f"{name}.{kind}_norm", inputs))
        new = [mhc.expand(s, y, post, comb) for s, y, (_, post, comb) in zip(streams, output, made, strict=True)]
        return np.array(new), np.array([pre for pre, _, _ in made])

    def entries(self, name, x, positions):
        kv = self.norm(f"{name}.kv_norm", x @ self.weights[f"{name}.wkv.weight"].T)
        kv = attention.rotate_all(kv, positions - self.origin, self.freqs)
        return formats.round_fp8(kv) if self.rounding else kv

    def attend(self, name, x):
        weights, config, positions = self.weights, self.config, self.first + np.arange(self.size)
        entries = [self.entries(name, self.main, self.seen)] if len(self.seen) else []
        entries = np.concatenate([*entries, self.entries(name, x, positions)])
        latent = self.norm(f"{name}.q_norm", x @ weights[f"{name}.wq_a.weight"].T)
        queries = (latent @ weights[f"{name}.wq_b.weight"].T).reshape(self.size, -1, config["head_dim"])
        queries = attention.rotate_all(queries, positions - self.origin, self.freqs)
        output = np.zeros_like(x)
        for k in range(self.size):
            heads = attention.attend(queries[k], entries, weights[f"{name}.attn_sink"], config["head_dim"] ** -0.5)
            heads = attention.rotate(heads, positions[k] - self.origin, self.freqs, inverse=True)
            low = attention.grouped_output(heads, weights[f"{name}.wo_a.weight"], config["o_groups"])
            output[k] = weights[f"{name}.wo_b.weight"] @ low
        return output

    def feed_forward(self, name, x):
        config, limit, output = self.config, self.config["swiglu_limit"], np.zeros_like(x)
        count, factor = config["dspark_num_experts_per_tok"], config["routed_scaling_factor"]
        for k, row in enumerate(x):
            gate = self.weights[f"{name}.gate.weight"], self.weights[f"{name}.gate.bias"]
            for expert, weight in zip(*experts.route(row, *gate, count, factor), strict=True):
                output[k] += experts.expert(row, *self.matrices(f"{name}.experts.{expert}"), limit, weight)
            output[k] += experts.expert(row, *self.matrices(f"{name}.shared_experts"), limit)
        return output

    def matrices(self, name):
        return tuple(self.weights[f"{name}.{w}.weight"] for w in ("w1", "w2", "w3"))

    def markov(self, step, previous):
        """Return the logits [V] of draft `step` after the token `previous`."""
        embedded = self.weights[f"{self.last}.markov_head.embed.weight"][previous]
        return self.base[step] + self.weights[f"{self.last}.markov_head.head.weight"] @ embedded

    def confidence(self, step, previous):
        """Return the confidence logit of draft `step` after the token `previous`."""
        embedded = self.weights[f"{self.last}.markov_head.embed.weight"][previous]
        projection = self.weights[f"{self.last}.confidence_head.proj.weight"][0]
        return float(projection @ np.concatenate([self.states[step], embedded]))


def log_softmax(logits):
    """Return the logarithm of the softmax of logits [V]."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def block_losses(block, tokens, targets, model_logits):
    """Return (base, Markov, confidence) losses summed over the K' targets of a block.

    Args:
        block (`Block`).
        tokens (sequence of int [K']): the true token before each target. targets (sequence of int [K']).
        model_logits (array [K', V]): the backbone's, for the same targets.
    """
    base = markov = confidence = 0.0
    for k, (previous, target, logits) in enumerate(zip(tokens, targets, model_logits, strict=True)):
        drafted = log_softmax(block.markov(k, previous))
        base -= log_softmax(block.base[k])[target]
        markov -= drafted[target]
        share = np.minimum(np.exp(drafted), np.exp(log_softmax(logits))).sum()  # that a drawn draft is accepted
        logit = block.confidence(k, previous)
        confidence += np.logaddexp(0, logit) - share * logit
    return base, markov, confidence
