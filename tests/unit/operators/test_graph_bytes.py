"""What kept graphs take: every storage once, and of a storage only the parts that are held."""

import torch
from torch import nn

import theodolite as th
from theodolite.operators.autograd.graphs import graph_bytes


def test_a_slice_of_a_data_set_counts_as_a_slice():
    x, y = torch.randn(1000, 6, dtype=torch.float64), torch.randint(3, (1000,))
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    problem = th.Problem(model, nn.CrossEntropyLoss(), [(x[i : i + 10], y[i : i + 10]) for i in range(0, 1000, 10)])
    for closed_form in (True, False):
        op = th.hessian(problem, closed_form=closed_form)
        op @ torch.ones(problem.size, dtype=torch.float64)
        assert op.cost().peak_bytes < 20 * x.numel() * 8


def test_parts_of_one_tensor_count_together_and_never_more_than_the_whole():
    whole = torch.ones(6, 10, dtype=torch.float64)
    q, k, v = whole.chunk(3)
    assert graph_bytes([q]) == 2 * 10 * 8
    assert graph_bytes([q, k, q]) == 4 * 10 * 8
    assert graph_bytes([q, k, v, whole]) == whole.numel() * 8
    assert graph_bytes([whole[:1].expand(60, 10)]) == whole.numel() * 8
    assert graph_bytes([q, v], without=[whole]) == 0
