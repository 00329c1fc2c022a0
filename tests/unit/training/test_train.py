"""`train`: the steps are those of a plain loop, whatever the optimizer; killed runs go on; the caller is left alone."""

from __future__ import annotations

import copy
import math
import os
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import theodolite as th
from theodolite.results import Outcome
from theodolite.training import cosine, step_decay, warmup
from theodolite.training.interruption import load_state, save_state, tensor_check_sums

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


def test_an_existing_run_is_not_trained_over(tmp_path):
    th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["SGD"], steps=2, checkpoint=tmp_path)
    kept = (tmp_path / "checkpoint.safetensors").read_bytes()
    model = network()
    with pytest.raises(FileExistsError, match=r"already holds a training run. Go on with it by resume=True"):
        th.train(model, nn.CrossEntropyLoss(), data(), OPTIMIZERS["SGD"], steps=1, checkpoint=tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == kept
    assert torch.equal(weights(model), weights(network()))


def loader(n: int = 50, size: int = 16) -> DataLoader:
    return DataLoader(TensorDataset(*data(n)), batch_size=size, shuffle=True)


def shifted() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data()
    return x + 1e-12, y


def changed_sgd(**changes):
    return lambda p: torch.optim.SGD(p, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **changes})


TENSORS = {"data": data(), "batch_size": 16}
SCHEDULED = {**TENSORS, "schedule": cosine(0.05, 9)}


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (TENSORS, {"batch_size": 8}, "batch_size 16, not 8"),
        (TENSORS, {"shuffle": False}, "shuffle True, not False"),
        (TENSORS, {"data": shifted()}, r"data 50 samples with check sum \w+, not 50 samples"),
        (TENSORS, {"data": data(49)}, "data 50 samples .* not 49 samples"),
        (TENSORS, {"clip": 1.0}, "clip None, not 1.0"),
        (TENSORS, {"optimizer": changed_sgd(lr=0.01)}, "learning rate 0.05, not 0.01"),
        (TENSORS, {"optimizer": changed_sgd(weight_decay=0.0)}, "weight_decay 0.001, not 0.0"),
        (TENSORS, {"schedule": 0.05}, "learning rate 0.05, not of a schedule"),
        (SCHEDULED, {"schedule": cosine(0.04, 9)}, "step 0 with learning rate 0.05; the schedule has 0.04"),
        (SCHEDULED, {"schedule": {0: 0.05, 3: 0.01}}, "took step 2 with learning rate"),
        ({"data": [data(20), data(30)]}, {"data": [data(20), data(31)]}, "data 50 samples .* not 51 samples"),
        ({"data": loader()}, {"data": loader(size=8)}, "batch_size 16, not 8"),
        ({"data": loader()}, {"data": loader(40)}, "samples 50, not 40"),
    ],
)
def test_going_on_with_other_data_or_settings_is_refused_with_the_remedy(tmp_path, first, then, message):
    keep = {"loss": nn.CrossEntropyLoss(), "optimizer": OPTIMIZERS["SGD"], "checkpoint": tmp_path}
    th.train(network(), **{**keep, **first}, steps=4)
    model = network()
    with pytest.raises(ValueError, match=f"{message}.* Give the same to go on"):
        th.train(model, **{**keep, **first, **then}, steps=6, resume=True)
    assert torch.equal(weights(model), weights(network()))
    assert th.train(model, **{**keep, **first}, steps=6, resume=True).steps == 6


def test_the_optimizer_that_was_interrupted_goes_on_as_it_is(tmp_path):
    """As in a notebook, where the cell is run again: rates that a schedule has changed meanwhile are no other settings."""
    for schedule in (None, cosine(0.1, 8), "torch"):
        model, folder = network(), tmp_path / str(schedule)[:5]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if schedule == "torch" else schedule
        options = {"steps": 8, "checkpoint": folder, "checkpoint_every": 2, "schedule": rate}
        with pytest.raises(StopError):
            th.train(model, nn.CrossEntropyLoss(), data(), optimizer, observe=stopping(5), **options)
        assert th.train(model, nn.CrossEntropyLoss(), data(), optimizer, resume=True, **options).steps == 8


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path):
    """It knows its seed and no further settings, and has no check sum."""
    whole = th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["Adam"], steps=6)
    th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["Adam"], steps=3, checkpoint=tmp_path)
    state = load_state(tmp_path)
    state["seed"] = state.pop("settings")["seed"]
    save_state(tmp_path, state)
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, "pt") as file:
        save_file({name: file.get_tensor(name) for name in file.keys()}, path, {"state": file.metadata()["state"]})  # noqa: SIM118
    again = {"checkpoint": tmp_path, "resume": True, "steps": 6}
    with pytest.raises(ValueError, match="seed 0, not 1"):
        th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["Adam"], seed=1, **again)
    assert th.train(network(), nn.CrossEntropyLoss(), data(), OPTIMIZERS["Adam"], **again).loss == whole.loss


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64])
def test_check_sums_see_any_kind_of_tensor(dtype):
    ones = torch.ones(2, 3, dtype=dtype)
    other = ones.clone()
    other[1, 2] = 0
    (a,), (b,), (c,) = (tensor_check_sums({"x": t}) for t in (ones, other, ones.reshape(3, 2)))
    assert len({a, b, c}) == 3
    assert tensor_check_sums({"x": ones.mH.contiguous().mH}) == [a]
    assert tensor_check_sums({"x": ones[0, 0], "y": ones[:0]})[0] != tensor_check_sums({"x": other[1, 2], "y": ones[:0]})[0]
    assert tensor_check_sums({"x": torch.eye(2).to_sparse()}) == ["x torch.float32 [2, 2]"]


def test_an_optimizer_of_another_model_is_refused():
    model, other = network(), network()
    with pytest.raises(ValueError, match=r"4 of the optimizer's 4 parameters are not the model's, .* model.parameters\(\)"):
        th.train(model, nn.CrossEntropyLoss(), data(), OPTIMIZERS["SGD"](other.parameters()), steps=2)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    model[-1] = nn.Linear(8, 3).double()  # a new head, which the optimizer does not know
    with pytest.raises(ValueError, match="2 of the optimizer's 4 parameters"):
        th.train(model, nn.CrossEntropyLoss(), data(), optimizer, steps=2)
    assert torch.equal(weights(other), weights(network()))


def test_parameters_of_the_loss_may_be_trained_too():
    model, scale = network(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    th.train(model, lambda output, target: nn.functional.cross_entropy(scale * output, target), data(), optimizer, steps=2)
    assert scale != 1


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


class TwoExperts(nn.Module):
    """Half of the rows each, by torch's grouped product, which itself knows no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(x) // 2
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([half, len(x)], dtype=torch.int32))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
def test_experts_train_in_float64():
    model, (x, y) = TwoExperts().double(), data(8)
    plain = model.weight.detach().clone().requires_grad_()
    nn.functional.cross_entropy(torch.cat([x[:4] @ plain[0], x[4:] @ plain[1]]), y).backward()
    th.train(model, nn.CrossEntropyLoss(), (x, y), lambda p: torch.optim.SGD(p, lr=0.1), steps=1)
    torch.testing.assert_close(model.weight.detach(), (plain - 0.1 * plain.grad).detach())


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


# Continuing an earlier run, and measuring at listed steps


def continued(model: nn.Module, given: object, steps: int, **options: object) -> th.training.Trace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # no state: what goes on is schedule and order
    return th.train(model, nn.CrossEntropyLoss(), given, optimizer, steps=steps, schedule=cosine(0.1, 30), seed=4, **options)


@pytest.mark.parametrize("form", ["tensors", "list", "loader"])
@pytest.mark.parametrize("cut", [3, 7, 10])
def test_a_run_in_two_parts_is_the_run_in_one(form, cut):
    x, y = data(50)
    batches = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 50, 10)]
    given, options = {
        "tensors": ((x, y), {"batch_size": 8}),
        "list": (batches, {}),
        "loader": (DataLoader(TensorDataset(x, y), batch_size=8), {}),
    }[form]
    whole, parts = network(), network()
    reference = continued(whole, given, 16, **options)
    one = continued(parts, given, cut, **options)
    two = continued(parts, given, 16 - cut, first=cut, **options)
    assert one.loss + two.loss == reference.loss
    assert one.rate + two.rate == reference.rate
    assert one.epoch + two.epoch == reference.epoch
    assert torch.equal(weights(whole), weights(parts))
    assert [row["step"] for row in two.rows()] == list(range(cut, 16))


def test_columns_are_measured_at_the_steps_listed_and_after_the_last():
    model, (x, y) = network(), data()
    seen = []
    measure = {"norm": lambda m: seen.append(0) or float(weights(m).norm())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": 10, "measure": measure, "every": [20, 23, 26], "first": 20}
    trace = th.train(model, nn.CrossEntropyLoss(), (x, y), optimizer, steps=6, **options)
    steps, values = trace.column("norm")
    assert steps == [20, 23, 26]
    assert len(seen) == 3
    assert values[-1] == float(weights(model).norm())
    assert [row["norm"] is not None for row in trace.rows()] == [True, False, False, True, False, False]


def test_a_list_of_steps_that_are_not_taken_is_refused():
    model, given = network(), data()
    with pytest.raises(ValueError, match=r"every\[1\]"):
        th.train(model, nn.CrossEntropyLoss(), given, torch.optim.SGD(model.parameters(), lr=0.1), steps=3, every=[0, 4])


def test_a_stream_without_length_cannot_be_entered_later():
    class Stream:
        def __iter__(self):
            yield data()

    model = network()
    with pytest.raises(ValueError, match="first needs data of known length"):
        th.train(model, nn.CrossEntropyLoss(), Stream(), torch.optim.SGD(model.parameters(), lr=0.1), steps=3, first=4)


def test_a_resumed_run_has_the_first_step_it_began_with(tmp_path):
    (x, y), model = data(), network()
    options = {"batch_size": 8, "checkpoint": tmp_path}
    continued(model, (x, y), 4, first=5, **options)
    whole = network()
    reference = continued(whole, (x, y), 9, first=5, batch_size=8)
    resumed = continued(network(), (x, y), 9, first=5, resume=True, **options)
    assert resumed.loss == reference.loss
    assert resumed.first == 5
    with pytest.raises(ValueError, match="first 5"):
        continued(network(), (x, y), 12, first=6, resume=True, **options)
