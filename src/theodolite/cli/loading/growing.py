"""What `theodolite grow` reads and writes: a Hugging Face folder, its optimizer's state, text, and the grown folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite import data as data_sets
from theodolite.cli.loading.batches import in_batches, rows_of, size_of
from theodolite.cli.loading.checkpoints import read_optimizer_state
from theodolite.cli.loading.datasets import NoTestPartError, Share, Source, load_data
from theodolite.cli.loading.hugging_face import HuggingData, HuggingFaceModel, load_folder
from theodolite.cli.loading.optimizers import make_optimizer
from theodolite.files import write_whole
from theodolite.models.pretrained import quiet
from theodolite.training.interruption import save_state

#: Tokens of a sequence at most, where nobody says so.
CONTEXT = 512
#: Pieces of the validation text that are looked for in the training text, characters of each, and the share from which on it is
#: no accident.
PIECES, PIECE, SHARED = 50, 120, 0.2
#: What belongs to a tokenizer or to the reading of images, by its name; all else is written by the model.
_BESIDE = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|merges|spiece|sentencepiece.*|.*chat_template.*|preprocessor_config|"
    r"processor_config)\.(json|txt|model|jinja|bpe\.model)"
)
_STRATEGY = re.compile(r"[\dR]+(?:,[\dR]+)+/\w+|[^,]+")


def strategies_of(text: str) -> str | list[str]:
    """Growth operators with commas between them; a list of layers has commas too.

    >>> strategies_of("last,8/4/copy, 0,1,R,2/copy"), strategies_of("all")
    (['last', '8/4/copy', '0,1,R,2/copy'], 'all')
    """
    if text.strip() == "all":
        return "all"
    found = [name.strip() for name in _STRATEGY.findall(re.sub(r",\s+", ",", text)) if name.strip()]
    if not found:
        raise ValueError(f"--strategies must be all, or operators as in last,identity or 8/4/copy. Got {text!r}.")
    return found


def read_folder(path: Path, seed: int) -> HuggingFaceModel:
    """The model in a folder; refused where its weights are quantised, missing in part, or need code of the folder's own."""
    config = path / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{path} holds no config.json. Name a folder made by save_pretrained; nothing is downloaded.")
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} is not JSON: {error}.") from error
    if isinstance(settings, dict) and settings.get("quantization_config"):
        raise ValueError(
            f"{path} holds quantised weights, which cannot be trained. Name a folder with the weights in full or half precision, "
            "grow that, and quantise the grown model."
        )
    try:
        loaded = load_folder(f"hf:{path}", seed)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--model hf:")) from error
    if lost := [note for note in loaded.notes if "random" in note]:
        raise ValueError(f"{path}: {lost[0]}. Growing is for a trained model.")
    return loaded


def optimizer_of(model: nn.Module, word: str, lr: float | None, state_file: Path | None) -> Optimizer:
    """The optimizer of the small model, with the state in a file where one is given."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if state_file is None:
        if lr is None:
            raise ValueError(
                "--lr is needed: the learning rate at which training goes on. Or give --optimizer-state, which has it."
            )
        made = make_optimizer(word, trained, lr)
    else:
        state = read_optimizer_state(state_file)
        made = make_optimizer(word, _grouped(trained, state, state_file), lr, state=state)
    assert made is not None
    return made


def _grouped(parameters: Sequence[nn.Parameter], state: Mapping[str, Any], file: Path) -> Any:
    """The parameters in as many groups as a state has: one, or the two of the Trainer, weights that decay and all others."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    decayed, others = ([p for p in parameters if (p.ndim > 1) == more] for more in (True, False))
    if sizes == [len(decayed), len(others)]:
        return [{"params": decayed}, {"params": others}]
    if len(sizes) == 1:
        return parameters
    raise ValueError(
        f"--optimizer-state {file} has groups of {', '.join(map(str, sizes))} parameters. Known are one group of all "
        f"{len(parameters)}, and the Trainer's two, {len(decayed)} and {len(others)}. In Python th.grow takes any optimizer."
    )


# Text


@dataclass(frozen=True)
class Streams:
    """Training batches in their order, one validation batch, and what they are."""

    training: Any
    validation: Any
    facts: dict[str, str]
    notes: tuple[str, ...]


def read_streams(
    loaded: HuggingFaceModel,
    data: str,
    validation: str | None,
    *,
    batches: int,
    batch_size: int,
    samples: int,
    context: int | None,
    seed: int,
) -> Streams:
    """So many batches of a text, spread over it and shuffled, and sequences of another text that it does not hold."""
    source = load_data(data, Share(None, seed))
    held_out = _held_out(data, validation, seed)
    if source.text is not None and held_out.text is not None:
        refuse_inside(source.text, held_out.text)
    length = context or CONTEXT
    train, valid = (HuggingData(loaded, n, seed, length) for n in (batches * batch_size, samples))
    training, _ = train.batches(source)
    facts = {"training text": source.origin, "validation text": held_out.origin}
    if not source.own:
        (whole,) = training
        facts["tokens of a sequence"] = str(train.length)
        order = torch.randperm(size_of(whole), generator=torch.Generator().manual_seed(seed))
        training = in_batches(rows_of(whole, order), batch_size)
        training = training[: max(1, size_of(whole) // batch_size)]  # whole ones
    kept, _ = valid.batches(held_out)
    return Streams(training, kept, facts, tuple(dict.fromkeys((*train.notes, *valid.notes))))


def _held_out(data: str, validation: str | None, seed: int) -> Source:
    """What --validation names, its test part where it has one; else the test part of the data."""
    word = validation or data
    try:
        return load_data(word, Share(None, seed, "test"))
    except NoTestPartError as error:
        if validation is None:
            raise ValueError(
                f"--validation is needed: text that --data {data} does not hold. Keep some of it back before training."
            ) from error
        return load_data(word, Share(None, seed))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(str(error).replace("--data", "--validation", 1)) from error


def refuse_inside(training: data_sets.Text, validation: data_sets.Text) -> None:
    """Raise where much of the validation text stands in the training text, letter by letter."""
    text, known = validation.train, training.train
    starts = range(0, max(1, len(text) - PIECE), max(1, len(text) // PIECES))
    pieces = [text[start : start + PIECE] for start in starts]
    found = sum(piece in known for piece in pieces)
    if found > SHARED * len(pieces):
        raise ValueError(
            f"--validation: {found} of {len(pieces)} pieces of its text stand in the training text, so that its loss says "
            "nothing about new text. Keep some text back before training, and give that."
        )


# The grown folder


def check_target(folder: Path, out: Path) -> None:
    """Refuse to write over a model."""
    if out.resolve() == folder.resolve():
        raise ValueError(f"--out must be another folder than {folder}, which holds the model that is grown.")
    if (out / "config.json").exists():
        raise ValueError(f"--out {out} holds a model already. Name another folder.")


def write_folder(source: Path, out: Path, model: Any, optimizer: Optimizer | None, step: int, record: Mapping[str, Any]) -> None:
    """The model as transformers writes it, the tokenizer, the state of the optimizer, and growth.json as the last of all."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".grown-", dir=out) as part, quiet():
        model.save_pretrained(part)
        for path in sorted(source.iterdir()):
            if path.is_file() and _BESIDE.fullmatch(path.name):
                shutil.copyfile(path, Path(part) / path.name)
        for path in sorted(Path(part).iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, out / path.name)
    if optimizer is not None and optimizer.state:
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        save_state(out / "optimizer", {"optimizer": _plain_state(optimizer), "parameters": groups, "step": step})
    write_whole(out / "growth.json", json.dumps(record, indent=1, default=str).encode())


def _plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state without what no file holds: functions among the settings."""
    state = optimizer.state_dict()
    plain = (bool, int, float, str, list, tuple, Tensor, type(None))
    groups = [{key: value for key, value in group.items() if isinstance(value, plain)} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": groups}
