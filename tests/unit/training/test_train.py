"""`train`: the steps are those of a plain loop, whatever the optimizer; killed runs go on; the caller is left alone."""

from __future__ import annotations

import copy
import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th
from theodolite.results import Outcome
from theodolite.training import cosine, step_decay, warmup

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


def data(n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 4, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator)


def network(dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_batch_steps_equal_a_plain_loop(name):
    x, y = data()
    ours, plain = network(), network()
    trace = th.train(ours, nn.CrossEntropyLoss(), (x, y), OPTIMIZERS[name], steps=7)
    optimizer = OPTIMIZERS[name](plain.parameters())
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        return loss

    for _ in range(7):
        losses.append(float(nn.functional.cross_entropy(plain(x), y).detach()))
        optimizer.step(closure)
    assert list(trace.loss) == losses
    assert torch.equal(weights(ours), weights(plain))
    assert trace.steps == 7
    assert list(trace.rate) == [optimizer.param_groups[0]["lr"]] * 7


def test_an_epoch_sees_every_sample_once_and_the_order_follows_the_seed():
    x, y = data()
    seen = {0: [], 1: []}
    for seed, batches in seen.items():
        model = network()
        observe = lambda step, model, batch, optimizer, into=batches: into.append(batch.args[0][:, 0])  # noqa: E731
        trace = th.train(
            model, nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], epochs=2, batch_size=16, seed=seed, observe=observe
        )
        assert [len(b) for b in batches] == [16, 16, 16, 2] * 2
        assert list(trace.epoch) == [0] * 4 + [1] * 4
        for epoch in (batches[:4], batches[4:]):
            assert torch.equal(torch.cat(epoch).sort().values, x[:, 0].sort().values)
        assert not torch.equal(torch.cat(batches[:4]), torch.cat(batches[4:]))
    assert not torch.equal(seen[0][0], seen[1][0])


def test_lists_and_loaders_bring_their_own_batches():
    x, y = data()
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    from_list, from_loader = network(), network()
    a = th.train(from_list, nn.CrossEntropyLoss(), batches, OPTIMIZERS["SGD"], epochs=3)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=[range(20), range(20, 50)])
    b = th.train(from_loader, nn.CrossEntropyLoss(), loader, OPTIMIZERS["SGD"], steps=6)
    assert a.loss == b.loss
    assert torch.equal(weights(from_list), weights(from_loader))
    with pytest.raises(ValueError, match="batch_size"):
        th.train(network(), nn.CrossEntropyLoss(), batches, OPTIMIZERS["SGD"], steps=1, batch_size=5)


class StopError(Exception):
    pass


def stopping(at: int):
    def observe(step, model, batch, optimizer):
        if step == at:
            raise StopError

    return observe


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
@pytest.mark.parametrize("form", ["tensors", "loader", "own generator"])
@pytest.mark.parametrize("stop", [3, 4, 9])
def test_a_resumed_run_takes_the_same_steps(tmp_path, name, form, stop):
    """Dropout, batch norm, shuffling, momentum: all go on as if nothing had happened."""
    x, y = data()

    def feed():
        own = torch.Generator().manual_seed(8) if form == "own generator" else None
        return (x, y) if form == "tensors" else DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=own)

    options = {"steps": 14, "seed": 5, "schedule": cosine(0.05, 14), "measure": {"norm": lambda m: float(weights(m).norm())}}
    options |= {"batch_size": 16} if form == "tensors" else {}
    whole, parts = network(0.3, norm=True), network(0.3, norm=True)
    undisturbed = th.train(whole, nn.CrossEntropyLoss(), feed(), OPTIMIZERS[name], **options)
    keep = {"checkpoint": tmp_path, "checkpoint_every": 2}
    with pytest.raises(StopError):
        th.train(parts, nn.CrossEntropyLoss(), feed(), OPTIMIZERS[name], observe=stopping(stop), **options, **keep)
    fresh = network(0.3, norm=True)
    resumed = th.train(fresh, nn.CrossEntropyLoss(), feed(), OPTIMIZERS[name], resume=True, **options, **keep)
    assert resumed.loss == undisturbed.loss
    assert resumed.measured == undisturbed.measured
    assert torch.equal(weights(fresh), weights(whole))
    again = th.train(network(0.3, norm=True), nn.CrossEntropyLoss(), feed(), OPTIMIZERS[name], resume=True, **options, **keep)
    assert again.loss == undisturbed.loss


@pytest.mark.parametrize("cut", [3, 4, 5, 8])
def test_a_run_cut_by_its_steps_goes_on_the_same(tmp_path, cut):
    """Also at the end of an epoch, where the next one's order must not have been drawn yet."""
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    whole = th.train(network(0.2), nn.CrossEntropyLoss(), loader, OPTIMIZERS["SGD"], steps=11)
    th.train(network(0.2), nn.CrossEntropyLoss(), loader, OPTIMIZERS["SGD"], steps=cut, checkpoint=tmp_path)
    rest = th.train(network(0.2), nn.CrossEntropyLoss(), loader, OPTIMIZERS["SGD"], steps=11, checkpoint=tmp_path, resume=True)
    assert rest.loss == whole.loss


def test_ctrl_c_saves_the_step_under_way(tmp_path):
    x, y = data()

    def press(step, model, batch, optimizer):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    whole = th.train(network(0.2), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["Adam"], steps=9, batch_size=16)
    options = {"steps": 9, "batch_size": 16, "checkpoint": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        th.train(network(0.2), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["Adam"], observe=press, **options)
    assert signal.getsignal(signal.SIGINT) is before
    seen = []
    rest = th.train(
        network(0.2),
        nn.CrossEntropyLoss(),
        (x, y),
        OPTIMIZERS["Adam"],
        resume=True,
        **options,
        observe=lambda step, *_: seen.append(step),
    )
    assert seen == [5, 6, 7, 8]
    assert rest.loss == whole.loss


def test_measuring_does_not_change_the_run():
    x, y = data()
    noisy = {"noise": lambda m: float(torch.rand(()))}
    traces = [
        th.train(network(0.4), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=6, measure=noisy, every=every)
        for every in (1, 3, 5)
    ]
    assert traces[0].loss == traces[1].loss == traces[2].loss


def test_groups_keep_their_ratio_under_a_schedule():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[-1].parameters(), "lr": 0.001}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    th.train(model, nn.CrossEntropyLoss(), data(), optimizer, steps=1, schedule=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.005])


def test_schedulers_that_would_do_nothing_are_refused():
    model, other = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 1)
    with pytest.raises(ValueError, match="another optimizer"):
        th.train(model, nn.CrossEntropyLoss(), data(), optimizer, steps=1, schedule=foreign)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        th.train(model, nn.CrossEntropyLoss(), data(), optimizer, steps=1, schedule=plateau)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["SGD"], steps=2, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="another optimizer than Adam"):
        th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["Adam"], steps=4, checkpoint=tmp_path, resume=True)


def test_a_torch_scheduler_is_stepped_and_resumed(tmp_path):
    x, y = data()

    def run(steps, resume):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return th.train(
            model, nn.CrossEntropyLoss(), (x, y), optimizer, steps=steps, schedule=scheduler, checkpoint=tmp_path, resume=resume
        )

    run(4, resume=False)
    assert run(8, resume=True).rate == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.025] * 2)


def test_a_checkpoint_of_another_run_is_refused_and_a_damaged_one_named(tmp_path):
    x, y = data()
    th.train(network(), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=2, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="seed 0"):
        th.train(network(), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=4, checkpoint=tmp_path, resume=True, seed=1)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged"):
        th.train(network(), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=4, checkpoint=tmp_path, resume=True)


def test_the_callers_random_state_and_the_modes_are_left_alone():
    x, y = data()
    model = network(0.5)
    model.eval()
    model[0].train()
    before = torch.get_rng_state()
    th.train(model, nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=3, batch_size=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model] == [True, False, False, False]
    with pytest.raises(StopError):
        th.train(model, nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=3, observe=stopping(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model] == [True, False, False, False]


def test_divergence_ends_the_run_and_says_so():
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.ones(1, 1).double()
    trace = th.train(model, nn.MSELoss(), (x, x), torch.optim.SGD(model.parameters(), lr=1e30), steps=50)
    assert trace.outcome is Outcome.DIVERGED
    assert trace.diverged
    assert trace.steps < 50
    assert not math.isfinite(trace.loss[-1])
    assert "NaN or infinite" in str(trace)


def test_until_clip_measure_and_evaluate():
    x, y = data()
    model = network()
    trace = th.train(
        model,
        nn.CrossEntropyLoss(),
        (x, y),
        OPTIMIZERS["SGD"],
        steps=500,
        until=0.9,
        measure={"size": lambda m: float(weights(m).norm())},
        every=5,
        evaluate=True,
    )
    assert trace.loss[-1] <= 0.9 < trace.loss[-2]
    steps, sizes = trace.column("size")
    assert steps == list(range(0, trace.steps, 5))
    assert len(sizes) == len(steps)
    assert trace.final_loss == pytest.approx(float(nn.functional.cross_entropy(model(x), y).detach()))
    with pytest.raises(ValueError, match="'size'"):
        trace.column("nosuch")

    clipped, start = network(), network()
    th.train(clipped, nn.CrossEntropyLoss(), (x, y), lambda p: torch.optim.SGD(p, lr=1.0), steps=1, clip=1e-3)
    assert float((weights(clipped) - weights(start)).norm()) == pytest.approx(1e-3, rel=1e-4)


def test_a_trace_is_a_result(tmp_path):
    x, y = data()
    trace = th.train(
        network(), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=3, measure={"one": lambda m: 1.0}, every=2
    )
    assert [row["one"] for row in trace.rows()] == [1.0, None, 1.0]
    assert tuple(trace.to_frame()["loss"]) == trace.loss
    trace.save(tmp_path / "trace")
    assert th.load(tmp_path / "trace").loss == trace.loss


def test_models_with_their_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids}]
    trace = th.train(model, None, batches, lambda p: torch.optim.Adam(p, lr=0.01), steps=20)
    assert trace.loss[-1] < 0.8 * trace.loss[0]


def test_schedules():
    x, y = data()
    trace = th.train(network(), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=5, schedule={0: 0.1, 2: 0.01})
    assert trace.rate == (0.1, 0.1, 0.01, 0.01, 0.01)
    trace = th.train(
        network(), nn.CrossEntropyLoss(), (x, y), OPTIMIZERS["SGD"], steps=4, schedule=warmup(step_decay(1, 0.5, [3]), 2)
    )
    assert trace.rate == (0.5, 1.0, 1.0, 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps or epochs"),
        ({"steps": 3, "epochs": 1}, "steps or epochs"),
        ({"steps": 0}, "steps"),
        ({"steps": 1, "every": 0}, "every"),
        ({"steps": True}, "steps"),
        ({"steps": 1, "clip": -1.0}, "clip"),
        ({"steps": 1, "batch_size": 0}, "batch_size"),
        ({"steps": 1, "schedule": {5: 0.1}}, "step 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["SGD"], **arguments)


def test_wrong_data_is_named():
    with pytest.raises(ValueError, match="data must be"):
        th.train(network(), nn.CrossEntropyLoss(), 5, OPTIMIZERS["SGD"], steps=1)
    for wrong in ("text", {"a": 1}):
        with pytest.raises(ValueError, match="data must be"):
            th.train(network(), nn.CrossEntropyLoss(), wrong, OPTIMIZERS["SGD"], steps=1)
    with pytest.raises(ValueError, match="only once"):
        th.train(network(), nn.CrossEntropyLoss(), iter([data()]), OPTIMIZERS["SGD"], steps=1)
    with pytest.raises(ValueError, match="no batches"):
        th.train(network(), nn.CrossEntropyLoss(), [], OPTIMIZERS["SGD"], steps=1)


def test_frozen_parameters_stay(capsys):
    model = network()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model[0].weight)
    th.train(model, nn.CrossEntropyLoss(), data(), OPTIMIZERS["Adam"], steps=3)
    assert torch.equal(model[0].weight, before)
    assert capsys.readouterr().out == ""
