"""Valid calls of what trains, watches, draws, generates, stores and judges: the second part of the table of `signatures`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import theodolite as th
from tests.faults.baselines import (
    Arguments,
    classification,
    eigenpairs,
    factors,
    growth_study,
    labelled,
    language_model,
    layer_ablation,
    line,
    log_linear,
    network,
    numbers,
    pairs_of_data,
    problem,
    risk,
    searched,
    setup,
    sgd,
    stability_rows,
    stacked,
    symmetric,
)
from theodolite import plots
from theodolite.data import Dataset, Documents, Text
from theodolite.data import generators as data_generators
from theodolite.measures import anchors, dictionary
from theodolite.measures.growth import Stage
from theodolite.monitors.log import fold
from theodolite.runners import Engine


@functools.cache
def folder() -> Path:
    """Where calls write; a folder of this process."""
    return Path(tempfile.mkdtemp(prefix="theodolite-faults-"))


def model_and(make: Callable[[nn.Module], Any], **more: Any) -> Arguments:
    model = network()
    return {"model": model, "loss": nn.MSELoss(), "data": pairs_of_data(), "optimizer": make(model), **more}


def fleet(**given: Any) -> Any:
    return th.Fleet(line, 2, loss=nn.CrossEntropyLoss(), rate=0.1, **given)


@functools.cache
def choice() -> Any:
    """The step size of a line."""
    data = {"train": labelled(), "steps": 2, "loss": nn.CrossEntropyLoss(), "values": {"lr": [0.1, 0.2]}}
    return th.tune_step_size(line, "sgd", **data, seeds=1, compare=False, progress=False)


@functools.cache
def trained_fleet() -> Any:
    return fleet().train(labelled(), steps=3, checkpoints=[0, 1])


def fed_monitor(**given: Any) -> Any:
    """A monitor that has seen one step."""
    monitor = th.Monitor(nn.MSELoss(), budget=None)
    model = given["model"]
    with suppress(Exception):  # the user's own loop, with a model that may be none
        nn.functional.mse_loss(model(pairs_of_data()[0]), pairs_of_data()[1]).backward()
    try:
        monitor.observe(**given)
    finally:
        monitor.close()
    return monitor


def attached_monitor(**given: Any) -> Any:
    monitor = th.Monitor(nn.MSELoss())
    try:
        return monitor.attach(**given)
    finally:
        monitor.close()


def opened_engine(**given: Any) -> Any:
    with th.runners.kept_open(**given):
        return None


def rows() -> list[dict[str, Any]]:
    return [
        {"x": x, "y": 2.0 * x, "low": x - 0.5, "high": x + 0.5, "error": 0.1, "of": of} for x in (1.0, 2.0, 3.0) for of in "ab"
    ]


def path_rows() -> list[dict[str, Any]]:
    return [{"alpha": a, "train_accuracy": p, "train_loss": 1 - p} for a, p in ((0.0, 0.9), (0.5, 0.6), (1.0, 0.8))]


def log_rows() -> list[dict[str, Any]]:
    return [{"kind": "step", "step": t, "loss": 2.0 / (t + 1), "gradient_norm": 1.0, "rate": 0.1} for t in range(5)]


def folded_log(pace: float) -> Any:
    return fold({"kind": "step", "step": t, "loss": pace**t} for t in range(30))


def sweep_rows() -> list[dict[str, Any]]:
    return [{"sweep": 0, "rate": 10.0**-i, "loss": 1.0, "smoothed": 1.0} for i in range(3)]


def validated_monitor(**given: Any) -> Any:
    monitor = th.Monitor(nn.MSELoss(), budget=None)
    try:
        monitor.validated(**given)
    finally:
        monitor.close()
    return monitor


def regime_rows() -> list[dict[str, Any]]:
    run = {"model": "network", "first_loss": 1.0}
    calm = {**run, "ratio": 0.5, "regime": "monotone", "final_loss": 0.1, "peak_loss": 1.0}
    return [calm, {**run, "ratio": 2.0, "regime": "catapult", "final_loss": 0.2, "peak_loss": 9.0}]


def choice_rows() -> list[dict[str, Any]]:
    one = {"n_components": 10, "sparsity": 2, "hidden_error": 0.5, "stderr": 0.1, "reconstruction": 0.2}
    return [one, {**one, "n_components": 20, "hidden_error": 0.4}]


@functools.cache
def pictures() -> Path:
    """A folder with five small pictures of each of two classes."""
    from matplotlib.image import imsave

    for name in "ab":
        (folder() / "pictures" / name).mkdir(parents=True, exist_ok=True)
        for i in range(5):
            imsave(folder() / "pictures" / name / f"{i}.png", numbers(4, 4).numpy())
    return folder() / "pictures"


def axes() -> Any:
    return plots.panels(1)[1][0]


def drawn(**more: Any) -> Arguments:
    """What all drawings of rows in groups take."""
    return {"by": "of", "order": ["a", "b"], "label": "", "xlabel": "x", "ylabel": "y", "title": "t", "ax": axes(), **more}


@functools.cache
def anchor_result() -> Any:
    return anchors.probe_states(numbers(40, 3), numbers(9, 3), top=(0, 1), sample=20)


@functools.cache
def stability_result() -> Any:
    train, test = (numbers(40, 2), torch.arange(40) % 2), (numbers(20, 2), torch.arange(20) % 2)
    return th.stability(line, "sgd", train, test, sizes=[8, 12], pairs=2, steps=3, loss=nn.CrossEntropyLoss(), rate=0.1, paths=0)


@functools.cache
def dataset() -> Dataset:
    return Dataset(numbers(6, 2).float(), torch.arange(6) % 2, numbers(4, 2).float(), torch.arange(4) % 2, ("a", "b"))


def graph() -> Any:
    return th.models.fcn_graph(2, [3, 3], 1)


def square(job: Any) -> dict[str, Any]:
    return {"square": job["x"] ** 2}


def jobs() -> list[dict[str, Any]]:
    return [{"x": 2}]


def judged(name: str) -> Callable[..., Any]:
    """A claim made by a verb, and judged."""

    def made(**given: Any) -> Any:
        found = getattr(th.experiments, name)(*given.values(), "a statement", lambda rows: 0.5)
        return found.judge([{}], "tiny")

    return made


def scheduled(name: str) -> Callable[..., Any]:
    """A schedule, asked for its first rates."""
    return lambda **given: [getattr(th.training, name)(**given)(step) for step in (0, 1, 5)]


IMAGE = {"classes": 3, "channels": 1, "activation": "relu", "init": "xavier", "seed": 0}

#: As `baselines.BASELINES`.
ROOMS: dict[str, Callable[[], Arguments]] = {
    # Training
    "train": lambda: model_and(sgd, steps=2, batch_size=3, schedule=0.1, until=0.0, clip=1.0, every=1, first=1,
        measure={"one": lambda model: 1.0}, observe=lambda *step: None, checkpoint_every=1, target="labels", seed=0),
    "train#epochs": lambda: model_and(sgd, epochs=1, batch_size=3),
    "training.cosine": lambda: {"rate": 0.1, "steps": 3, "final": 0.0},
    "training.step_decay": lambda: {"rate": 0.1, "factor": 0.5, "at": [1, 2]},
    "training.warmup": lambda: {"schedule": 0.1, "steps": 3},
    "training.SGD": lambda: {"momentum": 0.5, "dampening": 0.1, "weight_decay": 0.0},
    "training.RMSprop": lambda: {"alpha": 0.9, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.5},
    "training.Adam": lambda: {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    "Fleet": lambda: {"factory": line, "seeds": 2, "loss": nn.CrossEntropyLoss(), "optimizer": "sgd", "rate": 0.1,
        "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0, "mode": "train", "route": "auto", "memory": 1e6,
        "target": "labels"},
    "Fleet#adam": lambda: {"factory": line, "seeds": [0, 1], "loss": nn.CrossEntropyLoss(), "optimizer": "adam",
        "rate": [0.1, 0.2], "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    "Fleet#rmsprop": lambda: {"factory": line, "seeds": 2, "loss": nn.CrossEntropyLoss(), "optimizer": "rmsprop",
        "rate": {"*": 0.1}, "alpha": [0.9, 0.99]},
    "Fleet.train#epochs": lambda: {"data": labelled(), "epochs": 1, "batch_size": 2, "index": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "order_seeds": [0, 1], "every": [0, 1], "checkpoints": 1},
    "Fleet.train": lambda: {"data": labelled(), "steps": 2, "batch_size": 4, "order_seeds": 0, "schedule": 1.0,
        "test": labelled(), "until": 1e-3, "every": 1, "checkpoints": [0], "blow_up": 1e8},
    "Fleet.outputs": lambda: {"data": labelled(), "replicas": [0]},
    "Fleet.model": lambda: {"replica": 0},
    "training.FleetTrace.state": lambda: {"step": 1, "replica": 0},
    # Monitors
    "Monitor": lambda: {"loss": nn.MSELoss(), "probe": pairs_of_data(), "budget": 0.25, "by": "hessian", "top": 1,
        "target": "labels", "seed": 0},
    "Monitor.observe": lambda: {"step": 0, "model": (model := network()), "batch": pairs_of_data(), "optimizer": sgd(model),
        "value": 0.5, "clip": 0.5},
    "Monitor.attach": lambda: {"model": (model := network()), "optimizer": sgd(model), "first_step": 0},
    "Monitor.listen": lambda: {"model": (model := network()), "optimizer": sgd(model)},
    "Monitor.validated": lambda: {"step": 1, "loss": 0.5},
    "compare_runs": lambda: {"a": folded_log(0.99), "b": folded_log(0.9), "names": ("slow", "fast")},
    "MultiCatapult": lambda: model_and(sgd, raises=2, ratio=1.6, patience=2, by="hessian", settle=5, mode="eval", seed=0),
    "monitors.CriticalRateLR": lambda: {"optimizer": sgd((given := problem()).model), "probe": given, "multiple": 0.9,
        "every": 20, "last_epoch": -1},
    "monitors.cyclical_rate": lambda: {"low": 0.1, "high": 0.2, "period": 4},
    # Surveys
    "survey": lambda: {"problem": problem(), "lr": 0.1, "batch_size": 2, "budget": 5.0, "only": ["parameters"], "name": "net",
        "population": 100, "facts": {"a": "b"}, "seed": 0},
    "instruments.plan_survey": lambda: {"problem": problem(), "lr": 0.1, "budget": 5.0, "only": ["parameters"], "seed": 0},
    "instruments.SurveyContext": lambda: {"problem": (given := problem()), "lr": 0.1, "batch_size": 2,
        "optimizer": sgd(given.model),
        "population": 100, "seed": 0},
    "compare": lambda: {"problems": {"a": classification(), "b": classification()}, "k": 2, "tol": 1e-2, "path": False,
        "seed": 0},
    # Methods with numbers of problems, operators and results
    "Problem.few": lambda: {"count": 2},
    "Problem.sampling_error": lambda: {"quantity": lambda given: given.loss(), "groups": 3, "population": 100},
    "Problem.split": lambda: {"vector": numbers(17)},
    "LinearOperator.check_symmetry": lambda: {"seed": 0},
    "LinearOperator.rmatmul": lambda: {"x": numbers(4)},
    "linalg.Density.interval": lambda: {"level": 0.9},
    "linalg.TraceEstimate.interval": lambda: {"level": 0.9},
    "linalg.Eigenpairs.most_extreme": lambda: {"k": 1},
    "operators.KroneckerFactors.top_eigenpairs": lambda: {"k": 1},
    "measures.dynamics.BatchCriticalRates.quantile": lambda: {"share": 0.5},
    "measures.linearity.Graph.layer": lambda: {"index": 1},
    "measures.linearity.Graph.name": lambda: {"vertex": 1},
    "measures.linearity.Graph.of": lambda: {"edges": torch.tensor([[0, 1]]), "vertices": 2, "weight_of": [0],
        "fan_in": [1, 1], "inputs": [0], "outputs": [1]},
    "measures.anchors.transfer_certificate#mu": lambda: {"teacher": log_linear(), "student": log_linear(1), "labels": [0, 1],
        "a": [1.0, -1.0], "b": [0.0, 0.0], "mu": 0.5, "downstream": (log_linear(), log_linear(1))},
    "stability#epochs": lambda: {"factory": line, "optimizer": "sgd", "train": labelled(), "test": labelled(), "sizes": [4, 6],
        "pairs": 1, "loss": nn.CrossEntropyLoss(), "stop": "epochs", "epochs": 1, "schedule": 1.0, "rate": 0.1},
    "stability#loss": lambda: {"factory": line, "optimizer": "sgd", "train": labelled(), "test": labelled(), "sizes": [4, 6],
        "pairs": 1, "loss": nn.CrossEntropyLoss(), "stop": "train_loss", "steps": 2, "loss_target": 0.5, "rate": 0.1},
    "measures.anchors.AnchorProbe.histogram": lambda: {"top": 0, "bins": 5},
    "measures.anchors.AnchorProbe.vector": lambda: {"top": 0},
    "measures.anchors.LogLinear.from_logits": lambda: {"logits": numbers(6, 5), "rank": 2},
    "measures.anchors.OutputHead.restricted": lambda: {"words": 3},
    "measures.dictionary.SparseCodes.dense": lambda: {"atoms": 6},
    "measures.dictionary.LearningSettings": lambda: {"sparsity": 1, "hidden_fraction": 0.2, "objective": "masked",
        "masks": "batch", "batch_size": 5, "learning_rate": 1e-3, "optimizer": "adam", "decoder": "omp", "selection": "raw",
        "penalty": 0.1},
    "measures.stability.ConvexBounds.hold": lambda: {"distance": 0.1, "stability": 0.1, "tolerance": 0.0},
    "measures.stability.StabilityResult.explains": lambda: {"trial": 0, "step": 3},
    "measures.stability.StabilityResult.fit": lambda: {"quantity": "stab", "trial": 0, "step": 3},
    "measures.stability.StabilityResult.values": lambda: {"quantity": "stab", "trial": 0, "step": 3},
    "measures.quadratic_models.GeneralQuadratic.step": lambda: {"x": numbers(2, 3), "y": numbers(2), "rate": 0.1},
    "results.html_table": lambda: {"rows": [{"a": 1}], "limit": 5},
    # Models and graphs
    "models.cnn_graph": lambda: {"length": 4, "widths": [2], "outputs": 1, "channels": 1, "kernel": 3},
    "models.densenet_graph": lambda: {"inputs": 2, "widths": [2], "outputs": 1},
    "models.fcn_graph": lambda: {"inputs": 2, "widths": [2], "outputs": 1},
    "models.with_bottlenecks": lambda: {"graph": graph(), "layer": 1, "neurons": 1, "in_degree": 1, "seed": 0},
    "models.with_connections": lambda: {"graph": graph(), "source": 0, "target": 2},
    "models.with_drops": lambda: {"graph": graph(), "probability": 0.5, "seed": 0},
    "models.with_skips": lambda: {"graph": graph(), "skips": [(2, 5)]},
    "models.cnn": lambda: {"widths": (2, 2), **IMAGE, "kernel": 3, "stride": 2},
    "models.f_network": lambda: {"name": "F-4^2", "inputs": 3, "outputs": 2, "activation": "relu", "init": "xavier", "seed": 0},
    "models.fcn": lambda: {"inputs": 3, "widths": [4], "outputs": 2, "activation": "relu", "init": "xavier", "seed": 0},
    "models.lenet5": lambda: {"image": (1, 28, 28), "classes": 3, "conv1": 2, "conv2": 2, "fc1": 3, "fc2": 3,
        "activation": "relu", "init": "xavier", "seed": 0},
    "models.lenet_mini": lambda: {"image": (1, 8, 8), "classes": 3, "activation": "relu", "init": "xavier", "seed": 0},
    "models.myrtle5": lambda: {"width": 2, **IMAGE},
    "models.vgg11": lambda: {"width": 2, **IMAGE},
    "models.count_parameters": lambda: {"model": network()},
    "models.initialise": lambda: {"model": network(), "init": "xavier", "residuals": 2},
    "models.ntk_parameterise": lambda: {"model": network()},
    "models.ntk_cnn": lambda: {"image": (1, 4, 4), "width": 3, "depth": 2, "outputs": 1, "kernel": 3, "activation": "relu",
        "bias": "none", "bias_init": "zero", "init": "ntk", "seed": 0},
    "models.ntk_fcn": lambda: {"inputs": 3, "width": 3, "depth": 1, "outputs": 1, "activation": "relu", "bias": "none",
        "bias_init": "zero", "init": "ntk", "seed": 0},
    "models.load_weights": lambda: {"model": network(), "weights": network().state_dict()},
    "models.build": lambda: {"name": "F-4^2", "inputs": 3, "outputs": 2, "seed": 0},
    "models.cifar_resnet": lambda: {"depth": 8, "classes": 3, "channels": 1, "width": 2, "norm": "batch",
        "init": "kaiming_fan_out", "seed": 0},
    "models.resnet18": lambda: {"width": 2, **IMAGE, "norm": "batch"},
    "models.resnet20": lambda: {"classes": 3, "channels": 1, "width": 2, "norm": "batch", "init": "kaiming_fan_out", "seed": 0},
    "models.wrn": lambda: {"depth": 10, "k": 1, "classes": 3, "channels": 1, "norm": "batch", "init": "kaiming_normal",
        "seed": 0},
    "models.bert": lambda: {"vocabulary": 9, "context": 6, "dim": 4, "depth": 1, "heads": 2, "hidden": 4, "activation": "gelu",
        "init": "normal_0.02", "seed": 0},
    "models.gpt": lambda: {"vocabulary": 9, "context": 6, "dim": 4, "depth": 1, "heads": 2, "hidden": 4, "activation": "gelu",
        "init": "gpt2", "seed": 0},
    "models.llama_decoder": lambda: {"vocabulary": 9, "context": 6, "dim": 8, "hidden": 4, "depth": 1, "heads": 2,
        "kv_heads": 1, "rotary_base": 10000.0, "eps": 1e-5, "init": "normal_0.02", "seed": 0},
    "models.vision_transformer": lambda: {"image": (1, 8, 8), "patch": 4, "dim": 4, "depth": 1, "heads": 2, "classes": 3,
        "mlp_ratio": 2.0, "init": "xavier", "seed": 0},
    # Data
    "data.Dataset.scaled": lambda: {"mean": 0.1, "std": 2.0},
    "data.Dataset.subset": lambda: {"n_train": 2, "n_test": 2, "seed": 0},
    "data.Dataset.classes_only": lambda: {"classes": [0, 1]},
    "data.Documents.bag_of_words": lambda: {"size": 3},
    "data.Text.vocabulary": lambda: {"size": 3},
    "data.load": lambda: {"name": "digits"},
    "data.image_folder": lambda: {"folder": pictures(), "size": 4, "per_class": 1},
    "data.generators.exact_anchor_world": lambda: {"contexts": 3, "dim": 4, "label_words": 2, "bulk_words": 3, "level": -1.0,
        "scale": 1.0, "seed": 0},
    "data.generators.gaussian_classes": lambda: {"n": 4, "dim": 2, "margin": 1.2, "seed": 0},
    "data.generators.gaussian_dictionary_world": lambda: {"words": 4, "dim": 3, "contexts": 5, "radius": 3.0, "law": "uniform",
        "spread": 1.0, "offset": 0.3, "seed": 0},
    "data.generators.noisy_labels": lambda: {"labels": torch.arange(6) % 3, "classes": 3, "share": 0.2, "seed": 0},
    "data.generators.gaussian_mixture": lambda: {"n": 4, "dim": 2, "classes": 2, "within": 2.4, "seed": 0},
    "data.generators.mixture_1d": lambda: {"n": 4, "center": 2.0, "std": 1.0, "seed": 0},
    "data.generators.planted_dictionary": lambda: {"atoms": 4, "dim": 3, "seed": 0},
    "data.generators.planted_samples": lambda: {"dictionary": data_generators.planted_dictionary(4, 3), "n": 3, "sparsity": 2,
        "noise": 0.1, "law": "gaussian", "scale": 1.0, "seed": 0},
    "data.generators.rank_k_target": lambda: {"name": "rank-2", "dim": 4},
    "data.generators.rank_k_targets": lambda: {"name": "rank-2", "n": 3, "dim": 4, "noise": 0.1, "seed": 0},
    "data.generators.stream": lambda: {"purpose": "a test", "seed": 0},
    "data.generators.two_class_images": lambda: {"n": 2, "side": 4, "channels": 1, "rms": 1.1, "mean_cos": 0.9,
        "class_frac": 0.2, "label_noise": 0.0, "seed": 0},
    # Many jobs, and experiments
    "runners.Engine.of": lambda: {"engine": "serial", "workers": 1, "threads": 1},
    "runners.kept_open": lambda: {"engine": "serial", "workers": 1, "threads": 1},
    "runners.run_all": lambda: {"task": square, "jobs": jobs(), "engine": "serial", "workers": 1, "threads": 1},
    "runners.finish_all": lambda: {"task": square, "jobs": jobs(), "engine": "serial", "workers": 1, "threads": 1},
    "runners.run_stored": lambda: {"work": square, "jobs": jobs(), "name": "squares", "engine": "serial", "workers": 1,
        "threads": 1},
    "experiments.run": lambda: {"id": "checks/kronecker-identity", "size": "tiny", "engine": "serial", "workers": 1,
        "threads": 1},
    "experiments.at_least": lambda: {"bound": 0.5},
    "experiments.at_most": lambda: {"bound": 0.5},
    "experiments.between": lambda: {"low": 0.2, "high": 0.6},
    "experiments.within": lambda: {"tolerance": 0.1, "value": 0.5},
    "experiments.relative": lambda: {"tolerance": 0.1, "value": 0.5},
    # Drawings
    "plots.PowerLaw.interval": lambda: {"level": 0.9},
    "plots.bars": lambda: {"rows": rows(), "name": "of", "value": "y", "most": 4, "xlabel": "x", "ylabel": "y", "title": "t",
        "ax": axes()},
    "plots.correlation_of": lambda: {"x": [1.0, 2.0, 3.0], "y": [1.0, 2.0, 2.5], "kind": "pearson"},
    "plots.counted_histogram": lambda: {"rows": rows(), "low": "low", "high": "high", "density": "y", **drawn()},
    "plots.curves": lambda: {"rows": rows(), "x": "x", "y": "y", "band": "stderr", "quantiles": (0.25, 0.75), "error": "error",
        "log": "", "labels": "auto", **drawn()},
    "plots.density": lambda: {"rows": rows(), "x": "x", "y": "y", "error": "error", "width": 2.0, "nodes": [0.2], "floor": 1e-6,
        **drawn()},
    "plots.eigenvalues": lambda: {"rows": rows(), "value": "y", "index": "x", "error": "error", "kind": "points", **drawn()},
    "plots.grouped_bars": lambda: {"rows": rows(), "x": "x", "y": "y", "by": "of", "mark": "low", "xlabel": "x", "ylabel": "y",
        "title": "t", "ax": axes()},
    "plots.heatmap": lambda: {"rows": rows(), "x": "x", "y": "of", "value": "y", "xlabel": "x", "ylabel": "y", "label": "l",
        "center": 0.0, "limits": (0.0, 1.0), "title": "t", "ax": axes()},
    "plots.histogram": lambda: {"rows": rows(), "value": "y", "bins": 3, "log": "", **drawn()},
    "plots.intervals": lambda: {"rows": rows(), "name": "of", "value": "y", "error": "error", "xlabel": "x", "ylabel": "y",
        "title": "t", "ax": axes()},
    "plots.layer_ratios": lambda: {"rows": rows(), "columns": {"y": "a ratio"}, "layer": "of", "xlabel": "x", "ylabel": "y",
        "title": "t", "ax": axes()},
    "plots.leading_blocks": lambda: {"matrices": {"a": symmetric()}, "size": 2, "columns": 1, "label": "l", "title": "t"},
    "plots.linear_path": lambda: {"rows": path_rows(), "y": "loss", "ends": ("A", "B"), "title": "t", "ax": axes()},
    "plots.linear_path_panels": lambda: {"rows": path_rows(), "ends": ("A", "B"), "title": "t"},
    "plots.log_log": lambda: {"rows": rows(), "x": "x", "y": "y", "window": (0.5, 4.0), "guides": (-1.0,), **drawn()},
    "plots.look": lambda: {"i": 1},
    "plots.looks": lambda: {"keys": ["a", "b"], "start": 0},
    "plots.matrix": lambda: {"values": symmetric(), "row_names": list("abcd"), "column_names": list("abcd"), "center": 0.0,
        "limits": (0.0, 1.0), "number": ".2g", "blocks": [2, 2], "block_names": ["a", "b"], "label": "l", "xlabel": "x",
        "ylabel": "y", "title": "t", "ax": axes()},
    "plots.model_scores": lambda: {"rows": [{"model": "a", "loss": 0.5, "loss_error": 0.1, "critical_lr": 0.2}]},
    "plots.pairs_and_maxima": lambda: {"rows": stability_rows(), "quantity": "stab", "step": 9, "reduce": "max", "resamples": 20,
        "seed": 0, "title": "t", "ax": axes()},
    "plots.panels": lambda: {"count": 2, "columns": 1, "size": (3.6, 2.9), "title": "t", "figure": plots.panels(1)[0]},
    "plots.plot_anchor_errors": lambda: {"rows": anchor_result().rows(), "title": "t", "ax": axes()},
    "plots.plot_anchor_probe": lambda: {"probe": anchor_result(), "title": "t", "figure": plots.panels(1)[0]},
    "plots.plot_atom_geometry": lambda: {"geometry": anchors.atom_geometry(numbers(5, 3), pairs=10), "title": "t",
        "figure": plots.panels(1)[0]},
    "plots.plot_atom_usage": lambda: {"rows": [{"share": 0.0, "of": "a"}, {"share": 0.5, "of": "b"}], "by": "of", "title": "t",
        "ax": axes()},
    "plots.plot_atoms": lambda: {"atoms": numbers(4, 4), "patch_shape": (2, 2), "order": [1, 0], "count": 2, "columns": 1,
        "feature_names": list("abcd"), "title": "t", "ax": axes()},
    "plots.plot_bound_fit": lambda: {"rows": [{"epoch": 1, "objective": 0.5, "error": 0.2}, {"epoch": 2, "objective": 0.4,
        "error": 0.1}], "bound": 0.45, "title": "t", "ax": axes()},
    "plots.plot_step_size": lambda: {"choice": choice(), "title": "t", "ax": axes()},
    "plots.plot_certificate": lambda: {"certificate": risk(), "title": "t", "ax": axes()},
    "data.ul2_objectives": lambda: {"tokens": torch.arange(24).reshape(2, 12), "sentinel": 100, "shares": [0.5, 0.0, 0.5],
        "corrupted": 0.2, "span": 2, "seed": 0},
    "plots.plot_growth_choice": lambda: {"choice": th.landscape_aware_growth(**searched(lag=1)), "title": "t", "ax": axes()},
    "plots.plot_layer_ablation": lambda: {"ablation": layer_ablation(), "title": "t", "ax": axes()},
    "plots.growth_study_panels": lambda: {"study": growth_study(), "title": "t"},
    "plots.plot_stacking": lambda: {"stacking": th.adaptive_stacking(**stacked(), lag=1), "title": "t", "ax": axes()},
    "plots.plot_posterior": lambda: {"posterior": risk().posterior, "most": 5, "title": "t", "ax": axes()},
    "plots.plot_dictionary_choice": lambda: {"rows": choice_rows(), "title": "t", "figure": plots.panels(1)[0]},
    "plots.plot_learning_curve": lambda: {"rows": [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.4}], "title": "t",
        "ax": axes()},
    "plots.plot_log_partitions": lambda: {"probe": anchor_result(), "top": 0, "title": "t", "ax": axes()},
    "plots.plot_monitor": lambda: {"log": log_rows(), "title": "t", "figure": plots.panels(1)[0]},
    "plots.plot_runs": lambda: {"comparison": th.compare_runs(folded_log(0.99), folded_log(0.9))},
    "plots.power_law": lambda: {"x": [1.0, 2.0, 4.0], "y": [1.0, 2.0, 4.5]},
    "plots.range_test": lambda: {"rows": sweep_rows(), "suggestion": 0.02, "own": 0.05, "critical": 0.1, "window": (0.1, 0.2),
        "title": "t", "ax": axes()},
    "plots.reference#y": lambda: {"ax": axes(), "y": 0.5},
    "plots.span#y": lambda: {"ax": axes(), "y": (0.0, 0.5)},
    "plots.reference": lambda: {"ax": axes(), "x": 0.5, "label": "here", "colour": "#595959"},
    "plots.regime_diagram": lambda: {"rows": regime_rows(), "own": 1.0, "steps": 10, "optimizer": "SGD", "title": "t",
        "ax": axes()},
    "plots.save": lambda: {"figure": axes(), "path": str(folder() / "figure.svg")},
    "plots.scatter": lambda: {"rows": rows(), "x": "x", "y": "y", "text": "of", "correlation": "pearson", "log": "", **drawn()},
    "plots.span": lambda: {"ax": axes(), "x": (0.0, 0.5), "label": "here", "colour": "#595959"},
    "plots.stability_panels": lambda: {"rows": stability_rows(), "quantities": ["stab"], "title": "t",
        "figure": plots.panels(1)[0], "resamples": 20, "seed": 0},
    "plots.to_svg": lambda: {"figure": axes(), "prefix": "a", "title": "t"},
    "plots.with_error": lambda: {"value": 0.5, "error": 0.1},
    # For authors
    "testing.bilinear_problem": lambda: {"u": 2.0, "v": 3.0, "target": 1.0},
    "testing.dense_hessian": lambda: {"objective": (made := objective())[0], "parameters": made[1]},
    "testing.finite_difference_product": lambda: {"objective": (made := objective())[0], "parameters": made[1],
        "vector": torch.ones(2).double(), "step": 1e-5},
    "testing.quadratic_problem": lambda: {"eigenvalues": [2.0, 1.0]},
    "testing.random_symmetric": lambda: {"eigenvalues": torch.tensor([2.0, 1.0]), "seed": 0},
    "testing.softmax_problem": lambda: {"samples": 3, "inputs": 2, "classes": 2, "seed": 0},
    "testing.squared_loss_problem": lambda: {"samples": 3, "inputs": 2, "outputs": 2, "seed": 0},
}  # fmt: skip


def objective() -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    return lambda: w.square().sum(), [w]


def head() -> Any:
    return anchors.find_head(language_model(), (torch.randint(9, (2, 6)),), {})


#: Methods, by the object that they are asked of.
OWNERS: dict[str, Callable[[], Any]] = {
    "Fleet.train#epochs": fleet,
    "Fleet.outputs": fleet,
    "Fleet.model": fleet,
    "Fleet.train": fleet,
    "training.FleetTrace.state": trained_fleet,
    "Problem.few": problem,
    "Problem.sampling_error": problem,
    "Problem.split": problem,
    "LinearOperator.check_symmetry": lambda: th.operators.as_operator(symmetric()),
    "LinearOperator.rmatmul": lambda: th.operators.as_operator(symmetric()),
    "linalg.Density.interval": lambda: th.spectral_density(symmetric(), steps=3, points=32),
    "linalg.TraceEstimate.interval": lambda: th.trace(symmetric(), matvecs=6),
    "linalg.Eigenpairs.most_extreme": eigenpairs,
    "operators.KroneckerFactors.top_eigenpairs": factors,
    "measures.dynamics.BatchCriticalRates.quantile": lambda: th.measures.dynamics.batch_critical_rates(
        problem(), batch_size=2, batches=3
    ),
    "measures.linearity.Graph.layer": graph,
    "measures.linearity.Graph.name": graph,
    "measures.linearity.Graph.of": lambda: th.measures.linearity.Graph,
    "measures.anchors.AnchorProbe.histogram": anchor_result,
    "measures.anchors.AnchorProbe.vector": anchor_result,
    "measures.anchors.LogLinear.from_logits": lambda: anchors.LogLinear,
    "measures.anchors.OutputHead.restricted": head,
    "measures.dictionary.SparseCodes.dense": lambda: dictionary.pursue(numbers(4, 6), torch.eye(6).double(), 1),
    "measures.growth.GrowthStudy.heatmap": growth_study,
    "measures.growth.GrowthStudy.final_correlation": growth_study,
    "measures.growth.GrowthStudy.recall": growth_study,
    "measures.growth.GrowthStudy.regret": growth_study,
    "measures.growth.GrowthStudy.relative_regret": growth_study,
    "measures.growth.GrowthStudy.smoothed": growth_study,
    "measures.growth.GrowthStudy.transition": growth_study,
    "measures.growth.GrowthStudy.chosen": growth_study,
    "measures.growth.Stage.operators": lambda: Stage(3, 5),
    "measures.growth.GrowthOperator.picture": lambda: th.growth_operators(4, 2)[0],
    "measures.bounds.GaussianPosterior.sample": lambda: risk().posterior,
    "measures.stepsize.RateDescent.outside": lambda: th.measures.stepsize.descend_rate(
        symmetric(), torch.ones(4), 0.1, 5, updates=3
    ),
    "measures.audit.InputAudit.called": lambda: th.measures.audit.audit_inputs(problem()),
    "measures.data_audit.LabelAudit.recall": lambda: th.measures.data_audit.audit_labels(classification()),
    "measures.trials.Setup.set_lr": setup,
    "measures.progress.LearningProgress.followed": lambda: th.measures.progress.learning_progress(classification(), lr=0.1),
    "measures.dynamics.RateChoice.falls_to": lambda: th.measures.dynamics.choose_rate(problem(), 0.1, steps=8),
    "measures.stability.ConvexBounds.hold": lambda: th.measures.stability.convex_bounds(
        largest_input=2.0, largest_test_input=3.0, rate=0.1, batch=4, visits=5, smoothness=1.0
    ),
    "measures.stability.StabilityResult.explains": stability_result,
    "measures.stability.StabilityResult.fit": stability_result,
    "measures.stability.StabilityResult.values": stability_result,
    "measures.quadratic_models.GeneralQuadratic.step": lambda: th.measures.quadratic_models.GeneralQuadratic(
        numbers(3), lambda x: x, lambda x, w: x * w, 0.5
    ),
    "data.Dataset.scaled": dataset,
    "data.Dataset.subset": dataset,
    "data.Dataset.classes_only": dataset,
    "data.Documents.bag_of_words": lambda: Documents(("a b", "b c"), torch.arange(2), ("a",), torch.arange(1), ("x", "y")),
    "data.Text.vocabulary": lambda: Text("a b c", "a", "b"),
    "runners.Engine.of": lambda: Engine,
    "plots.PowerLaw.interval": lambda: plots.power_law([1.0, 2.0, 4.0], [1.0, 2.0, 4.5]),
}

#: Names that stand for something done after the call.
STAND_INS: dict[str, Callable[..., Any]] = {
    "Monitor.observe": fed_monitor,
    "Monitor.attach": attached_monitor,
    "Monitor.validated": validated_monitor,
    "Monitor.listen": lambda **given: th.Monitor(nn.MSELoss()).listen(**given),
    "models.build": lambda name, **given: th.models.build(name, **given),
    "runners.kept_open": opened_engine,
    "runners.run_all": lambda **given: list(th.runners.run_all(**given)),
    "runners.finish_all": lambda **given: list(th.runners.finish_all(**given)),
    **{f"experiments.{name}": judged(name) for name in ("at_least", "at_most", "between", "within", "relative")},
    **{f"training.{name}": scheduled(name) for name in ("cosine", "step_decay", "warmup")},
    "monitors.cyclical_rate": lambda **given: [th.monitors.cyclical_rate(**given)(step) for step in (0, 1, 5)],
}
