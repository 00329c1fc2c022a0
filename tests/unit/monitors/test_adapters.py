"""The same monitor in a plain loop, on an optimizer, in Lightning, in the Hugging Face Trainer and in `th.train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import theodolite as th
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
    with pytest.raises(ValueError, match="own loss"):
        MonitorCallback(th.Monitor(nn.CrossEntropyLoss()))


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
