"""The list of experiments, by id; a module is imported when its experiment is asked for."""

from __future__ import annotations

import fnmatch
import functools
import importlib
from importlib.metadata import entry_points

from theodolite.errors import TheodoliteError, nearest
from theodolite.experiments.base import Experiment, check_declaration

#: Others add theirs through this group of entry points: `id = "module:Class"`.
GROUP = "theodolite.experiments"

_ANCHORS = "theodolite.experiments.anchors"
_CHECKS = "theodolite.experiments.checks"
_CATAPULT = "theodolite.experiments.catapult"
_CATAPULT_FEATURES = "theodolite.experiments.catapult_features"
_HESSIAN = "theodolite.experiments.hessian"
_LINEARITY = "theodolite.experiments.linearity"
_SPARSE_CODING = "theodolite.experiments.sparse_coding"
_STABILITY = "theodolite.experiments.stability"
_TARGETS: dict[str, str] = {
    "checks/stability-edge": f"{_CHECKS}.stability_edge:StabilityEdge",
    "checks/kronecker-identity": f"{_CHECKS}.kronecker_identity:KroneckerIdentity",
    "anchor/table-3.1": f"{_ANCHORS}.tables:Table31",
    "anchor/figure-3.1": f"{_ANCHORS}.tables:Figure31",
    "anchor/figure-3.2": f"{_ANCHORS}.dictionaries:Figure32",
    "anchor/figure-3.3": f"{_ANCHORS}.distributions:Figure33",
    "anchor/table-B.1": f"{_ANCHORS}.tables:TableB1",
    "anchor/table-B.2": f"{_ANCHORS}.tables:TableB2",
    "anchor/figure-B.1": f"{_ANCHORS}.dictionaries:FigureB1",
    "anchor/figure-B.2": f"{_ANCHORS}.dictionaries:FigureB2",
    "anchor/figure-B.3": f"{_ANCHORS}.distributions:FigureB3",
    "anchor/figure-B.4": f"{_ANCHORS}.distributions:FigureB4",
    "anchor/worlds": f"{_ANCHORS}.worlds:Worlds",
    "anchor/theorems": f"{_ANCHORS}.theorems:Theorems",
    "anchor/pretraining": f"{_ANCHORS}.pretraining:Pretraining",
    "anchor/transfer": f"{_ANCHORS}.transfer:Transfer",
    "anchor/attacks": f"{_ANCHORS}.attacks:Attacks",
    "catapult/theorems": f"{_CATAPULT}.theorems:Theorems",
    "catapult/window": f"{_CATAPULT}.window:Window",
    "catapult/figure-3.1": f"{_CATAPULT}.regimes:Figure31",
    "catapult/figure-3.3": f"{_CATAPULT}.line:Figure33",
    "catapult/figure-B.1": f"{_CATAPULT}.line:FigureB1",
    "catapult/figure-B.4": f"{_CATAPULT}.general:FigureB4",
    "catapult/figure-3.2": f"{_CATAPULT}.best_loss:Figure32",
    "catapult/figure-3.4": f"{_CATAPULT}.best_loss:Figure34",
    "catapult/figure-B.2": f"{_CATAPULT}.top_eigenvector:FigureB2",
    "catapult/figure-B.3": f"{_CATAPULT}.top_eigenvector:FigureB3",
    "catapult/figure-B.5": f"{_CATAPULT}.accuracy:FigureB5",
    "catapult/figure-B.6": f"{_CATAPULT}.accuracy:FigureB6",
    "catapult/figure-B.7": f"{_CATAPULT}.accuracy:FigureB7",
    "catapult/figure-B.8": f"{_CATAPULT}.accuracy:FigureB8",
    "catapult/figure-B.9": f"{_CATAPULT}.accuracy:FigureB9",
    "catapult/figure-B.10": f"{_CATAPULT}.activations:FigureB10",
    "catapult/figure-B.11": f"{_CATAPULT}.activations:FigureB11",
    "catapult/figure-B.12": f"{_CATAPULT}.activations:FigureB12",
    "catapult/figure-B.13": f"{_CATAPULT}.activations:FigureB13",
    "catapult/after-kernel": f"{_CATAPULT}.after_kernel:AfterKernel",
    "catapult/critical-rate": f"{_CATAPULT}.critical_rate:CriticalRate",
    "catapult-features/figure-4.3": f"{_CATAPULT_FEATURES}.gd_catapult:Figure43",
    "catapult-features/figure-C.3": f"{_CATAPULT_FEATURES}.gd_catapult:FigureC3",
    "catapult-features/figure-C.5": f"{_CATAPULT_FEATURES}.gd_catapult:FigureC5",
    "catapult-features/theorems": f"{_CATAPULT_FEATURES}.theorems:Theorems",
    "catapult-features/figure-4.4": f"{_CATAPULT_FEATURES}.raising:Figure44",
    "catapult-features/figure-4.5": f"{_CATAPULT_FEATURES}.one_sample:Figure45",
    "catapult-features/figure-4.6": f"{_CATAPULT_FEATURES}.matching:Figure46",
    "catapult-features/table-4.2": f"{_CATAPULT_FEATURES}.matching:Table42",
    "catapult-features/figure-4.7": f"{_CATAPULT_FEATURES}.sgd_spikes:Figure47",
    "catapult-features/figure-C.9": f"{_CATAPULT_FEATURES}.sgd_spikes:FigureC9",
    "catapult-features/figure-C.10": f"{_CATAPULT_FEATURES}.sgd_spikes:FigureC10",
    "catapult-features/figure-C.11": f"{_CATAPULT_FEATURES}.sgd_spikes:FigureC11",
    "catapult-features/figure-C.12": f"{_CATAPULT_FEATURES}.sgd_spikes:FigureC12",
    "catapult-features/figure-C.22": f"{_CATAPULT_FEATURES}.sgd_spikes:FigureC22",
    "catapult-features/table-4.1": f"{_CATAPULT_FEATURES}.feature_sgd_figures:Table41",
    "catapult-features/figure-4.8": f"{_CATAPULT_FEATURES}.feature_gd_figures:Figure48",
    "catapult-features/figure-4.9": f"{_CATAPULT_FEATURES}.feature_sgd_figures:Figure49",
    "catapult-features/figure-4.10": f"{_CATAPULT_FEATURES}.feature_sgd_figures:Figure410",
    "catapult-features/figure-4.11": f"{_CATAPULT_FEATURES}.feature_optimizers:Figure411",
    "catapult-features/figure-C.13": f"{_CATAPULT_FEATURES}.feature_gd_figures:FigureC13",
    "catapult-features/figure-C.14": f"{_CATAPULT_FEATURES}.feature_gd_figures:FigureC14",
    "catapult-features/figure-C.15": f"{_CATAPULT_FEATURES}.feature_gd_figures:FigureC15",
    "catapult-features/figure-C.16": f"{_CATAPULT_FEATURES}.feature_gd_figures:FigureC16",
    "catapult-features/figure-C.17": f"{_CATAPULT_FEATURES}.feature_gd_figures:FigureC17",
    "catapult-features/figure-C.18": f"{_CATAPULT_FEATURES}.feature_sgd_further:FigureC18",
    "catapult-features/figure-C.19": f"{_CATAPULT_FEATURES}.feature_sgd_figures:FigureC19",
    "catapult-features/figure-C.20": f"{_CATAPULT_FEATURES}.feature_sgd_further:FigureC20",
    "catapult-features/figure-C.21": f"{_CATAPULT_FEATURES}.feature_sgd_further:FigureC21",
    "catapult-features/figure-C.23": f"{_CATAPULT_FEATURES}.feature_sgd_figures:FigureC23",
    "catapult-features/table-C.1": f"{_CATAPULT_FEATURES}.feature_optimizers:TableC1",
    "catapult-features/agop-penalty": f"{_CATAPULT_FEATURES}.feature_penalty:AGOPPenalty",
    "hessian/figure-1": f"{_HESSIAN}.overlap:Figure1",
    "hessian/figure-2": f"{_HESSIAN}.full:Figure2",
    "hessian/figure-3": f"{_HESSIAN}.correspondence:Figure3",
    "hessian/figure-4": f"{_HESSIAN}.spectra:Figure4",
    "hessian/figure-5": f"{_HESSIAN}.overlap:Figure5",
    "hessian/figure-6": f"{_HESSIAN}.ranks:Figure6",
    "hessian/figure-8": f"{_HESSIAN}.full:Figure8",
    "hessian/figure-9": f"{_HESSIAN}.overlap:Figure9",
    "hessian/figure-10": f"{_HESSIAN}.overlap_layers:Figure10",
    "hessian/figure-12": f"{_HESSIAN}.overlap_layers:Figure12",
    "hessian/figure-15": f"{_HESSIAN}.correspondence:Figure15",
    "hessian/figure-18": f"{_HESSIAN}.spectra:Figure18",
    "hessian/figure-23": f"{_HESSIAN}.overlap_layers:Figure23",
    "hessian/figure-24": f"{_HESSIAN}.overlap_law:Figure24",
    "hessian/figure-25": f"{_HESSIAN}.overlap_law:Figure25",
    "hessian/figure-20": f"{_HESSIAN}.clusters:Figure20",
    "hessian/figure-27": f"{_HESSIAN}.batchnorm_figures:Figure27",
    "hessian/table-2": f"{_HESSIAN}.settings:Table2",
    "hessian/table-3": f"{_HESSIAN}.settings:Table3",
    "hessian/table-6": f"{_HESSIAN}.tables:Table6",
    "hessian/table-7": f"{_HESSIAN}.tables:Table7",
    "hessian/table-8": f"{_HESSIAN}.batchnorm:Table8",
    "hessian/table-10": f"{_HESSIAN}.weights:Table10",
    "hessian/theorems": f"{_HESSIAN}.theorems:Theorems",
    "linearity/figure-2.1": f"{_LINEARITY}.layering:Figure21",
    "linearity/figure-2.2": f"{_LINEARITY}.drift:Figure22",
    "linearity/figure-2.3": f"{_LINEARITY}.bottlenecks:Figure23",
    "linearity/hessian-scaling": f"{_LINEARITY}.scaling:HessianScaling",
    "linearity/taylor": f"{_LINEARITY}.taylor:Taylor",
    "linearity/pl": f"{_LINEARITY}.polyak:PolyakLojasiewicz",
    "linearity/lemmas": f"{_LINEARITY}.lemmas:Lemmas",
    "linearity/attention-and-recurrence": f"{_LINEARITY}.extensions:AttentionAndRecurrence",
    "sparse-coding/figure-2.1": f"{_SPARSE_CODING}.overrealization:Figure21",
    "sparse-coding/figure-2.2": f"{_SPARSE_CODING}.all_parameters:Figure22",
    "sparse-coding/figure-2.3": f"{_SPARSE_CODING}.noise_level:Figure23",
    "sparse-coding/theorems": f"{_SPARSE_CODING}.theorems:Theorems",
    "sparse-coding/baselines": f"{_SPARSE_CODING}.baselines:Baselines",
    "sparse-coding/score": f"{_SPARSE_CODING}.score:Score",
    "sparse-coding/real-patches": f"{_SPARSE_CODING}.patches:Patches",
    "sparse-coding/codes": f"{_SPARSE_CODING}.codes:Codes",
    "sparse-coding/ablations": f"{_SPARSE_CODING}.ablations:Ablations",
    "stability/figure-2.1": f"{_STABILITY}.logistic:Figure21",
    "stability/table-2.1": f"{_STABILITY}.settings:Table21",
    "stability/figure-2.2": f"{_STABILITY}.deep:Figure22",
    "stability/figure-2.3": f"{_STABILITY}.deep:Figure23",
    "stability/figure-2.4": f"{_STABILITY}.connectivity:Figure24",
    "stability/figure-A.1": f"{_STABILITY}.size_range:FigureA1",
    "stability/figure-A.2": f"{_STABILITY}.seed_trials:FigureA2",
    "stability/figure-A.3": f"{_STABILITY}.seed_trials:FigureA3",
    "stability/figure-A.4": f"{_STABILITY}.seed_trials:FigureA4",
    "stability/figure-A.5": f"{_STABILITY}.seed_trials:FigureA5",
    "stability/figure-A.6": f"{_STABILITY}.seed_trials:FigureA6",
    "stability/figure-A.7": f"{_STABILITY}.seed_trials:FigureA7",
    "stability/figure-A.8": f"{_STABILITY}.seed_trials:FigureA8",
    "stability/figure-A.9": f"{_STABILITY}.seed_trials:FigureA9",
    "stability/figure-A.10": f"{_STABILITY}.seed_trials:FigureA10",
    "stability/figure-A.11": f"{_STABILITY}.parameter_distance:FigureA11",
    "stability/figure-A.12": f"{_STABILITY}.parameter_distance:FigureA12",
    "stability/figure-A.13": f"{_STABILITY}.parameter_distance:FigureA13",
    "stability/figure-A.14": f"{_STABILITY}.connectivity:FigureA14",
    "stability/figure-A.15": f"{_STABILITY}.connectivity:FigureA15",
    "stability/stopping": f"{_STABILITY}.stopping:StoppingRules",
}
_CLASSES: dict[str, type[Experiment]] = {}


class UnknownExperimentError(TheodoliteError, ValueError):
    """No experiment has this id."""


def names(pattern: str = "*") -> list[str]:
    """Ids of the registered experiments that fit a glob, such as `"catapult/*"`; a bare word is looked for anywhere.

    >>> names("checks/*")
    ['checks/kronecker-identity', 'checks/stability-edge']
    """
    known = {**_TARGETS, **_third_party(), **dict.fromkeys(_CLASSES)}
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return sorted(name for name in known if fnmatch.fnmatchcase(name, glob))


def get(name: str) -> Experiment:
    """The experiment with this id; `"module:Class"` names one that is not registered."""
    return _class_of(name)()


def register(experiment: type[Experiment]) -> type[Experiment]:
    """Add an experiment for this process; usable as a decorator."""
    check_declaration(experiment)
    _CLASSES[experiment.id] = experiment
    return experiment


def _class_of(name: str) -> type[Experiment]:
    if name in _CLASSES:
        return _CLASSES[name]
    target = {**_third_party(), **_TARGETS}.get(name, name)
    if ":" not in target:
        near = ", ".join(nearest(name, names(), 3))
        raise UnknownExperimentError(f"There is no experiment {name!r}. The nearest are: {near}. `theodolite list` shows all.")
    module, _, attribute = target.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # whatever the user's module does when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UnknownExperimentError(f"{target!r} could not be imported: {reason}. It must read module:Class.") from error
    if not (isinstance(found, type) and issubclass(found, Experiment)):
        raise UnknownExperimentError(f"{target!r} is no Experiment but {found!r}.")
    check_declaration(found)
    return found


def _third_party() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP)}
