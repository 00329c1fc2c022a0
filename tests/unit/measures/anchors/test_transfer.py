"""The transfer certificate on worlds with known anchors, its preconditions, and the forms of its inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.data.generators import exact_anchor_world, gaussian_dictionary_world
from theodolite.errors import NonFiniteError
from theodolite.measures.anchors.transfer.certificate import TransferCertificate, transfer_certificate
from theodolite.measures.anchors.transfer.log_linear import LogLinear, kl_divergence, shift_log_linear
from theodolite.measures.anchors.transfer.readout import anchored_logits, thresholded_score

DOUBLE = torch.float64
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=DOUBLE)

# the certificate on the exact-anchor world -----------------------------------------------------------------------------


def exact_task(**changes):
    """World, teacher, thresholds at the lower quartile."""
    world = exact_anchor_world(**{"seed": 0, **changes})
    teacher = LogLinear(world.states, world.atoms)
    b = anchored_logits(teacher, world.anchor, world.labels).quantile(0.25, dim=0)
    return world, teacher, b


def perturbed(world, size, seed=1):
    """The student: label atoms moved by Gaussian noise of that length (on average)."""
    noise = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) / 4
    atoms = world.atoms.clone()
    atoms[:4] += size * noise
    return LogLinear(world.states, atoms)


SIZES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.7, 1.0, 1.5)


@pytest.mark.parametrize("gamma", [None, 0.5])
@pytest.mark.parametrize("shape", [{}, {"scale": 0.5}, {"level": 0.0, "seed": 7}])
def test_check_14_no_bound_is_below_the_measured_error(shape, gamma):
    """T7 end to end; undecided contexts are covered as well."""
    world, teacher, b = exact_task(**shape)
    errors = []
    for size in SIZES:
        one = transfer_certificate(teacher, perturbed(world, size), labels=world.labels, a=SIGNS, b=b, gamma=gamma)
        assert min(one.theorem_bound, one.general_bound, one.tight_bound) >= one.eps_cls + one.undecided
        assert one.theorem_bound >= one.general_bound >= one.tight_bound == one.bound
        assert one.eps_b < 1e-12
        assert one.violated == ()
        assert math.isnan(one.kl_of_errors) or one.kl_of_errors >= one.kl_floor
        errors.append(one.eps_cls)
    assert errors[-1] > 0.05  # the student does fail in the end
    assert errors[0] < errors[-1]


def test_check_04_divergence_grows_with_the_square_of_the_perturbation():
    world, teacher, b = exact_task()
    scaled = [
        transfer_certificate(teacher, perturbed(world, s), labels=world.labels, a=SIGNS, b=b).eps_kl / s**2
        for s in (0.001, 0.01, 0.03, 0.1)
    ]
    assert max(scaled) / min(scaled) < 1.02


def test_a_large_margin_and_a_close_student_give_a_bound_that_says_something():
    world, teacher, b = exact_task(scale=0.5)
    one = transfer_certificate(teacher, perturbed(world, 0.001), labels=world.labels, a=SIGNS, b=b, gamma=0.5)
    assert one.verdict == "non-vacuous"
    assert one.tight_bound < one.general_bound < one.theorem_bound < 1
    assert one.sentence().startswith("Non-vacuous: at most")
    assert 0.3 < one.discarded < 0.7
    assert "Left out" in one.sentence()
    far = transfer_certificate(teacher, perturbed(world, 1.0), labels=world.labels, a=SIGNS, b=b, gamma=0.5)
    assert far.verdict == "vacuous"
    assert far.sentence().startswith("Vacuous: the certificate guarantees nothing")


def test_quantities_are_those_of_their_definitions():
    world, teacher, b = exact_task()
    student = perturbed(world, 0.5)
    one = transfer_certificate(teacher, student, labels=world.labels, a=2 * SIGNS, b=b, gamma=0.4)
    f = [thresholded_score(anchored_logits(m, world.anchor, world.labels), 2 * SIGNS, b) for m in (teacher, student)]
    kept = f[0].abs() >= 0.4
    assert one.eps_cls == pytest.approx(float((f[0] * f[1] < 0)[kept].double().mean()))
    assert one.undecided == pytest.approx(float((f[1] == 0)[kept].double().mean()))
    assert one.discarded == pytest.approx(1 - float(kept.double().mean()))
    assert one.mu == pytest.approx(float(kept.double().mean()))
    assert one.p_b == pytest.approx(float(teacher.logits().softmax(1)[:, 4:].sum(1).min()))
    assert one.eps_kl == pytest.approx(float(kl_divergence(teacher.logits(), student.logits()).mean()))
    assert one.Gamma == pytest.approx(0.4 / (4 * 2))
    assert one.Lambda == pytest.approx(0.2 / 8, abs=1e-9)
    assert one.kl_of_errors == pytest.approx(
        float(kl_divergence(teacher.logits(), student.logits())[kept & (f[0] * f[1] < 0)].min())
    )


def test_the_smallest_score_is_the_margin_unless_it_is_zero():
    world, teacher, b = exact_task()
    one = transfer_certificate(teacher, teacher, labels=world.labels, a=SIGNS, b=b)
    f = thresholded_score(anchored_logits(teacher, world.anchor, world.labels), SIGNS, b)
    assert 0 < one.discarded == pytest.approx(float((f == 0).double().mean()))
    assert one.gamma == pytest.approx(float(f[f != 0].abs().min()))
    assert one.eps_kl == one.eps_cls == one.bound == 0
    assert math.isnan(one.kl_of_errors)


def test_a_shift_of_the_student_changes_nothing():
    world, teacher, b = exact_task()
    student = perturbed(world, 0.3)
    c = 50 * torch.randn(2000, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    plain, moved = (
        transfer_certificate(teacher, m, labels=world.labels, a=SIGNS, b=b, gamma=0.3)
        for m in (student, shift_log_linear(student, c))
    )
    assert moved.eps_cls == plain.eps_cls
    assert moved.eps_kl == pytest.approx(plain.eps_kl, rel=1e-9)
    assert moved.eps_b < 1e-9


# preconditions -------------------------------------------------------------------------------------------------------


def test_check_14_violated_preconditions_are_told_and_the_theorem_bound_is_withdrawn():
    world, teacher, b = exact_task(scale=0.5)
    student = perturbed(world, 1e-4)

    def certificate(b=b, a=SIGNS, **more):
        return transfer_certificate(teacher, student, labels=world.labels, a=a, b=b, **more)

    fine = certificate(gamma=0.5)
    assert fine.violated == ()
    assert fine.theorem_bound < 1
    for error, text, others_hold in ((0.02, "not above 8 ε_b", True), (0.05, "not above 4 ε_b", False)):
        off = world.anchor.clone()
        off[-1] += error  # Γ is 0.125 for γ = 0.5
        one = certificate(gamma=0.5, anchors=(off, world.anchor), b=b - error)
        assert one.eps_b == pytest.approx(error)
        assert len(one.violated) == 1
        assert text in one.violated[0]
        assert one.theorem_bound == 1
        assert (one.tight_bound < 1) == others_hold
        assert "Precondition violated: the margin" in one.sentence()
    low = certificate(b=b.clamp(max=-3.0), gamma=0.5)
    assert any("below ε_b − log(4k)" in text for text in low.violated)
    assert low.theorem_bound == 1
    assert low.tight_bound < 1


def test_check_14_a_margin_of_six_is_too_large_for_the_theorem():
    states = torch.tensor([[13.0, 0.0, 1.0], [0.0, 13.0, 1.0]], dtype=DOUBLE)
    weight = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=DOUBLE)
    model = LogLinear(states, weight)
    one = transfer_certificate(model, model, labels=[0, 1], a=[1.0, -1.0], b=[0.0, 0.0], anchors=(torch.zeros(3), torch.zeros(3)))
    assert one.Gamma == pytest.approx(6.5)
    assert one.violated == ("the margin Γ = 6.5 is not below 6",)
    assert one.theorem_bound == 1
    assert one.tight_bound == 0


def test_without_an_anchor_the_certificate_is_vacuous_and_says_so():
    world = gaussian_dictionary_world(300, 16, 800, (0.5, 4.0), seed=0)
    teacher = LogLinear(world.states, world.atoms)
    student = LogLinear(world.states, world.atoms + 0.01 * torch.randn(300, 16, generator=torch.Generator().manual_seed(0)))
    one = transfer_certificate(teacher, student, labels=range(4), a=SIGNS, b=[-8.0] * 4, top=10)
    assert one.verdict == "vacuous"
    assert one.bound == one.heuristic_bound == 1
    assert one.eps_b_99 < one.eps_b
    assert one.p_b_01 > one.p_b
    assert "no bound holds" in one.sentence()


# forms of input ------------------------------------------------------------------------------------------------------


def gaussian_task():
    """Atoms that span the states, so that logits know as much as states do."""
    world = gaussian_dictionary_world(60, 8, 300, 1.0, seed=0)
    teacher = LogLinear(world.states, world.atoms)
    noise = torch.randn(60, 8, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    student = LogLinear(world.states, world.atoms + 0.2 * noise)
    return teacher, student, {"labels": range(4), "a": SIGNS, "b": [-4.5] * 4, "gamma": 0.2}


def test_logits_give_the_certificate_of_states():
    teacher, student, task = gaussian_task()
    by_states = transfer_certificate(teacher, student, **task)
    by_logits = transfer_certificate(teacher.logits(), student.logits(), **task)
    for name in ("eps_cls", "undecided", "discarded", "mu"):
        assert getattr(by_logits, name) == getattr(by_states, name)
    for name in ("eps_kl", "eps_b", "eps_b_99", "p_b", "Gamma", "kl_floor"):
        assert getattr(by_logits, name) == pytest.approx(getattr(by_states, name), rel=1e-7)
    assert by_states.eps_cls > 0
    assert len(by_logits.anchor_teacher) == 8  # the dimension, found


def test_separate_downstream_contexts_with_a_given_ratio():
    world, teacher, b = exact_task(scale=0.5)
    student = perturbed(world, 0.3)
    first, second = slice(0, 1500), slice(1500, None)
    task = {"labels": world.labels, "a": SIGNS, "b": b, "gamma": 0.3, "mu": 0.5}
    one = transfer_certificate(teacher.at(first), student.at(first), downstream=(teacher.at(second), student.at(second)), **task)
    f = thresholded_score(anchored_logits(teacher, world.anchor, world.labels), SIGNS, b)[second]
    kept = float((f.abs() >= 0.3).double().mean())
    assert one.mu == pytest.approx(0.5 * kept)
    assert one.mu_source == "supplied"
    assert one.discarded == pytest.approx(1 - kept)
    assert one.eps_kl == pytest.approx(float(kl_divergence(teacher.logits(first), student.logits(first)).mean()))


def test_separate_downstream_contexts_as_logits():
    teacher, student, task = gaussian_task()
    first, second, task = slice(0, 200), slice(200, None), {**task, "mu": 0.5}
    one = transfer_certificate(teacher.at(first), student.at(first), downstream=(teacher.at(second), student.at(second)), **task)
    z = [m.logits() for m in (teacher, student)]
    again = transfer_certificate(z[0][first], z[1][first], downstream=(z[0][second], z[1][second]), **task)
    assert again.eps_cls == one.eps_cls
    assert again.kl_floor == pytest.approx(one.kl_floor, rel=1e-7)
    assert again.eps_b == pytest.approx(one.eps_b, rel=1e-7)


def test_the_ratio_is_computed_for_probabilities_over_the_same_contexts():
    world, teacher, b = exact_task(contexts=60, scale=0.5)
    student = perturbed(world, 0.7)
    g = torch.Generator().manual_seed(0)
    pre, down = torch.rand(2, 60, generator=g, dtype=DOUBLE) + 0.1
    down[:20] = 0
    one = transfer_certificate(teacher, student, labels=world.labels, a=SIGNS, b=b, pretraining=pre, downstream=down)
    f = thresholded_score(anchored_logits(teacher, world.anchor, world.labels), SIGNS, b)
    weights = torch.where(f != 0, down, 0.0)
    ratio = (pre / pre.sum()) / (weights / weights.sum())
    assert one.mu == pytest.approx(float(ratio[weights > 0].min()))
    assert one.mu < 1
    assert one.mu_source == "computed"
    assert one.bound >= one.eps_cls + one.undecided
    assert one.eps_cls > 0
    pre[30] = 0
    never = transfer_certificate(teacher, student, labels=world.labels, a=SIGNS, b=b, pretraining=pre, downstream=down)
    assert never.mu == 0
    assert never.bound == 1
    assert "never occurs in pre-training" in never.violated[0]


def test_extremes_over_downstream_contexts_only_are_never_worse():
    world, teacher, b = exact_task(scale=0.5)
    student = perturbed(world, 0.001)
    pair = {"downstream": (teacher.at(slice(0, 50)), student.at(slice(0, 50))), "mu": 0.9}
    task = {"labels": world.labels, "a": SIGNS, "b": b, "gamma": 0.5, **pair}
    everywhere, there = (transfer_certificate(teacher, student, over=over, **task) for over in ("all", "downstream"))
    assert there.p_b > everywhere.p_b
    assert there.tight_bound < everywhere.tight_bound
    assert there.eps_kl == everywhere.eps_kl


def test_the_teacher_chooses_the_bulk_for_both():
    """With `top`, the student's mass is summed over the teacher's words, whatever the student finds probable."""
    world = gaussian_dictionary_world(50, 8, 40, 1.0, seed=0)
    teacher, student = LogLinear(world.states, world.atoms), LogLinear(world.states, world.atoms.flip(0))
    chosen = teacher.logits().topk(45).indices.sort(1).values
    one = transfer_certificate(teacher, student, labels=[0, 1], a=[1.0, -1.0], b=[-9.0, -9.0], top=45, over="all")
    outside = torch.zeros(40, 50, dtype=torch.bool).scatter(1, chosen, True)
    outside[:, :2] = True
    bulk = student.logits().masked_fill(outside, -math.inf).logsumexp(1)
    fit = torch.linalg.lstsq(student.states, bulk[:, None]).solution[:, 0]
    assert one.eps_b_student == pytest.approx(float((student.states @ fit - bulk).abs().max()), rel=1e-8)
    smaller = transfer_certificate(teacher, student, labels=[0, 1], a=[1.0, -1.0], b=[-9.0, -9.0], bulk=range(10, 20))
    assert smaller.p_b == pytest.approx(float(teacher.logits().softmax(1)[:, 10:20].sum(1).min()))


def test_certificates_are_saved_and_shown(tmp_path):
    world, teacher, b = exact_task(contexts=50)
    one = transfer_certificate(teacher, perturbed(world, 0.1), labels=world.labels, a=SIGNS, b=b)
    one.save(tmp_path / "certificate")
    again = TransferCertificate.load(tmp_path / "certificate")
    assert again.sentence() == one.sentence()
    assert again.labels == (0, 1, 2, 3)
    assert torch.equal(again.anchor_teacher, one.anchor_teacher)
    assert one.rows()[0]["verdict"] == one.verdict


# errors --------------------------------------------------------------------------------------------------------------

STATES, WEIGHT = torch.eye(6, 3, dtype=DOUBLE) + 1, torch.arange(15, dtype=DOUBLE).reshape(5, 3) / 10
MODEL = LogLinear(STATES, WEIGHT)
TASK = {"labels": [0, 1], "a": [1.0, -1.0], "b": [-9.0, -9.5]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": [0, 5]}, ValueError, "labels must be ids from 0 to 4"),
        ({"labels": [-1, 0]}, ValueError, "labels must be ids from 0 to 4"),
        ({"labels": [1, 1]}, ValueError, "labels must be distinct"),
        ({"labels": []}, ValueError, "at least one word id"),
        ({"labels": range(5), "a": torch.ones(5), "b": torch.ones(5)}, ValueError, "No bulk is left"),
        ({"bulk": [1, 2]}, ValueError, r"must not hold label words. Take \[1\]"),
        ({"bulk": [2, 9]}, ValueError, "bulk must be ids from 0 to 4"),
        ({"top": 3}, ValueError, "top=3 and 2 excluded words leaves no bulk"),
        ({"a": [1.0]}, ValueError, "a must hold 2 numbers"),
        ({"a": [0.0, 0.0]}, ValueError, "no classifier"),
        ({"b": [0.0, math.nan]}, NonFiniteError, "b holds NaN"),
        ({"student": LogLinear(STATES, WEIGHT[:4])}, ValueError, "share one vocabulary. Got 5 and 4 words"),
        ({"student": LogLinear(STATES[:5], WEIGHT)}, ValueError, "same contexts. Got 6 and 5"),
        ({"mu": 1.5}, ValueError, "mu must be a number above 0 and at most 1"),
        ({"mu": 0.0}, ValueError, "mu must be a number above 0 and at most 1"),
        ({"mu": math.nan}, ValueError, "mu must be a number above 0 and at most 1"),
        ({"mu": 0.5}, ValueError, "leave mu out"),
        ({"downstream": (MODEL, MODEL)}, ValueError, r"pass mu in \(0, 1\]"),
        ({"downstream": (MODEL,), "mu": 0.5}, ValueError, "pair"),
        ({"downstream": (LogLinear(STATES, WEIGHT + 1), MODEL), "mu": 0.5}, ValueError, "same atoms"),
        ({"downstream": (MODEL.logits(), MODEL.logits()), "mu": 0.5}, TypeError, "both as LogLinear"),
        ({"downstream": torch.zeros(6)}, ValueError, "not all of them 0"),
        ({"downstream": torch.ones(4)}, ValueError, r"downstream must be \(6,\)"),
        ({"pretraining": torch.full((6,), math.nan)}, ValueError, "finite probabilities"),
        ({"gamma": 0.0}, ValueError, "gamma must be a positive"),
        ({"gamma": 1e6}, ValueError, "No downstream context has"),
        ({"b": [99.0, 99.0]}, ValueError, "lower the thresholds"),
        ({"over": "most"}, ValueError, "over must be one of"),
        ({"teacher": torch.full((6, 5), math.nan)}, NonFiniteError, "logits hold NaN"),
        ({"anchors": (torch.zeros(2), torch.zeros(3))}, ValueError, r"anchor must be \(3,\)"),
        ({"anchors": (torch.full((3,), math.nan), torch.zeros(3))}, NonFiniteError, "anchor vector holds NaN"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"teacher": MODEL, "student": MODEL, **TASK, **change}
    with pytest.raises(error, match=message):
        transfer_certificate(arguments.pop("teacher"), arguments.pop("student"), **arguments)


def test_the_task_of_the_errors_is_fine_itself():
    assert transfer_certificate(MODEL, MODEL, **TASK).eps_cls == 0


def test_arrays_of_numpy_are_logits_too():
    task = {"labels": np.array([0, 1]), "a": np.array([1.0, -1.0]), "b": np.array([-9.0, -9.5]), "top": np.int64(1)}
    tensors = transfer_certificate(MODEL.logits(), MODEL.logits(), **task, pretraining=torch.arange(6.0) + 1)
    arrays = transfer_certificate(MODEL.logits().numpy(), MODEL.logits().numpy(), **task, pretraining=np.arange(6.0) + 1)
    assert arrays.rows() == tensors.rows()
    assert transfer_certificate(MODEL, MODEL, **task, downstream=np.ones(6)).mu_source == "computed"
    with pytest.raises(TypeError, match=r"teacher must be LogLinear models or logits \(contexts, words\)\. Got str"):
        transfer_certificate("gpt2", MODEL, **task)
    with pytest.raises(TypeError, match="downstream must be LogLinear models or logits"):
        transfer_certificate(MODEL, MODEL, **task, downstream=("gpt2", "opt"), mu=0.5)
    for wrong in (1.5, (1, 2)):
        with pytest.raises(ValueError, match="top must be one"):
            transfer_certificate(MODEL, MODEL, **{**task, "top": wrong})
