"""Decoder replay: how many tokens of a prompt the decoder computes.

The model is a causal encoder-decoder (V4.1 report section 2.2): its last pooling layer, the *cut*, makes entries and
index keys of every token from its input; from there on, layers reach earlier tokens by their windows alone. Of a prompt
they need to compute only what the wanted logits and later windows can see.

        layers before the cut     all T tokens
        cut                       pools all T tokens, then attends with the last n_0
        cut + k                   the last n_k tokens, n_k falling by a window a layer ("exact") or constant ("bounded")

Source: contract section 13.
"""

from __future__ import annotations

from dataclasses import replace

from .attention import LayerContext
from .cache import Dsv4Cache
from .decoder import StreamState
from .sequence_layout import SequenceLayout

REPLAY_MODES = ("full", "exact", "bounded")


def check_replay(mode: str, *, keep: int = 0, columns: int = 0, window: int = 0) -> None:
    r"""Check a replay mode, and that it computes what a call wants.

    Args:
        mode (`str`): as given.
        keep (`int`, *optional*): last columns whose final state is wanted, of `columns`.
        window (`int`, *optional*): tokens that a query sees, itself included.

    Raises:
        ValueError: for an unknown mode, or for "bounded" when more is wanted than it computes.
    """
    if mode not in REPLAY_MODES:
        raise ValueError(f"decoder_replay is {mode!r}; accepted: {REPLAY_MODES}.")
    if mode == "bounded" and keep > window:
        raise ValueError(
            f"decoder_replay='bounded' computes the last {window} final states and {keep} of {columns} are wanted; "
            f"accepted: logits_to_keep of 1 to {window} without labels, optional outputs and packed documents, or 'exact', or 'full'."
        )


def decoder_tokens(mode: str, *, tokens: int, keep: int, rollback: int, window: int, layers: int) -> list[int]:
    r"""Return how many of the last tokens of a row each decoder layer computes, from the cut on.

    exact: layer k of K computes (w - 1) + keep + R + (w - 1)(K - 1 - k): the last layer, what windows see of it after the
    call and up to R dropped tokens; each layer before it, a window more. bounded: w; the cut, whose window is whole,
    a window and R more.

    Args:
        mode (`str`): "full", "exact" or "bounded".
        tokens (`int`): new tokens T; nothing above is returned.
        keep (`int`): last tokens whose logits are wanted.
        rollback (`int`): R, tokens that may be dropped afterwards.
        window (`int`): w, tokens that a query sees, itself included.
        layers (`int`): K, layers from the cut on.
    """
    if mode == "full":
        counts = [tokens] * layers
    elif mode == "exact":
        counts = [window - 1 + keep + rollback + (window - 1) * (layers - 1 - k) for k in range(layers)]
    else:
        counts = [2 * window - 1 + rollback] + [window] * (layers - 1)
    return [min(tokens, count) for count in counts]


class DecoderReplay:
    r"""Narrows what flows through one call to the tokens that a layer computes.

    Args:
        mode (`str`): "full", "exact" or "bounded".
        config (`Dsv41TextConfig` or `Dsv4Config`): schedule and window.
        context (`LayerContext`): of all tokens of the call.
        keep (`int`): last columns whose final state is wanted.
        cache (`Dsv4Cache`, *optional*): tokens that it can take back are computed too.
    """

    def __init__(self, mode: str, config, context: LayerContext, keep: int, cache: Dsv4Cache | None):
        layout, self._cut = context.layout, config.decoder_cut
        spare = 0 if cache is None else cache.rollback + cache.keep_extra(layout.columns)
        sizes = {"keep": keep, "rollback": spare, "window": config.sliding_window}
        layers = config.num_hidden_layers - self._cut
        counts = decoder_tokens(mode, tokens=layout.columns, layers=layers, **sizes)
        floor = None if cache is None else cache.window_floor
        behind_cut = layout if floor is None else replace(layout, floor=floor)
        self._layouts = [layout] * self._cut + [layout.tail(counts[0])]
        self._layouts += [behind_cut.tail(count) for count in counts[1:]]
        self._whole = self._context = context
        # Where the windows behind the cut begin once the call is done, `[B]` int64 or `None`.
        self.window_floor = self._layouts[-1].floor if mode == "bounded" and layers > 1 else floor

    @property
    def layout(self) -> SequenceLayout:
        """The tokens that the last layer computes."""
        return self._layouts[-1]

    def layout_entering(self, index: int) -> SequenceLayout:
        """The tokens that layer `index` is given."""
        return self._whole.layout if index == self._cut else self._layouts[index]

    def enter(self, index: int, flow: StreamState) -> tuple[StreamState, LayerContext]:
        """Return what layer `index` is given: the flow and the context of its tokens."""
        layout, before = self._layouts[index], self._context.layout
        if layout is before:
            return flow, self._context
        self._context = self._whole.tail(layout)
        if index == self._cut:
            return flow, self._whole._replace(next_layout=layout)
        return flow.tail(before, layout), self._context
