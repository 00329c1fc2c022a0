"""Valid calls of measures, operators, algorithms and problems, each of a moment: the first part of what `signatures` has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import theodolite as th
from theodolite.measures import anchors, bounds, dictionary, stepsize, trials
from theodolite.measures import quadratic_models as quadratic

Arguments = dict[str, Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def pairs_of_data() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(6, 2), numbers(6, 2).flip(0)


def deep_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)).double()


def deepened(**more: Any) -> Arguments:
    model = deep_network()
    batch = {"inputs": numbers(2, 2), "data": pairs_of_data(), "loss": nn.MSELoss()}
    return {"model": model, "optimizer": sgd(model), **batch, **more}


def searched(**more: Any) -> Arguments:
    """What the search for a growth operator is given."""
    model = deep_network()
    batch = {"loss": nn.MSELoss(), "data": pairs_of_data(), "batch_size": 3, "validation": (numbers(8, 2) + 9, numbers(8, 2))}
    names = {"operators": ["last", "0/1/copy"], "baselines": ["small"], "state": "copy", "body": "", "target": "labels"}
    return {"model": model, "optimizer": sgd(model), **batch, **names, "layers": 3, "first": 2, "progress": False, **more}


def stacked() -> Arguments:
    def build(layers: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), *(nn.Linear(3, 3) for _ in range(layers)), nn.Linear(3, 2)).double()

    valid = (numbers(8, 2) + 9, numbers(8, 2))
    given = {"loss": nn.MSELoss(), "data": pairs_of_data(), "optimizer": "sgd", "schedule": 0.1, "validation": valid}
    return {"build": build, **given, "stages": [(2, 2), (3, 2)], "progress": False}


@functools.cache
def growth_study() -> Any:
    return th.growth_study(**searched(steps=4, every=2))


def layer_ablation() -> Any:
    return th.measures.growth.ablate_layers(th.Problem(deep_network(), nn.MSELoss(), pairs_of_data()))


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(8, 2), torch.arange(8) % 2


def problem() -> th.Problem:
    return th.Problem(network(), nn.MSELoss(), pairs_of_data())


def classification() -> th.Problem:
    return th.Problem(network(), nn.CrossEntropyLoss(), labelled())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_optimizer(**more: Any) -> Arguments:
    given = problem()
    return {"problem": given, "optimizer": sgd(given.model), **more}


@functools.cache
def structure() -> Any:
    return th.hessian_structure(classification(), k=3)


def factors() -> Any:
    return th.kronecker_factors(classification())["2"]


def eigenpairs() -> Any:
    return th.top_eigenpairs(th.hessian(problem()), 2)


def symmetric() -> torch.Tensor:
    return torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64))


def orthonormal() -> torch.Tensor:
    return torch.eye(4, dtype=torch.float64)[:, :2]


def log_linear(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return anchors.LogLinear(torch.randn(12, 3, generator=generator), torch.randn(7, 3, generator=generator))


def language_model() -> nn.Module:
    return th.models.gpt(9, 6, 4, 1, 1, seed=0)


def dictionary_rows() -> dict[str, Any]:
    return {"signals": numbers(10, 6), "dictionary": torch.eye(6, dtype=torch.float64)}


def learning_settings() -> Any:
    return dictionary.LearningSettings(1, batch_size=5)


def path_ends() -> Arguments:
    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return {"state_a": network().state_dict(), "state_b": other.state_dict()}


def stability_rows() -> list[dict[str, Any]]:
    return [
        {"m": m, "pair": k, "trial": 0, "step": 9, "gap_loss": m**-0.4 * (1 - k / 50), "stab": 1.0 - k / 40}
        for m in (1e3, 2e3, 4e3)
        for k in range(4)
    ]


def line(seed: int) -> nn.Module:
    return nn.Linear(2, 2).double()


def bilinear() -> Arguments:
    return {"u": numbers(3, 1), "v": numbers(3)}


def classes() -> Any:
    return quadratic.sign_classes(torch.tensor([1.0, -2.0, 3.0]).double(), numbers(3))


def on_line(**more: Any) -> Arguments:
    return {"g": 1.0, "kernel": 1.0, "rate": 0.5, "steps": 2, "until": 1e-6, **more}


def setup() -> trials.Setup:
    return trials.copied_setup(problem(), 0.1, None, 3)


def evaluated(given: th.Problem) -> Arguments:
    """A problem with its first batch and what the model makes of it."""
    batch = next(iter(given.data))
    with given.session(second=False):
        return {"problem": given, "found": given.evaluate(given.tensors(given.leaves(grad=False)), batch, 0), "batch": batch}


def squared_error() -> Any:
    return th.measures.progress.LossKind("squared error")


def trained(**given: Any) -> bool:
    with trials.in_training(**given):
        return given["problem"].model.training


def fitted(**settings: Any) -> Any:
    """The estimator checks its settings when it is fitted and asked for its score, as scikit-learn has it."""
    signals = numbers(10, 6).numpy()
    return dictionary.MaskedDictionaryLearning(**settings).fit(signals).score(signals)


def measured_problem(**given: Any) -> float:
    """What batches weigh is read when it is needed."""
    return th.Problem(**given).loss()


def certified() -> th.Problem:
    """Sixty samples of two classes, and a network that was not trained on them."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    return th.Problem(network(), nn.CrossEntropyLoss(), (x, (x[:, 0] > 0).long()))


def before_training() -> dict[str, torch.Tensor]:
    return {name: p.detach() + 0.2 for name, p in network().named_parameters()}


@functools.cache
def source_fit() -> Any:
    return bounds.source_posterior(certified(), before_training(), epochs=1, batch_size=30, decays=(), samples=30)


@functools.cache
def risk() -> Any:
    return th.pac_bayes_bound(certified(), start=before_training(), epochs=1, passes=1, progress=False)


#: Public callables by their place under `theodolite`, with the arguments of a valid call, all by name.
BASELINES: dict[str, Callable[[], Arguments]] = {
    "Problem": lambda: {"model": network(), "loss": nn.MSELoss(), "data": pairs_of_data(), "params": "*", "mode": "eval",
        "batch_weight": [1.0], "target": "labels", "check": True, "hold_bytes": 1000},
    "hessian": lambda: {"problem": problem(), "keep": "auto", "memory_budget": 10**6, "batched": True, "closed_form": True},
    "gauss_newton": lambda: {"problem": problem(), "keep": "auto", "memory_budget": 10**6, "batched": True},
    "layer_hessians": lambda: {"problem": problem(), "layers": "0", "bias": True, "keep": "auto", "memory_budget": 10**6},
    "kronecker_factors": lambda: {"problem": classification(), "layers": "0", "mode": "ggn", "draws": 2, "max_passes": 4,
        "seed": 0},
    "top_eigenpairs": lambda: {"op": symmetric(), "k": 1, "which": "largest", "tol": 1e-3, "start": orthonormal(),
        "max_matvecs": 20,
        "verify": "auto", "seed": 0},
    "spectral_density": lambda: {"op": symmetric(), "probes": 2, "steps": 3, "points": 32, "bandwidth": 0.1, "seed": 0},
    "trace": lambda: {"op": symmetric(), "matvecs": 6, "method": "hutch++", "seed": 0},
    "subspace_overlap": lambda: {"u": orthonormal(), "v": orthonormal()},
    "overlap_curve": lambda: {"u": orthonormal(), "v": orthonormal()},
    "hessian_structure": lambda: {"problem": classification(), "layers": "2", "k": 2, "tol": 1e-2, "classes": 2, "mode": "ggn",
        "draws": 2, "max_passes": 4, "seed": 0},
    "critical_learning_rate": lambda: with_optimizer(by="hessian", trial=False, clip=0.5, population=50, start=numbers(17, 1),
        max_matvecs=50,
        tol=1e-3, seed=0),
    "find_max_learning_rate": lambda: {"problem": problem(), "low": 0.1, "high": 50.0, "tol": 0.5, "steps": 3, "blown_up": 1e3},
    "catapult_sweep": lambda: {"problem": problem(), "rates": [0.1], "models": ("network",), "steps": 3, "seeds": 1,
        "test": pairs_of_data(), "ratios": (0.5,), "batch_size": 3, "every": 1, "by": "hessian"},
    "classify_run": lambda: {"trace": [1.0, 0.5, 0.2], "kernel": [1.0, 1.0, 1.0], "blown_up": 10.0, "rise": 0.05,
        "settled": 0.5,
        "kernel_fall": 0.01, "slack": 1e-6},
    "tangent_kernel": lambda: {"model_or_problem": network(), "inputs": numbers(3, 2), "other": numbers(2, 2), "outputs": 0,
        "memory_budget": 10**6},
    "tangent_kernel_operator": lambda: {"model_or_problem": problem(), "metric": torch.ones(17).double(), "keep": "auto",
        "memory_budget": 10**6},
    "linearize": lambda: {"model": network()},
    "quadratize": lambda: {"model": network()},
    "linearity": lambda: {"problem": problem(), "radius": 0.5, "output": 0, "samples": 0, "directions": 1, "segments": 2,
        "displacement": numbers(17), "rate": 0.1, "seed": 0},
    "DagNetwork": lambda: {"graph": th.models.fcn_graph(2, [3], 1), "activation": "tanh", "seed": 0},
    "agop": lambda: {"model_or_problem": network(), "inputs": numbers(3, 2), "at": "0", "batch_size": 2, "projections": 1,
        "seed": 0},
    "agop_alignment": lambda: {"a": symmetric(), "b": symmetric()},
    "anchor_probe": lambda: {"model": language_model(), "data": torch.randint(9, (8, 6)), "top": 1, "exclude": 0, "anchors": 1,
        "held_out": 0.2, "context": 6, "stride": 3, "drop_first": 0, "max_positions": 40, "batch_size": 4, "restrict_vocab": 8,
        "chunk": 8, "mask_token": 0, "every": 2, "geometry": True, "sample": 5, "seed": 0},
    "MaskedDictionaryLearning": lambda: {"n_components": 4, "sparsity": 1, "hidden_fraction": 0.2, "objective": "masked",
        "masks": "batch", "n_init": 1, "max_iter": 2, "batch_size": 5, "learning_rate": 1e-3, "optimizer": "adam",
        "decoder": "omp",
        "selection": "raw", "penalty": 0.1, "missing": "error", "score_masks": 2, "random_state": 0},
    "orthogonal_matching_pursuit": lambda: {**dictionary_rows(), "k": 1, "visible": torch.ones(6, dtype=torch.bool),
        "selection": "raw", "tolerance": 1e-3},
    "recovery_error": lambda: {"true": torch.eye(3), "learned": torch.eye(3), "metric": "cosine"},
    "stability": lambda: {"factory": line, "optimizer": "sgd", "train": (numbers(40, 2), torch.arange(40) % 2),
        "test": (numbers(20, 2), torch.arange(20) % 2), "sizes": [8, 12], "pairs": 2, "steps": 3, "loss": nn.CrossEntropyLoss(),
        "batch_size": 4, "checkpoints": [2], "trials": 1, "init_seed": 0, "order_seed": 0, "pair_seed": 0, "eval_size": 10,
        "paths": 0,
        "check_steps": 1, "rate": 0.1},
    "meta_gradient": lambda: {"factory": line, "optimizer": "sgd", "train": (numbers(12, 2), torch.arange(12) % 2),
        "valid": (numbers(30, 2)[12:], torch.arange(18) % 2), "steps": 3, "loss": nn.CrossEntropyLoss(),
        "hyper": ("lr", "momentum"),
        "objective": "log_last", "split": "valid", "units": "log", "batch_size": 4, "lr": 0.1, "momentum": 0.5, "dampening": 0.1,
        "weight_decay": 0.01, "schedule": {0: 1.0, 1: 0.5}, "knots": 2, "seed": 0},
    "meta_gradient#reverse": lambda: {"factory": line, "optimizer": "rmsprop", "train": labelled(), "steps": 3,
        "loss": nn.CrossEntropyLoss(), "mode": "reverse", "segment": 2, "lr": 0.1, "alpha": 0.9, "eps": 1e-6},
    "meta_gradient#smoothed": lambda: {"factory": line, "optimizer": "adam", "train": labelled(), "steps": 3,
        "loss": nn.CrossEntropyLoss(), "mode": "smoothed", "pairs": 2, "spread": 0.1, "lr": 0.1, "betas": (0.9, 0.99)},
    "linear_path": lambda: {"model": network(), **path_ends(), "train": labelled(), "test": labelled(),
        "batchnorm": "interpolate",
        "loss": nn.CrossEntropyLoss(), "alphas": torch.linspace(0, 1, 6), "accuracy": "auto", "batch_size": 4},
    "pac_bayes_bound": lambda: {"problem": certified(), "prior": "start", "start": before_training(), "posterior": "kronecker",
        "refresh": "iter", "layer_scales": True, "objective": "kl", "optimizer": "adam", "init_s": "curvature", "epochs": 1,
        "batch_size": 30, "passes": 1, "rank": 1, "delta": 0.025, "delta_draws": 0.01, "seed": 0},
    "pac_bayes_bound#split": lambda: {"problem": certified().on((numbers(120, 2), torch.arange(120) % 2)), "prior": "split",
        "split": 0.5, "recipe": lambda model, data: None, "epochs": 1, "passes": 1, "test": certified()},
    "pac_bayes_bound#held-out": lambda: {"problem": certified(), "prior": "held-out", "epochs": 1, "passes": 1,
        "trained_on": certified().on((numbers(120, 2), torch.arange(120) % 2))},
    "risk_certificate": lambda: {"errors": 10.0, "draws": 1000, "kl": 5.0, "n": 500, "penalty": 1.0, "delta": 0.025,
        "delta_draws": 0.01, "guessing": 0.5},
    "held_out_bound": lambda: {"errors": 3, "n": 100, "delta": 0.05},
    "kl_inverse": lambda: {"q": 0.1, "budget": 0.2},
    "growth_operators": lambda: {"layers": 6, "added": 2, "starts": [0, 1], "blocks": [1, 2], "inits": ["copy", "random"]},
    "grow": lambda: deepened(operator="last", layers=3, state="copy", seed=0, body=""),
    "landscape_aware_growth": lambda: searched(lag=2, every=1, steps=20, clip=1.0, schedule=0.1, seed=0),
    "growth_study": lambda: searched(steps=2, every=1, seeds=[0, 1], clip=1.0, schedule=0.1),
    "adaptive_stacking": lambda: {**stacked(), "lag": 1, "batch_size": 3, "clip": 1.0, "body": "", "target": "labels", "seed": 0},
    "measures.growth.GrowthStudy.heatmap": lambda: {"until": 2, "smooth": 1},
    "measures.growth.GrowthStudy.final_correlation": lambda: {"kind": "pearson", "smooth": 1},
    "measures.growth.GrowthStudy.recall": lambda: {"r": 2, "smooth": 1},
    "measures.growth.GrowthStudy.regret": lambda: {"smooth": 1},
    "measures.growth.GrowthStudy.relative_regret": lambda: {"smooth": 1},
    "measures.growth.GrowthStudy.smoothed": lambda: {"window": 1},
    "measures.growth.GrowthStudy.transition": lambda: {"until": 2, "smooth": 1},
    "measures.growth.GrowthStudy.chosen": lambda: {"lag": 1},
    "measures.growth.Stage.operators": lambda: {"depth": 2},
    "grow#list": lambda: deepened(operator=[0, 0, 1]),
    "measures.growth.growth_operator": lambda: {"text": "last", "layers": 6, "added": 2},
    "measures.growth.ablate_layers": lambda: {"problem": th.Problem(deep_network(), nn.MSELoss(), pairs_of_data()), "body": ""},
    "measures.growth.find_body": lambda: {"model": deep_network(), "body": ""},
    "measures.growth.GrowthOperator.of": lambda: {"layers": [0, 0, 1], "init": "copy"},
    "measures.growth.GrowthOperator.picture": lambda: {"first": 1},
    "measures.bounds.bernoulli_kl": lambda: {"q": 0.1, "p": 0.2},
    "measures.bounds.all_bounds": lambda: {"empirical": 0.1, "kl": 5.0, "n": 500, "delta": 0.025, "penalty": 1.0},
    "measures.bounds.bound_from_summary": lambda: {"ebar": 0.1, "kl": 5.0, "rho": -1.3, "n": 500, "delta": 0.025,
        "precision": 100.0, "ceiling": 0.1},
    "measures.bounds.grid_index": lambda: {"variance": 0.05, "precision": 100.0, "ceiling": 0.1},
    "measures.bounds.grid_penalty": lambda: {"j": 3},
    "measures.bounds.rounded_variance": lambda: {"variance": 0.05, "precision": 100.0, "ceiling": 0.1},
    "measures.bounds.source_posterior": lambda: {"problem": certified(), "start": before_training(), "preset": "ITER",
        "epochs": 1, "batch_size": 30, "rate": 1e-3, "decays": (1,), "every": 1, "optimizer": "rmsprop", "init_s": "weights",
        "delta": 0.025, "samples": 30, "seed": 0},
    "measures.bounds.source_certificate": lambda: {"problem": certified(), "fit": source_fit(), "networks": 2, "delta": 0.025,
        "delta_draws": 0.01, "seed": 0},
    "measures.bounds.GaussianPosterior.sample": lambda: {"seed": 0},
    "stable_meta_gradient": lambda: {"hessian": symmetric(), "w0": torch.ones(4), "rate": 0.1, "steps": 5, "objective": "last"},
    "stable_meta_gradient#products": lambda: {"hessian": th.operators.as_operator(symmetric()), "w0": torch.ones(4),
        "rate": torch.tensor([0.1, 0.2]), "steps": 5},
    "measures.stepsize.optimal_rate": lambda: {"hessian": symmetric(), "w0": torch.ones(4), "steps": 5, "tol": 1e-9},
    "measures.stepsize.descend_rate": lambda: {"hessian": symmetric(), "w0": torch.ones(4), "rate": 0.1, "steps": 5,
        "updates": 3, "meta_rate": 0.01},
    "measures.stepsize.RateDescent.outside": lambda: {"within": 0.01},
    "measures.stepsize.unrolled_meta_gradient": lambda: {"hessian": symmetric(), "w0": torch.ones(4), "rate": 0.1, "steps": 5,
        "dtype": torch.float32},
    "measures.stepsize.descend_unrolled": lambda: {"hessian": symmetric(), "w0": torch.ones(4), "rate": 0.1, "steps": 5,
        "updates": 3, "meta_rate": 0.001, "meta_optimizer": "rmsprop", "dtype": torch.float32, "clip": 100.0},
    "meta_gradient_health": lambda: {"hessian": symmetric(), "w0": torch.ones(4), "rates": [0.1, 1.0],
        "steps": [5, 50], "dtype": torch.float32},
    "measures.stepsize.draw_tasks": lambda: {"dim": 4, "samples": 3, "tasks": 2, "seed": 0},
    "measures.stepsize.interpolation_error": lambda: {"dim": 9, "samples": 4, "sigma": 1.0},
    "measures.stepsize.least_squares_curves": lambda: {"dim": 4, "samples": 6, "sigmas": [1.0], "rates": [0.1, 0.2], "steps": 3,
        "tasks": 2, "train_share": 0.5, "seed": 0},
    "measures.stepsize.least_squares_scores": lambda: {"dim": 4, "samples": 6, "rates": [0.1], "sigma": 1.0, "steps": 3,
        "tasks": 2, "seed": 0},
    "measures.stepsize.population_risk": lambda: {"eigenvalues": torch.ones(4), "rates": [0.1], "steps": 3, "dim": 4,
        "samples": 6, "sigma": 1.0},
    "measures.stepsize.population_rates": lambda: {"eigenvalues": torch.ones(4), "steps": 3, "dim": 4, "samples": 6,
        "sigma": 1.0},
    "measures.stepsize.sgd_risk": lambda: {"drawn": th.measures.stepsize.draw_tasks(4, 3, 1), "rates": [0.1], "steps": 3,
        "sigma": 1.0, "paths": 2, "seed": 0},
    "tune_step_size": lambda: {"factory": line, "optimizer": "sgd", "train": (numbers(20, 2), torch.arange(20) % 2),
        "valid": (numbers(20, 2) + 9, torch.arange(20) % 2), "steps": 2, "loss": nn.CrossEntropyLoss(), "hyper": ["lr"],
        "search": "sweep", "lr": 0.1, "seeds": 1, "budget": 3, "compare": False, "batch_size": 10, "split": "valid", "seed": 0},
    "tune_step_size#values": lambda: {"factory": line, "tasks": [((numbers(20, 2), torch.arange(20) % 2), None)], "steps": 2,
        "loss": nn.CrossEntropyLoss(), "values": {"lr": [0.1, 0.2]}, "seeds": 1, "compare": False},
    "LearnedOptimizer": lambda: {"params": list(network().parameters()), "network": stepsize.OptimizerNetwork.new(), "lr": 1.0},
    "meta_train": lambda: {"factory": line, "train": (numbers(40, 2), torch.arange(40) % 2),
        "valid": (numbers(20, 2) + 9, torch.arange(20) % 2), "loss": nn.CrossEntropyLoss(), "split": "valid", "samples": 20,
        "valid_samples": 10, "problems": 2, "trajectories": 1, "together": 2, "segments": (1, 0.0), "length": (2, 0.0),
        "batch_size": 5, "network": stepsize.OptimizerNetwork.new(hidden=4), "lr": 0.01, "decay": 0.9, "eps": 1e-10, "clip": 1e4,
        "checkpoint_every": 5, "seed": 0},
    "measures.stepsize.OptimizerNetwork.new": lambda: {"hidden": 4, "seed": 0},
    "operators.DenseOperator": lambda: {"matrix": symmetric(), "symmetric": True},
    "operators.DiagonalOperator": lambda: {"diagonal": torch.ones(3)},
    "operators.IdentityOperator": lambda: {"n": 3, "dtype": torch.float64, "device": "cpu"},
    "operators.KroneckerOperator": lambda: {"a": th.operators.as_operator(symmetric()),
        "b": th.operators.as_operator(symmetric())},
    "operators.ProductOperator": lambda: {"left": th.operators.as_operator(symmetric()),
        "right": th.operators.as_operator(symmetric())},
    "operators.CongruentOperator": lambda: {"op": th.operators.as_operator(symmetric()),
        "scale": th.operators.DiagonalOperator(torch.ones(4).double())},
    "operators.HessianOperator": lambda: {"problem": problem(), "keep": "auto", "memory_budget": 10**6, "batched": True},
    "operators.GaussNewtonOperator": lambda: {"problem": problem(), "keep": "auto", "memory_budget": 10**6, "batched": True},
    "operators.JacobianOperator": lambda: {"problem": problem(), "keep": "auto", "memory_budget": 10**6, "batched": True},
    "operators.LayerHessians": lambda: {"problem": problem(), "layers": "0", "keep": "auto", "memory_budget": 10**6},
    "operators.TangentKernelOperator": lambda: {"jacobian": th.operators.jacobian(problem()),
        "metric": torch.ones(17).double()},
    "operators.as_operator": lambda: {"source": symmetric(), "symmetric": True},
    "operators.congruent": lambda: {"op": th.operators.as_operator(symmetric()), "scale": torch.ones(4).double()},
    "operators.jacobian": lambda: {"problem": problem(), "keep": "auto", "memory_budget": 10**6, "batched": True},
    "measures.hessian.autocorrelation": lambda: {"factors": factors()},
    "measures.hessian.compare_layers": lambda: {"a": structure()["2"], "b": structure()["2"], "names": ("A", "B"), "k": 2},
    "measures.hessian.conditioning": lambda: {"pairs": eigenpairs(), "density": th.spectral_density(th.hessian(problem()),
        steps=6),
        "threshold": 0.01},
    "measures.hessian.correspondence": lambda: {"vectors": numbers(6, 2), "factors": factors()},
    "measures.hessian.decoupling_error": lambda: {"block": th.layer_hessians(classification())["2"], "factors": factors(),
        "tol": 1e-2,
        "seed": 0, "max_matvecs": 50},
    "measures.hessian.firing_rates": lambda: {"problem": th.Problem(th.models.fcn(2, [3], 2).double(), nn.MSELoss(),
        pairs_of_data()),
        "layers": "fc1"},
    "measures.hessian.full_hessian_approximation": lambda: {"problem": classification(), "k": 2, "variant": "paper",
        "max_passes": 8,
        "seed": 0},
    "measures.hessian.gradient_alignment": lambda: {"gradient": numbers(17), "pairs": eigenpairs()},
    "measures.hessian.kronecker_overlap": lambda: {"vectors": numbers(6, 2), "factors": factors()},
    "measures.hessian.logit_clusters": lambda: {"problem": classification(), "layer": "2"},
    "measures.hessian.outlier_count": lambda: {"values": torch.tensor([3.0, 2.0, 0.1, 0.1, 0.1]), "classes": 2},
    "measures.hessian.predicted_overlap": lambda: {"a": factors(), "b": factors(), "k": 2},
    "measures.hessian.rank_one_count": lambda: {"factors": factors()},
    "measures.hessian.rank_ratios": lambda: {"vectors": numbers(6, 2), "m": 2, "n": 3},
    "measures.hessian.sharp_subspace": lambda: {"product": numbers(2, 3), "definition": "A"},
    "measures.hessian.track_eigenpairs": lambda: {"problem": problem(), "checkpoints": [network().state_dict()], "k": 1,
        "labels": [0],
        "layers": "0", "which": "largest", "tol": 1e-2, "verify": "auto", "seed": 0},
    "measures.hessian.weight_product": lambda: {"weights": [numbers(3, 2), numbers(2, 3)], "rates": [torch.ones(2).double(),
        torch.ones(3).double()]},
    "measures.dynamics.batch_critical_rates": lambda: with_optimizer(batch_size=2, batches=3, by="kernel", seed=0),
    "lr_range_test": lambda: with_optimizer(lr=0.1, batch_size=3, low=1e-3, high=1.0, steps=3, sweeps=2, critical=False, seed=0),
    "measures.dynamics.choose_rate": lambda: {"problem": (given := problem()), "lr": 0.1, "optimizer": sgd(given.model),
        "others": [0.2], "batch_size": 3, "steps": 8, "score_on": problem(), "trivial": 1.0, "seconds": 0.1, "seed": 0},
    "measures.dynamics.choose_batch_size": lambda: {"problem": (given := problem()), "lr": 0.1, "optimizer": sgd(given.model),
        "batch_size": 1, "steps": 8, "score_on": problem(), "trivial": 1.0, "seconds": 0.1, "seed": 0},
    "measures.dynamics.catapult_count": lambda: {"exceeded": [True, False, True], "best_step": 1},
    "measures.dynamics.expected_regime": lambda: with_optimizer(rate=0.1, steps=3, seed=0),
    "measures.dynamics.gradient_noise": lambda: {"problem": problem(), "groups": 3, "gradient": problem().gradient(),
        "seed": 0},
    "measures.dynamics.match_table": lambda: {"exceeded": [True, False], "losses": [1.0, 2.0, 1.0], "slack": 0.0},
    "measures.dynamics.spike_events": lambda: {"losses": [1.0, 3.0, 1.0, 0.9], "rise": 1.2, "window": 2, "recovered": 1.05,
        "kernel": [1.0, 1.0, 1.0, 1.0], "slack": 1e-6},
    "measures.dynamics.split_loss": lambda: {"kernel": symmetric(), "residual": numbers(4), "ranks": (1, 2), "outputs": 2,
        "seed": 0},
    "measures.dynamics.split_loss_by_curvature": lambda: {"values": torch.tensor([2.0, 1.0]).double(), "vectors": orthonormal(),
        "gradient": numbers(4), "loss": 1.0, "ranks": (1, 2), "outputs": 1},
    "measures.dynamics.weight_linearity": lambda: with_optimizer(rate=0.1, steps=2, kernel_on=problem(), seed=0),
    "measures.kernel.TaylorTwin": lambda: {"model": network(), "order": 1},
    "measures.kernel.kernel_drift": lambda: {"problem": problem(), "radius": 0.5, "probes": 1, "displacement": numbers(17),
        "seed": 0},
    "measures.kernel.kernels_on_ball": lambda: {"problem": problem(), "radius": 0.5, "probes": 1, "displacement": numbers(17),
        "seed": 0},
    "measures.kernel.pl_report": lambda: {"problem": problem(), "radius": 0.5, "probes": 1, "displacement": numbers(17),
        "rate": 0.1,
        "seed": 0},
    "measures.kernel.relative_drift": lambda: {"there": symmetric(), "here": symmetric()},
    "measures.kernel.squared_loss_curvature": lambda: {"problem": problem()},
    "measures.linearity.dag_width": lambda: {"graph": th.models.fcn_graph(2, [3], 1), "beta": 0.1, "safe_share": 0.05},
    "measures.linearity.hessian_norm": lambda: {"problem": problem(), "output": 0, "samples": 0, "tol": 1e-2, "seed": 0},
    "measures.linearity.in_degree_report": lambda: {"model": network(), "beta": 0.1},
    "measures.linearity.layer_index": lambda: {"vertices": 2, "edges": torch.tensor([[0, 1]])},
    "measures.linearity.linearity_deviation": lambda: {"problem": problem(), "radius": 0.5, "output": 0, "sample": 0,
        "directions": 1,
        "segments": 2, "displacement": numbers(17), "tol": 1e-2, "seed": 0},
    "measures.features.agop_penalty": lambda: {"model_or_problem": network(), "inputs": numbers(3, 2), "norm": "frobenius",
        "at": "0",
        "projections": 1, "seed": 0},
    "measures.features.feature_movement": lambda: {"model_or_problem": network(), "inputs": numbers(3, 2), "copies": 3,
        "seed": 0},
    "measures.features.feature_report": lambda: {"model_or_problem": network(), "inputs": numbers(3, 2),
        "reference": torch.eye(2).double(), "batch_size": 2, "seed": 0},
    "measures.features.input_gradients": lambda: {"model_or_problem": network(), "inputs": numbers(3, 2), "at": "0",
        "batch_size": 2,
        "projections": 1, "seed": 0},
    "measures.features.AGOP": lambda: {"at": "0", "batch_size": 2, "projections": 1, "seed": 0},
    "measures.anchors.LogLinear": lambda: {"states": numbers(4, 3), "weight": numbers(7, 3), "bias": numbers(7)},
    "measures.anchors.NormalEquations": lambda: {"dim": 2, "targets": 1, "rows": 4},
    "measures.anchors.anchor_clusters": lambda: {"states": numbers(20, 3), "values": numbers(20), "anchors": 2, "by": "value",
        "rounds": 1, "top": 0, "seed": 0},
    "measures.anchors.anchored_logits": lambda: {"model": log_linear(), "anchor": numbers(3).float(), "labels": [0, 1]},
    "measures.anchors.atom_geometry": lambda: {"weight": numbers(5, 3), "pairs": 10, "seed": 0},
    "measures.anchors.compare_prompts": lambda: {"models": {"a": log_linear(), "b": log_linear(1)}, "labels": [0, 1],
        "a": [1.0, -1.0],
        "b": [0.0, 0.0], "anchor": numbers(3), "top": 1, "mu": {"a": 0.5}},
    "measures.anchors.compare_readouts": lambda: {"model": log_linear(), "classes": torch.arange(12) % 2, "labels": [0, 1],
        "anchor": numbers(3).float(), "shift": 5.0, "train_shift": 0.0, "train_share": 0.5, "method": "logistic", "seed": 0},
    "measures.anchors.find_head": lambda: {"model": language_model(), "args": (torch.randint(9, (1, 4)),), "kwargs": {}},
    "measures.anchors.fit_readout": lambda: {"features": numbers(8, 2), "classes": torch.arange(8) % 2, "method": "logistic",
        "quantile": 0.25, "ridge": 1e-3, "steps": 5, "lr": 0.05},
    "measures.anchors.kl_divergence": lambda: {"teacher": numbers(4, 3), "student": numbers(4, 3)},
    "measures.anchors.log_bulk_partition": lambda: {"logits": numbers(4, 5), "top": (0, 1)},
    "measures.anchors.probe_states": lambda: {"states": numbers(40, 3), "weight": numbers(9, 3), "bias": numbers(9), "top": 1,
        "exclude": 0, "anchors": 1, "held_out": 0.2, "chunk": 8, "geometry": True, "sample": 5, "seed": 0},
    "measures.anchors.rare_word_kl": lambda: {"probability": 0.01, "strength": 3.0},
    "measures.anchors.rare_word_logits": lambda: {"logits": numbers(4, 5), "word": 1, "strength": 2.0},
    "measures.anchors.rare_word_module": lambda: {"model": language_model(), "state": numbers(4).float(), "word": 1,
        "strength": 2.0, "head": "head"},
    "measures.anchors.rare_word_weight": lambda: {"weight": numbers(5, 3), "state": numbers(3), "word": 1, "strength": 2.0},
    "measures.anchors.shift_anchor": lambda: {"anchor": numbers(3)},
    "measures.anchors.shift_log_linear": lambda: {"model": log_linear(), "shift": 2.0},
    "measures.anchors.shift_logits": lambda: {"logits": numbers(4, 5), "shift": 2.0},
    "measures.anchors.shifted_module": lambda: {"model": language_model(), "shift": 2.0, "head": "head"},
    "measures.anchors.silencing_shift": lambda: {"logits": numbers(4, 2), "thresholds": numbers(2), "slack": 1.0},
    "measures.anchors.thresholded_score": lambda: {"features": numbers(4, 2), "a": numbers(2), "b": numbers(2)},
    "measures.anchors.total_variation": lambda: {"teacher": numbers(4, 3), "student": numbers(4, 3)},
    "measures.anchors.transfer_certificate": lambda: {"teacher": log_linear(), "student": log_linear(1), "labels": [0, 1],
        "a": [1.0, -1.0], "b": [0.0, 0.0], "gamma": 0.1, "bulk": [2, 3], "top": 0},
    "measures.dictionary.atom_matches": lambda: {"true": torch.eye(3), "learned": torch.eye(3)},
    "measures.dictionary.chi_square_max_bound": lambda: {"n": 10},
    "measures.dictionary.choose_dictionary": lambda: {"X": numbers(20, 6), "n_components": [4], "sparsity": [1],
        "held_out": 0.2, "seed": 0,
        "max_iter": 2},
    "measures.dictionary.coherence": lambda: {"dictionary": numbers(3, 4), "visible": torch.ones(4, dtype=torch.bool)},
    "measures.dictionary.exhaustive_codes": lambda: {**dictionary_rows(), "k": 1, "visible": torch.ones(6, dtype=torch.bool)},
    "measures.dictionary.gershgorin_bound": lambda: {"dictionary": numbers(3, 4), "s": 2},
    "measures.dictionary.hidden_error": lambda: {**dictionary_rows(), "sparsity": 1, "hidden_fraction": 0.2, "masks": 2,
        "decoder": "omp",
        "selection": "raw", "penalty": 0.1, "seed": 0},
    "measures.dictionary.learn_dictionaries": lambda: {"signals": numbers(10, 6), "initial": torch.eye(6).double()[None],
        "settings": learning_settings(), "epochs": 1, "seeds": (0,)},
    "measures.dictionary.masked_loss": lambda: {**dictionary_rows(), "k": 1, "visible": torch.arange(6) > 1, "decoder": "omp"},
    "measures.dictionary.objective_and_gradient": lambda: {"components": torch.eye(6).double()[None], "signals": numbers(1, 4,
        6),
        "settings": learning_settings(), "visible": (torch.arange(6) > 1).reshape(1, 1, 6)},
    "measures.dictionary.omp_success_bound": lambda: {"k": 2, "atoms": 50, "eta": 0.1},
    "measures.dictionary.omp_threshold": lambda: {"noise": 0.1, "k": 2, "atoms": 50, "coherence": 0.2, "eta": 0.1},
    "measures.dictionary.oracle_risks": lambda: {"dictionary": torch.ones(1, 2).double(), "k": 1,
        "visible": torch.tensor([True, False]),
        "noise": 1.0, "scale": 1.0},
    "measures.dictionary.overfitting_dictionary": lambda: {"true": torch.eye(3), "angles": 2, "radius": 0.1},
    "measures.dictionary.permutation_error": lambda: {"true": torch.eye(3), "learned": torch.eye(3)},
    "measures.dictionary.pursue": lambda: {**dictionary_rows(), "k": 1, "selection": "raw", "tolerance": 1e-3},
    "measures.dictionary.reconstruction_loss": lambda: {**dictionary_rows(), "k": 1, "decoder": "omp", "selection": "raw"},
    "measures.dictionary.restricted_isometry": lambda: {"dictionary": numbers(3, 4), "s": 2, "samples": 3, "seed": 0},
    "measures.stability.convex_bounds": lambda: {"largest_input": 2.0, "largest_test_input": 3.0, "rate": 0.1, "batch": 4,
        "visits": 5,
        "smoothness": 1.0, "outputs": 2},
    "measures.stability.example_losses": lambda: {"loss": nn.CrossEntropyLoss(), "outputs": numbers(4, 2),
        "targets": torch.arange(4) % 2},
    "measures.stability.explains": lambda: {"rows_or_result": stability_rows(), "trial": 0, "step": 9, "gap": "gap_loss",
        "stab": "stab",
        "reduce": "max",
        "resamples": 20, "level": 0.9, "seed": 0, "pool": 10000},
    "measures.stability.fit_power_law": lambda: {"ms": [100, 200, 400], "values_per_pair": [[1.0, 0.8], [0.5, 0.4], [0.25,
        0.2]],
        "reduce": "max", "resamples": 20, "level": 0.9, "seed": 0},
    "measures.stability.fv_bound": lambda: {"beta": 0.1, "m": 100, "delta": 0.1, "c": 1.0},
    "measures.stability.largest_norm": lambda: {"inputs": numbers(4, 2)},
    "measures.stability.largest_smoothness": lambda: {"inputs": numbers(4, 2), "batches": torch.tensor([[0, 1], [2, 3]]),
        "outputs": 2,
        "enough": 100.0},
    "measures.stability.make_pair": lambda: {"train_pool": pairs_of_data(), "test_pool": pairs_of_data(), "m": 3,
        "rng": np.random.default_rng(0)},
    "measures.stability.slope_windows": lambda: {"ms": [1, 2, 4, 8], "g": [8.0, 4.0, 2.0, 1.9], "spread": 0.2},
    "measures.stability.visiting_steps": lambda: {"places": torch.tensor([0]), "m": 4, "batch_size": 2, "steps": 4,
        "order_seed": 0},
    "measures.quadratic_models.GatedBilinear": lambda: {"u": numbers(3, 2), "v": numbers(3), "u0": numbers(3, 2)},
    "measures.quadratic_models.class_eigenvalues": lambda: {**bilinear(), "u0": numbers(3, 1), "classes": classes()},
    "measures.quadratic_models.class_orbit": lambda: {**bilinear(), "classes": classes(), "rate": 0.1, "steps": 2,
        "until": 1e-6},
    "measures.quadratic_models.critical_rate": lambda: {"lambda_1": 4.0, "convention": "mean", "outputs": 10},
    "measures.quadratic_models.descend": lambda: {**bilinear(), "x": numbers(2, 1), "y": numbers(2), "rate": 0.1, "steps": 2,
        "until": 1e-6},
    "measures.quadratic_models.displacement": lambda: {"orbit": quadratic.one_example(1.0, 1.0, 0.0, 0.1, 0.5, 2), "c": 0.1},
    "measures.quadratic_models.gated_kernel": lambda: {**bilinear(), "gate": torch.ones(3, 2).double(), "x": numbers(2, 1)},
    "measures.quadratic_models.gated_output": lambda: {**bilinear(), "gate": torch.ones(3, 2).double(), "x": numbers(2, 1)},
    "measures.quadratic_models.half_sum_rate": lambda: {"rate": 0.5, "convention": "mean", "outputs": 10},
    "measures.quadratic_models.largest_rate": lambda: {"converges": lambda rate: rate < 3.0, "low": 1.0, "high": 8.0,
        "tol": 0.1,
        "expansions": 2},
    "measures.quadratic_models.one_example": lambda: on_line(y=0.0, c=0.1),
    "measures.quadratic_models.one_example_step": lambda: {"g": numbers(2), "kernel": numbers(2), "y": 0.0, "c": 0.1,
        "rate": 0.5},
    "measures.quadratic_models.pure_quadratic": lambda: on_line(gamma=0.1, norm=1.0),
    "measures.quadratic_models.quadratic_step": lambda: {"residual": numbers(2), "jacobian": numbers(2, 3),
        "curved": numbers(2, 3),
        "rate": 0.1},
    "measures.quadratic_models.reduced_step": lambda: {"u": numbers(2), "v": numbers(2), "w": 0.1},
    "measures.quadratic_models.sign_classes": lambda: {"x": torch.tensor([1.0, -2.0]).double(), "y": numbers(2)},
    "measures.quadratic_models.GeneralQuadratic": lambda: {"w": numbers(2), "features": lambda x: x, "product": lambda x,
        w: x * w,
        "gamma": 0.5},
    "measures.quadratic_models.top_direction": lambda: {"kernel": symmetric(), "next_kernel": symmetric(),
        "residual": numbers(4),
        "next_residual": numbers(4), "rate": 0.1},
    "measures.quadratic_models.unit_sigma": lambda: on_line(y=0.0, c0=0.1, gamma=0.1),
    "measures.audit.audit_batches": lambda: {"problem": problem()},
    "measures.audit.audit_inputs": lambda: {"problem": problem()},
    "measures.audit.audit_parameters": lambda: {"problem": problem()},
    "measures.audit.InputAudit.called": lambda: {"feature": 0},
    "measures.data_audit.LabelAudit.recall": lambda: {"of": (0.5, 1.0), "classes": (0, 1)},
    "measures.data_audit.audit_columns": lambda: {"problem": problem(), "most": 100, "seed": 0},
    "measures.data_audit.audit_labels": lambda: {"problem": classification(), "valid": classification(), "most": 100, "seed": 0},
    "measures.data_audit.audit_samples": lambda: {"problem": problem(), "seed": 0},
    "measures.data_audit.audit_targets": lambda: {"problem": problem(), "most": 100, "seed": 0},
    "measures.data_audit.audit_validation": lambda: {"problem": problem(), "valid": problem(), "seed": 0},
    "measures.progress.check_setup": lambda: with_optimizer(lr=0.1, valid=problem(), batch_size=3, gradient=numbers(17),
        progress=th.measures.progress.learning_progress(problem()), seed=0),
    "measures.progress.gradient_flow": lambda: with_optimizer(lr=0.1, gradient=numbers(17)),
    "measures.progress.judge_state": lambda: {"loss": 0.5, "trivial": 1.0, "margin_error": 0.1, "slope": -0.1,
        "slope_error": 0.01, "losses": (1.0, 0.9)},
    "measures.progress.learning_progress": lambda: with_optimizer(lr=0.1, valid=problem(), batch_size=3, steps=2, seed=0),
    "measures.progress.loss_kind": lambda: evaluated(problem()),
    "measures.progress.trivial_prediction": lambda: {"problem": (given := problem()), "kind": squared_error(),
        "found": evaluated(given)["found"]},
    "measures.trials.Setup.set_lr": lambda: {"lr": 0.2},
    "measures.progress.LearningProgress.followed": lambda: {"start": 2.0, "end": 1.0, "steps": 60},
    "measures.dynamics.RateChoice.falls_to": lambda: {"final": 0.5},
    "measures.trials.cannot_restart": lambda: {"model": network()},
    "measures.trials.copied_setup": lambda: with_optimizer(lr=0.1, batch_size=3, seed=0),
    "measures.trials.in_one_batch": lambda: {"problem": problem()},
    "measures.trials.in_training": lambda: {"problem": problem(), "seed": 0},
    "measures.trials.loss_of": lambda: {"model": network(), "problem": problem()},
    "measures.trials.outcome_of": lambda: {"trial": {"not_tried": "", "start": 2.0, "own": 2.0, "changed": 1.0, "steps": 8}},
    "measures.trials.random_batches": lambda: {"problem": problem(), "batch_size": 3, "steps": 2, "seed": 0},
    "measures.trials.run_steps": lambda: {"setup": setup(), "steps": 2, "seed": 0},
    "measures.trials.start_anew": lambda: {"model": network(), "seed": 0},
    "measures.trials.try_changes": lambda: with_optimizer(remedies={"nothing": trials.Remedy("wait", lambda setup: None)}, lr=0.1,
        steps=2, batch_size=3, score_on=problem(), seconds=1.0, seed=0),
    "measures.trials.usual_batch_size": lambda: {"problem": problem()},
}  # fmt: skip

#: Names that stand for something done after construction.
STAND_INS: dict[str, Callable[..., Any]] = {
    "Problem": measured_problem,
    "MaskedDictionaryLearning": fitted,
    "measures.trials.in_training": trained,
    "measures.trials.random_batches": lambda **given: list(trials.random_batches(**given)),
}
