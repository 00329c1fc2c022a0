"""How often will this classifier be wrong on new data? A bound that holds with stated confidence, or says that it is vacuous.

What is certified is a network whose weights are drawn from a Gaussian posterior. The prior is one of three:

- `"start"`: an isotropic Gaussian around the untrained weights. The data may be the training data: they had no part in those.
- `"held-out"`: around the weights of the model as it stands. The data must not have been trained on, in any way.
- `"split"`: around weights that are trained here on a part of the data; the certificate comes from the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from theodolite.arguments import a_function, a_path, checked, count, either, fraction, nonnegative, optional
from theodolite.arguments import seed as a_seed
from theodolite.errors import ArgumentError
from theodolite.measures.bounds import checkpoints
from theodolite.measures.bounds.blocks import make_blocks
from theodolite.measures.bounds.calculator import all_bounds, held_out_bound, total
from theodolite.measures.bounds.fit import Fit, Settings
from theodolite.measures.bounds.gibbs import DrawnError, drawn_error
from theodolite.measures.bounds.noisy_network import NoisyNetwork, Samples
from theodolite.measures.bounds.posterior import GaussianPosterior
from theodolite.measures.bounds.priors import Prior, error_at, find_prior, hash_of, refuse_overlap
from theodolite.problem import Problem
from theodolite.problem.accuracy import answers, right_answers
from theodolite.problem.arguments import a_problem
from theodolite.problem.batches import fingerprint
from theodolite.progress import counting
from theodolite.results import Cost, Outcome, Result, Row

PriorKind = Literal["start", "held-out", "split"]
#: Fewer samples certify nothing.
FEWEST_SAMPLES = 50
#: Samples of a batch where ten steps an epoch would take fewer.
FEWEST_IN_BATCH = 32
#: Where one network is drawn for a batch, which is one draw: draws that are aimed at, and the fewest and most samples of one.
DRAWS, SMALLEST_BATCH, LARGEST_BATCH = 2000, 10, 100
#: Nats that a prior variance costs, about: j = 900.
PRICE = 14.0
#: Variances of the prior that are tried for the prior itself, in units of those of the posterior.
NARROWER = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RiskCertificate(Result):
    """An upper bound on the error rate on new data, true with probability `confidence` over the data and the draws.

    `value` is the bound, `empirical` the error rate of `draws` independent draws on the n samples and `empirical_upper` what it
    is at most; `kl` the divergence in nats, `penalty` the nats that the choice of each prior variance costs, `scales` these
    variances. `bounds` has every form of the bound on the same numbers, `prior_value` that of the prior itself: `value` is never
    above it. Where the prior wins, `fitted` is the certificate of the posterior that was fitted, else None.
    `held_out` is the binomial bound of the model without noise on samples that had no part in it, where there are such: it
    speaks of another network, by itself as sure as `confidence`, and is often tighter. `mean_error` is the error rate on the
    samples of the posterior's mean, which nothing here covers. `start_hash` is that of the prior's centre, `trained_on` how many
    training samples were compared with those that are certified.
    """

    value: float
    confidence: float
    empirical: float
    empirical_upper: float
    kl: float
    n: int
    draws: int
    scales: dict[str, float]
    penalty: dict[str, float]
    bounds: dict[str, float]
    prior_value: float
    guessing: float = 0.5
    prior: str = "given"
    held_out: float | None = None
    mean_error: float | None = None
    start_hash: str = ""
    trace: tuple[Row, ...] = ()
    posterior: GaussianPosterior | None = None
    fitted: RiskCertificate | None = None
    trained_on: int = 0

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing: 99.9 % and more."""
        return self.value >= 0.999

    @property
    def no_better_than_guessing(self) -> bool:
        """Whether always naming the commonest class is known to do as well."""
        return self.value >= self.guessing

    def rows(self) -> list[Row]:
        shared = {"n": self.n, "draws": self.draws, "kl": self.kl, "penalty": total(self.penalty), "empirical": self.empirical}
        return [{"form": name, "bound": value, **shared} for name, value in self.bounds.items()]

    def sentence(self) -> str:
        percent, sure = f"{100 * self.value:.3g} %", f"{100 * self.confidence:.4g} %"
        if self.vacuous:
            return f"Vacuous: nothing can be said about new data from {self.n} samples with this prior."
        drawn = "the posterior"
        if self.fitted is not None:
            drawn = f"the prior (the fitted posterior, at {100 * self.fitted.value:.3g} %, says less)"
        said = f"With {sure} confidence the network, its weights drawn from {drawn}, is wrong on at most {percent} of new data"
        if self.no_better_than_guessing:
            said += f", which is no better than always naming the commonest class ({100 * self.guessing:.3g} %)"
        if self.held_out is not None and self.held_out < self.value:
            counted = f"{100 * self.held_out:.3g} %, by counting errors on held-out samples"
            said += f"; the model without noise is wrong on at most {counted}"
        return f"{said}."


def _some_errors(name: str, value: Any) -> float:
    """A number of errors, or a sum of values in [0, 1]."""
    return nonnegative(name, value)


@checked(
    errors=_some_errors, draws=count, kl=nonnegative, n=count, penalty=nonnegative, delta=fraction,
    delta_draws=fraction, guessing=fraction,
)  # fmt: skip
def risk_certificate(
    errors: float,
    draws: int,
    kl: float,
    n: int,
    *,
    penalty: float = 0.0,
    delta: float = 0.025,
    delta_draws: float = 0.01,
    guessing: float = 0.5,
) -> RiskCertificate:
    """The certificate of a posterior from its numbers: no network is needed.

    Args:
        errors: how many of the draws were wrong (a sum of values in [0, 1] counts as well).
        draws: independent draws, each of a network and a sample, all samples equally often.
        kl: `KL(Q‖P)` in nats, P chosen without the samples.
        n: samples.
        penalty: nats that a choice among priors costs.
        delta, delta_draws: how often the bound, and the bound on the draws, may be wrong.
        guessing: the error rate of always naming the commonest class.

    Returns:
        The `RiskCertificate`; `value` is the bound.

    >>> found = risk_certificate(1200, 60_000, 4000.0, 60_000)
    >>> round(found.value, 4), round(found.confidence, 3), found.vacuous
    (0.1205, 0.965, False)
    """
    if errors > draws:
        raise ArgumentError(f"errors must be at most draws = {draws}. Got {errors:g}.")
    _check_shares(delta, delta_draws)
    drawn = DrawnError(errors / draws, draws)
    return _certificate(drawn, kl, n, {"given": penalty}, {}, delta, delta_draws, guessing=guessing)


def _check_shares(delta: float, delta_draws: float) -> None:
    if delta + delta_draws >= 1:
        raise ArgumentError(
            f"delta and delta_draws must come to less than 1: nothing is sure otherwise. Got {delta:g} and {delta_draws:g}."
        )


def _certificate(
    drawn: DrawnError,
    kl: float,
    n: int,
    penalty: Mapping[str, float],
    scales: Mapping[str, float],
    delta: float,
    delta_draws: float,
    **more: Any,
) -> RiskCertificate:
    upper = drawn.upper(delta_draws)
    bounds = all_bounds(upper, kl, n, delta, total(penalty))
    given = {"prior_value": 1.0, "outcome": Outcome.FINISHED, **more}
    return RiskCertificate(
        value=bounds["maurer"],
        confidence=1 - delta - delta_draws,
        empirical=drawn.value,
        empirical_upper=upper,
        kl=kl,
        n=n,
        draws=drawn.draws,
        scales=dict(scales),
        penalty=dict(penalty),
        bounds=bounds,
        **given,
    )


@checked(
    problem=a_problem,
    epochs=count,
    batch_size=count,
    passes=count,
    rank=count,
    split=fraction,
    recipe=optional(a_function),
    delta=fraction,
    delta_draws=fraction,
    test=optional(a_problem),
    trained_on=optional(a_problem),
    checkpoint=a_path,
    seed=a_seed,
)
def pac_bayes_bound(
    problem: Problem,
    *,
    prior: PriorKind = "start",
    start: nn.Module | Mapping[str, Tensor] | None = None,
    posterior: Literal["kronecker", "standard", "isotropic", "low-rank"] = "kronecker",
    refresh: Literal["iter", "once", "weights"] = "iter",
    layer_scales: bool | None = None,
    objective: Literal["kl", "pinsker", "quadratic", "catoni"] = "kl",
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam",
    init_s: Literal["curvature", "flat", "weights"] = "curvature",
    epochs: int = 20,
    batch_size: int = 1000,
    passes: int = 10,
    rank: int | None = None,
    split: float = 0.5,
    recipe: Callable[[nn.Module, Any], None] | None = None,
    delta: float = 0.025,
    delta_draws: float = 0.01,
    test: Problem | None = None,
    trained_on: Problem | None = None,
    checkpoint: str | PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    progress: bool | None = None,
) -> RiskCertificate:
    """How often a classifier will be wrong on new data, at most: fit a posterior to its certificate, then count its errors.

    Args:
        prior: `"start"` (untrained weights, `start=`), `"held-out"` (the model's own weights, which never saw these data) or
            `"split"` (weights trained here on the share `split` of the data, by `recipe`).
        start: the weights before training: a module of the same architecture or its state dict. With `"split"`: where its
            training begins, by default new weights of each layer's own initialiser.
        posterior: along which axes weights vary: the eigenvectors of each layer's Kronecker factors, the weights themselves, all
            weights of a layer alike, or alike but for the fifty sharpest axes.
        refresh: when axes are found anew: every few epochs, once, or every few epochs from products of the weights.
        layer_scales: a prior variance for each layer, else one for all, which costs less where there are many layers and few
            samples. None: for each with `"start"`, and where a thousandth of the samples pays for it.
        objective: what the fit minimises; the certificate is always Maurer's form.
        init_s: where the variances begin: by curvature, all at the prior's, or at the size of the weights.
        batch_size: of the fit; smaller where the data would give fewer than ten batches.
        passes: how often the data are drawn on for the certificate.
        rank: directions of each layer's input that may leave the prior, None for all. Fewer are faster.
        recipe: `recipe(model, data)` trains in place, for `"split"`; on a list of batches `(inputs, targets)`; by default
            Adam for 20 epochs, at least 500 steps.
        delta, delta_draws: how often the bound may be wrong because of the data, and because of the draws.
        test: the same problem on samples that had no part in anything; they bound the model without noise.
        trained_on: with `"held-out"`, the same problem on the samples that the model was trained on: shared ones are refused.
        checkpoint, resume: a folder that keeps what a split trained and the fit after each epoch, and whether to go on from it.

    Returns:
        The `RiskCertificate`; `value` is the bound.

    >>> x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    >>> model = nn.Linear(2, 2)
    >>> start = {name: p.detach().clone() for name, p in model.named_parameters()}
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0], [-3.0, 0.0]])), model.bias.data.zero_()
    >>> problem = Problem(model, nn.CrossEntropyLoss(), (x, (x[:, 0] < 0).long()))
    >>> found = pac_bayes_bound(problem, start=start, epochs=5, passes=2, progress=False)
    >>> found.vacuous, found.value < 0.5, found.value <= found.prior_value
    (False, True, True)
    """
    began = time.perf_counter()
    _check_choices(prior, posterior, refresh, objective, optimizer, init_s)
    _check_shares(delta, delta_draws)
    _check_problem(problem, split if prior == "split" else 0.0)
    _refuse_shared(problem, prior, test, trained_on)
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None and not resume and checkpoints.holds_fit(folder):
        raise ArgumentError(f"checkpoint: {folder} holds a fit. Pass resume=True to go on with it, or another folder.")
    how: dict[str, Any] = {"split": split, "recipe": recipe, "seed": seed, "progress": progress}
    centre = find_prior(problem, prior, start, folder=folder, **how)
    problem = centre.problem
    network = NoisyNetwork(problem, Samples(problem), make_blocks(problem, centre.weights, rank=rank))
    if layer_scales is None:
        groups = len({block.group for block in network.blocks.values()})
        layer_scales = prior == "start" or PRICE * groups <= problem.samples / 1000
    settings = Settings(
        basis=posterior,
        refresh=refresh,
        layer_scales=layer_scales,
        objective=objective,
        optimizer=optimizer,
        init_s=init_s,
        epochs=epochs,
        batch_size=min(batch_size, max(FEWEST_IN_BATCH, problem.samples // 10)),
        delta=delta,
    )
    if rank is not None and posterior not in ("kronecker", "low-rank"):
        raise ArgumentError(
            f"rank counts directions of Kronecker factors: it belongs to 'kronecker' and 'low-rank', not {posterior!r}."
        )
    fit = Fit(network, list(network.blocks.values()), settings, seed)
    _run(fit, centre, folder, passes, progress)
    found = _judge(fit, centre, passes, delta, delta_draws, seed, progress)
    found = _with_facts(found, fit, centre, test, time.perf_counter() - began, seed)
    return replace(found, trained_on=0 if trained_on is None else trained_on.samples)


def _check_choices(prior: str, posterior: str, refresh: str, objective: str, optimizer: str, init_s: str) -> None:
    for name, value, choices in (
        ("prior", prior, ("start", "held-out", "split")),
        ("posterior", posterior, ("kronecker", "standard", "isotropic", "low-rank")),
        ("refresh", refresh, ("iter", "once", "weights")),
        ("objective", objective, ("kl", "pinsker", "quadratic", "catoni")),
        ("optimizer", optimizer, ("adam", "rmsprop", "sgd")),
        ("init_s", init_s, ("curvature", "flat", "weights")),
    ):
        either(name, value, choices)


def _check_problem(problem: Problem, trained_share: float) -> None:
    """Raise unless every sample has one label, samples are enough and independent, and the network is a function."""
    problem.check_repeatable()
    problem.refuse_batch_coupling("A certificate")
    problem.refuse_cutting("A certificate")
    left = problem.samples - round(trained_share * problem.samples)
    if left < FEWEST_SAMPLES:
        after = f", of which the split leaves {left}" if trained_share else ""
        raise ValueError(f"data: a certificate needs {FEWEST_SAMPLES} samples or more. Got {problem.samples}{after}.")
    batch = problem.placed(problem.few(4))
    with problem.session(second=False), torch.no_grad():
        output = problem.output(problem.tensors(problem.leaves(grad=False)), batch, 0)
    right = right_answers(output, batch.target, problem.loss_function)
    labels = answers(batch.target, problem.loss_function)
    if right is None or labels is None or len(right) != batch.size:
        raise ValueError(
            "A certificate is for classifiers with one label for each sample: integer classes, one-hot rows or the sign of a "
            f"single output. Got targets of shape {tuple(getattr(batch.target, 'shape', ()))} "
            f"and outputs of shape {tuple(output.shape)}."
        )


def _refuse_shared(problem: Problem, prior: str, test: Problem | None, trained_on: Problem | None) -> None:
    """Raise where samples that must have had no part in something had one."""
    if test is not None:
        refuse_overlap(problem, test, "test holds {shared} of the {of} samples of the data: a bound from them would not be one.")
    if trained_on is None:
        return
    if prior != "held-out":
        raise ArgumentError(f"trained_on belongs to prior='held-out': for {prior!r} the data may be the training data.")
    refuse_overlap(
        trained_on, problem, "{shared} of the {of} samples of the data were trained on, so that they certify nothing here."
    )
    if test is not None:
        refuse_overlap(
            trained_on, test, "{shared} of the {of} samples of test were trained on: a bound from them would not be one."
        )


# Fitting, with what is kept on disk


def _run(fit: Fit, centre: Prior, folder: Path | None, passes: int, progress: bool | None) -> None:
    """The epochs of the fit that are left."""
    trained = hash_of(dict(zip(fit.problem.names, fit.problem.leaves(grad=False), strict=True)))
    data = [fingerprint(batch) for batch in fit.problem.data]
    identity = {"settings": repr(fit.settings), "start": centre.hash, "trained": trained, "data": data, "seed": fit.seed}
    state = None if folder is None else checkpoints.kept(folder, checkpoints.FIT, identity)
    if state is not None:
        fit.restore(state["fit"])
    with counting("fitting the posterior", progress=progress, total=fit.settings.epochs) as counted:
        counted(fit.epoch)
        while fit.epoch < fit.settings.epochs:
            fit.take_epoch()
            counted(1)
            if folder is not None:
                state = {"epochs": fit.settings.epochs, "passes": passes, "fit": fit.state()}
                checkpoints.keep(folder, checkpoints.FIT, identity, state)


# Counting errors


def _judge(
    fit: Fit, centre: Prior, passes: int, delta: float, delta_draws: float, seed: int, progress: bool | None
) -> RiskCertificate:
    """The better of the certificates of the posterior and of the prior itself, which share δ and split δ'."""
    network, half = fit.network, delta_draws / 2
    size = fit.settings.batch_size
    if not network.by_sample:
        size = min(LARGEST_BATCH, max(SMALLEST_BATCH, fit.n * passes // DRAWS))
    fitted, prices = fit.posterior().rounded()
    own, own_prices = _best_prior(fit).rounded()
    found = []
    for i, (candidate, penalty) in enumerate(((fitted, prices), (own, own_prices))):
        drawn = drawn_error(network, candidate, passes, batch_size=size, seed=seed + 1 + i, progress=progress)
        kl = candidate.kl() if i == 0 else 0.0
        one = _certificate(drawn, kl, fit.n, penalty, candidate.variances, delta, half, posterior=candidate)
        found.append(replace(one, confidence=1 - delta - delta_draws))
    first, second = (replace(one, prior_value=found[1].value, prior=centre.kind) for one in found)
    return first if first.value <= second.value else replace(second, fitted=first)


def _best_prior(fit: Fit) -> GaussianPosterior:
    """The prior whose own certificate looks best: narrower ones make fewer errors where its centre is a good network."""
    fitted = fit.posterior()
    options = []
    for factor in NARROWER:
        variances = {group: factor * v for group, v in fitted.variances.items()}
        candidate = replace(fitted, variances=variances).prior()
        penalty = total(candidate.rounded()[1])
        options.append((fit.bound_of(list(candidate.blocks), variances, penalty), candidate))
    return min(options, key=lambda pair: pair[0])[1]


def _with_facts(
    found: RiskCertificate, fit: Fit, centre: Prior, test: Problem | None, seconds: float, seed: int
) -> RiskCertificate:
    network = fit.network
    assert found.posterior is not None
    mean, guessing = error_at(fit.problem, found.posterior.means())
    errors, n = 0, 0  # of the model without noise, on all samples that had no part in it
    if centre.kind != "start":
        errors, n = round(error_at(fit.problem, centre.weights)[0] * fit.n), fit.n
    if test is not None:
        trained = dict(zip(fit.problem.names, fit.problem.leaves(grad=False), strict=True))
        wrong = round(error_at(test.with_model(fit.problem.model), trained)[0] * test.samples)
        _refuse_contradiction(found, wrong, test.samples)
        errors, n = errors + wrong, n + test.samples
    if centre.kind == "split":
        found = _complete(found, fit.problem.model)
    route = "weights drawn for each sample" if network.by_sample else f"weights drawn for each batch: {network.why}"
    return replace(
        found,
        held_out=held_out_bound(errors, n, 1 - found.confidence) if n else None,
        mean_error=mean,
        guessing=guessing,
        start_hash=centre.hash,
        trace=tuple(fit.trace),
        seed=seed,
        cost=Cost(seconds, route, 0, fit.problem.notes),
    )


def _complete(found: RiskCertificate, model: nn.Module) -> RiskCertificate:
    """With all that the certified network has beside its drawn parameters: it is no model of the user's."""
    assert found.posterior is not None
    drawn = {block.name for block in found.posterior.blocks}
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fixed = {name: tensor.detach().clone() for name, tensor in everything.items() if name not in drawn}
    fitted = found.fitted and _complete(found.fitted, model)
    return replace(found, posterior=replace(found.posterior, fixed=fixed), fitted=fitted)


def _refuse_contradiction(found: RiskCertificate, errors: int, n: int) -> None:
    """Raise where test samples show that the certificate is false: then its prior has seen the data."""
    surely = errors / n - 6 * math.sqrt(max(errors, 1)) / n
    if surely > found.value:
        raise ArgumentError(
            f"The certificate ({found.value:.3g}) is contradicted by the test data (error rate {errors / n:.3g}): the centre of "
            "the prior was trained on the data given here. Give weights, or data, that had no part in each other."
        )
