"""`generate` with drafts of the model's own drafter: propose, verify in one forward, keep what was accepted.

One row whose prompt is read in one piece goes through transformers' assisted decoding, with the drafter as its candidate
generator. Batches, prompts read in chunks, continued caches and stopping criteria that may end a text inside a block go
through the loop here, in which rows accept different counts and are rolled back on their own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from .draft_scheduler import DraftReport, DSparkScheduler
from .draft_verification import accept_drafts, draw, process_rows

# Criteria that transformers' loop applies at every token of a block; others it asks at the end of a block only.
PER_TOKEN_CRITERIA = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria)


@dataclass
class Dsv4DraftedOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with drafts: the usual fields, and `draft_report` (`DraftReport`)."""

    draft_report: DraftReport | None = None


class DraftSession:
    r"""The drafting side of one call of `generate`.

    Args:
        model: with a drafter.
        config (`GenerationConfig`): prepared. processor (`LogitsProcessorList`): applied to draft logits too, so that
            drafts follow what the model may choose.
        scheduler (`DSparkScheduler`, *optional*).
    """

    def __init__(self, model, config: GenerationConfig, processor: LogitsProcessorList, scheduler):
        self.model, self.config, self.processor = model, config, processor
        self.report = DraftReport(scheduler=scheduler or DSparkScheduler())
        self.pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)

    def draft(
        self, rows: list[torch.Tensor], cache, active: list[bool]
    ) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor | None]:
        r"""Draft for every row.

        Args:
            rows (list of `torch.Tensor` `[length]`): tokens so far; the cache has seen all but the last of each.
            active (list of `bool`): rows that are not finished.

        Returns:
            how many drafts to verify for each row; drafts `[B, K]`; the scores `[B, K, V]` they were drawn by; and
            confidence logits `[B, K]` or `None`.
        """
        scores, drafts = [], []

        def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
            so_far = [torch.cat([row, *(d[i : i + 1] for d in drafts)]) for i, row in enumerate(rows)]
            here = logits.to(device=rows[0].device, dtype=torch.float32)
            scores.append(process_rows(self.processor, so_far, here, active, self.pad))
            drafts.append(draw(scores[-1], self.config.do_sample))
            return drafts[-1].to(logits.device)

        block = self.model.draft(torch.stack([row[-1] for row in rows]), cache, choose)
        # The last token of a text need not be drafted: a step yields one token beyond the drafts. Bounded replay skips
        # nothing of a verification that is no longer than a window.
        most = block.tokens.shape[1]
        if self.config.decoder_replay == "bounded":
            most = min(most, self.model.config.get_text_config().sliding_window - 1)
        if cache.max_length is not None:  # a block begins behind the longest row
            most = max(0, min(most, cache.max_length - cache.columns - 1))
        limits = [
            min(most, self.config.max_length - len(row) - 1) if wanted else -1
            for row, wanted in zip(rows, active, strict=True)
        ]
        lengths = self.report.scheduler.choose(block.confidence, limits)
        return lengths, torch.stack(drafts, dim=1), torch.stack(scores, dim=1), block.confidence


class DraftCandidates(CandidateGenerator):
    """The drafter as transformers' assisted decoding asks for it (one row)."""

    requires_model_outputs = True
    model_kwargs_overrides: dict = {}

    def __init__(self, session: DraftSession):
        self.session = session
        self._last: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def get_candidates(self, input_ids, model_outputs=None, is_first_iteration=False, **kwargs):
        """Return `input_ids` `[1, S]` with drafts behind, and the scores they were drawn by when sampling."""
        self._last = None
        if is_first_iteration:  # the prompt has not been read
            return input_ids, None
        (length,), drafts, scores, confidence = self.session.draft([input_ids[0]], model_outputs.cache, [True])
        self._last = drafts[0, :length], None if confidence is None else confidence[0]
        if length == 0:
            return input_ids, None
        candidates = torch.cat([input_ids, drafts[:, :length]], dim=1)
        return candidates, scores[:, :length] if self.session.config.do_sample else None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Count what became of the drafts."""
        if self._last is None:
            return
        drafts, confidence = self._last
        kept, report = int(num_matches), self.session.report
        # Where a text ends at a draft, the loop counts one match less; a rejected draft is never chosen again.
        cut = kept < len(drafts) and bool(input_ids[0, -1] == drafts[kept])
        report.steps += 1
        report.add(len(drafts), kept + cut, confidence, cut)


class DraftedRows:
    r"""The loop for rows that accept different counts.

    Args:
        session (`DraftSession`). criteria (`StoppingCriteriaList`): asked per row and token.
        streamer (*optional*): of one row.
    """

    def __init__(self, session: DraftSession, criteria: StoppingCriteriaList, streamer=None):
        self.session, self.criteria, self.streamer = session, criteria, streamer
        config = session.config
        self.do_sample = config.do_sample
        self.records = {
            name: [] for name in ("scores", "logits")
            if config.return_dict_in_generate and getattr(config, f"output_{name}")
        }  # fmt: skip

    def run(self, input_ids: torch.Tensor, model_kwargs: dict) -> torch.Tensor:
        """Continue `input_ids` `[B, S]` and return the sequences; the cache in `model_kwargs` is extended."""
        model, config, cache = self.session.model, self.session.config, model_kwargs["cache"]
        outputs = model._prefill(input_ids, config, model_kwargs)
        self.base = cache.column_mask
        if self.base is None:
            self.base = torch.ones(len(input_ids), cache.columns, dtype=torch.bool, device=cache.lengths.device)
        self.options = {"decoder_replay": config.decoder_replay, "use_cache": True, "return_dict": True}
        self.rows, self.active = list(input_ids), [True] * len(input_ids)
        self.new = [0] * len(input_ids)
        for values in self.records.values():
            values.extend([] for _ in input_ids)
        logits = outputs.logits[:, -1].to(dtype=torch.float32, device=input_ids.device, copy=True)
        scores = process_rows(self.session.processor, self.rows, logits, self.active, self.session.pad)
        for row, token in enumerate(draw(scores, self.do_sample)):
            self._extend(row, token[None], scores[row][None], logits[row][None])
        cache.activate_past_recording()
        try:
            while any(self.active):
                self._step(cache)
            if config.return_dict_in_generate or getattr(cache, "_is_user_defined", False):
                self._complete(cache)
        finally:
            cache.crop(0)
            cache.record_past = False
        if self.streamer is not None:
            self.streamer.end()
        return self._sequences()

    def _step(self, cache) -> None:
        """Draft, verify in one forward, keep the accepted tokens of each row and drop the rest from the cache."""
        lengths, drafts, draft_scores, confidence = self.session.draft(self.rows, cache, self.active)
        fed = [torch.cat([row[-1:], draft[:n]]) for row, draft, n in zip(self.rows, drafts, lengths, strict=True)]
        logits = self._forward(cache, [ids if a else ids[:0] for ids, a in zip(fed, self.active, strict=True)])
        scores = self._processed(logits, fed)
        dropped = torch.zeros(len(fed), dtype=torch.long)
        for row in [row for row, active in enumerate(self.active) if active]:
            count = lengths[row]
            proposal = draft_scores[row, :count] if self.do_sample else None
            tokens, _ = accept_drafts(scores[row, : count + 1], drafts[row, :count], proposal)
            kept = self._extend(row, tokens, scores[row], logits[row])
            dropped[row] = count + 1 - kept
            # A row that ended before its last gained token kept drafts only.
            cut = kept < len(tokens)
            logit = None if confidence is None else confidence[row]
            self.session.report.add(count, kept - (not cut), logit, cut)
        self.session.report.steps += 1
        cache.crop_rows(dropped)
        self._align(cache)

    def _forward(self, cache, fed: list[torch.Tensor]) -> torch.Tensor:
        """Feed tokens of each row and return logits `[B, longest, V]` in float32."""
        longest = max(len(ids) for ids in fed)
        block = fed[0].new_full((len(fed), longest), self.session.pad)
        mask = torch.zeros_like(block, dtype=torch.bool)
        for row, ids in enumerate(fed):
            block[row, : len(ids)], mask[row, : len(ids)] = ids, True
        seen = cache.column_mask
        seen = mask.new_ones(len(fed), cache.columns) if seen is None else seen.to(mask.device)
        mask = torch.cat([seen, mask], dim=1)
        mask = None if bool(mask.all()) else mask.long()
        device = self.session.model.device
        mask = None if mask is None else mask.to(device)
        outputs = self.session.model(
            block.to(device), attention_mask=mask, cache=cache, logits_to_keep=longest, **self.options
        )
        return outputs.logits.to(dtype=torch.float32, device=block.device)

    def _processed(self, logits: torch.Tensor, fed: list[torch.Tensor]) -> torch.Tensor:
        """Apply the logits processors to `[B, longest, V]`; position i of a row follows its first i drafts."""
        if not self.session.processor:
            return logits
        steps = []
        for i in range(logits.shape[1]):
            active = [a and i < len(ids) for a, ids in zip(self.active, fed, strict=True)]
            so_far = [torch.cat([row, ids[1 : i + 1]]) for row, ids in zip(self.rows, fed, strict=True)]
            steps.append(process_rows(self.session.processor, so_far, logits[:, i], active, self.session.pad))
        return torch.stack(steps, dim=1)

    def _extend(self, row: int, tokens: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> int:
        """Append tokens until one ends the row, and return how many were appended."""
        kept = 0
        while kept < len(tokens) and self.active[row]:
            self.rows[row] = torch.cat([self.rows[row], tokens[kept : kept + 1].to(self.rows[row])])
            for name, values in (("scores", scores), ("logits", logits)):
                if name in self.records:
                    self.records[name][row].append(values[kept])
            kept += 1
            self.active[row] = not bool(self.criteria(self.rows[row][None], None).all())
        self.new[row] += kept
        if self.streamer is not None:
            self.streamer.put(tokens[None, :kept].cpu())
        return kept

    def _align(self, cache) -> None:
        """Put the new tokens of each row right behind the prompt's columns, as plain decoding has them."""
        held = cache.lengths.to(self.base.device) - self.base.sum(-1)
        new = torch.arange(int(held.max()), device=held.device) < held[:, None]
        cache.align_columns(torch.cat([self.base, new], dim=1))

    def _complete(self, cache) -> None:
        """Feed what plain decoding has fed: of rows that ended early, their last token and the padding after it."""
        longest, ends = max(self.new), self._sequences()
        width = ends.shape[1]
        fed = [ends[row, width - 1 - (longest - count) : width - 1] for row, count in enumerate(self.new)]
        # In pieces of a window: replay skips nothing of them, as nothing of plain decoding, and few logits exist at once.
        # They are fed behind the longest row, where a fixed capacity may have room for fewer.
        piece = self.session.model.config.get_text_config().sliding_window
        if cache.max_length is not None:
            piece = max(1, min(piece, cache.max_length - cache.columns))
        for start in range(0, max(map(len, fed)), piece):
            self._forward(cache, [ids[start : start + piece] for ids in fed])
            self._align(cache)

    def _sequences(self) -> torch.Tensor:
        """The rows `[B, T]`, ended ones filled with padding."""
        return torch.nn.utils.rnn.pad_sequence(self.rows, batch_first=True, padding_value=self.session.pad)

    def recorded(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """Scores or logits of every new token, `[B, V]` each; zeros for rows that had ended."""
        if name not in self.records:
            return None
        rows = self.records[name]
        empty = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else empty for row in rows]) for step in range(max(self.new))
        )


class Dsv4DraftMixin:
    """Assisted decoding of these models: by their own drafter, by prompt lookup, by another model."""

    @property
    def drafter(self):
        """The drafter (`Dsv4DSpark` or `Dsv4Mtp`), `None` if the model was loaded without one."""
        return self._language_model.drafter

    @property
    def _language_model(self):
        return getattr(self.model, "language_model", self.model)

    def draft(self, tokens: torch.Tensor, cache, choose):
        r"""Draft the tokens after `tokens` `[B]`, which the cache has not seen (see `Dsv4DSpark.propose`).

        Raises:
            ValueError: if the cache holds tokens that the drafter has not seen.
        """
        _check_drafter_saw(cache)
        device, home, embed = self._language_model.drafter_device, tokens.device, self.get_input_embeddings()
        with torch.no_grad():
            block = self.drafter.propose(
                tokens.to(device),
                cache,
                lambda ids: embed(ids).to(device),
                lambda states: self.lm_head(states).to(device),
                lambda step, logits: choose(step, logits.to(home)).to(device),
            )
        confidence = None if block.confidence is None else block.confidence.to(home)
        return block._replace(tokens=block.tokens.to(home), confidence=confidence)

    def _get_candidate_generator(self, generation_config, **kwargs):
        session = getattr(generation_config, "_draft_session", None)
        if session is None:
            return super()._get_candidate_generator(generation_config=generation_config, **kwargs)
        return DraftCandidates(session)

    # transformers reads `inputs_tensor` from this signature.
    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_model=None,
        **model_kwargs,
    ):
        """Decode with drafts; what transformers' loop cannot do, the loop here does."""
        options = {
            "logits_processor": logits_processor, "stopping_criteria": stopping_criteria,
            "generation_config": generation_config, "synced_gpus": synced_gpus, "streamer": streamer,
            "inputs_tensor": inputs_tensor, "assistant_model": assistant_model,
        }  # fmt: skip
        if not generation_config.use_mtp:
            self._read_prompt(input_ids, generation_config, model_kwargs)
            output = super()._assisted_decoding(input_ids, **options, **model_kwargs)
            model_kwargs["cache"].record_past = False
            return output
        _check_call(assistant_model, streamer, synced_gpus, len(input_ids), model_kwargs)
        _check_drafter_saw(model_kwargs["cache"])
        session = DraftSession(self, generation_config, logits_processor, generation_config._draft_scheduler)
        if self._fits_library_loop(input_ids, stopping_criteria, generation_config, model_kwargs["cache"]):
            generation_config._draft_session = session
            output = super()._assisted_decoding(input_ids, **options, **model_kwargs)
            model_kwargs["cache"].record_past = False
            found = {} if torch.is_tensor(output) else {f.name: getattr(output, f.name) for f in fields(output)}
            sequences = found.pop("sequences", output)
        else:
            _check_outputs(generation_config)
            loop = DraftedRows(session, stopping_criteria, streamer)
            sequences = loop.run(input_ids, model_kwargs)
            found = {name: loop.recorded(name) for name in ("scores", "logits")} | {"cache": model_kwargs["cache"]}
        if not generation_config.return_dict_in_generate:
            return sequences
        return Dsv4DraftedOutput(sequences=sequences, draft_report=session.report, **found)

    def _read_prompt(self, input_ids, generation_config, model_kwargs) -> None:
        """Read all but the last token of a prompt that continues a cache or comes in chunks.

        transformers' assisted decoding would feed a continued prompt again from its start, and all of it at once.
        """
        cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
        length = getattr(generation_config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
        if cache is None or model_kwargs.get("inputs_embeds") is not None or length != input_ids.shape[1]:
            return  # embeddings are read once, and new tokens alone are fed as they are
        seen = cache.get_seq_length()
        if not seen and generation_config.prefill_chunk_size is None:
            return
        if length - seen > 1:
            config, part = copy.copy(generation_config), dict(model_kwargs)
            config._mask_length = length - 1
            part |= {k: part[k][..., :-1] for k in ("attention_mask", "position_ids") if part.get(k) is not None}
            self._prefill(input_ids[:, :-1], config, part)
        for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL:
            model_kwargs.pop(name, None)
        # Says that the ids are the whole sequence (`prepare_inputs_for_generation`).
        model_kwargs["attention_mask"] = torch.ones_like(input_ids) if mask is None else mask

    @staticmethod
    def _fits_library_loop(input_ids, criteria, config, cache) -> bool:
        simple = all(isinstance(c, PER_TOKEN_CRITERIA) for c in criteria)
        return len(input_ids) == 1 and simple and config.prefill_chunk_size is None and cache.get_seq_length() == 0

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        """Allow several sequences per prompt with the model's own drafts, which the loop here decodes as a batch."""
        count = generation_config.num_return_sequences
        if generation_config.use_mtp:
            generation_config.num_return_sequences = 1
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        generation_config.num_return_sequences = count


def _check_call(assistant_model, streamer, synced_gpus, batch, model_kwargs) -> None:
    """Raise a `ValueError` for what cannot go with the model's own drafts."""
    if assistant_model is not None:
        raise ValueError("assistant_model is given with use_mtp=True; accepted: one of the two.")
    if model_kwargs.get("cache") is None:
        raise ValueError("use_cache is False with use_mtp=True; accepted: True.")
    if streamer is not None and batch > 1:
        raise ValueError(f"streamer is given for {batch} rows; accepted: one row.")
    if synced_gpus:
        raise ValueError("synced_gpus is True with use_mtp=True; accepted: False.")


def _check_drafter_saw(cache) -> None:
    if not cache.draft or (cache.draft[0].parts is None and cache.is_initialized and bool(cache.lengths.any())):
        raise ValueError(
            "cache holds tokens that the drafter has not seen; accepted: a cache that was filled after the drafter was "
            "loaded."
        )


def _check_outputs(config: GenerationConfig) -> None:
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name) and config.return_dict_in_generate:
            raise ValueError(f"{name} is True with use_mtp=True for a batch, a chunked prompt or a continued cache; "
                             "accepted: False.")  # fmt: skip


def check_draft_options(config: GenerationConfig) -> None:
    r"""Raise a `ValueError` if a generation config asks for drafts together with what they exclude."""
    if (config.num_beams or 1) != 1:
        raise ValueError(f"num_beams is {config.num_beams} with use_mtp=True; accepted: 1.")
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight"):
        if getattr(config, name, None) is not None:
            raise ValueError(f"{name} is {getattr(config, name)!r} with use_mtp=True; accepted: None.")
    # The processors of these two keep a state of their own, which cannot be rolled back.
    if config.guidance_scale not in (None, 1):
        raise ValueError(f"guidance_scale is {config.guidance_scale} with use_mtp=True; accepted: None or 1.")
    if isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig):
        raise ValueError("watermarking_config is a SynthIDTextWatermarkingConfig with use_mtp=True; accepted: None, or a "
                         "WatermarkingConfig.")  # fmt: skip
