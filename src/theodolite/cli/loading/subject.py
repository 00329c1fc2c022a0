"""`Subject`: a model, a loss and data that fit one another, and how `load_subject` makes it of the words of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from theodolite.arguments import positive_integers
from theodolite.cli.loading import losses
from theodolite.cli.loading import text as tokens
from theodolite.cli.loading.batches import first_parts, in_batches, with_inputs, with_targets
from theodolite.cli.loading.checkpoints import load_checkpoint
from theodolite.cli.loading.datasets import DEFAULT_SAMPLES, NoTestPartError, Part, Share, Source, from_value, load_data
from theodolite.cli.loading.module_attribute import call, load_attribute, names_code
from theodolite.cli.loading.optimizers import check_rate, load_state
from theodolite.data import load
from theodolite.models import build
from theodolite.models.initialisation import seeded
from theodolite.problem import Batch, Problem
from theodolite.problem.calling import main_output
from theodolite.problem.state_guard import cuda_devices, random_states_kept
from theodolite.results import fields_of
from theodolite.text import listed, nearest
from theodolite.training import train
from theodolite.training.fleets.recorder import eval_mode

SEQUENCES = 16  # for a model of transformers, where no number was given
KEYS = ("model", "loss", "data", "optimizer", "lr")
FORMS = "a torch.nn.Module, (model, loss), (model, loss, optimizer), a dict with the keys " + ", ".join(KEYS) + ", or a Problem"


@dataclass(frozen=True)
class Subject:
    """What is to be surveyed, and where it came from.

    `loss` is None and `own_loss` true where the model returns its own. `facts` says what was loaded from where, `notes` what the
    user must know. `population` is the size of the full data where these are a part of it. `optimizer`, `lr` and `problem` are
    there where the user's own code gave them, `optimizer_state` where the checkpoint held one, `valid` where validation data
    belong to it, `columns` and `labels` where a table named its inputs and classes, `why_loss` where nobody named the loss.
    """

    model: nn.Module
    name: str
    data: Any = None
    data_name: str = ""
    loss: Any = None
    own_loss: bool = False
    optimizer: Optimizer | None = None
    lr: float | None = None
    problem: Problem | None = None
    population: int | None = None
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    optimizer_state: dict[str, Any] | None = None
    valid: Any = None
    columns: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    why_loss: str = ""


def load_subject(
    model: str | None,
    data: str | None,
    loss: str | None = None,
    *,
    checkpoint: str | Path | None = None,
    samples: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    pretrained: bool = True,
    part: Part = "train",
    everything: bool = False,
) -> Subject:
    """The model, loss and data that the words name; the global random state is left alone.

    Args:
        model: a built-in name, `module:attribute`, or `hf:FOLDER`; None is a small network that suits the data.
        data: the name of a data set, `module:attribute`, or a file; None is what the model word brings or what suits it.
        loss: `cross-entropy`, `mse`, `bce`, `l1` or `module:attribute`; None is the model's own or follows from the targets.
        checkpoint: weights for the model, .safetensors or a file of torch's.
        samples: how many examples (sequences) to take, a seeded choice; None is as many as a survey needs, or `everything`.
        batch_size: cut data given as tensors into batches.
        part: of data that have a training and a test part, which one; NoTestPartError where there is none.
        pretrained: whether ResNet20 and stories260k take their stored weights where these are there.
    """
    counts = {"--samples": samples, "--batch-size": batch_size}
    positive_integers(**{option: count for option, count in counts.items() if count is not None})
    losses.word_of(loss)  # a wrong word shows before anything is loaded
    stored = pretrained and checkpoint is None
    with seeded(seed):
        found = _load_parts(model, data, loss, Share(samples, seed, part, everything), stored)
        if checkpoint is not None:
            state = load_checkpoint(found.model, checkpoint).optimizer
            fresh = tuple(n for n in found.notes if not n.startswith("weights are random"))
            facts = {**found.facts, "weights": str(checkpoint)}
            found = replace(found, facts=facts, notes=fresh, optimizer_state=state)
            if state is not None and found.optimizer is not None:
                load_state(found.optimizer, state)
        found = _with_loss(found, loss)
        if batch_size is not None:
            found = replace(found, data=in_batches(found.data, batch_size), problem=None)
    found = replace(found, data=_with_names(found))
    title = f"{found.name} on {found.data_name}" if found.data_name else found.name
    facts = {**found.facts, "loss": found.facts.get("loss", losses.name_of(found.loss))}
    return replace(found, name=title, facts=facts, notes=tuple(dict.fromkeys(found.notes)))


def _with_names(found: Subject) -> Any:
    """Tables get back the names of their columns and classes: the survey speaks in them."""
    names, labels = found.columns, found.labels
    if names is None:
        return found.data
    import pandas

    def frame(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == len(names)
        return pandas.DataFrame(x.numpy(), columns=list(names)) if fits else x

    def series(y: Tensor) -> Any:
        fits = labels is not None and y.ndim == 1 and not y.is_floating_point()
        return pandas.Series(pandas.Categorical.from_codes(y.tolist(), pandas.Index(labels or ()))) if fits else y

    return with_inputs(with_targets(found.data, series), frame)


def load_test_part(load: Callable[[str, Part], Subject], test: str | None, data: str | None) -> Subject | None:
    """What --test names, whole where it has no parts; else the test part of --data; None where that has none.

    `load` gives a part of the data that a word names.
    """
    word = test or data
    if word is None:
        return None
    try:
        return load(word, "test")
    except NoTestPartError:
        return None if test is None else load(word, "train")


def _load_parts(model: str | None, data: str | None, loss: str | None, share: Share, stored: bool) -> Subject:
    if model is not None and model.startswith("hf:"):
        from theodolite.cli.loading.hugging_face import load_folder

        loaded = load_folder(model, share.seed)
        return _hugging_subject(loaded, None if data is None else load_data(data, share, SEQUENCES), share)
    if model is not None and names_code(model):
        return _own_parts(model, data, share)
    from theodolite.cli.loading.built_in_models import BuildRequest, named_model

    source = None if data is None else load_data(data, share)
    notes: tuple[str, ...] = ()
    if model is None:
        model = "GPT-small" if source is not None and source.text is not None else "F-40^2"
        notes = (f"the network is {model}, because no --model was given",)
    built = named_model(BuildRequest(model, loss, share.count(source), share.seed, stored), source)
    return replace(built, notes=(*notes, *built.notes))


def _hugging_subject(loaded: Any, source: Source | None, share: Share) -> Subject:
    from theodolite.cli.loading.hugging_face import HuggingData

    maker = HuggingData(loaded, share.count(source), share.seed)
    content, population = maker.batches(source)
    kind = type(loaded.model).__name__
    facts = {
        "model": f"{kind} from {loaded.folder or loaded.weights}",
        "weights": loaded.weights,
        "data": f"random, seed {share.seed}" if source is None else source.origin,
    }
    name = "random images" if loaded.task == "images" else "random tokens"
    return Subject(
        loaded.model, loaded.name, content, name if source is None else source.name, own_loss=True,
        population=population, facts=facts, notes=(*loaded.notes, *(() if source is None else source.notes), *maker.notes),
    )  # fmt: skip


def _own_parts(target: str, data: str | None, share: Share) -> Subject:
    """The user's model on the data named, on the data it brought, or on random data if transformers knows its kind."""
    own = own_model(target, share.seed)
    hugging = _as_hugging(own) if own.own_loss else None
    if data is not None:
        source = load_data(data, share, SEQUENCES if hugging is not None else DEFAULT_SAMPLES)
    elif own.data is not None:
        source = from_value(own.data, "its own data", Share(share.samples, share.seed))
    elif hugging is not None:
        source = None
    else:
        raise ValueError(f"--model {target!r} brings no data: name some with --data, or return a dict with the key data.")
    if hugging is not None and (source is None or not source.own):
        made = _hugging_subject(hugging, source, share)
        facts = {**own.facts, "data": made.facts["data"]}
        return replace(own, **fields_of(made, "data data_name population notes"), facts=facts)
    assert source is not None
    text = source.content is None
    source = text_for_any_model(own.model, source, share.count(source)) if text else fit_inputs(own.model, source)
    untouched = data is None and source.population is None
    return replace(
        own, data=source.content, data_name="" if data is None else source.name, population=source.population,
        problem=own.problem if untouched else None, facts={**own.facts, "data": source.origin}, notes=source.notes,
        columns=source.columns, labels=source.labels,
    )  # fmt: skip


def own_model(target: str, seed: int) -> Subject:
    """The module, problem or builder that `module:attribute` names; a builder is called, under the seed."""
    found = load_attribute(target, "--model", seed)
    built = isinstance(found, type) or (callable(found) and not isinstance(found, nn.Module))
    if built:
        found = call(target, found, seed)
    subject = _understood(target, found)
    facts = {
        "model": f"{type(subject.model).__name__} from {target}",
        "weights": f"as {target} {'made' if built else 'holds'} them",
    }
    return replace(subject, facts=facts)


def returns_own_loss(model: nn.Module) -> bool:
    """Whether a model takes labels and so returns its own loss, as those of Hugging Face do."""
    parameters = inspect.signature(model.forward).parameters
    loose = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "labels" in parameters or (loose and hasattr(model, "config") and hasattr(model, "base_model"))


def _understood(target: str, found: Any) -> Subject:
    name = target.rpartition(":")[2]
    if isinstance(found, Problem):
        return _from_problem(name, found)
    if isinstance(found, nn.Module):
        return _checked(target, name, {"model": found})
    if isinstance(found, Mapping):
        odd = [key for key in found if key not in KEYS]
        if odd:
            near = listed(nearest(str(odd[0]), KEYS, 1))
            raise ValueError(
                f"--model {target!r} gave a dict with the key {odd[0]!r}; the keys are {listed(KEYS)}. Nearest: {near}."
            )
        return _checked(target, name, dict(found))
    if isinstance(found, tuple | list) and len(found) in (2, 3):
        return _checked(target, name, dict(zip(("model", "loss", "optimizer"), found, strict=False)))
    raise ValueError(f"--model {target!r} must give {FORMS}. It gave a {type(found).__name__}.")


def _checked(target: str, name: str, parts: dict[str, Any]) -> Subject:
    model, loss, optimizer, lr = (parts.get(key) for key in ("model", "loss", "optimizer", "lr"))
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {target!r} must give {FORMS}. Its model is a {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise ValueError(
            f"--model {target!r}: the loss must be a function (output, target) -> scalar or None. It is a {type(loss).__name__}."
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"--model {target!r}: the optimizer must be a torch.optim.Optimizer. It is a {type(optimizer).__name__}."
        )
    check_rate(lr)
    own = loss is None and returns_own_loss(model)
    return Subject(model, name, parts.get("data"), loss=loss, own_loss=own, optimizer=optimizer, lr=lr)


def _from_problem(name: str, problem: Problem) -> Subject:
    own = problem.loss_function is None
    data = [_raw(batch, own_loss=own) for batch in problem.data]
    return Subject(problem.model, name, data, "its own", loss=problem.loss_function, own_loss=own, problem=problem)


def _raw(batch: Batch, *, own_loss: bool) -> Any:
    """A parsed batch in a form that `Problem` would read the same way again."""
    if own_loss and not batch.args:
        return dict(batch.kwargs)
    if batch.target is None:
        return batch.args[0]
    return (*batch.args, batch.target) if batch.args else (dict(batch.kwargs), batch.target)


def _as_hugging(own: Subject) -> Any:
    """The user's model as one of transformers' that we can make batches for, or None."""
    if not hasattr(getattr(own.model, "config", None), "get_text_config"):
        return None
    from theodolite.cli.loading.hugging_face import HuggingFaceModel, task_of

    task = task_of(type(own.model).__name__)
    return None if task is None else HuggingFaceModel(own.model, task, own.name)


def _with_loss(found: Subject, word: str | None) -> Subject:
    """The loss by the word, by the builder, by the model itself, or by the targets, in this order."""
    plain = losses.word_of(word)
    if word is not None and found.own_loss and plain is not None:
        if plain != "cross-entropy":
            raise ValueError(
                f"--loss {word}: {type(found.model).__name__} computes its own loss. Leave --loss out, or name module:attribute."
            )
        return replace(found, notes=(*found.notes, "cross-entropy is computed by the model itself, which knows its labels"))
    if word is None and (found.loss is not None or found.own_loss):
        return found
    target = first_parts(found.data)[1]
    if word is None:
        chosen, note = losses.inferred(target)
        return replace(found, loss=chosen, notes=(*found.notes, note), why_loss=note)
    kept = found.loss if plain == "cross-entropy" and found.loss is losses.token_cross_entropy else None
    changed = replace(found, loss=kept or losses.loss_from(word, target), own_loss=False, problem=None)
    if plain in losses.ELEMENTWISE:
        fitted, note = fit_targets(changed.model, changed.data)
        changed = replace(changed, data=fitted, notes=(*changed.notes, *((note,) if note else ())))
    return replace(changed, facts={**changed.facts, "loss": word})


def trial(model: nn.Module, inputs: Any) -> Tensor | None:
    """The output for two samples, in eval mode and without a trace; None where the model refuses them."""
    if not isinstance(inputs, Tensor):
        return None
    try:
        with torch.no_grad(), random_states_kept(cuda_devices(model)), eval_mode(model):
            return main_output(model(inputs[:2]))
    except Exception:  # any refusal is reported in full when the survey calls the model
        return None


def fit_inputs(model: nn.Module, source: Source) -> Source:
    """Flat images for a model that wants them; other data as it is."""
    if source.own:
        return source
    x = first_parts(source.content)[0]
    if not isinstance(x, Tensor) or x.ndim < 3 or trial(model, x) is not None or trial(model, x.flatten(1)) is None:
        return source
    flat = with_inputs(source.content, lambda t: t.flatten(1))
    return replace(source, content=flat, notes=(*source.notes, "the images were flattened, because the model takes vectors"))


def fit_targets(model: nn.Module, data: Any) -> tuple[Any, str]:
    """Targets for a loss that compares number by number: class labels one-hot, numbers as a column where there is one output."""
    inputs, target = first_parts(data)
    output = trial(model, inputs)
    if not isinstance(target, Tensor) or output is None:
        return data, ""
    kind, columns = output.dtype, output.shape[-1]
    if target.ndim == 1 and output.ndim == 2 and columns > 1 and not target.is_floating_point():
        return with_targets(data, lambda t: F.one_hot(t, columns).to(kind)), "class labels were turned into vectors of 0 and 1"
    if target.ndim == 1 and output.ndim == 2 and columns == 1:
        return with_targets(data, lambda t: t.unsqueeze(1).to(kind)), "the targets were turned into one column"
    if not target.is_floating_point():
        return with_targets(data, lambda t: t.to(kind)), "the targets were turned into real numbers"
    return data, ""


def text_for_any_model(model: nn.Module, source: Source, samples: int | None) -> Source:
    """Text as bytes for a network with an embedding: it is to predict the next one."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None or source.text is None:
        raise ValueError(f"--data {source.name} is text, but the model has no embedding of tokens. Name data of numbers.")
    count = samples or tokens.TEXT_SEQUENCES
    encode = tokens.byte_encoder(embedding.num_embeddings)
    ids, population = tokens.sequences(source.text.train, encode, tokens.LENGTH, count, source.name)
    note = "tokens are bytes modulo the vocabulary, and each is to predict the next: the model's own tokenizer is not known"
    return replace(source, content=tokens.next_tokens(ids), population=population, notes=(*source.notes, note))


STEPS, RATE, BATCH = 400, 0.1, 64


def embedded_example(seed: int = 0) -> Subject:
    """A 64-48-48-10 network on digits after a few hundred steps of plain SGD, with the optimizer it was trained by."""
    digits = load("digits").scaled().flat()
    data = (digits.x_train, digits.y_train)
    model = build("F-48^2", inputs=digits.x_train.shape[1], seed=seed)
    loss = nn.CrossEntropyLoss()
    sgd = SGD(model.parameters(), lr=RATE)
    trace = train(model, loss, data, sgd, steps=STEPS, batch_size=BATCH, seed=seed)
    facts = {
        "model": "F-48^2, fully connected, ReLU",
        "data set": f"scikit-learn digits, {len(digits.y_train)} training samples",
        "training": f"{STEPS} steps of SGD at {RATE:g} in batches of {BATCH}, loss {trace.loss[0]:.3g} to {trace.loss[-1]:.3g}",
    }
    return Subject(
        name="a small network on handwritten digits", model=model, loss=loss, data=data, valid=(digits.x_test, digits.y_test),
        facts=facts, optimizer=sgd,
    )  # fmt: skip
