"""How often will the network be wrong on new data, with stated confidence?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import theodolite as th
from theodolite.errors import ArgumentError, BatchCoupledError, NotRepeatableError
from theodolite.instruments.base import Instrument, Picture, Results, SurveyContext, Work, inapplicable
from theodolite.measures.bounds import RiskCertificate, pac_bayes_bound
from theodolite.measures.bounds.certificate import FEWEST_SAMPLES
from theodolite.measures.data_audit.views import labels_of
from theodolite.problem import Problem
from theodolite.results import Finding, Severity

SOURCE = "Maurer (2004); Dziugaite and Roy (2017); Wu, Zhu and others (2020): PAC-Bayes bounds with curved posteriors."
#: Gradients of the same samples that a step of the fit takes, and a pass of draws; two posteriors are drawn from.
STEP, DRAWS = 4.0, 2.0
#: Beside the steps: bases and first spreads, in gradients, and what Python takes for each batch, in seconds.
BEGINNING, OVERHEAD = 40.0, 4e-3


def fit_work(samples: int, epochs: int, passes: int, batch_size: int = 1000) -> Work:
    """What a certificate from so many samples takes, in gradients over these samples."""
    batches = -(-samples // batch_size)
    gradients = BEGINNING * min(1.0, 4000 / samples) + STEP * epochs + 2 * DRAWS * passes
    return Work(gradients=gradients, seconds=OVERHEAD * batches * (epochs + 2 * passes) + 0.2)


def percent(rate: float) -> str:
    """An error rate as a reader says it.

    >>> percent(0.12345)
    '12.3 %'
    """
    return f"{100 * rate:.3g} %"


def certificate_findings(result: RiskCertificate, found: Callable[..., Finding]) -> list[Finding]:
    """What a certificate says; `found` makes a finding of a severity, a sentence and a label."""
    numbers = {"quantity": f"bound on the error rate, {100 * result.confidence:.4g} % sure", "value": result.value}
    more = "More samples say more; prior='split' or start= may fit better than this prior."
    if result.vacuous:
        said = [found(Severity.NOTE, result.sentence(), "vacuous", **numbers, advice=more)]
    elif result.no_better_than_guessing:
        said = [found(Severity.NOTE, result.sentence(), "no better than guessing", **numbers, advice=more)]
    else:
        said = [found(Severity.GOOD, result.sentence(), "certified", **numbers)]
    if result.held_out is not None and result.held_out < result.value:
        text = (
            f"Counting errors says more here: without noise in its weights the network is wrong on at most "
            f"{percent(result.held_out)} of new data (exact binomial bound, {100 * result.confidence:.4g} % sure), where the "
            f"bound of the drawn networks is {percent(result.value)}."
        )
        said.append(found(Severity.NOTE, text, "held-out bound tighter", quantity="binomial bound", value=result.held_out))
    if result.prior in _CONDITIONS:
        condition, remedy = _CONDITIONS[result.prior].format(n=result.n), ""
        if result.trained_on:
            condition += f" None of them is among the {result.trained_on} samples that it was trained on."
        elif result.prior == "held-out":
            remedy = "Give the training data (trained_on=, --trained-on): shared samples are refused."
        said.append(found(Severity.NOTE, condition, "prior unknown", **({"advice": remedy} if remedy else {})))
    return said


#: What nothing here can check, by the kind of prior.
_CONDITIONS = {
    "held-out": "This holds only if the {n} samples had no part in training or in choosing the model: no early stopping, no "
    "tuning on them.",
    "start": "This holds only if the weights before training owe nothing to the {n} samples: no pretraining, no earlier run on "
    "them.",
}


class Certificate(Instrument):
    name = "certificate"
    order = 215
    depth = "deep"
    title = "Certificate of the error rate"
    question = "How often will the network be wrong on new data, with stated confidence?"
    how = (
        "A Gaussian around the weights as they stand is fitted to its own PAC-Bayes bound on the validation data, along the "
        "eigenvectors of each layer's Kronecker factors; then errors of drawn networks are counted, one network per sample."
    )
    source = SOURCE
    efforts = ({"epochs": 20, "passes": 10}, {"epochs": 5, "passes": 3})
    columns: ClassVar = {"form": "form of the bound", "bound": "error rate at most", "n": "samples", "kl": "KL, nats"}

    def concerns(self, context: SurveyContext) -> bool:
        return labels_of(context.problem) is not None

    def applies(self, context: SurveyContext) -> str:
        if labels_of(context.problem) is None:
            return "it is for classifiers with one label for each sample"
        if context.valid is None:
            return (
                "it takes samples that were not trained on (valid=, --valid); from the training data: th.pac_bayes_bound with "
                "start=, the weights before training"
            )
        few = context.valid.samples
        return f"it takes {FEWEST_SAMPLES} validation samples or more, there are {few}" if few < FEWEST_SAMPLES else ""

    def cost(self, context: SurveyContext, **effort: Any) -> Work:
        assert context.valid is not None
        work = fit_work(context.valid.samples, effort["epochs"], effort["passes"])
        share = context.valid.samples / context.problem.samples
        return Work(gradients=share * work.gradients, seconds=work.seconds)

    @inapplicable(ArgumentError, BatchCoupledError, NotRepeatableError, ValueError)
    def run(self, context: SurveyContext, **effort: Any) -> RiskCertificate:
        assert context.valid is not None
        return certificate_of(context.valid, context.problem, seed=context.seed, **effort)

    def findings(self, context: SurveyContext, result: RiskCertificate) -> list[Finding]:
        return certificate_findings(result, self.found)

    def figure(self, results: Results) -> Picture:
        return th.plots.plot_certificate(results[self.name])


def certificate_of(valid: Problem, problem: Problem, **settings: Any) -> RiskCertificate:
    """The certificate of the model that `problem` holds, on data that it was not trained on."""
    same = valid if valid.model is problem.model else valid.with_model(problem.model)
    return pac_bayes_bound(same, prior="held-out", trained_on=problem, progress=False, **settings)
