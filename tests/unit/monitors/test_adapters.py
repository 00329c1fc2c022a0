"""The same monitor in a plain loop, on an optimizer, in Lightning, in the Hugging Face Trainer and in `th.train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import theodolite as th
from theodolite.measures.dynamics.optimizers import stability_law
from theodolite.monitors import read_log

N, BATCH = 48, 8


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 6, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data()), batch_size=BATCH)


def losses(report: th.monitors.MonitorReport) -> list[float]:
    return [row["loss"] for row in report.steps]


def in_a_plain_loop() -> tuple[nn.Module, th.monitors.MonitorReport]:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.Monitor(loss, budget=None) as monitor:
        for step, batch in enumerate(loader()):
            optimizer.zero_grad()
            loss(model(batch[0]), batch[1]).backward()
            monitor.observe(step, model, batch, optimizer)
            optimizer.step()
    return model, monitor.report()


def test_on_an_optimizer() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = th.Monitor(loss, budget=None).attach(model, optimizer)
    for x, y in loader():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    monitor.close()
    _, report = in_a_plain_loop()
    assert losses(monitor.report()) == losses(report)
    assert [row["critical_rate"] for row in monitor.report().looks] == [row["critical_rate"] for row in report.looks]
    optimizer.step()  # the hook is gone
    assert len(monitor.report().steps) == len(report.steps)
    with pytest.raises(ValueError, match=r"nn\.Module such as"):
        th.Monitor(lambda output, target: output.sum()).attach(model, optimizer)


def test_in_train() -> None:
    model, loss = network(), nn.CrossEntropyLoss()
    with th.Monitor(loss, budget=None) as monitor:
        trace = th.train(
            model, loss, data(), lambda p: torch.optim.SGD(p, lr=0.1), steps=5, batch_size=BATCH, observe=monitor.observe
        )
    assert losses(monitor.report()) == pytest.approx(list(trace.loss))


def test_in_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")
        from theodolite.monitors.adapters.lightning import MonitorCallback

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network, self.loss = network(), nn.CrossEntropyLoss()

            def forward(self, x: Tensor) -> Tensor:
                return self.network(x)

            def training_step(self, batch: Any, index: int) -> Tensor:
                return self.loss(self(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def fit(**settings: Any) -> tuple[Any, Any]:
            callback = MonitorCallback(th.Monitor(nn.CrossEntropyLoss(), budget=None))
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback], **settings,
            )  # fmt: skip
            module = Module()
            trainer.fit(module, loader())
            return module, callback.monitor.report()

        module, report = fit()
        plain, expected = in_a_plain_loop()
        assert losses(report) == pytest.approx(losses(expected))
        assert all(torch.equal(a, b) for a, b in zip(module.network.parameters(), plain.parameters(), strict=True))
        assert not report.notes
        assert len(report.looks) == len(expected.looks)
        _, accumulated = fit(accumulate_grad_batches=2)
        assert len(accumulated.steps) == N // BATCH // 2
        assert not accumulated.notes


def lightning_fit(make: Any, monitor: th.Monitor | None, folder: Path, **settings: Any) -> Any:
    """A Lightning module after one epoch, watched or not."""
    lightning = pytest.importorskip("lightning")
    from theodolite.monitors.adapters.lightning import MonitorCallback

    torch.manual_seed(0)
    callbacks = [] if monitor is None else [MonitorCallback(monitor)]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=callbacks, **settings,
    )  # fmt: skip
    module = make(lightning.LightningModule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader())
    return module


def without_forward(base: Any) -> Any:
    """An own signature of the loss, a penalty through a second output, numbers that are logged and counted, dropout."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = network(), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
            self.seen, self.calls = torch.zeros(()), 0

        def own_loss(self, x: Tensor, code: Tensor, target: Tensor) -> Tensor:
            return weighted(self.decoder(code), target) + 0.1 * code.square().mean()

        def training_step(self, batch: Any) -> dict[str, Tensor]:
            x, y = batch
            self.seen += len(x)
            self.calls += 1
            loss = self.own_loss(x, self.encoder(x), y)
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def standing_still(base: Any) -> Any:
    """A module whose learning rate is 0, which logs the number of its steps as validation loss."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", float(self.global_step))

        def val_dataloader(self) -> Any:
            return loader()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Module()


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_in_lightning_a_step_of_few_batches_has_their_mean_loss(tmp_path: Path, scaled: bool) -> None:
    """Six batches in steps of four: the last step of the epoch has two. A scaler of mixed precision changes no loss either."""
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    each = [float(nn.functional.cross_entropy(network()(x), y).detach()) for x, y in loader()]
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if scaled else []
    monitor = th.Monitor(None)
    lightning_fit(standing_still, monitor, tmp_path, accumulate_grad_batches=4, plugins=plugins, val_check_interval=0.5)
    assert losses(monitor.report()) == pytest.approx([sum(each[:4]) / 4, sum(each[4:]) / 2], rel=1e-2 if scaled else 1e-5)
    assert [(row["step"], row["loss"]) for row in monitor.report().validation] == [(0, 0.0), (2, 2.0)]


@pytest.mark.parametrize("several", [False, True], ids=["one set", "two sets"])
def test_evaluations_of_the_hugging_face_trainer(tmp_path: Path, several: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from theodolite.monitors.adapters.transformers import MonitorCallback

    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=BATCH, max_steps=5, report_to=[], save_strategy="no", use_cpu=True,
        logging_strategy="no", disable_tqdm=True, learning_rate=1e-2, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    monitor, sets = th.Monitor(None), {"one": Rows(), "other": torch.utils.data.Subset(Rows(), range(8))}
    trainer = transformers.Trainer(
        model=Classifier(), args=settings, train_dataset=Rows(), eval_dataset=sets if several else Rows(),
        callbacks=[MonitorCallback(monitor)],
    )  # fmt: skip
    trainer.train()
    name = "eval_one_loss" if several else "eval_loss"
    expected = [(row["step"], row[name]) for row in trainer.state.log_history if name in row]
    assert [(row["step"], row["loss"]) for row in monitor.report().validation] == expected
    assert len(expected) >= 2


@pytest.mark.parametrize("given", [None, nn.CrossEntropyLoss()], ids=["no loss", "another loss"])
def test_lightning_without_forward(tmp_path: Path, given: Any) -> None:
    monitor = th.Monitor(given, budget=None, probe=data())
    watched, plain = (lightning_fit(without_forward, m, tmp_path) for m in (monitor, None))
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))
    assert (float(watched.seen), watched.calls) == (N, N // BATCH)
    report = monitor.report()
    assert len(report.steps) == N // BATCH
    assert sum(row["on"] == "batch" for row in report.looks) == N // BATCH
    assert sum(row["on"] == "probe" for row in report.looks) == N // BATCH
    assert any("training_step" in note for note in report.notes) == (given is not None)
    assert not any("failed" in note and "features" not in note for note in report.notes), report.notes
    torch.manual_seed(0)
    start, (x, y) = without_forward(type(watched).__mro__[1]), (t[:BATCH] for t in data())

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = start

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": self.start.own_loss(x, self.start.encoder(x), y)}

    truth = th.critical_learning_rate(th.Problem(Whole(), None, [{"x": x, "y": y}]))
    assert report.looks[0]["by"] == "hessian"
    assert report.looks[0]["critical_rate"] == pytest.approx(truth.value, rel=1e-2)


def gan(base: Any) -> Any:
    class Gan(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(2, 6), nn.Linear(6, 1)

        def forward(self, z: Tensor) -> Tensor:
            return self.generator(z)

        def training_step(self, batch: Any, index: int) -> None:
            first, second = self.optimizers()
            for optimizer, sign in ((first, 1.0), (second, -1.0)):
                fake = self(torch.randn(len(batch[0]), 2))
                loss = sign * (self.critic(fake).mean() - self.critic(batch[0]).mean()) + 1.0
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.critic, self.generator)]

    return Gan()


def test_a_gan_in_lightning(tmp_path: Path) -> None:
    monitor = th.Monitor(None, budget=None)
    watched, plain = (lightning_fit(gan, m, tmp_path) for m in (monitor, None))
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))
    report = monitor.report()
    assert len(report.steps) == N // BATCH
    assert all(row["gradient_norm"] > 0 for row in report.steps)
    assert not report.looks
    assert [note for note in report.notes if "steps its optimizers itself" in note]


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 32, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_the_hugging_face_trainer(tmp_path: Path, accumulate: int) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from theodolite.monitors.adapters.transformers import MonitorCallback

    def fit(*callbacks: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=4, report_to=[], save_strategy="no",
            logging_strategy="no", use_cpu=True, disable_tqdm=True, seed=1, gradient_accumulation_steps=accumulate, bf16=True,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = transformers.Trainer(model=model, args=settings, train_dataset=Sentences(), callbacks=list(callbacks))
            mean.append(trainer.train().training_loss)
        return model

    mean: list[float] = []

    callback = MonitorCallback(th.Monitor(None, budget=None, log=tmp_path / "log"))
    watched, plain = fit(callback), fit()
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), plain.parameters(), strict=True))
    report = callback.monitor.report()
    assert sum(losses(report)) / 4 == pytest.approx(mean[0], rel=1e-3)
    assert len(report.steps) == 4
    assert not report.notes
    assert all(row["critical_rate"] > 0 for row in report.looks)
    assert report.looks[0]["by"] == "gauss_newton"
    assert {row["on"] for row in report.looks} == {"batch", "probe"}
    log = read_log(tmp_path / "log")
    assert [row["loss"] for row in log.steps] == pytest.approx(losses(report))
    assert log.run["model"] == "GPT2LMHeadModel"
    assert log.end is not None
    with pytest.raises(ValueError, match="computes the loss"):
        MonitorCallback(th.Monitor(nn.CrossEntropyLoss()))


WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


class Classifier(nn.Module):
    """A model as the Trainer knows them: with labels it returns a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.dropout, self.config = nn.Dropout(0.3), SimpleNamespace()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.dropout(self.network(x))
        found = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**found, "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = data()
        return {"x": x[index], "labels": y[index]}


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, weight=WEIGHTS)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=0.3)


def pops_labels(trainer: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
    labels = inputs.pop("labels")
    output = model(**inputs)
    trainer.log({"seen": float(len(labels))})
    trainer.calls = getattr(trainer, "calls", 0) + 1
    loss = weighted(output["logits"], labels)
    return (loss, output) if return_outputs else loss


def keeps_labels(trainer: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
    output = model(**inputs)  # its own loss is left aside
    loss = weighted(output["logits"], inputs["labels"])
    return (loss, output) if return_outputs else loss


def penalised(trainer: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
    loss = model(**inputs)["loss"] + sum(p.square().sum() for p in model.parameters())
    return (loss, {}) if return_outputs else loss


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        pytest.param({"label_smoothing_factor": 0.3}, smoothed, marks=pytest.mark.slow),
        ({"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: weighted(outputs["logits"], labels)}, weighted),
        pytest.param({"compute_loss": pops_labels}, weighted, marks=pytest.mark.slow),
        pytest.param({"compute_loss": keeps_labels}, weighted, marks=pytest.mark.slow),
        ({"compute_loss": penalised}, None),
    ],
    ids=["label smoothing", "compute_loss_func", "labels taken out", "class weights", "a penalty"],
)
def test_the_trainers_own_loss_is_the_one_watched(tmp_path: Path, way: dict[str, Any], expected: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from theodolite.monitors.adapters.transformers import MonitorCallback

    kind = type("OwnTrainer", (transformers.Trainer,), {k: v for k, v in way.items() if k == "compute_loss"})
    smoothing = {k: v for k, v in way.items() if k == "label_smoothing_factor"}
    func = {k: v for k, v in way.items() if k == "compute_loss_func"}

    def fit(*callbacks: Any) -> Any:
        model = Classifier()
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=N, max_steps=3, report_to=[], save_strategy="no", optim="sgd",
            logging_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=0.1, max_grad_norm=0.0, **smoothing,
        )  # fmt: skip
        trainer = kind(model=model, args=settings, train_dataset=Rows(), callbacks=list(callbacks), **func)
        trainer.train()
        return trainer

    callback = MonitorCallback(th.Monitor(None, budget=None))
    watched, plain = fit(callback), fit()
    pairs = zip(watched.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "compute_loss" not in vars(watched)
    assert getattr(watched, "calls", 0) == getattr(plain, "calls", 0)
    assert len(watched.state.log_history) == len(plain.state.log_history)
    report = callback.monitor.report()
    assert len(report.steps) == 3
    [first] = [row for row in report.looks if row["on"] == "batch" and row["step"] == 0]
    torch.manual_seed(0)
    model = Classifier()
    if expected is None:
        plain_loss = nn.functional.cross_entropy
        problem = th.Problem(model, lambda z, y: plain_loss(z, y) + sum(p.square().sum() for p in model.parameters()), data())
        truth = th.critical_learning_rate(problem)
        assert first["by"] == "hessian"
    else:
        assert not report.notes
        truth = th.critical_learning_rate(th.Problem(model, expected, data()), by="gauss_newton")
    assert first["critical_rate"] == pytest.approx(truth.value, rel=1e-2)


@pytest.mark.parametrize("trainer", ["hugging face", "lightning"])
def test_trainers_that_clip(tmp_path: Path, trainer: str) -> None:
    x, y = data()
    torch.manual_seed(0)
    start = Classifier().eval()
    gradient = th.Problem(start, nn.functional.cross_entropy, (x, y)).gradient()
    monitor, most = th.Monitor(None, budget=None), 0.05 * float(gradient.norm())
    if trainer == "lightning":

        def make(base: Any) -> Any:
            class Module(base):  # type: ignore[misc]
                def __init__(self) -> None:
                    super().__init__()
                    self.inner = Classifier().eval()

                def training_step(self, batch: Any, index: int) -> Tensor:
                    self.inner.eval()
                    return nn.functional.cross_entropy(self.inner(x)["logits"], y)

                def configure_optimizers(self) -> torch.optim.Optimizer:
                    return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

            return Module()

        lightning_fit(make, monitor, tmp_path, gradient_clip_val=most)
    else:
        transformers = pytest.importorskip("transformers")
        from theodolite.monitors.adapters.transformers import MonitorCallback

        start.dropout.p = 0.0
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=N, max_steps=3, report_to=[], save_strategy="no",
            logging_strategy="no", use_cpu=True, disable_tqdm=True, learning_rate=1e-3, max_grad_norm=most,
        )  # fmt: skip
        model = Classifier()
        model.load_state_dict(start.state_dict())
        model.dropout.p = 0.0
        transformers.Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[MonitorCallback(monitor)]).train()
    first = monitor.report().looks[0]
    assert first["clip"] == pytest.approx(0.05, rel=1e-3)
    optimizer = torch.optim.AdamW(start.parameters(), lr=1e-3, weight_decay=0.0)
    problem = th.Problem(start, nn.functional.cross_entropy, (x, y))
    unclipped = th.critical_learning_rate(problem, by="gauss_newton", optimizer=optimizer).value
    # A first step divides clipped gradients by their own size: the factor cancels, but for eps. Without it: 20 times off.
    assert first["critical_rate"] == pytest.approx(unclipped, rel=0.1)
    for p, g in zip(start.parameters(), problem.split(gradient).values(), strict=True):
        p.grad = 0.05 * g.reshape(p.shape)
    law = stability_law(optimizer, problem, coming_step=True).clipped(0.05)
    exact = float(torch.linalg.eigvalsh(law.effective(th.gauss_newton(problem)).to_dense().double())[-1])
    assert first["critical_rate"] == pytest.approx(law.rate(exact), rel=5e-3)


def test_the_optimizer_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, loss = network(), nn.CrossEntropyLoss()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(plain)
    x, y = data()
    loss(model(x), y).backward()
    with th.Monitor(loss, budget=None) as monitor:
        monitor.observe(0, model, (x, y), wrapped)
        wrapped.step()
    report = monitor.report()
    assert not report.notes
    assert report.looks[0]["critical_rate"] > 0
    problem = th.Problem(model, loss, (x, y))
    assert th.critical_learning_rate(problem, optimizer=wrapped).value == pytest.approx(
        th.critical_learning_rate(problem, optimizer=plain).value
    )


def test_a_tensorboard_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from theodolite.monitors.adapters.tensorboard import scalar_writer

    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = scalar_writer(tmp_path)
        with th.Monitor(loss, budget=None, writer=writer) as monitor:
            for step, (x, y) in enumerate(loader()):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                monitor.observe(step, model, (x, y), optimizer)
                optimizer.step()
        writer.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert {"theodolite/loss", "theodolite/batch/critical_rate", "theodolite/probe/sharpness"} <= set(
            events.Tags()["scalars"]
        )
        assert len(events.Scalars("theodolite/loss")) == N // BATCH
