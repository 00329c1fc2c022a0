"""`load_subject`: the words of the command line become a model, a loss and data that fit one another."""

from __future__ import annotations

from collections.abc import Callable
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
from theodolite.cli.loading.datasets import DEFAULT_SAMPLES, NoTestPartError, Part, Source, from_value, load_data
from theodolite.cli.loading.model_spec import ModelSpec
from theodolite.cli.loading.module_attribute import names_code
from theodolite.cli.loading.optimizers import load_state
from theodolite.data import load
from theodolite.models import build
from theodolite.models.initialisation import seeded
from theodolite.problem import Problem
from theodolite.problem.calling import main_output
from theodolite.results import fields_of
from theodolite.training import train

ALL = 10**9  # samples: whatever there is


@dataclass(frozen=True)
class Subject:
    """What is to be surveyed, and where it came from.

    `loss` is None where the model returns its own. `facts` says what was loaded from where, `notes` what the user must
    know. `population` is the size of the full data where these are a part of it. `optimizer`, `lr` and `problem` are there
    where the user's own code gave them, `optimizer_state` where the checkpoint held one.
    """

    name: str
    model: nn.Module
    loss: Callable[[Any, Any], Tensor] | None
    data: Any
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    population: int | None = None
    optimizer: Optimizer | None = None
    lr: float | None = None
    problem: Problem | None = None
    optimizer_state: dict[str, Any] | None = None


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
        spec = _load_spec(model, data, loss, _Share(samples, seed, part, everything), stored)
        state = None
        if checkpoint is not None:
            state = load_checkpoint(spec.model, checkpoint).optimizer
            fresh = tuple(n for n in spec.notes if not n.startswith("weights are random"))
            spec = replace(spec, facts={**spec.facts, "weights": str(checkpoint)}, notes=fresh)
            if state is not None and spec.optimizer is not None:
                load_state(spec.optimizer, state)
        spec = _with_loss(spec, loss)
        if batch_size is not None:
            spec = replace(spec, data=in_batches(spec.data, batch_size), problem=None)
    title = f"{spec.name} on {spec.data_name}" if spec.data_name else spec.name
    facts = {**spec.facts, "loss": spec.facts.get("loss", losses.name_of(spec.loss))}
    same = fields_of(spec, "model loss data population optimizer lr problem")
    return Subject(title, **same, facts=facts, notes=tuple(dict.fromkeys(spec.notes)), optimizer_state=state)


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


@dataclass(frozen=True)
class _Share:
    """How much of the data is taken, and of which part."""

    samples: int | None
    seed: int
    part: Part
    everything: bool

    def load(self, word: str, default: int = DEFAULT_SAMPLES) -> Source:
        return load_data(word, samples=self.samples, seed=self.seed, default=ALL if self.everything else default, part=self.part)

    def count(self, source: Source | None) -> int | None:
        """Sequences to make of a text, None for the usual number; random ones have no end."""
        return ALL if self.samples is None and self.everything and source is not None else self.samples


def _load_spec(model: str | None, data: str | None, loss: str | None, share: _Share, stored: bool) -> ModelSpec:
    if model is not None and model.startswith("hf:"):
        from theodolite.cli.loading.hugging_face import load_folder

        loaded = load_folder(model, share.seed)
        return _hugging_spec(loaded, None if data is None else share.load(data, 16), share)
    if model is not None and names_code(model):
        return _own_parts(model, data, share)
    from theodolite.cli.loading.built_in_models import BuildRequest, named_model

    source = None if data is None else share.load(data)
    notes: tuple[str, ...] = ()
    if model is None:
        model = "GPT-small" if source is not None and source.text is not None else "F-40^2"
        notes = (f"the network is {model}, because no --model was given",)
    spec = named_model(BuildRequest(model, loss, share.count(source), share.seed, stored), source)
    return replace(spec, notes=(*notes, *spec.notes))


def _hugging_spec(loaded: Any, source: Source | None, share: _Share) -> ModelSpec:
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
    return ModelSpec(
        loaded.model, loaded.name, content, name if source is None else source.name, own_loss=True,
        population=population, facts=facts, notes=(*loaded.notes, *(() if source is None else source.notes), *maker.notes),
    )  # fmt: skip


def _own_parts(target: str, data: str | None, share: _Share) -> ModelSpec:
    """The user's model on the data named, on the data it brought, or on random data if transformers knows its kind."""
    from theodolite.cli.loading.model_spec import own_model

    spec = own_model(target, share.seed)
    hugging = _as_hugging(spec) if spec.own_loss else None
    if data is not None:
        source = share.load(data, 16 if hugging is not None else DEFAULT_SAMPLES)
    elif spec.data is not None:
        source = from_value(spec.data, "its own data", share.samples, share.seed)
    elif hugging is not None:
        source = None
    else:
        raise ValueError(f"--model {target!r} brings no data: name some with --data, or return a dict with the key data.")
    if hugging is not None and (source is None or not source.own):
        made = _hugging_spec(hugging, source, share)
        facts = {**spec.facts, "data": made.facts["data"]}
        return replace(spec, **fields_of(made, "data data_name population notes"), facts=facts)
    assert source is not None
    text = source.content is None
    source = text_for_any_model(spec.model, source, share.count(source)) if text else fit_inputs(spec.model, source)
    untouched = data is None and source.population is None
    return replace(
        spec, data=source.content, data_name="" if data is None else source.name, population=source.population,
        problem=spec.problem if untouched else None, facts={**spec.facts, "data": source.origin}, notes=source.notes,
    )  # fmt: skip


def _as_hugging(spec: ModelSpec) -> Any:
    """The user's model as one of transformers' that we can make batches for, or None."""
    if not hasattr(getattr(spec.model, "config", None), "get_text_config"):
        return None
    from theodolite.cli.loading.hugging_face import HuggingFaceModel, task_of

    task = task_of(type(spec.model).__name__)
    return None if task is None else HuggingFaceModel(spec.model, task, spec.name)


def _with_loss(spec: ModelSpec, word: str | None) -> ModelSpec:
    """The loss by the word, by the builder, by the model itself, or by the targets, in this order."""
    plain = losses.word_of(word)
    if word is not None and spec.own_loss and plain is not None:
        if plain != "cross-entropy":
            raise ValueError(
                f"--loss {word}: {type(spec.model).__name__} computes its own loss. Leave --loss out, or name module:attribute."
            )
        return replace(spec, notes=(*spec.notes, "cross-entropy is computed by the model itself, which knows its labels"))
    if word is None and (spec.loss is not None or spec.own_loss):
        return spec
    target = first_parts(spec.data)[1]
    if word is None:
        chosen, note = losses.inferred(target)
        return replace(spec, loss=chosen, notes=(*spec.notes, note))
    kept = spec.loss if plain == "cross-entropy" and spec.loss is losses.token_cross_entropy else None
    changed = replace(spec, loss=kept or losses.loss_from(word, target), own_loss=False, problem=None)
    if plain in losses.ELEMENTWISE:
        fitted, note = fit_targets(changed.model, changed.data)
        changed = replace(changed, data=fitted, notes=(*changed.notes, *((note,) if note else ())))
    return replace(changed, facts={**changed.facts, "loss": word})


def trial(model: nn.Module, inputs: Any) -> Tensor | None:
    """The output for two samples, in eval mode and without a trace; None where the model refuses them."""
    if not isinstance(inputs, Tensor):
        return None
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            return main_output(model(inputs[:2]))
    except Exception:  # any refusal is reported in full when the survey calls the model
        return None
    finally:
        for module, training in modes:
            module.training = training


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
    return Subject(name="a small network on handwritten digits", model=model, loss=loss, data=data, facts=facts, optimizer=sgd)
