"""The example of drafts, smaller: what drafts must not change, and what training and the choice of lengths must gain."""

from types import SimpleNamespace

import pytest
import torch

from examples import drafts
from modeling_dsv4.training import DraftTraining

# It trains a model and its drafter.
pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "compress_ratios": [0, 1, 0], "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1], "candidate_source_layer_id": -1, "dspark_target_layer_ids": [0, 1],
}  # fmt: skip
STEPS, DRAFT_STEPS, TOKENS = 40, 30, 36


@pytest.fixture(scope="module")
def learned():
    """The stories, what an untrained drafter came to, and every way to decode where verifying is dear."""
    stories, model = drafts.Stories(4), drafts.new_model(0, **SMALL)
    rows = stories.rows(drafts.BATCH * STEPS, 0)
    drafts.train(model, rows, steps=STEPS, seed=0, progress=False)
    prompts = [stories.ids(state, 1) for state in stories.held_out[1::2]]
    untrained = drafts.decode(model, prompts, TOKENS, drafts.Verifying(always=5))
    draft = DraftTraining("frozen", anchors=8)
    drafts.train(model, rows, steps=DRAFT_STEPS, seed=0, draft=draft, progress=False)
    head = model.drafter[-1].confidence_head.proj.weight
    before = head.detach().clone()
    found = drafts.compare(model, stories, {"dear": drafts.STEEP}, prompts=3, tokens=TOKENS, progress=False)["dear"]
    assert torch.equal(head, before)
    return SimpleNamespace(stories=stories, prompts=prompts, untrained=untrained, found=found)


def test_held_out_stories_begin_where_none_was_learned(learned):
    stories = learned.stories
    first = {tuple(stories.ids(state, 1).tolist()) for state in stories.held_out}
    assert len(first) == 5 and sorted(stories.following) == sorted(stories.held_out + stories.learned)
    for row in stories.rows(50, 1):
        length = len(stories.ids(0, 1))
        assert tuple(row["input_ids"][:length].tolist()) not in first and row["input_ids"].shape == (46,)


def test_no_way_to_decode_changes_a_text(learned):
    plain = learned.found["no drafts"].texts
    assert [len(text) for text in plain] == [len(prompt) + TOKENS for prompt in learned.prompts]
    for name, way in learned.found.items():
        assert all(map(torch.equal, way.texts, plain)), name


def test_forwards_are_counted_and_saved(learned):
    rows = len(learned.prompts)
    for name, way in learned.found.items():
        assert way.forwards == (rows + way.report.steps if way.verified else rows * TOKENS), name
        assert way.report.drafted == sum(way.verified) and way.report.steps == len(way.verified)
    assert learned.found["always 0"].forwards == rows * TOKENS
    assert learned.found["always 5"].forwards < 0.6 * rows * TOKENS


def test_a_trained_drafter_is_accepted_far_more_often(learned):
    trained, untrained = learned.found["always 5"].report, learned.untrained.report
    assert trained.accepted / trained.steps > max(1.0, 1.5 * untrained.accepted / untrained.steps)


def test_the_scheduler_is_worth_its_choice(learned):
    """In tokens per second by its own curve, against the better of none and all drafts.

    Fitted, noise says no more than how often drafts are accepted on the whole, which is enough for a length that does not
    lose more than a tenth. As it is, noise may cost up to what the worse of the two costs.
    """
    rates = {name: way.rate(drafts.STEEP) for name, way in learned.found.items() if way.verified}
    fixed = rates["always 0"], rates["always 5"]
    assert rates["always 0"] == 1.0
    assert rates["scheduler, trained head, fitted"] >= max(fixed)
    assert rates["scheduler, noise head, fitted"] >= 0.9 * max(fixed)
    assert rates["scheduler, noise head"] >= min(fixed)
    errors = {name: way.report.calibration_error for name, way in learned.found.items() if way.verified}
    assert errors["scheduler, trained head, fitted"] < errors["scheduler, trained head"]


def test_the_table_has_a_line_for_every_way(learned):
    lines = drafts.table(learned.found, drafts.STEEP).splitlines()[1:]
    assert [line[:32].strip() for line in lines] == list(learned.found)
    assert lines[1].split()[-3:-1] == ["0%", "1.00"]
