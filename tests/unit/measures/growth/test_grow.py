"""`grow` on plain models: layers, optimizers, what is kept, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite.measures.growth import GrowthOperator, find_body
from theodolite.testing import ResultContract, model_state, same

IDS = torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(0))


def small_gpt(**more):
    return th.models.gpt(20, 8, 16, 4, 2, seed=0, **more).double()


def next_token(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(model, make=torch.optim.AdamW, steps=3, **settings):
    """The model after a few steps, so that nothing is zero or equal by its initialisation, and its optimizer."""
    optimizer = make(model.parameters(), lr=1e-2, **settings)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    next_token(model(IDS), IDS.roll(-1, 1)).backward()
    optimizer.step()


def operator(init="copy", start=1, block=1, layers=4, added=2):
    return GrowthOperator(start, block, init, layers=layers, added=added)


@pytest.mark.parametrize("init", ["copy", "random", "identity"])
def test_check_04_old_layers_are_equal_and_not_shared(init):
    model, _ = trained(small_gpt())
    grown = th.grow(model, operator(init), inputs=IDS).model
    old = [i for i, origin in enumerate(operator(init).layer_map()) if not origin.is_new]
    for before, place in zip(model.layers, old, strict=True):
        for p, q in zip(before.parameters(), grown.layers[place].parameters(), strict=True):
            assert torch.equal(p, q)
    pointers = [p.data_ptr() for m in (model, grown) for p in m.parameters()]
    assert len(set(pointers)) == len(pointers)
    with torch.no_grad():
        grown.layers[2].mlp.up.weight.zero_()  # a new layer
    assert grown.layers[1].mlp.up.weight.abs().min() > 0


@pytest.mark.parametrize("init", ["copy", "random", "identity", "scaled"])
def test_check_05_parameters_rise_by_k_blocks(init):
    model = small_gpt()
    block = sum(p.numel() for p in model.layers[0].parameters())
    grown = th.grow(model, operator(init), inputs=IDS)
    assert grown.parameters - grown.parameters_before == 2 * block
    assert len({id(p) for p in grown.model.parameters()}) == len({id(p) for p in model.parameters()}) + 2 * 16


def test_check_06_copies_are_equal_bit_by_bit():
    model, _ = trained(small_gpt())
    for block in (1, 2):
        grown = th.grow(model, operator(block=block)).model
        for layer, (source, _) in zip(grown.layers, operator(block=block).layer_map(), strict=True):
            assert same(layer.state_dict(), model.layers[source].state_dict())


def test_check_06_random_layers_differ_from_all_others():
    model, _ = trained(small_gpt())
    grown = th.grow(model, operator("random")).model
    for names in (["mlp", "up"], ["attention", "query"]):
        weights = [layer.get_submodule(".".join(names)).weight for layer in grown.layers]
        assert all(not torch.isclose(a, b).any() for i, a in enumerate(weights) for b in weights[:i])


def test_check_07_an_identity_changes_nothing_wherever_it_stands():
    model, _ = trained(small_gpt())
    for op in th.growth_operators(4, 2, inits=["identity"]):
        assert th.grow(model, op, inputs=IDS).preservation.outputs < 1e-12, op.name
    copied = th.grow(model, operator(), inputs=IDS).preservation
    assert copied.outputs > 1e-3  # copies do change it


@pytest.mark.parametrize("init", ["copy", "random", "identity", "scaled"])
def test_check_08_the_optimizer_grows(init):
    model, optimizer = trained(small_gpt())
    grown = th.grow(model, operator(init), optimizer=optimizer, inputs=IDS)
    named = dict(grown.model.named_parameters())
    assert len(grown.optimizer.state) == len(named)
    old = dict(model.named_parameters())
    for name, p in named.items():
        state, parts = grown.optimizer.state[p], name.split(".")
        if parts[0] == "layers":
            source, _ = operator(init).layer_map()[int(parts[1])]
            if source is None:
                assert state["step"] == 0
                assert not state["exp_avg"].any()
                continue
            parts[1] = str(source)
        there = optimizer.state[old[".".join(parts)]]
        if torch.equal(p, old[".".join(parts)]):
            assert same(state["exp_avg"], there["exp_avg"])
            assert state["step"] == there["step"] == 3
            assert state["exp_avg_sq"].data_ptr() != there["exp_avg_sq"].data_ptr()
        else:  # set to zero, or halved
            assert state["step"] == 0
    before = copy.deepcopy(grown.model)
    step(grown.model, grown.optimizer)
    still = [
        name
        for (name, p), q in zip(named.items(), before.parameters(), strict=True)
        if p.grad is not None and p.grad.any() and torch.equal(p, q)
    ]
    assert still == []


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_all_parameters_of_an_identity_move_within_two_steps(make):
    """After one step the projections into the stream are no longer zero, and let the gradient through to the others."""
    model, _ = trained(small_gpt())
    grown = th.grow(model, operator("identity"), inputs=IDS).model
    before = copy.deepcopy(grown)
    optimizer = make(grown.parameters(), lr=0.1)
    for _ in range(2):
        step(grown, optimizer)
    pairs = zip(grown.named_parameters(), before.parameters(), strict=True)
    assert [name for (name, p), q in pairs if torch.equal(p, q)] == []


@pytest.mark.parametrize(("state", "steps"), [("copy", {3, 0}), ("zero_new", {3, 0}), ("reset", set())])
def test_states(state, steps):
    model, optimizer = trained(small_gpt())
    grown = th.grow(model, operator("copy" if state == "zero_new" else "random"), optimizer=optimizer, state=state)
    assert {int(held["step"]) for held in grown.optimizer.state.values()} == steps


def test_a_random_layer_has_the_bias_correction_of_its_own_first_step():
    """Its step is that of a fresh Adam, −lr · sign(gradient), though the others have taken a hundred."""
    model, optimizer = trained(small_gpt(), torch.optim.Adam, steps=100)
    grown = th.grow(model, operator("random"), optimizer=optimizer)
    weight = grown.model.layers[2].mlp.up.weight
    before = weight.detach().clone()
    step(grown.model, grown.optimizer)
    moved = weight.grad.abs() > 1e-5
    torch.testing.assert_close((weight - before)[moved], -1e-2 * weight.grad.sign()[moved], rtol=1e-2, atol=0)


def test_groups_are_kept():
    model = small_gpt()
    body = list(model.layers.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in body)]
    groups = [{"params": body, "lr": 0.5, "initial_lr": 0.7}, {"params": rest, "weight_decay": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    grown = th.grow(model, operator(), optimizer=optimizer).optimizer
    assert [len(group["params"]) for group in grown.param_groups] == [6 * 16, len(rest)]
    for new, old in zip(grown.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in new.items() if k != "params"} == {k: v for k, v in old.items() if k != "params"}
    named = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    names = th.grow(model, operator(), optimizer=named).optimizer.param_groups[0]["param_names"]
    assert len(set(names)) == len(names) == len(named.param_groups[0]["params"]) + 2 * 16


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Rprop, torch.optim.Adagrad])
def test_optimizers_whose_state_does_not_begin_at_zero(make):
    """New parameters then have none, and get it at the first step as ever; torch's Adagrad makes it when it is built."""
    model, optimizer = trained(small_gpt(), make)
    grown = th.grow(model, operator("random"), optimizer=optimizer)
    step(grown.model, grown.optimizer)
    assert all(torch.isfinite(p).all() for p in grown.model.parameters())
    assert len(grown.optimizer.state) == len(list(grown.model.parameters()))


@pytest.mark.parametrize("init", ["copy", "random"])
def test_adafactor_keeps_rows_and_columns(init):
    model, optimizer = trained(small_gpt(), torch.optim.Adafactor)
    grown = th.grow(model, operator(init), optimizer=optimizer)
    held = grown.optimizer.state[grown.model.layers[2].mlp.up.weight]
    there = optimizer.state[model.layers[1].mlp.up.weight]
    assert same(held, there if init == "copy" else {key: torch.zeros_like(t) for key, t in there.items()})
    step(grown.model, grown.optimizer)


def test_an_optimizer_with_one_state_for_all_is_refused():
    model = small_gpt()
    with pytest.raises(TypeError, match="one history of all parameters"):
        th.grow(model, operator(), optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_wrapper_is_taken_off_and_the_result_says_so():
    model = small_gpt()
    grown = th.grow(nn.DataParallel(model), operator(), inputs=IDS)
    assert type(grown.model) is type(model)
    assert "The grown model is a plain GPT" in grown.sentence()


def test_too_little_memory_is_said_before_anything_is_copied(monkeypatch):
    model = small_gpt()
    needed = 8 * th.grow(model, operator()).parameters
    for free in (needed, needed - 1):
        monkeypatch.setattr("theodolite.measures.growth.growing.available_bytes", lambda device, free=free: free)
        if free == needed:
            th.grow(model, operator())
        else:
            with pytest.raises(ValueError, match=r"needs 0.0 GiB on cpu beside the old one.*model.cpu\(\)"):
                th.grow(model, operator())


def test_the_model_and_all_random_states_are_left_as_found():
    model, optimizer = trained(small_gpt())
    model.layers[1].eval()
    before = (model_state(model), copy.deepcopy(optimizer.state_dict()), [m.training for m in model.modules()])
    random = torch.get_rng_state()
    for init in ("random", "identity"):
        th.grow(model, operator(init), optimizer=optimizer, data=(IDS, IDS), loss=next_token)
    assert same(before, (model_state(model), optimizer.state_dict(), [m.training for m in model.modules()]))
    assert torch.equal(random, torch.get_rng_state())


def test_same_seed_same_layers():
    model = small_gpt()
    first, again, other = (th.grow(model, operator("random"), seed=seed).model.state_dict() for seed in (3, 3, 4))
    assert same(first, again)
    assert not same(first, other)


def test_types_freezing_and_modes_are_kept():
    model = th.models.gpt(20, 8, 16, 4, 2, seed=0).to(torch.bfloat16)
    model.layers[1].requires_grad_(False)
    model.layers[2].eval()
    for init in ("copy", "random"):
        grown = th.grow(model, operator(init)).model
        assert {p.dtype for p in grown.parameters()} == {torch.bfloat16}
        assert [layer.mlp.up.weight.requires_grad for layer in grown.layers] == [True, False, False, True, True, True]
        assert [layer.training for layer in grown.layers] == [True, True, True, False, False, True]
        assert grown.head.weight is grown.tokens.weight


@pytest.mark.parametrize("init", ["torch", "normal_0.02", "gpt2"])
def test_random_layers_are_drawn_as_the_model_was(init):
    model = th.models.gpt(20, 8, 64, 4, 2, init=init, seed=0)
    model = trained(model, steps=30)[0]
    layer = th.grow(model, operator("random", layers=4, added=2)).model.layers[2]
    expected = {"torch": (1 / 8 / 3**0.5, 1 / 16 / 3**0.5), "normal_0.02": (0.02, 0.02), "gpt2": (0.02, 0.02 / 12**0.5)}[init]
    for weight, std in zip((layer.mlp.up.weight, layer.mlp.down.weight), expected, strict=True):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert layer.norm1.weight.tolist() == [1.0] * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_identities_in_lower_precision(dtype):
    """Small weights count too: what they add is nothing exactly, not nearly."""
    model = th.models.gpt(20, 8, 16, 4, 2, init="gpt2", seed=0).to(dtype)
    grown = th.grow(model, operator("identity"), inputs=IDS)
    assert grown.preservation.outputs == 0.0
    zeros = [name for name, p in grown.model.layers[2].named_parameters() if name.endswith("weight") and not p.any()]
    assert zeros == ["attention.out.weight", "mlp.down.weight"]


def test_scaled_copies_add_half():
    model, _ = trained(small_gpt())
    grown = th.grow(model, operator("scaled"), inputs=IDS).model
    source, new = grown.layers[1], grown.layers[2]
    assert torch.equal(new.attention.out.weight, 0.5 * source.attention.out.weight)
    assert torch.equal(new.mlp.down.bias, 0.5 * source.mlp.down.bias)
    assert torch.equal(new.mlp.up.weight, source.mlp.up.weight)


def test_post_norm_has_no_identity_and_says_so():
    model = th.models.bert(20, 8, 16, 4, 2, seed=0).double()
    grown = th.grow(trained(model)[0], operator("identity"), inputs=IDS)
    assert "no identity block" in grown.sentence()
    assert grown.preservation.outputs > 1e-6
    assert not grown.model.layers[2].mlp.down.weight.any()
    assert grown.model.layers[2].mlp.up.weight.all()


def test_any_list_of_layers():
    model, _ = trained(small_gpt())
    grown = th.grow(model, [0, 1, None, 2, 3, 1], inputs=IDS)
    assert grown.source == (0, 1, None, 2, 3, 1)
    assert grown.is_new == (False, False, True, False, False, True)
    assert torch.equal(grown.model.layers[5].mlp.up.weight, model.layers[1].mlp.up.weight)


def test_names_need_the_depth():
    model = small_gpt()
    assert th.grow(model, "double", layers=8).source == (0, 1, 2, 3) * 2
    assert th.grow(model, "2/1/random", layers=6).source == (0, 1, 2, None, 3, None)
    with pytest.raises(ValueError, match="layers must be given"):
        th.grow(model, "last")


def test_the_change_of_the_loss_is_measured():
    model, _ = trained(small_gpt())
    data = (IDS, IDS.roll(-1, 1))
    found = th.grow(model, operator(), data=data, loss=next_token)
    with torch.no_grad():
        losses = [float(next_token(m(IDS), data[1])) for m in (model, found.model)]
        change = (model(IDS) - found.model(IDS)).abs().max()
    assert found.preservation.loss_before == pytest.approx(losses[0], rel=1e-12)
    assert found.preservation.loss_after == pytest.approx(losses[1], rel=1e-12)
    assert found.preservation.outputs == pytest.approx(float(change), rel=1e-12)


class Numbered(nn.Module):
    """A block that knows its number, shares a table with the others, and has an initialiser of its own kind."""

    def __init__(self, number, table):
        super().__init__()
        self.layer_idx, self.table = number, table
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.gain * self.linear(x + self.table.weight[0])


class Counting(nn.Module):
    """A model that reads its depth from attributes, as many do."""

    def __init__(self, layers=3):
        super().__init__()
        self.config = SimpleNamespace(n_layer=layers, width=3)
        self.num_layers = layers
        self.table = nn.Embedding(2, 4)
        self.blocks = nn.ModuleList(Numbered(i, self.table) for i in range(layers))

    def forward(self, x):
        for i in range(self.num_layers):
            x = self.blocks[i](x)
        return x


@pytest.mark.parametrize("init", ["copy", "random", "identity"])
def test_what_counts_layers_is_counted_anew(init):
    torch.manual_seed(0)
    model = Counting()
    x = torch.randn(2, 4)
    found = th.grow(model, operator(init, layers=3), inputs=x)
    grown = found.model
    assert (grown.num_layers, grown.config.n_layer, grown.config.width) == (5, 5, 3)
    assert (model.num_layers, model.config.n_layer) == (3, 3)
    assert [block.layer_idx for block in grown.blocks] == [0, 1, 2, 3, 4]
    assert all(block.table is grown.table for block in grown.blocks)
    assert found.parameters - found.parameters_before == 2 * 24
    assert {"num_layers was 3 and is 5 now.", "config.n_layer was 3 and is 5 now."} <= set(found.notes)
    assert any("gain has no initialiser" in note for note in found.notes) == (init == "random")
    if init == "identity":
        assert found.preservation.outputs == 0.0
        assert not grown.blocks[2].linear.weight.any()
        assert torch.equal(grown.table.weight, model.table.weight)


def test_blocks_in_a_sequential_with_other_layers():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    assert find_body(model).names == ("1", "2")
    grown = th.grow(model, [0, 1, 1, 0], inputs=torch.randn(5, 2)).model
    assert [type(layer).__name__ for layer in grown] == ["Linear"] * 5 + ["Tanh", "Linear"]
    assert list(grown._modules) == [str(i) for i in range(7)]
    assert torch.equal(grown[3].weight, model[2].weight)
    assert torch.equal(grown[6].weight, model[4].weight)


def test_experts_that_were_not_called_are_found_too():
    """Of two experts one is never chosen on these inputs; both must be zero in an identity."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)) for _ in range(2))

        def forward(self, x):
            return x + self.experts[int(x.sum() > 0)](x)

    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts())
    grown = th.grow(model, [0, 0, 1], inputs=-torch.rand(2, 3)).model  # a copy
    assert grown[1].experts[1][2].weight.any()
    identity = GrowthOperator.of([0, 0, 1], "identity")
    block = th.grow(model, identity, inputs=-torch.rand(2, 3)).model[1]
    for expert in block.experts:
        assert not expert[2].weight.any()
        assert not expert[2].bias.any()
        assert expert[0].weight.all()


class TestGrown(ResultContract):
    def make(self):
        found = th.grow(small_gpt(), operator("random"), data=(IDS, IDS), loss=next_token)
        return dataclasses.replace(found, model=None, optimizer=None)


class TestPreservation(ResultContract):
    def make(self):
        return th.grow(small_gpt(), operator("random"), data=(IDS, IDS), loss=next_token).preservation


def test_a_result_is_saved_without_its_model(tmp_path):
    found = th.grow(small_gpt(), operator())
    found.save(tmp_path / "grown")
    back = th.load(tmp_path / "grown")
    assert (back.model, back.optimizer, back.source) == (None, None, found.source)


def shared_layers():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, layer, layer)


def quantised():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: th.grow(small_gpt(), "last", layers=4), "layers must be above the 4"),
        (lambda: th.grow(small_gpt(), "last", layers=9), "'double' to 8 first"),
        (lambda: th.grow(small_gpt(), operator(layers=5)), "operator is for a model of 5 layers; layers has 4"),
        (lambda: th.grow(small_gpt(), operator(), layers=7), "layers must be 6"),
        (lambda: th.grow(small_gpt(), operator("identity")), "inputs must be given for init='identity'"),
        (
            lambda: th.grow(small_gpt(), operator(), optimizer=torch.optim.SGD(small_gpt().parameters())),
            "that model does not have",
        ),
        (lambda: th.grow(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), [0, 0]), "no list of blocks"),
        (lambda: th.grow(nn.ModuleList([small_gpt(), small_gpt()]), [0, 0, 1], body="x"), "body must be the name"),
        (lambda: th.grow(shared_layers(), [0, 0, 1, 2]), "share one body"),
        (lambda: th.grow(quantised(), [0, 0, 1]), "quantised weights.*full or half precision"),
        (lambda: th.grow(nn.Sequential(*(nn.Linear(3, 4) for _ in range(2))), [0, 0, 1], inputs=torch.ones(1, 3)), "inputs: "),
    ],
)
def test_errors_name_the_remedy(make, words):
    with pytest.raises(ValueError, match=words):
        make()
