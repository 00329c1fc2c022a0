"""Growing a model: beside loading it, in memory, and a trial beside the bare steps that it takes."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import theodolite as th
from harness import Row, Settings, Work, race, try_row
from memory import usage
from theodolite.measures.growth.validation import part_losses, validation_problem
from theodolite.models.pretrained import quiet
from theodolite.problem.tensors import bytes_of

RATE, BATCH = 1e-3, 8


def _llama(settings: Settings) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    dim, layers = settings.pick(512, 32), settings.pick(8, 2)
    sizes = {"hidden_size": dim, "intermediate_size": 3 * dim, "num_attention_heads": 8, "num_hidden_layers": layers}
    with quiet():
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=settings.pick(8000, 50), **sizes)).eval()


def grow_time(settings: Settings) -> Iterator[Row]:
    """A Llama of 8 layers and 512 dimensions grown to 16, in units of loading the small one from its folder; the aim is 3.
    mergekit's passthrough reads and writes the same layers on disk."""
    import transformers as hf

    model = _llama(settings)
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder, quiet():
        model.save_pretrained(folder)  # type: ignore[operator]
        load = partial(hf.AutoModelForCausalLM.from_pretrained, folder)
        work = f"{layers} layers to {2 * layers}, in times of loading"
        for who, make in (("ours, copy", "last"), ("ours, identity", "identity"), ("mergekit passthrough", None)):
            row = Row("grow-time", work, who)
            one: Work = (
                partial(_passthrough, folder, layers) if make is None else partial(th.grow, model, make, layers=2 * layers)
            )
            yield try_row(row, partial(_timed, unit=load, work=one, settings=settings))


def _timed(row: Row, *, unit: Work, work: Work, settings: Settings) -> None:
    work()
    row.charge(race(unit, {"": work}, settings)[""])
    row.say(f"{1000 * row.details['gradient_seconds']:.3g} ms to load")


def _passthrough(folder: str, layers: int) -> None:
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    slices = [{"sources": [{"model": folder, "layer_range": [0, layers]}]}] * 2
    text = yaml.safe_dump({"merge_method": "passthrough", "dtype": "float32", "slices": slices})
    with tempfile.TemporaryDirectory() as out:
        run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), out, MergeOptions(copy_tokenizer=False))
        assert (Path(out) / "config.json").exists()


def grow_memory(settings: Settings) -> Iterator[Row]:
    """The most that `th.grow` takes beside the old model, over the new model and one block; the aim is 1."""
    for who, name in (("ours, copy", "last"), ("ours, identity", "identity"), ("ours, random", "random-top")):
        yield try_row(Row("grow-memory", "peak over new model and a block", who), partial(_peak, name=name, settings=settings))


def _peak(row: Row, *, name: str, settings: Settings) -> None:
    model: Any = _llama(settings)
    used, grown = usage(partial(th.grow, model, name, layers=2 * model.config.num_hidden_layers))
    allowed = bytes_of(list(grown.model.parameters())) + bytes_of(list(model.model.layers[0].parameters()))
    row.memory = used.peak / allowed
    row.say(f"peak {used.peak / 2**20:.4g} MiB, allowed {allowed / 2**20:.4g} MiB")


# Trials


def _task(settings: Settings) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A character GPT of width 64 and random tokens: the time does not depend on what they say."""
    torch.manual_seed(0)
    dim = settings.pick(64, 8)
    model = th.models.gpt(vocabulary=65, context=64, dim=dim, depth=4, seed=0)
    ids = torch.randint(65, (settings.pick(1000, 100), 65))
    rows = settings.pick(128, 16)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())

    return model, loss, (ids[rows:, :-1], ids[rows:, 1:]), (ids[:rows, :-1], ids[:rows, 1:])


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def grow_trial(settings: Settings) -> Iterator[Row]:
    """A trial of four operators, validated every 50 steps, in bare steps of the same grown models and their validations; the aim
    is 1.1."""
    steps = settings.pick(100, 4)
    row = Row("grow-trial", f"4 operators, {steps} steps each at batch {BATCH}, in bare steps", "ours")
    yield try_row(row, partial(_trial, steps=steps, settings=settings))


def _trial(row: Row, *, steps: int, settings: Settings) -> None:
    model, loss, train, valid = _task(settings)
    names = ["last", "interleave", "random-top", "identity"]
    every = max(1, steps // 2)
    options: dict[str, Any] = {"layers": 6, "operators": names, "lag": steps, "every": every, "batch_size": BATCH}

    def trial() -> None:
        th.landscape_aware_growth(
            model, loss, train, _adamw(model), validation=valid, baselines=(), prune=False, progress=False, **options
        )  # fmt: skip

    small = [th.grow(model, name, layers=6, inputs=train[0][:2]).model for name in names]

    def bare() -> None:
        for one in small:
            grown = copy.deepcopy(one)
            optimizer = _adamw(grown)
            problem = validation_problem(grown, loss, valid, "labels")
            for step in range(steps):
                if step % every == 0:
                    part_losses(problem, grown)
                rows = slice(step * BATCH % 512, step * BATCH % 512 + BATCH)
                optimizer.zero_grad()
                loss(grown(train[0][rows]), train[1][rows]).backward()
                optimizer.step()
            part_losses(problem, grown)

    row.charge(race(bare, {"": trial}, settings)[""])
    row.say(f"{row.details['gradient_seconds']:.3g} s of bare steps")


def grow_prune(settings: Settings) -> Iterator[Row]:
    """What dropping hopeless candidates saves of the steps of a trial; the goal is 40 %."""
    yield try_row(
        Row("grow-prune", "share of the steps that are taken, all operators", "ours"), partial(_pruned, settings=settings)
    )


def _pruned(row: Row, *, settings: Settings) -> None:
    model, loss, _, _ = _task(settings)
    # Something to learn: the second half of each row repeats the first.
    ids = torch.randint(65, (settings.pick(1500, 200), 32)).repeat(1, 2)
    train, valid = ((part[:, :-1], part[:, 1:]) for part in (ids[100:], ids[:100]))
    optimizer, steps = _adamw(model), settings.pick(300, 4)
    th.train(model, loss, train, optimizer, steps=steps, batch_size=BATCH, progress=False)
    lag = settings.pick(60, 4)
    choice = th.landscape_aware_growth(
        model, loss, train, optimizer, layers=6, lag=lag, every=max(1, lag // 10), first=steps, batch_size=BATCH,
        validation=valid, baselines=(), progress=False,
    )  # fmt: skip
    all_steps = len(choice.operators) * choice.lag
    row.ratio = choice.trial_steps / all_steps
    row.say(f"{choice.trial_steps} of {all_steps} steps: {100 * (1 - row.ratio):.0f} % saved; best {choice.best.name}")
