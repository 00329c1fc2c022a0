"""Progress is shown when asked for, and products are counted."""

from __future__ import annotations

import torch

import theodolite as th

MATRIX = torch.diag(torch.linspace(1, 2, 30).double())


def test_silent_in_a_pipe(capfd):
    th.top_eigenpairs(MATRIX, 2)
    assert capfd.readouterr() == ("", "")


def test_a_bar_when_asked_for(capfd):
    th.top_eigenpairs(MATRIX, 2, progress=True)
    th.spectral_density(MATRIX, probes=2, steps=3, progress=True)
    th.trace(MATRIX, matvecs=9, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    for title in ("eigenpairs", "spectral density", "trace"):
        assert title in err


def test_algorithms_spend_the_products_they_report():
    class Counting(th.operators.DenseOperator):
        count = 0

        def _matmat(self, x):
            self.count += x.shape[1]
            return super()._matmat(x)

    for measure in (
        lambda op: th.top_eigenpairs(op, 3),
        lambda op: th.top_eigenpairs(op, 3, which="smallest", start=torch.eye(30).double()[:, :3]),
        lambda op: th.spectral_density(op, probes=3, steps=5),
        lambda op: th.trace(op, matvecs=30),
        lambda op: th.trace(op, matvecs=31, method="xtrace"),
        lambda op: th.trace(op, matvecs=7, method="hutchinson"),
    ):
        op = Counting(MATRIX)
        op.check_symmetry()
        op.count = 0
        assert measure(op).matvecs == op.count
