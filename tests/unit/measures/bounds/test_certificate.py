"""Certificates: which priors are refused, that the prior itself is never beaten by what is worse, and that runs resume."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.errors import ArgumentError, BatchCoupledError
from theodolite.measures.bounds import RiskCertificate, grid_index, grid_penalty, held_out_bound, kl_inverse
from theodolite.measures.bounds import checkpoints as room

from .cases import Scaled, SmallCnn, Words, mlp, prototypes, state, trained

QUICK = {"epochs": 4, "batch_size": 200, "passes": 2, "progress": False}


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    data, model = prototypes(1500, 1), mlp(40, 12, 2)
    start = trained(model, data, 8)
    return model, data, start


def problem_of(case, **more) -> th.Problem:
    model, data, _ = case
    return th.Problem(model, nn.CrossEntropyLoss(), data, **more)


def test_a_certificate_holds_on_fresh_samples_and_says_what_it_is(case):
    model, _, start = case
    before = state(model)
    found = th.pac_bayes_bound(
        problem_of(case), start=start, **{**QUICK, "epochs": 10}, test=problem_of(case).on(prototypes(4000, 9))
    )
    assert not found.vacuous
    assert found.value < found.guessing
    fresh = th.Problem(model, nn.CrossEntropyLoss(), prototypes(5000, 5))
    wrong = 0
    for seed in range(20):
        weights = found.posterior.sample(seed)
        with torch.no_grad():
            output = torch.func.functional_call(model, weights, fresh.data._batches[0].args)
        wrong += int((output.argmax(1) != fresh.data._batches[0].target).sum())
    assert wrong / 100_000 < found.value
    assert found.empirical <= found.empirical_upper <= found.value <= found.prior_value
    assert found.held_out < found.value
    assert "without noise" in found.sentence()
    assert found.confidence == pytest.approx(0.965)
    assert found.mean_error is not None
    assert len(found.trace) == 10
    assert all(torch.equal(before[name], value) for name, value in state(model).items())
    assert set(found.scales) == set(found.penalty) == {"0", "2"}


def test_the_prior_itself_is_never_beaten_by_something_worse():
    """Random labels: nothing can be learned, and the certificate is chance plus what counting costs."""
    torch.manual_seed(0)
    x = torch.randn(4000, 10)
    y = torch.randint(2, (4000,), generator=torch.Generator().manual_seed(1))
    model = mlp(10, 20, 2)
    start = trained(model, (x, y), 10)
    found = th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x, y)), start=start, **QUICK)
    assert found.value == by_formula(found, 4000)
    assert found.value <= found.prior_value < float(kl_inverse(0.53, 0.012))  # by 4000 samples and 8000 draws of chance
    assert abs(found.empirical - 0.5) < 4 * 0.5 / math.sqrt(found.draws)
    assert found.no_better_than_guessing
    assert "no better than always naming the commonest class" in found.sentence()


def by_formula(found: RiskCertificate, n: int) -> float:
    """What the bound is, from the error rate of the draws, the divergence and the places of the variances on the grid."""
    paid = sum(grid_penalty(round(grid_index(variance))) for variance in found.scales.values())
    upper = kl_inverse(found.empirical, math.log(1 / 0.005) / found.draws)
    return pytest.approx(float(kl_inverse(upper, (found.kl + paid + math.log(2 * math.sqrt(n) / 0.025)) / n)), rel=1e-12)


def test_where_the_prior_wins_the_fitted_certificate_is_kept(tmp_path):
    """Labels that nothing can learn, and a posterior around weights that have learned them by heart."""
    torch.manual_seed(0)
    x, y = torch.randn(1000, 10), torch.randint(2, (1000,), generator=torch.Generator().manual_seed(1))
    model = mlp(10, 60, 2)
    start = trained(model, (x, y), 40)
    found = th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x, y)), start=start, **QUICK)
    assert found.fitted is not None
    assert found.kl == 0 < found.fitted.kl
    assert found.value == found.prior_value == found.fitted.prior_value < found.fitted.value
    assert found.fitted.confidence == found.confidence
    assert f"the fitted posterior, at {100 * found.fitted.value:.3g} %, says less" in found.sentence()
    found.save(tmp_path / "kept")
    again = th.load(tmp_path / "kept")
    assert again.fitted.value == found.fitted.value
    assert again.sentence() == found.sentence()


def test_random_labels_come_to_at_most_0_52_at_60_000_samples():
    """By formula: the prior itself, half of the draws wrong, ten passes, two layers whose variances are near 7e-4."""
    found = th.risk_certificate(300_000, 600_000, 0.0, 60_000, penalty=2 * grid_penalty(500), delta_draws=0.005)
    assert 0.5 < found.value <= 0.52


def test_a_model_that_never_saw_the_data_is_certified_by_them(case):
    model, _, _ = case
    held_out = th.Problem(model, nn.CrossEntropyLoss(), prototypes(1500, 7))
    found = th.pac_bayes_bound(held_out, prior="held-out", **QUICK)
    assert found.held_out <= found.value < 0.2
    assert found.kl < 50
    assert found.trained_on == 0
    compared = th.pac_bayes_bound(held_out, prior="held-out", trained_on=problem_of(case), **QUICK)
    assert compared.trained_on == 1500
    assert compared.value == found.value


def test_all_samples_that_had_no_part_are_counted_together(case):
    """The bound of the model without noise is one binomial bound: the smaller of two would be less sure than it says."""
    model, _, _ = case
    held_out, test = (th.Problem(model, nn.CrossEntropyLoss(), prototypes(n, seed)) for n, seed in ((500, 7), (700, 8)))
    found = th.pac_bayes_bound(held_out, prior="held-out", test=test, **QUICK)
    with torch.no_grad():
        errors = sum(int((model(b.args[0]).argmax(1) != b.target).sum()) for part in (held_out, test) for b in part.data)
    assert found.held_out == pytest.approx(held_out_bound(errors, 1200, 0.035), rel=1e-12)


def test_a_prior_is_trained_on_a_part_of_the_data(case):
    found = th.pac_bayes_bound(problem_of(case), prior="split", split=0.5, **QUICK)
    assert found.n == 750
    assert found.prior == "split"
    calls = []
    own = th.pac_bayes_bound(
        problem_of(case), prior="split", split=0.5, recipe=lambda model, data: calls.append((model, data)), **QUICK
    )
    assert len(calls) == 1
    assert calls[0][0] is not case[0]
    assert own.start_hash != found.start_hash


def test_a_split_begins_with_nothing_of_the_trained_model(case):
    """Running statistics and parameters that are not measured come from `start`, not from the model that saw all samples."""
    torch.manual_seed(0)
    data = prototypes(300, 3)
    model = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, data, 4)
    seen = []
    how = {"recipe": lambda model, data: seen.append({k: v.clone() for k, v in model.state_dict().items()}), **QUICK}
    problem = th.Problem(model, nn.CrossEntropyLoss(), data, params=["0.*", "3.*"])
    th.pac_bayes_bound(problem, prior="split", start=start, **how)
    assert all(torch.equal(seen[0][name], value) for name, value in start.items())
    parameters = {name: value for name, value in start.items() if name in dict(model.named_parameters())}
    th.pac_bayes_bound(problem, prior="split", start=parameters, **how)
    assert not seen[1]["1.running_mean"].any()
    with pytest.raises(ArgumentError, match=r"start lacks the parameter 1\.weight"):
        th.pac_bayes_bound(problem, prior="split", start={k: v for k, v in start.items() if k != "1.weight"}, **how)


def test_the_posterior_of_a_split_holds_the_whole_network(tmp_path):
    """Running statistics and what is not measured are those of the copy that was trained, not of the user's model."""
    torch.manual_seed(0)
    data = prototypes(600, 3)
    model = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), data, params="3.*"), prior="split", **QUICK)
    found.save(tmp_path / "kept")
    x, y = prototypes(2000, 4)
    for posterior in (found.posterior, th.load(tmp_path / "kept").posterior):
        assert set(posterior.fixed) == set(before) - {"3.weight", "3.bias"}
        wrong = (posterior.module(model.eval())(x).argmax(1) != y).float().mean()
        assert wrong < found.value
        drawn = torch.func.functional_call(model, posterior.sample(0), (x,)).argmax(1)
        assert (drawn != y).float().mean() < found.value
    untrained = (model(x).argmax(1) != y).float().mean()
    assert untrained > found.value  # the user's own model is another one
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_split_trains_models_that_take_names():
    """The usual recipe calls the model as the problem does."""
    torch.manual_seed(0)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(40, 2)

        def forward(self, pixels=None, labels=None):
            logits = self.head(pixels)
            return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}

    x, y = prototypes(400, 3)
    found = th.pac_bayes_bound(th.Problem(Named(), None, {"pixels": x, "labels": y}), prior="split", **QUICK)
    assert found.n == 200
    assert found.mean_error < 0.3


@pytest.mark.parametrize("kind", ["cnn", "words", "scaled"])
def test_other_networks(kind):
    torch.manual_seed(0)
    model = {"cnn": SmallCnn, "words": Words, "scaled": Scaled}[kind]()
    x = {"cnn": torch.randn(200, 1, 8, 8), "words": torch.randint(7, (200, 6)), "scaled": torch.randn(200, 5)}[kind]
    y = torch.arange(200) % 3
    start = trained(model, (x, y), 3)
    found = th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x, y)), start=start, **{**QUICK, "batch_size": 50})
    assert 0 < found.value <= found.prior_value <= 1
    assert ("for each batch" in found.cost.route) == (kind == "scaled")


def test_killed_runs_resume_to_the_same_certificate(case, tmp_path, monkeypatch):
    start = case[2]
    whole = th.pac_bayes_bound(problem_of(case), start=start, **QUICK)
    saves, save = [], room.save_state

    def save_then_die(*arguments):
        save(*arguments)
        saves.append(1)
        if len(saves) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(room, "save_state", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        th.pac_bayes_bound(problem_of(case), start=start, checkpoint=tmp_path, **QUICK)
    monkeypatch.setattr(room, "save_state", save)
    with pytest.raises(ArgumentError, match="resume=True"):
        th.pac_bayes_bound(problem_of(case), start=start, checkpoint=tmp_path, **QUICK)
    resumed = th.pac_bayes_bound(problem_of(case), start=start, checkpoint=tmp_path, resume=True, **QUICK)
    assert (resumed.value, resumed.kl, resumed.empirical) == (whole.value, whole.kl, whole.empirical)
    with pytest.raises(ArgumentError, match="other data, weights or settings"):
        th.pac_bayes_bound(problem_of(case), start=start, checkpoint=tmp_path, resume=True, **{**QUICK, "batch_size": 100})


def test_a_killed_split_goes_on_with_what_it_has_trained(case, tmp_path, monkeypatch):
    whole = th.pac_bayes_bound(problem_of(case), prior="split", **QUICK)
    save = room.save_state

    def save_then_die(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    how = {"prior": "split", "checkpoint": tmp_path, **QUICK}
    monkeypatch.setattr(room, "save_state", save_then_die)
    with pytest.raises(KeyboardInterrupt):
        th.pac_bayes_bound(problem_of(case), **how)
    monkeypatch.setattr(room, "save_state", save)
    monkeypatch.setattr("theodolite.measures.bounds.priors._usual_recipe", lambda *_: pytest.fail("it trains again"))
    with pytest.raises(ArgumentError, match="resume=True"):
        th.pac_bayes_bound(problem_of(case), **how)
    with pytest.raises(ArgumentError, match="a split of other data"):
        th.pac_bayes_bound(problem_of(case), **{**how, "seed": 1}, resume=True)
    resumed = th.pac_bayes_bound(problem_of(case), **how, resume=True)
    assert (resumed.value, resumed.kl, resumed.start_hash) == (whole.value, whole.kl, whole.start_hash)


def test_a_certificate_is_saved_and_read_back(case, tmp_path):
    found = th.pac_bayes_bound(problem_of(case), start=case[2], **QUICK)
    found.save(tmp_path / "certificate")
    again = th.load(tmp_path / "certificate")
    assert again.rows() == found.rows()
    assert again.sentence() == found.sentence()
    assert again.posterior.kl() == pytest.approx(found.posterior.kl(), rel=1e-9)


# What is refused


def test_priors_that_have_seen_the_data(case):
    model, data, start = case
    problem = problem_of(case)
    with pytest.raises(ArgumentError, match="start is missing"):
        th.pac_bayes_bound(problem)
    with pytest.raises(ArgumentError, match="equals the model's weights"):
        th.pac_bayes_bound(problem, start=model)
    with pytest.raises(ArgumentError, match="another architecture"):
        th.pac_bayes_bound(problem, start=mlp(40, 13, 2))
    with pytest.raises(ArgumentError, match="lacks the parameter"):
        th.pac_bayes_bound(problem, start={"0.weight": start["0.weight"]})
    with pytest.raises(ArgumentError, match="start belongs to"):
        th.pac_bayes_bound(problem, prior="held-out", start=start)
    frozen = th.Problem(model, nn.CrossEntropyLoss(), data, params="2.*")
    with pytest.raises(ArgumentError, match="is not measured, and differs from start"):
        th.pac_bayes_bound(frozen, start=start)


def test_a_prior_that_memorised_random_labels_is_caught():
    """It would certify far below the risk of one half."""
    torch.manual_seed(0)
    x = torch.randn(300, 20)
    y = torch.randint(2, (300,), generator=torch.Generator().manual_seed(1))
    model = mlp(20, 100, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    th.train(model, nn.CrossEntropyLoss(), (x, y), optimizer, epochs=150, progress=False)
    memorised = state(model)
    assert float((model(x).argmax(1) != y).float().mean()) < 0.02
    problem = th.Problem(mlp(20, 100, 2), nn.CrossEntropyLoss(), (x, y))
    with pytest.raises(ArgumentError, match="no untrained network"):
        th.pac_bayes_bound(problem, start=memorised)
    lied = th.Problem(model, nn.CrossEntropyLoss(), (x, y))
    test = lied.on((torch.randn(2000, 20), torch.randint(2, (2000,), generator=torch.Generator().manual_seed(3))))
    with pytest.raises(ArgumentError, match="contradicted by the test data"):
        th.pac_bayes_bound(lied, prior="held-out", test=test, **QUICK)
    with pytest.raises(ArgumentError, match="300 of the 300 samples of the data were trained on"):
        th.pac_bayes_bound(lied, prior="held-out", trained_on=lied, **QUICK)
    one = lied.on((torch.cat([torch.randn(99, 20), x[:1]]), torch.zeros(100, dtype=torch.long)))
    with pytest.raises(ArgumentError, match="1 of the 100 samples of the data were trained on"):
        th.pac_bayes_bound(one, prior="held-out", trained_on=lied, **QUICK)
    with pytest.raises(ArgumentError, match="300 of the 300 samples of test were trained on"):
        th.pac_bayes_bound(test, prior="held-out", test=lied, trained_on=lied, **QUICK)


def test_problems_that_have_no_certificate(case):
    model, (x, y), start = case
    with pytest.raises(ValueError, match="50 samples or more"):
        th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x[:40], y[:40])), start=start)
    regression = th.Problem(mlp(40, 4, 1), nn.MSELoss(), (x, torch.randn(len(x), 1)))
    with pytest.raises(ValueError, match="for classifiers with one label"):
        th.pac_bayes_bound(regression, prior="held-out")
    seen = problem_of(case).on((x[:100], y[:100]))
    with pytest.raises(ArgumentError, match="of the data: a bound from them would not be one"):
        th.pac_bayes_bound(problem_of(case), start=start, test=seen)
    with pytest.raises(ArgumentError, match="test holds 100 of the 100 samples"):  # also those of the part that is trained on
        th.pac_bayes_bound(problem_of(case), prior="split", test=seen)
    with pytest.raises(ArgumentError, match="rank counts directions"):
        th.pac_bayes_bound(problem_of(case), start=start, posterior="standard", rank=3)
    with pytest.raises(ValueError, match="prior must be"):
        th.pac_bayes_bound(problem_of(case), prior="trained")
    with pytest.raises(ArgumentError, match="trained_on belongs to"):
        th.pac_bayes_bound(problem_of(case), start=start, trained_on=problem_of(case))
    with pytest.raises(ValueError, match="of which the split leaves 30"):
        th.pac_bayes_bound(problem_of(case), prior="split", split=0.98)
    with pytest.raises(ArgumentError, match="less than 1"):
        th.pac_bayes_bound(problem_of(case), start=start, delta=0.5, delta_draws=0.5)
    with pytest.raises(ArgumentError, match="less than 1"):
        th.risk_certificate(1, 10, 1.0, 100, delta=0.9, delta_draws=0.2)


def test_normalisations_and_dropout():
    torch.manual_seed(0)
    x, y = torch.randn(100, 5), torch.arange(100) % 2
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(BatchCoupledError):
        th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x, y), mode="train"), prior="held-out")
    start = state(model)
    nn.init.normal_(model[0].weight)
    with pytest.raises(BatchCoupledError, match="running statistics"):
        th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x, y)), start=start)
    found = th.pac_bayes_bound(th.Problem(model, nn.CrossEntropyLoss(), (x, y)), prior="held-out", **QUICK)
    assert found.value <= 1
    noisy = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    dropped = th.Problem(noisy, nn.CrossEntropyLoss(), (x, y), mode="train", check=False)
    with pytest.raises(th.errors.NotRepeatableError):
        th.pac_bayes_bound(dropped, prior="held-out")
