"""The anchor probe as an instrument: for which models it speaks, what it says of planted cases, what it costs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import theodolite as th
from theodolite.analyses.anchors import write_anchors
from theodolite.instruments import registry
from theodolite.instruments.base import SurveyContext
from theodolite.instruments.language.anchors import (
    anchor_findings,
    certificate_needs,
    head_of,
    is_language_model,
    positions_per_sample,
)
from theodolite.measures.anchors import probe_states
from theodolite.models import bert, gpt

WORDS = 60


def next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(samples: int = 40, length: int = 17) -> torch.Tensor:
    return torch.randint(0, WORDS, (samples, length), generator=torch.Generator().manual_seed(0))


def language_problem(scale: float = 1.0) -> th.Problem:
    """A GPT with a random head of its own; `scale` 1 leaves it as it is made."""
    model = gpt(WORDS, 16, 16, 1, 2, tied=False, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.norm.bias.fill_(1.0)  # a constant direction
    ids = text()
    return th.Problem(model, next_token, (ids[:, :-1], ids[:, 1:]))


def classifier_problem() -> th.Problem:
    x = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    return th.Problem(model, nn.CrossEntropyLoss(), (x, torch.arange(30) % 10))


class TokenClassifier(nn.Module):
    """Tokens in, a few tags out for each of them."""

    def __init__(self, outputs: int, pool: bool) -> None:
        super().__init__()
        self.table, self.head, self.pool = nn.Embedding(WORDS, 8), nn.Linear(8, outputs), pool

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(x.mean(1) if self.pool else x)


def survey(problem: th.Problem, **more) -> tuple[th.instruments.Survey, dict[str, th.Finding]]:
    found = th.survey(problem, only=["anchors"], progress=False, **more)
    assert found.sound, found
    return found, {f.label: f for f in found.findings}


def world(states: torch.Tensor, weight: torch.Tensor, **more) -> dict[str, th.Finding]:
    return {f.label: f for f in anchor_findings(probe_states(states, weight, **more))}


# For which models


def test_a_survey_of_an_image_classifier_does_not_speak_of_anchors():
    problem = classifier_problem()
    plan = th.instruments.plan_survey(problem)
    assert "anchors" not in {row["instrument"] for row in plan.rows()}
    found = th.survey(problem, only=["anchors"], progress=False)
    row = next(row for row in found.plan if row["instrument"] == "anchors")
    assert row["state"] == "skipped"
    assert "no language model" in row["reason"]


@pytest.mark.parametrize("pool", [True, False])
def test_classifiers_of_tokens_are_no_language_models(pool):
    ids = text()
    y = torch.zeros(len(ids), dtype=torch.int64) if pool else torch.zeros_like(ids)
    problem = th.Problem(TokenClassifier(5, pool), nn.CrossEntropyLoss() if pool else next_token, (ids, y))
    assert not is_language_model(problem)


def test_as_many_classes_as_words_but_no_position_is_refused_without_a_result():
    ids = text()
    problem = th.Problem(TokenClassifier(WORDS, True), nn.CrossEntropyLoss(), (ids, torch.arange(len(ids)) % WORDS))
    result = th.survey(problem, only=["anchors"], progress=False)
    assert result.sound


def test_too_few_positions_are_refused_with_their_number():
    ids = text(2)
    problem = th.Problem(gpt(WORDS, 16, 16, 1, 2, seed=0), next_token, (ids[:, :-1], ids[:, 1:]))
    found = th.survey(problem, only=["anchors"], progress=False)
    row = next(row for row in found.plan if row["instrument"] == "anchors")
    assert "32 positions are too few for 16 dimensions: 48" in row["reason"]


def test_it_runs_in_a_survey_of_a_language_model_and_draws_its_picture(tmp_path):
    problem = language_problem(40.0)
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    found, by = survey(problem)
    result = found.results["anchors"]
    assert result.positions == 640
    assert result.vocabulary == WORDS
    assert {"bulk mass", "atoms"} < set(by)
    assert by["atoms"].error is not None
    page = found.to_html(tmp_path / "index.html").read_text()
    assert "could not be drawn" not in page
    assert 'id="section-anchors"' in page
    assert all(torch.equal(before[name], value) for name, value in problem.model.state_dict().items())


def test_a_masked_model_is_probed_at_hidden_positions_and_some_are_held_out():
    ids = text(60, 16)
    targets = torch.full_like(ids, -100)
    targets[:, ::4] = ids[:, ::4]
    problem = th.Problem(bert(WORDS, 16, 16, 1, 2, seed=0), next_token, (ids.masked_fill(targets >= 0, WORDS - 1), targets))
    found, _ = survey(problem)
    result = found.results["anchors"]
    assert positions_per_sample(problem) == 4
    assert result.positions == 240
    assert result.held_out_positions > 0
    assert result.biased


def test_hugging_face_batches_are_read():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ids = text(40, 16)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    found, by = survey(th.Problem(transformers.GPT2LMHeadModel(config).eval(), None, [batch]))
    assert found.results["anchors"].positions == 640
    assert found.results["anchors"].perplexity is not None
    assert "bulk mass" in by


def test_efforts_get_cheaper_and_a_budget_may_leave_it_out():
    problem = language_problem()
    instrument, context = registry.get("anchors"), SurveyContext(problem)
    prices = [context.timings.seconds(instrument.cost(context, **effort)) for effort in instrument.efforts]
    assert prices == sorted(prices, reverse=True)
    assert all(price > 0 for price in prices)
    assert head_of(problem).weight.shape == (WORDS, 16)


# What it says


def states(n: int = 3000, d: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randn(n, d, generator=generator), torch.ones(n, 1)], dim=1).double()


def test_a_planted_anchor_is_found():
    """All words share one atom: log Z is linear exactly."""
    atom = torch.randn(1, 9, generator=torch.Generator().manual_seed(1)).double()
    by = world(states(), atom.expand(500, 9), top=(0, 1))
    found = by["anchor vector"]
    assert found.severity is th.results.Severity.GOOD
    assert found.value == pytest.approx(1.0, abs=1e-9)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert "anchored logits" in found.advice


def test_a_head_of_zeros_needs_no_anchor():
    by = world(states(), 1e-3 * torch.randn(200, 9, generator=torch.Generator().manual_seed(1)).double())
    assert by["constant partition"].value < 0.1


def test_states_of_varying_norm_have_no_anchor():
    """A Gaussian dictionary: log Z grows with the squared norm, which is not linear."""
    h = states(4000, 12)
    h[:, :12] *= torch.linspace(0.2, 2.0, 4000)[torch.randperm(4000)][:, None]
    by = world(h, torch.randn(2000, 13, generator=torch.Generator().manual_seed(1)).double())
    assert "no anchor" in by
    assert "not comparable across contexts" in by["no anchor"].advice
    assert by["no anchor"].value < 0.5


def test_a_missing_constant_direction_is_named():
    """The same atom for all words, but without the constant coordinate and far from zero: an intercept is all that lacks."""
    h = torch.randn(3000, 6, generator=torch.Generator().manual_seed(0)).double()
    weight = torch.randn(1, 6, generator=torch.Generator().manual_seed(1)).double().expand(3000, 6)
    by = world(h, weight, top=(0,))
    assert "intercept" in by["no anchor"].sentence


def test_first_positions_that_stand_apart_are_told():
    from dataclasses import replace

    probe = probe_states(states(1000), torch.randn(50, 9, generator=torch.Generator().manual_seed(1)).double())
    places = torch.arange(1000) % 20
    values = probe.sampled_values + 30.0 * (places == 0)[:, None]
    by = {f.label: f for f in anchor_findings(replace(probe, sampled_places=places, sampled_values=values))}
    assert by["first positions"].value > 0.5
    assert "first positions" not in {f.label for f in anchor_findings(replace(probe, sampled_places=places))}


def test_without_a_held_out_part_the_value_is_in_sample_and_has_no_error():
    atom = torch.randn(1, 9, generator=torch.Generator().manual_seed(1)).double()
    by = world(states(), atom.expand(50, 9), top=0, held_out=0.0)
    assert by["anchor vector"].error is None
    assert "fitted positions" in by["anchor vector"].sentence


def test_the_certificate_is_not_claimed():
    atom = torch.randn(1, 9, generator=torch.Generator().manual_seed(1)).double()
    near = certificate_needs(probe_states(states(), atom.expand(50, 9), top=0))
    assert "neither vacuous nor not" in near.sentence
    assert "that is possible" in near.sentence
    far = certificate_needs(probe_states(states(), 3 * torch.randn(50, 9, generator=torch.Generator().manual_seed(1)).double()))
    assert "it cannot apply here" in far.sentence
    assert far.value > 0.75


def test_the_page_escapes_names_and_has_all_sections(tmp_path):
    probe = probe_states(states(), torch.randn(300, 9, generator=torch.Generator().manual_seed(1)).double(), anchors=2)
    page, findings = write_anchors(probe, tmp_path / "deep" / "index.html", name="<script>x</script>", facts={"model": "<b>"})
    content = page.read_text()
    assert "<script>x" not in content
    assert "&lt;b&gt;" in content
    for name in ("anchor", "partition", "clusters", "atoms", "certificate"):
        assert f'id="section-{name}"' in content
    assert content.count("<svg id=") == 3
    assert findings[0].headline
    assert all(finding.sentence.endswith(".") for finding in findings)


def test_without_geometry_the_page_has_no_atoms(tmp_path):
    probe = probe_states(states(500), torch.randn(30, 9, generator=torch.Generator().manual_seed(1)).double(), geometry=False)
    page, _ = write_anchors(probe, tmp_path / "index.html")
    assert 'id="section-atoms"' not in page.read_text()
    assert len(th.plots.plot_anchor_probe(probe).axes) == 2
