"""Every public callable: its name under `theodolite`, how it is found, and a valid call of it or why there is none."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import theodolite as th
from tests.faults import baselines, room_baselines
from tests.faults.baselines import Arguments

#: Valid calls by name, made anew for each call, so that no call sees what another one changed; "name#other" is a second one.
BASELINES: dict[str, Callable[[], Arguments]] = {**baselines.BASELINES, **room_baselines.ROOMS}
#: Names that stand for something done after the call.
STAND_INS: dict[str, Callable[..., Any]] = {**baselines.STAND_INS, **room_baselines.STAND_INS}

_MEASURES = (
    "hessian dynamics kernel linearity features anchors dictionary stability quadratic_models audit data_audit mode_connectivity "
    "progress trials bounds stepsize growth"
)
_ROOMS = [
    *[
        "problem",
        "operators",
        "linalg",
        "training",
        "monitors",
        "plots",
        "models",
        "data",
        "data.generators",
        "runners",
        "experiments",
        "results",
    ],
    *["report", "instruments", "testing"],
    *(f"measures.{name}" for name in _MEASURES.split()),
]

_NO_NUMBERS = "takes no number, model, loss, data or optimizer: names, paths and flags alone"
_RECORD = "a record that functions of the package make and users read"
_AUTHORS = "called by the package, with what the package has made; authors write it"
_FILES = "its arguments are paths, whose faults are files: test_damaged_files and test_hostile_folders"
#: Public callables without a valid call here, and why.
WITHOUT: dict[str, str] = {
    "LinearOperator": "abstract: what its subclasses are given is tested there",
    "measures.anchors.prompted_states": "needs a tokenizer and a language model; its numbers go through `probe_states`",
    "models.stories260k_from": "needs the weights of that model; `load_weights` is tested",
    "models.resnet20_from": "needs the weights of that model; `load_weights` is tested",
    "models.llama_from_config": "needs a file's whole configuration; its numbers go to `llama_decoder`",
    "measures.growth.bert_large_stages": _NO_NUMBERS,
    "plots.style": _NO_NUMBERS,
    "testing.known_problems": _NO_NUMBERS,
    "testing.dense_gauss_newton": "two functions and tensors, as `dense_hessian`",
    "testing.model_state": "for tests: a model in, its state out",
    "testing.same": "for tests: anything is compared with anything",
    **dict.fromkeys(("results.fields_of", "results.worst_first", "results.number"), _RECORD),
    **dict.fromkeys(("models.names", "data.names", "data.listing", "data.where", "data.weights", "data.fetch"), _NO_NUMBERS),
    **dict.fromkeys(("data.stories260k_config", "data.stories260k_tokenizer", "data.Tokenizer"), _NO_NUMBERS),
    **dict.fromkeys(("experiments.names", "experiments.get", "experiments.coverage", "experiments.sources"), _NO_NUMBERS),
    **dict.fromkeys(("experiments.register", "instruments.register", "instruments.names"), _NO_NUMBERS),
    **dict.fromkeys(("experiments.cited", "experiments.equal", "experiments.measured", "experiments.rows"), _NO_NUMBERS),
    **dict.fromkeys(("load", "results.save", "monitors.read_log", "experiments.load_run"), _FILES),
    **dict.fromkeys(("report.collect_runs", "report.write_gallery", "report.write_page", "report.write_watch"), _FILES),
    **dict.fromkeys(("report.watch_html", "report.page_html", "report.provenance_of", "report.WatchServer"), _FILES),
    **dict.fromkeys(("runners.Computations", "runners.RunStore"), _FILES),
    **dict.fromkeys(("experiments.Study", "experiments.Experiment", "experiments.Figure", "experiments.Params"), _AUTHORS),
    **dict.fromkeys(("experiments.sizes", "instruments.Instrument", "training.FleetOptimizer"), _AUTHORS),
    **dict.fromkeys(
        [f"testing.{name}Contract" for name in ("Operator", "Result", "Instrument", "Experiment", "Declaration")],
        "inherited, never called",
    ),
    **dict.fromkeys(("problem.join_like", "problem.match_layers", "problem.split_like", "problem.Selection.positions"), _AUTHORS),
    **dict.fromkeys(("Problem.evaluate", "Problem.gradients_of", "Problem.output", "LinearOperator.suggest_start"), _AUTHORS),
    **dict.fromkeys([f"operators.{name}Operator.build" for name in ("Hessian", "GaussNewton", "Jacobian")], _AUTHORS),
    **dict.fromkeys(("operators.HessianOperator.build_graph", "testing.OperatorContract.close"), _AUTHORS),
    **dict.fromkeys(("testing.OperatorContract.draw", "instruments.Instrument.found", "measures.features.AGOP.add"), _AUTHORS),
    **dict.fromkeys(("instruments.SurveyContext.affordable", "measures.dictionary.LearningSettings.check"), _AUTHORS),
    "measures.stepsize.MetaTraining.optimizer": "`LearnedOptimizer` with the network of the result",
    **dict.fromkeys(("measures.bounds.Block.nats", "measures.bounds.Block.beside"), _AUTHORS),
    "MultiCatapult.observe": "ignores its arguments but the optimizer, as `train` calls it",
    "data.Tokenizer.decode": "needs a tokenizer's file",
}


def resolve(name: str) -> Callable[..., Any]:
    """The public callable of this name, or what stands for it."""
    if name in STAND_INS:
        return STAND_INS[name]
    if name in room_baselines.OWNERS:
        return getattr(room_baselines.OWNERS[name](), plain_name(name).rpartition(".")[2])  # type: ignore[no-any-return]
    return declared(name)


def plain_name(name: str) -> str:
    """The name without what tells several valid calls of one callable apart."""
    return name.partition("#")[0]


def declared(name: str) -> Callable[..., Any]:
    """The function or class itself, for its signature."""
    thing: Any = th
    for part in plain_name(name).split("."):
        thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(f"{thing.__name__}.{part}")
    return thing  # type: ignore[no-any-return]


def public_callables() -> set[str]:
    """Functions and classes of the package's stub and of its rooms, and methods that take numbers."""
    found: dict[int, str] = {id(getattr(th, name)): name for name in th.__all__ if callable(getattr(th, name))}
    for room in _ROOMS:
        module = importlib.import_module(f"theodolite.{room}")
        for name in getattr(module, "__all__", None) or _own(module):
            thing = getattr(module, name)
            if (
                callable(thing)
                and getattr(thing, "__module__", "").startswith("theodolite")
                and getattr(thing, "__name__", name) == name
            ):
                found.setdefault(id(thing), f"{room}.{name}")
    named = {name: declared(name) for name in found.values()}
    methods = {name for owner, thing in named.items() if inspect.isclass(thing) for name in _methods(owner, thing)}
    return methods | {name for name, thing in named.items() if not _is_record(thing)}


def _own(module: Any) -> list[str]:
    return [
        name for name, thing in vars(module).items() if name[0] != "_" and getattr(thing, "__module__", "") == module.__name__
    ]


def _methods(owner: str, kind: type) -> Iterator[str]:
    """The methods that a class defines itself and that take whole or real numbers."""
    for name, thing in vars(kind).items():
        method = getattr(thing, "__func__", thing)
        if name.startswith("_") or not inspect.isfunction(method) or not method.__module__.startswith("theodolite"):
            continue
        if any(re.search(r"\b(int|float)\b", str(p.annotation)) for p in inspect.signature(method).parameters.values()):
            yield f"{owner}.{name}"


def numbers_without_a_call() -> set[str]:
    """Arguments annotated as whole or real numbers that no valid call has."""
    called: dict[str, set[str]] = {}
    for name, make in BASELINES.items():
        called.setdefault(plain_name(name), set()).update(make())
    return {
        f"{name}.{p.name}"
        for name, given in called.items()
        for p in inspect.signature(declared(name)).parameters.values()
        if re.search(r"\b(int|float)\b", str(p.annotation)) and p.name not in given
    }


def _is_record(thing: Any) -> bool:
    """Whether this is a class of values that are read, and not made, by users; errors and enumerations too."""
    return inspect.isclass(thing) and (
        hasattr(thing, "__dataclass_fields__") or issubclass(thing, tuple | BaseException) or hasattr(thing, "__members__")
    )
