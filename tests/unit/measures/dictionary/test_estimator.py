"""The scikit-learn face: its contract, NaN, resuming, scores that choose, and what users get for bad input."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import theodolite as th
from theodolite.data.generators import planted_dictionary, planted_samples

Learner = th.MaskedDictionaryLearning


@pytest.fixture(scope="module")
def signals() -> Any:
    return planted_samples(planted_dictionary(20, 16), 300, 2, noise=0.1).signals.numpy()


@pytest.mark.parametrize(
    "estimator",
    [
        Learner(max_iter=3),
        Learner(max_iter=3, objective="reconstruction"),
        Learner(max_iter=2, decoder="lasso"),
        Learner(max_iter=2, masks="sample", n_init=2),
        Learner(max_iter=2, masks="cycle", missing="mask"),
    ],
    ids=["masked", "reconstruction", "lasso", "sample", "missing"],
)
def test_check_estimator(estimator: Learner) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's own checks
        outcomes = check_estimator(estimator, on_fail=None)
    assert len(outcomes) > 40
    assert [o["check_name"] for o in outcomes if o["status"] not in ("passed", "skipped")] == []
    assert {o["check_name"] for o in outcomes if o["status"] == "skipped"} <= {"check_array_api_input"}


def test_same_seed_same_atoms_and_another_seed_others(signals: Any) -> None:
    first, again, other = (Learner(25, sparsity=2, max_iter=5, random_state=s).fit(signals).components_ for s in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_fit_transform_shapes_and_inverse(signals: Any) -> None:
    learner = Learner(30, sparsity=3, max_iter=5, random_state=0)
    codes = learner.fit_transform(signals)
    assert codes.shape == (300, 30)
    assert ((codes != 0).sum(1) <= 3).all()
    assert np.allclose(np.linalg.norm(learner.components_, axis=1), 1)
    assert np.allclose(learner.inverse_transform(codes), learner.reconstruct(signals))
    assert learner.n_iter_ == 5
    assert learner.n_steps_ == 10
    assert learner.loss_curve_.shape == (5,)
    assert list(learner.get_feature_names_out())[:2] == ["maskeddictionarylearning0", "maskeddictionarylearning1"]


def test_single_precision_stays(signals: Any) -> None:
    learner = Learner(20, max_iter=2, random_state=0).fit(signals.astype(np.float32))
    assert learner.components_.dtype == np.float32
    assert learner.transform(signals.astype(np.float32)).dtype == np.float32


def test_warm_start_equals_one_long_fit(signals: Any) -> None:
    whole = Learner(25, sparsity=2, max_iter=8, random_state=0).fit(signals)
    parts = Learner(25, sparsity=2, max_iter=4, random_state=0, warm_start=True).fit(signals)
    parts = pickle.loads(pickle.dumps(parts)).fit(signals)
    assert np.array_equal(whole.components_, parts.components_)
    assert np.allclose(whole.loss_curve_, parts.loss_curve_)
    assert parts.n_iter_ == 8


def test_without_warm_start_a_fit_begins_anew(signals: Any) -> None:
    learner = Learner(25, sparsity=2, max_iter=4, random_state=0)
    first = learner.fit(signals).components_
    assert np.array_equal(first, learner.fit(signals).components_)


def test_partial_fit_learns_batch_by_batch(signals: Any) -> None:
    learner = Learner(25, sparsity=2, random_state=0)
    for _ in range(20):
        for batch in np.array_split(signals, 3):
            learner.partial_fit(batch)
    assert learner.n_steps_ == 60
    assert learner.loss_curve_[-9:].mean() < learner.loss_curve_[:9].mean()


def test_several_starts_keep_the_one_that_predicts_best(signals: Any) -> None:
    many = Learner(25, sparsity=2, max_iter=5, n_init=4, random_state=0).fit(signals)
    one = Learner(25, sparsity=2, max_iter=5, n_init=1, random_state=0).fit(signals)
    assert many.score(signals) >= one.score(signals)


class TestMissing:
    @pytest.fixture
    def signals(self) -> Any:
        return planted_samples(planted_dictionary(10, 16), 400, 2, noise=0.02).signals.numpy()

    @pytest.fixture
    def holes(self, signals: Any) -> Any:
        spoilt = signals.copy()
        spoilt[np.random.default_rng(0).random(spoilt.shape) < 0.2] = np.nan
        return spoilt

    def test_nan_is_refused_by_default_with_the_remedy(self, holes: Any) -> None:
        with pytest.raises(ValueError, match="missing='mask'"):
            Learner(max_iter=1).fit(holes)

    def test_learns_codes_fills_and_scores(self, signals: Any, holes: Any) -> None:
        learner = Learner(20, sparsity=2, max_iter=150, learning_rate=5e-3, missing="mask", random_state=0).fit(holes)
        assert np.isfinite(learner.transform(holes)).all()
        assert np.isfinite(learner.score(holes))
        filled = learner.impute(holes)
        gone = np.isnan(holes)
        assert np.array_equal(filled[~gone], holes[~gone])
        error = np.mean((filled - signals)[gone] ** 2)
        assert error < 0.5 * np.mean(signals[gone] ** 2)

    def test_infinity_is_never_a_missing_value(self, holes: Any) -> None:
        bad = holes.copy()
        bad[0, 0] = np.inf
        with pytest.raises(ValueError, match="infinity"):
            Learner(max_iter=1, missing="mask").fit(bad)

    def test_nothing_there_at_all(self) -> None:
        with pytest.raises(ValueError, match="Every entry is missing"):
            Learner(max_iter=1, missing="mask").fit(np.full((5, 4), np.nan))


class TestScore:
    def test_is_minus_the_error_per_hidden_coordinate(self, signals: Any) -> None:
        learner = Learner(25, sparsity=2, max_iter=5, random_state=0).fit(signals)
        report = learner.hidden_error(signals)
        assert learner.score(signals) == -report.value
        assert 0 < report.stderr < report.value < report.baseline
        assert report.hidden == 1
        assert "Hidden coordinates are predicted" in str(report)

    def test_equals_a_plain_sum(self, signals: Any) -> None:
        atoms = planted_dictionary(20, 16)
        report = th.dictionary.hidden_error(signals, atoms, 2, hidden_fraction=0.25, masks=3, seed=7)
        from theodolite.measures.dictionary.hidden import visible_masks

        total = 0.0
        for step in range(3):
            seen = visible_masks(16, 4, masks="batch", batch=1, step=step, seeds=(7,))[0, 0].numpy()
            codes = th.orthogonal_matching_pursuit(signals[:, seen], atoms[:, seen].numpy(), 2)
            total += np.mean((signals - codes @ atoms.numpy())[:, ~seen] ** 2) / 3
        assert report.value == pytest.approx(total, rel=1e-10)

    def test_true_atoms_are_near_the_noise_and_others_are_not(self, signals: Any) -> None:
        true = th.dictionary.hidden_error(signals, planted_dictionary(20, 16), 2)
        other = th.dictionary.hidden_error(signals, planted_dictionary(20, 16, seed=9), 2)
        assert 0.01 < true.value < 0.02  # the noise alone is 0.01
        assert other.value > 3 * true.value

    def test_check_20_prefers_what_reconstruction_does_not(self) -> None:
        true = planted_dictionary(40, 30, seed=2)
        sample = planted_samples(true, 700, 2, seed=2).signals.numpy()
        masked, plain = (
            Learner(160, sparsity=2, objective=o, max_iter=150, batch_size=100, random_state=0).fit(sample[:500])
            for o in ("masked", "reconstruction")
        )
        assert masked.score(sample[500:]) > plain.score(sample[500:])
        assert masked.hidden_error(sample[:500]).reconstruction > plain.hidden_error(sample[:500]).reconstruction

    def test_chooses_in_a_grid_search_and_by_choose_dictionary(self) -> None:
        signals = planted_samples(planted_dictionary(10, 16), 400, 2, noise=0.02).signals.numpy()
        search = GridSearchCV(Learner(max_iter=40, sparsity=2, random_state=0), {"n_components": [3, 20]}, cv=2).fit(signals)
        assert search.best_params_ == {"n_components": 20}
        choice = th.dictionary.choose_dictionary(signals, [3, 20], [1, 2], max_iter=100, learning_rate=5e-3)
        assert (choice.n_components, choice.sparsity) == (20, 2)
        assert len(choice.rows()) == 4
        assert "predict hidden coordinates best" in str(choice)


def test_in_a_pipeline_and_cloned(signals: Any) -> None:
    codes = make_pipeline(StandardScaler(), clone(Learner(18, max_iter=2, random_state=0))).fit_transform(signals)
    assert codes.shape == (300, 18)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_components": 0}, "n_components must be"),
        ({"sparsity": 40}, "sparsity must be at most"),
        ({"max_iter": 0}, "max_iter"),
        ({"missing": "drop"}, "missing must be"),
        ({"objective": "plain"}, "objective must be"),
        ({"hidden_fraction": 0.0}, "hidden_fraction"),
        ({"init": np.zeros((2, 2))}, "init must be"),
    ],
)
def test_bad_settings(signals: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Learner(**settings).fit(signals)


def test_zero_signals_and_twin_signals_are_no_trouble() -> None:
    data = np.zeros((12, 6))
    learner = Learner(8, max_iter=3, random_state=0).fit(data)
    assert not learner.transform(data).any()
    twins = np.repeat(np.eye(6)[:2], 6, axis=0)
    assert np.isfinite(Learner(8, sparsity=2, max_iter=3, random_state=0).fit(twins).components_).all()


def test_diverged_learning_says_so(signals: Any) -> None:
    with pytest.raises(ArithmeticError, match="Learning stopped after pass 1"):
        Learner(max_iter=3, objective="reconstruction").fit(signals * 1e200)


class TestGoingOn:
    @pytest.mark.parametrize("change", [{"n_components": 30}, {"n_init": 3}])
    def test_with_another_shape_is_refused(self, signals: Any, change: dict[str, Any]) -> None:
        learner = Learner(20, max_iter=2, warm_start=True, random_state=0).fit(signals)
        learner.set_params(**change)
        for method in (learner.fit, learner.partial_fit):
            with pytest.raises(ValueError, match="Learning began with n_init=1 and 20 atoms"):
                method(signals)

    def test_settings_are_looked_at_again_before_decoding(self, signals: Any) -> None:
        learner = Learner(20, max_iter=2, random_state=0).fit(signals)
        for change, message in (({"selection": "bogus"}, "selection"), ({"sparsity": 0}, "sparsity")):
            with pytest.raises(ValueError, match=message):
                clone(learner).set_params(**change).fit(signals)
            before = learner.get_params()
            with pytest.raises(ValueError, match=message):
                learner.set_params(**change).transform(signals)
            learner.set_params(**before)


def test_several_starts_that_cannot_be_compared_are_refused_before_they_are_trained(signals: Any) -> None:
    with pytest.raises(ValueError, match="sparsity must be from 1 to 15"):
        Learner(30, sparsity=16, objective="reconstruction", n_init=2, max_iter=10**9).fit(signals)
    for settings in ({"score_masks": 0}, {"score_masks": -1}):
        with pytest.raises(ValueError, match="score_masks must be"):
            Learner(max_iter=1, **settings).fit(signals).score(signals)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_iter": 2.5}, "max_iter must be a whole number"),
        ({"n_init": 2.5}, "n_init must be a whole number"),
        ({"n_components": 2, "init": np.zeros((2, 16))}, "length zero"),
    ],
)
def test_more_bad_settings(signals: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Learner(**settings).fit(signals)


def test_rows_without_any_entry_have_zero_codes() -> None:
    data = planted_samples(planted_dictionary(10, 16), 50, 2).signals.numpy()
    data[3] = np.nan
    learner = Learner(12, max_iter=2, missing="mask", random_state=0).fit(data)
    assert not learner.transform(data[3:4]).any()
    assert not learner.transform(data)[3].any()


def test_score_with_missing_values_is_a_plain_mean_over_what_is_there() -> None:
    from theodolite.measures.dictionary.hidden import visible_masks

    atoms = planted_dictionary(20, 16)
    signals = planted_samples(atoms, 60, 2, noise=0.1).signals
    observed = np.random.default_rng(1).random(signals.shape) < 0.7
    report = th.dictionary.hidden_error(
        signals, atoms, 2, hidden_fraction=0.25, masks=3, seed=7, observed=torch.from_numpy(observed)
    )
    squares, count = 0.0, 0
    for step in range(3):
        seen = visible_masks(16, 4, masks="batch", batch=1, step=step, seeds=(7,))[0, 0].numpy()
        for row, known in zip(signals.numpy(), observed, strict=True):
            code = th.orthogonal_matching_pursuit(row[None], atoms.numpy(), 2, visible=(known & seen)[None])
            squares += np.sum((row - code[0] @ atoms.numpy())[known & ~seen] ** 2)
            count += int((known & ~seen).sum())
    assert report.value == pytest.approx(squares / count, rel=1e-10)


def test_standard_error_of_the_score_is_that_of_new_signals() -> None:
    atoms = planted_dictionary(20, 16)
    reports = [
        th.dictionary.hidden_error(planted_samples(atoms, 80, 2, noise=0.1, seed=s).signals, atoms, 2, seed=3) for s in range(60)
    ]
    spread = np.std([r.value for r in reports], ddof=1)
    assert 0.75 < np.mean([r.stderr for r in reports]) / spread < 1.3


def test_steps_too_long_for_the_numbers_are_noticed(signals: Any) -> None:
    with pytest.raises(ArithmeticError, match="Learning stopped"):
        Learner(max_iter=3, optimizer="sgd", learning_rate=1e300).fit(signals)
