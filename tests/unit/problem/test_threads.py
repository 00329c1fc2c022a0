"""Measurements in several threads: the numbers of one thread, and nothing left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.utils.checkpoint
from torch import nn

import theodolite as th


def problem(seed: int) -> th.Problem:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return th.Problem(model, nn.CrossEntropyLoss(), (torch.randn(40, 6, generator=generator), torch.arange(40) % 3))


def measured(subject: th.Problem) -> list[float]:
    curvature = th.hessian(subject, closed_form=False, keep="never")
    kernel = th.tangent_kernel(subject)
    return [*map(float, th.top_eigenpairs(curvature, 2, progress=False).values), subject.loss(), float(kernel.trace())]


def switches():
    cuda = torch.backends.cuda
    return (
        torch.utils.checkpoint.CheckpointFunction.__qualname__,
        torch.backends.mha.get_fastpath_enabled(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.is_grad_enabled(),
    )


def test_different_models_in_threads():
    before, alone = switches(), [measured(problem(seed)) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: [measured(problem(seed)) for _ in range(3)][-1], range(4)))
    assert together == alone
    assert switches() == before


def test_one_model_in_two_threads():
    subject = problem(0)
    alone = measured(subject)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda _: measured(subject), range(6)))
    assert together == [alone] * 6
    assert subject.model.training
