"""Which values make sense where: a range for every argument that is a number, by what it means and not by what is accepted.

`docs/guide/python.rst` states the ranges of the common names; where a function means something else by one, its docstring does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite import Problem


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_list_of(holds: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(holds, value))


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def is_finite_tensor(value: Any) -> bool:
    return is_tensor(value) and bool(torch.isfinite(value).all())


def is_own_data(value: Any) -> bool:
    """Objects of the user's own, as batches or as parts of one: only the model can tell what they are."""
    entries = list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return bool(entries) and all(type(entry) is object for entry in entries)


def entries_of(value: Any) -> Tensor:
    """The entries of a finite number or tensor; NaN, which lies in no range, for anything else."""
    if is_finite_tensor(value):
        return value  # type: ignore[no-any-return]
    return torch.tensor(float(value) if is_finite(value) else math.nan, dtype=torch.float64)


@dataclass(frozen=True)
class Range:
    """Values with their words. `bounded`: there is a largest one, by what the other arguments hold."""

    words: str
    holds: Callable[[Any], bool]
    names: str
    bounded: bool = False


#: Arguments as `argument` or, where a function or a method differs, as `function.argument` or `Class.method.argument`.
RANGES: tuple[Range, ...] = (
    # Whole numbers
    Range("1, 2, 3, ...", lambda v: is_whole(v) and v >= 1,
        "updates most sweeps few.count steps epochs every checkpoint_every batch_size draws max_passes matvecs max_matvecs max_iter points copies "
        "batches anchors context stride max_positions chunk n_components n_init masks score_masks n m angles population "
        "patience settle spike_events.window segments pairs pool projections workers threads classes channels inputs "
        "width depth heads kv_heads hidden vocabulary dim length neurons in_degree conv1 conv2 fc1 fc2 patch residuals "
        "contexts words bulk_words label_words size columns count bins limit samples batch outputs eval_size per_class "
        "vertices targets spectral_density.probes Monitor.top planted_dictionary.atoms dense.atoms omp_threshold.atoms "
        "omp_success_bound.atoms LearningSettings.sparsity hessian_structure.k compare.k compare_layers.k "
        "track_eigenpairs.k omp_threshold.k omp_success_bound.k wrn.k sample regime_diagram.steps cnn.kernel "
        "passes networks grid_penalty.j held_out_bound.n pac_bayes_bound.rank tasks sgd_risk.paths knots segment "
        "problems trajectories together valid_samples "
        "growth_operators.layers growth_operator.layers smooth r Stage.operators.depth ul2_objectives.span"),
    Range("8, 9, ...", lambda v: is_whole(v) and v >= 8, "risk_certificate.n all_bounds.n bound_from_summary.n"),
    Range("1, 2, 3, ... up to what there is", lambda v: is_whole(v) and 1 <= v < 1000,
        "k sparsity s rank restrict_vocab OutputHead.restricted.words TaylorTwin.order added grow.layers "
        "landscape_aware_growth.layers growth_study.layers", bounded=True),
    Range("0, 1, 2, ...", lambda v: is_whole(v) and v >= 0,
        "memory_budget hold_bytes directions drop_first mask_token rounds rows expansions resamples paths check_steps best_step "
        "step first_step start i kernel_drift.probes kernels_on_ball.probes pl_report.probes learn_dictionaries.epochs "
        "anchor_clusters.top compare_prompts.top expected_regime.steps visiting_steps.steps class_orbit.steps "
        "descend.steps one_example.steps pure_quadratic.steps unit_sigma.steps raises tune_step_size.seed GrowthOperator.picture.first "
        "first lag GrowthStudy.heatmap.until GrowthStudy.transition.until"),
    Range("0, 1, 2, ... up to what there is", lambda v: is_whole(v) and 0 <= v < 1000,
        "n_train n_test held_out_bound.errors", bounded=True),
    Range("0 or more, up to the draws", lambda v: is_finite(v) and 0 <= v <= 1000, "risk_certificate.errors", bounded=True),
    Range("2, 3, ...", lambda v: is_whole(v) and v >= 2,
        "tune_step_size.budget period groups side bars.most exact_anchor_world.dim gaussian_dictionary_world.dim rank_k_target.dim rank_k_targets.dim "
        "ntk_cnn.depth"),
    Range("-1, where a schedule begins, or a step", lambda v: is_whole(v) and v >= -1, "last_epoch"),
    Range("an odd number from 1 on", lambda v: is_whole(v) and v >= 1 and v % 2 == 1, "kernel GrowthStudy.smoothed.window"),
    Range("a place: 0, 1, ... below what there is", lambda v: is_whole(v) and 0 <= v < 1000,
        "feature output layer.index vertex replica layer source with_connections.target word linearity.samples hessian_norm.samples "
        "linearity_deviation.sample trial StabilityResult.explains.trial StabilityResult.fit.trial "
        "StabilityResult.values.trial tangent_kernel.outputs StabilityResult.explains.step StabilityResult.fit.step "
        "StabilityResult.values.step FleetTrace.state.step AnchorProbe.histogram.top AnchorProbe.vector.top "
        "plot_log_partitions.top", bounded=True),
    Range("a seed of torch: from -2^63 to 2^64 - 1", is_whole, "seed init_seed order_seed pair_seed train.seed"),
    Range("a seed of NumPy: from 0 to 2^32 - 1", lambda v: is_whole(v) and v >= 0,
        "random_state rng order_seeds Fleet.train.order_seeds"),
    # Real numbers
    Range("above 0 and finite", lambda v: is_finite(v) and v > 0,
        "suggestion critical seconds bandwidth blown_up blow_up lr rate learning_rate low high radius smoothness enough lambda_1 largest_input "
        "largest_test_input memory budget loss_target rotary_base eps floor own multiple penalty norm fv_bound.c "
        "silencing_shift.slack finite_difference_product.step density.width scaled.std variance precision ceiling schedule oracle_risks.scale "
        "meta_rate RateDescent.outside.within planted_samples.scale clip step_decay.factor population_risk.sigma population_rates.sigma "
        "interpolation_error.sigma least_squares_scores.sigma sgd_risk.sigma meta_gradient.spread"),
    Range("above 0 and at most 1000", lambda v: is_finite(v) and 0 < v <= 1000, "mlp_ratio"),
    Range("0 or more and finite", lambda v: is_finite(v) and v >= 0,
        "LearnedOptimizer.lr compare_readouts.shift train_shift slack tolerance eta until Fleet.train.until spread ridge noise gamma "
        "weight_decay scale std within offset kernel_fall final rms classify_run.rise Adam.eps RMSprop.eps Fleet.eps "
        "meta_gradient.eps cyclical_rate.low "
        "half_sum_rate.rate overfitting_dictionary.radius gaussian_dictionary_world.radius Fleet.train.schedule "
        "Fleet.rate stability.rate kl risk_certificate.penalty all_bounds.penalty"),
    Range("above 0 and below 1", lambda v: is_finite(v) and 0 < v < 1,
        "tol level hidden_fraction threshold train_share choose_dictionary.held_out corrupted beta delta delta_draws split guessing decay"),
    Range("above 0 and at most 1", lambda v: is_finite(v) and 0 < v <= 1, "transfer_certificate.mu safe_share settled"),
    Range("0 or more and below 1", lambda v: is_finite(v) and 0 <= v < 1, "momentum alpha held_out quantile"),
    Range("from 0 to 1", lambda v: is_finite(v) and 0 <= v <= 1,
        "share coherence probability mean_cos class_frac label_noise dampening empirical ebar"),
    Range("above 1 and finite", lambda v: is_finite(v) and v > 1, "ratio rise"),
    Range("1 or more and finite", lambda v: is_finite(v) and v >= 1, "recovered"),
    Range("finite", is_finite,
        "shift LearningProgress.followed.start train.until strength center margin mean bound reference.x reference.y value exact_anchor_world.level "
        "GeneralQuadratic.gamma split_loss_by_curvature.loss quadratic_step.rate GeneralQuadratic.step.rate "
        "trivial judge_state.loss reduced_step.w experiments.between.low experiments.between.high bilinear_problem.u bilinear_problem.v "
        "bilinear_problem.target with_error.value scaled.mean rho"),
    Range("0 or more, NaN where there is none", lambda v: isinstance(v, int | float) and not isinstance(v, bool) and not v < 0,
        "with_error.error"),
    Range("a number, NaN where it has blown up", lambda v: isinstance(v, float | int) and not isinstance(v, bool),
        "Monitor.observe.value validated.loss slope LearningProgress.followed.end RateChoice.falls_to.final"),
    Range("0 or more, infinite where it is not known", lambda v: isinstance(v, float | int) and v >= 0 and v is not True,
        "margin_error slope_error"),
    Range("finite, also as tensors that broadcast", lambda v: is_finite(v) or is_finite_tensor(v),
        "class_orbit.rate GeneralQuadratic.step.y descend.rate top_direction.rate rare_word_kl.strength "
        "shift_logits.shift shift_log_linear.shift one_example.g one_example.kernel one_example.rate one_example.y "
        "one_example_step.y one_example_step.rate pure_quadratic.g "
        "pure_quadratic.kernel pure_quadratic.rate pure_quadratic.gamma unit_sigma.g "
        "unit_sigma.kernel unit_sigma.rate unit_sigma.y unit_sigma.c0 unit_sigma.gamma"),
    Range("from 0 to 1, also as tensors", lambda v: bool(((entries_of(v) >= 0) & (entries_of(v) <= 1)).all()),
        "rare_word_kl.probability kl_inverse.q bernoulli_kl.q bernoulli_kl.p"),
    Range("0 or more, also infinite and as tensors",
        lambda v: bool((entries_of(v) >= 0).all()) or (isinstance(v, float) and v == math.inf), "kl_inverse.budget"),
    Range("0 or more, also as arrays", lambda v: bool((entries_of(v) >= 0).all()),
        "fv_bound.beta hold.distance hold.stability one_example.c one_example_step.c pure_quadratic.norm displacement.c "
        "stable_meta_gradient.rate descend_rate.rate unrolled_meta_gradient.rate descend_unrolled.rate"),
    Range("0 or more, what a float counts exactly", lambda v: bool(((entries_of(v) >= 0) & (entries_of(v) < 2**53)).all()),
        "convex_bounds.visits"),
    Range("1 or more, also as arrays", lambda v: bool((entries_of(v) >= 1).all()), "fv_bound.m"),
    Range("above 0, also as arrays", lambda v: bool((entries_of(v) > 0).all()), "convex_bounds.rate"),
    Range("above 0 and below 1, also as arrays", lambda v: is_finite(v) and 0 < v < 1, "fv_bound.delta"),
    # Several of them
    Range("one or more of 1, 2, 3, ...", lambda v: is_list_of(lambda w: is_whole(w) and w >= 1, v),
        "sizes ms blocks patch_shape choose_dictionary.n_components choose_dictionary.sparsity image ranks cnn.widths"),
    Range("places, or none", lambda v: is_list_of(lambda w: is_whole(w) and w >= 0, v), "starts"),
    Range("three shares that sum to 1", lambda v: False, "shares"),
    Range("above all tokens", lambda v: is_whole(v) and v > 23, "sentinel"),
    Range("baselines, or none", lambda v: v == [], "baselines"),
    Range("stages, each deeper than the one before", lambda v: False, "stages"),
    Range("layers in order, none for a random one",
        lambda v: is_list_of(lambda w: w is None or is_whole(w), v), "GrowthOperator.of.layers grow.operator"),
    Range("none of 1, 2, 3, ... or more", lambda v: v == [] or is_list_of(lambda w: is_whole(w) and w >= 1, v), "widths"),
    Range("one of 1, 2, 3, ... or several", lambda v: (is_whole(v) and v >= 1) or is_list_of(lambda w: is_whole(w) and w >= 1, v),
        "seeds trials ntk_cnn.width ntk_fcn.width meta_gradient_health.steps sgd_risk.steps"),
    Range("one of 0 or more or several", lambda v: (is_finite(v) and v >= 0) or is_list_of(lambda w: is_finite(w) and w >= 0, v),
        "meta_gradient_health.rates"),
    Range("one of 0, 1, 2, ... or several", lambda v: is_whole(v) and v >= 0, "labels bulk at order replicas"),
    Range("one of 0, 1, 2, ... or several, also as a float", lambda v: is_finite(v) and v >= 0 and float(v).is_integer(),
        "top"),
    Range("one of 0, 1, 2, ... or several, or none", lambda v: v == [] or (is_whole(v) and v >= 0), "exclude"),
    Range("steps, or none", lambda v: v == [] or (is_whole(v) and v >= 1), "checkpoints Fleet.train.every train.every"),
    Range("one or more above 0 and finite", lambda v: is_list_of(lambda w: is_finite(w) and w > 0, v),
        "rates ratios panels.size sigmas"),
    Range("two numbers, the smaller first; infinite ends reach the edge", lambda v: False,
        "limits quantiles log_log.window span.x span.y"),
    Range("numbers, some of which may be missing", lambda v: isinstance(v, list) and all(isinstance(w, float) for w in v),
        "nodes correlation_of.x correlation_of.y power_law.x power_law.y"),
    Range("a least number and the mean of what is added", lambda v: False, "meta_train.segments meta_train.length"),
    Range("whole numbers, one class each", lambda v: isinstance(v, Tensor) and not v.is_floating_point() and not v.is_meta,
        "noisy_labels.labels"),
    Range("parameters, NaN where a run has blown up",
        lambda v: isinstance(v, list) and len(v) > 0 and all(is_tensor(t) and t.is_floating_point() for t in v),
        "LearnedOptimizer.params"),
    Range("epochs, or none", lambda v: v == [] or v == () or is_list_of(lambda w: is_whole(w) and w >= 0, v), "decays"),
    Range("rates, or none", lambda v: v == [], "others"),
    Range("two numbers, the smaller first, or none", lambda v: v == [], "range_test.window"),
    Range("shares, NaN where one is not known", lambda v: isinstance(v, list), "recall.of"),
    Range("some of 0, 1, 2, ..., or none", lambda v: v == [] or is_list_of(lambda w: is_whole(w) and w >= 0, v), "recall.classes"),
    Range("slopes, or none", lambda v: v == [], "guides"),
    Range("one or more of 0 or more", lambda v: is_list_of(lambda w: is_finite(w) and w >= 0, v), "eigenvalues"),
    Range("positive eigenvalues, as many as the other arguments say", lambda v: False,
        "population_risk.eigenvalues population_rates.eigenvalues"),
    Range("one or more of finite numbers", lambda v: is_list_of(is_finite, v), "a b g alphas betas"),
    Range("losses of a run, NaN where it has blown up", lambda v: isinstance(v, list) and len(v) > 0, "trace losses"),
    Range("norms along a run, or none", lambda v: isinstance(v, list), "classify_run.kernel spike_events.kernel judge_state.losses"),
    Range("a name, looked up once there is a model", lambda v: isinstance(v, str), "AGOP.at"),
    Range("a batch; one that holds NaN is diagnosed",
        lambda v: v == [] or is_own_data(v) or (isinstance(v, tuple) and all(map(is_tensor, v))),
        "Monitor.observe.batch"),
    Range("data, which may not fit the model that is still to come",
        lambda v: isinstance(v, Problem) or is_own_data(v) or (isinstance(v, tuple) and all(map(is_finite_tensor, v))),
        "Monitor.probe"),
    Range("jobs, or none", lambda v: v == [], "run_all.jobs finish_all.jobs"),
    Range("rows, or none", lambda v: v == [], "html_table.rows"),
    Range("a path", lambda v: isinstance(v, str), "folder path compare_runs.a compare_runs.b"),
    Range("lists of finite numbers", lambda v: False, "values_per_pair"),
    Range("pairs of places", lambda v: v == [], "skips"),
    Range("what stands for each, of any kind", lambda v: isinstance(v, list), "track_eigenpairs.labels"),
    Range("true or false, or none", lambda v: v == [], "exceeded"),
    Range("whole numbers, one for each", lambda v: is_list_of(is_whole, v),
        "weight_of fan_in Graph.of.inputs Graph.of.outputs index"),
    # Tensors: of any shape, or of one that the other arguments set; of a run that may have blown up
    Range("logits of any shape, −inf for words that are never said", lambda v: is_tensor(v) and not bool(torch.isnan(v).any()),
        "rare_word_logits.logits shift_logits.logits"),
    Range("a tensor of finite numbers of any shape", is_finite_tensor,
        "class_orbit.v silencing_shift.logits silencing_shift.thresholds largest_norm.inputs largest_smoothness.inputs"),
    Range("a tensor of any numbers, which are only arranged or copied", is_tensor, "Problem.split.vector"),
    Range("a matrix; entries that are not finite are shown as such",
        lambda v: all(map(is_tensor, v.values() if isinstance(v, dict) else [v])),
        "matrix.values leading_blocks.matrices"),
    Range("keys of any kind", lambda v: isinstance(v, list | Tensor), "looks.keys"),
    Range("tensors of any numbers by name, which are only copied",
        lambda v: isinstance(v, dict) and all(map(is_tensor, v.values())),
        "load_weights.weights"),
    Range("a tensor, NaN where a run has blown up", is_tensor,
        "example_losses.outputs class_eigenvalues.u class_eigenvalues.v class_eigenvalues.u0 gated_kernel.u gated_kernel.v gated_kernel.gate "
        "gated_kernel.x gated_output.u gated_output.v gated_output.gate gated_output.x quadratic_step.residual "
        "quadratic_step.jacobian quadratic_step.curved reduced_step.u reduced_step.v one_example_step.g "
        "one_example_step.kernel top_direction.next_kernel top_direction.residual top_direction.next_residual"),
    # Not numbers
    Range("a text", lambda v: isinstance(v, str), "name target purpose prefix optimizer"),
    Range("a function", callable, "batch_weight features product loss task work"),
    Range("a function, or a finite number", lambda v: callable(v) or is_finite(v), "shifted_module.shift"),
    Range("a model", lambda v: isinstance(v, nn.Module), "model"),
    Range("a model or a problem", lambda v: isinstance(v, nn.Module | Problem), "model_or_problem linearize.model quadratize.model"),
)  # fmt: skip

#: Arguments that are shown as texts, whatever they are: no value is bad here.
SHOWN = {"title", "xlabel", "ylabel", "label", "ends", "regime_diagram.optimizer"}

_BY_NAME = {name: place for place in RANGES for name in place.names.split()}

#: Arguments for which None is a choice of its own, though it is not the default.
OPTIONAL = {
    "band",
    "center",
    "within.value",
    "relative.value",
    "mode",
    "loss",
    "norm",
    "restricted.words",
    "accuracy",
    "masked_loss.visible",
    "objective_and_gradient.visible",
    "Monitor.budget",
    "judge_state.trivial",
    "slope",
    "slope_error",
    "copied_setup.optimizer",
}


def keys(name: str, argument: str) -> list[str]:
    """The names under which an argument may stand, the most particular first."""
    parts = name.partition("#")[0].split(".")
    return [f"{'.'.join(parts[-2:])}.{argument}", f"{parts[-1]}.{argument}", argument]


def range_of(name: str, argument: str) -> Range | None:
    """The range of an argument of a public callable, if one is stated."""
    return next((_BY_NAME[key] for key in keys(name, argument) if key in _BY_NAME), None)
