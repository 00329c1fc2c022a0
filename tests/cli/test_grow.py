"""`theodolite grow`: folders that load, trials that choose, that are interrupted and go on, and one line for bad words."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from theodolite.cli import main

transformers = pytest.importorskip("transformers")

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
TRIAL = ("--data", "train.txt", "--validation", "valid.txt", "--lr", "0.01", "--batch-size", "2", "--samples", "8")
THREE = ("small", "--layers", "3", "--strategies", "last,identity,0,1,1/random", "--lag", "4")


def text(words: int, seed: int) -> str:
    """Words of random letters: two seeds have no stretch in common."""
    places = torch.randint(26, (words, 5), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join("".join(LETTERS[place] for place in word) for word in places)


def tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<unk>": len(LETTERS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Llama of two layers with its tokenizer and its optimizer after two steps, a GPT-2 without, and two texts."""
    folder = tmp_path_factory.mktemp("grow")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=29, num_hidden_layers=2, **sizes))
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == more]} for more in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.003)
    for _ in range(2):
        ids = torch.randint(28, (2, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "small")
    tokenizer().save_pretrained(folder / "small")
    torch.save(optimizer.state_dict(), folder / "small" / "optimizer.pt")
    settings = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).save_pretrained(folder / "gpt2")
    (folder / "train.txt").write_text(text(400, 0))
    (folder / "valid.txt").write_text(text(100, 1))
    (folder / "part.txt").write_text(text(400, 0)[300:900])
    for name, entry in (("coded", {"auto_map": {"AutoModel": "x.Y"}}), ("quantised", {"quantization_config": {"bits": 4}})):
        (folder / name).mkdir()
        written = json.loads((folder / "small" / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**written, **entry}))
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text((folder / "small" / "config.json").read_text())
    return folder


@pytest.fixture(autouse=True)
def here(files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", list(sys.path))


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["grow", *arguments])
    return int(ended.value.code or 0)


def loaded(folder: str):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        return model, model(input_ids=ids, labels=ids)


def test_one_strategy_needs_no_data(files, capsys):
    assert call("small", "--layers", "4", "--strategies", "identity", "--out", "alone") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 layers have become 4 by 0,0,1,1/identity: ")
    assert lines[-1] == "The grown model is in alone, the page is alone/index.html"
    (small, before), (grown, after) = loaded("small"), loaded("alone")
    assert len(grown.model.layers) == 4
    torch.testing.assert_close(after.logits, before.logits, atol=1e-5, rtol=0)
    assert torch.equal(grown.model.layers[3].mlp.up_proj.weight, small.model.layers[1].mlp.up_proj.weight)
    record = json.loads((files / "alone" / "growth.json").read_text())
    assert (record["operator"], record["lag"], record["trial"]) == ("0,0,1,1/identity", 0, [])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (files / "alone" / name).read_bytes() == (files / "small" / name).read_bytes()
    assert not (files / "alone" / "optimizer").exists()
    assert not (files / "alone" / "optimizer.pt").exists()
    assert '<p class="kicker">growing</p>' in (files / "alone" / "index.html").read_text(encoding="utf-8")


def test_the_loss_before_any_step_where_there_is_text(capsys):
    words = ("--strategies", "last", "--validation", "valid.txt", "--data", "train.txt", "--json")
    assert call("small", "--layers", "3", *words, "--out", "told") == 0
    assert "that of the small model" in json.loads(capsys.readouterr().out)["verdict"]


def test_a_trial_chooses_and_its_state_goes_on(files, capsys):
    words = (*TRIAL[:4], *TRIAL[6:], "--optimizer-state", "small/optimizer.pt")
    assert call(*THREE, *words, "--out", "tried", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("Grow by ")
    assert {row["operator"] for row in found["trial"]} == {"1/1/copy", "0,1,1/identity", "0,1,1/random", "small"}
    assert {f["label"] for f in found["findings"]} >= {"short trial"}
    assert not (files / "tried" / "search").exists()
    model, _ = loaded("tried")
    assert len(model.model.layers) == 3
    # The state on disk is in the order of the parameters, in the Trainer's two groups: three of four steps are copies or old.
    from theodolite.cli.loading.growing import optimizer_of

    optimizer = optimizer_of(model, "adamw", None, files / "tried" / "optimizer" / "checkpoint.safetensors")
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        sum((p.ndim > 1) == more for p in model.parameters()) for more in (True, False)
    ]
    assert {int(state["step"]) for state in optimizer.state.values()} <= {4, 6}
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    page = (files / "tried" / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg id=") == 1
    assert all(title in page for title in ("Every operator", "The trial", "At equal FLOPs", "The grown model"))
    # It goes on from there, one layer deeper.
    state = "tried/optimizer/checkpoint.safetensors"
    assert call("tried", "--layers", "4", "--strategies", "last", "--optimizer-state", state, "--out", "deeper") == 0
    assert len(loaded("deeper")[0].model.layers) == 4


def test_lag_0_is_the_loss_right_after_growing(capsys):
    assert call(*THREE[:5], "--lag", "0", *TRIAL, "--out", "at-once", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    losses = {row["operator"]: row["loss"] for row in found["trial"] if row["operator"] != "small"}
    assert found["operator"] == min(losses, key=losses.get)
    assert "right after growing" in found["verdict"]


def test_a_killed_trial_goes_on_to_the_same_choice(files, capsys, monkeypatch):
    from theodolite.measures.growth import runs

    words = (*THREE, *TRIAL, "--json")
    assert call(*words, "--out", "whole") == 0
    whole = json.loads(capsys.readouterr().out)
    save, saves = runs.Run.save, []

    def save_then_die(*arguments):
        save(*arguments)
        saves.append(1)
        if len(saves) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.Run, "save", save_then_die)
    assert call(*words, "--out", "killed") == 130
    assert "the same command with --resume goes on" in capsys.readouterr().err
    monkeypatch.setattr(runs.Run, "save", save)
    assert call(*words, "--out", "killed") == 2
    assert "already holds a search" in capsys.readouterr().err
    assert not (files / "killed" / "config.json").exists()
    assert call(*words, "--out", "killed", "--resume") == 0
    resumed = json.loads(capsys.readouterr().out)
    assert resumed["trial"] == whole["trial"]
    assert (files / "killed" / "model.safetensors").read_bytes() == (files / "whole" / "model.safetensors").read_bytes()


def test_a_dry_run_prices_and_writes_nothing(files, capsys):
    assert call(*THREE, *TRIAL, "--out", "dry", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["candidates"], found["steps"]) == (3, 12)
    assert found["flops"] == pytest.approx(12 * found["step_flops"])
    assert found["baseline_flops"] == found["flops"]
    assert found["bytes"] > 0
    assert found["seconds"] > 0
    assert call("small", "--layers", "3", "--strategies", "last", "--dry-run", "--out", "dry") == 0
    assert capsys.readouterr().out.startswith("No step is taken: 0 FLOPs")
    assert not (files / "dry").exists()


def test_bytes_stand_for_a_tokenizer_that_is_not_there(capsys):
    assert call("gpt2", "--layers", "3", "--strategies", "last,identity", "--lag", "1", *TRIAL, "--out", "bytes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert any("bytes modulo the vocabulary" in note for note in found["notes"])
    assert len(loaded("bytes")[0].transformer.h) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("small", "--layers", "2"), "layers must be above the 2"),
        (("small", "--layers", "5"), "double"),
        (("small", "--layers", "4", "--strategies", "0/3/copy"), "block must divide the 2 new layers: 1, 2"),
        (("small", "--layers", "3", "--strategies", "lats"), "did you mean 'last'?"),
        (("small", "--layers", "3", "--strategies", ","), "--strategies must be all, or operators"),
        (("small", "--layers", "3", "--lag", "soon"), "--lag must be auto"),
        (("small", "--layers", "3"), "--data and --validation are needed"),
        (("small", "--layers", "3", "--data", "train.txt", "--lr", "0.1"), "--validation is needed"),
        (("small", "--layers", "3", *TRIAL[:3], "part.txt", *TRIAL[4:]), "stand in the training text"),
        (("small", "--layers", "3", *TRIAL[:4]), "--lr is needed"),
        (("small", "--layers", "3", *TRIAL[:3], "gone.txt", *TRIAL[4:]), "--validation: there is no file gone.txt"),
        (("small", "--layers", "3", "--strategies", "last", "--optimizer-state", "train.txt"), "train.txt could not be read"),
        (("small", "--layers", "3", "--strategies", "last", "--optimizer-state", "small/model.safetensors"), "no state of an"),
        (("gpt2", "--layers", "3", "--strategies", "last", "--optimizer-state", "small/optimizer.pt"), "--optimizer-state"),
        (("small", "--layers", "3", "--strategies", "last", "--out", "small"), "--out must be another folder"),
        (("small", "--layers", "3", "--strategies", "last", "--out", "gpt2"), "holds a model already"),
        (("coded", "--layers", "3", "--strategies", "last"), "neither fetched nor run"),
        (("quantised", "--layers", "3", "--strategies", "last"), "quantised weights"),
        (("bare", "--layers", "3", "--strategies", "last"), "weights are random"),
        (("nowhere", "--layers", "3"), "nowhere holds no config.json"),
    ],
)
def test_bad_words_are_one_line_and_code_2(words, said, capsys):
    assert call(*words, *(() if "--out" in words else ("--out", "bad"))) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_all_that_diverge_write_no_model(files, capsys):
    words = ("small", "--layers", "3", "--strategies", "last,identity", "--lag", "6", *TRIAL[:4], *TRIAL[6:])
    assert call(*words, "--lr", "1e30", "--optimizer", "sgd", "--no-baseline", "--out", "lost") == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("All 2 ways to grow from 2 to 3 layers diverged after 6 steps: lower the learning rate.")
    assert "No model was written." in captured.err
    assert not (files / "lost" / "config.json").exists()
    assert (files / "lost" / "index.html").exists()
