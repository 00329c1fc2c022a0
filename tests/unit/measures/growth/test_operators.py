"""Growth operators against the examples and counts of the source, and identities of any operator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import theodolite as th
from theodolite.measures.growth import INITS, NAMES, GrowthOperator, growth_operator
from theodolite.measures.growth.operators import added_layers


def an_operator():
    """Any operator of the family, up to 12 layers."""

    @st.composite
    def drawn(draw):
        layers = draw(st.integers(1, 12))
        added = draw(st.integers(1, layers))
        return draw(st.sampled_from(th.growth_operators(layers, added, inits=INITS)))

    return drawn()


def test_check_01_the_four_examples_of_the_source():
    """Six layers and three new ones from the second on; the source counts from 1."""
    examples = {
        (1, "copy"): "1 2 [2] 3 [3] 4 [4] 5 6",
        (3, "copy"): "1 2 3 4 [2 3 4] 5 6",
        (1, "random"): "1 2 [R] 3 [R] 4 [R] 5 6",
        (3, "random"): "1 2 3 4 [R R R] 5 6",
    }
    for (block, init), picture in examples.items():
        assert GrowthOperator(1, block, init, layers=6, added=3).picture(first=1) == picture
    copied = GrowthOperator(1, 3, layers=6, added=3).layer_map()
    assert [source for source, _ in copied] == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert [is_new for _, is_new in copied] == [False] * 4 + [True] * 3 + [False] * 2
    drawn = GrowthOperator(1, 1, "random", layers=6, added=3).layer_map()
    assert [source for source, _ in drawn] == [0, 1, None, 2, None, 3, None, 4, 5]


def test_check_02_the_numbers_of_operators():
    """Thirty in the study of twelve layers, and (L − k + 1) · d(k) · 2 without a choice."""
    chosen = th.growth_operators(12, 4, starts=(0, 2, 4, 6, 8), blocks=(1, 2, 4))
    assert len({operator.name for operator in chosen}) == len(chosen) == 30
    assert len({tuple(operator.layer_map()) for operator in chosen}) == 30
    assert len(th.growth_operators(6, 3)) == 4 * 2 * 2
    assert len(th.growth_operators(5, 5, inits="copy")) == 2


def test_check_03_the_strategies_of_the_stages():
    """93 of them, copies alone."""
    stages = [(4, [0]), (8, range(5)), (12, range(9)), (16, range(0, 13, 2)), (20, range(0, 17, 2))]
    counts = [len(th.growth_operators(n, 4, starts=starts, blocks=(1, 2, 4), inits=["copy"])) for n, starts in stages]
    assert counts == [3, 15, 27, 21, 27]
    assert sum(counts) == 93


@given(an_operator())
def test_any_operator_keeps_the_old_layers_in_order(operator):
    places = operator.layer_map()
    assert len(places) == operator.depth == operator.layers + operator.added
    assert [source for source, is_new in places if not is_new] == list(range(operator.layers))
    assert sum(is_new for _, is_new in places) == operator.added
    assert {source is None for source, is_new in places if is_new} == {operator.init == "random"}
    assert operator.picture().count("[") == operator.added // operator.block


@given(an_operator())
def test_a_name_says_all_of_an_operator(operator):
    assert growth_operator(operator.name, operator.layers, operator.added) == operator
    as_list = GrowthOperator.of([source for source, _ in operator.layer_map()], operator.init)
    assert as_list.layer_map() == operator.layer_map()
    assert growth_operator(as_list.name, operator.layers, operator.added) == as_list


def test_operators_come_in_the_order_that_breaks_ties():
    found = th.growth_operators(5, 2, starts=[1, 0], blocks=[2, 1], inits=["identity", "copy", "random"])
    expected = [f"{start}/{block}/{init}" for init in ("random", "copy", "identity") for start in (0, 1) for block in (1, 2)]
    assert [operator.name for operator in found] == expected
    assert min(found, key=lambda operator: operator.key) == found[0]


@pytest.mark.parametrize(
    ("name", "layers", "added", "picture"),
    [
        ("last", 4, 2, "0 1 2 3 [2 3]"),
        ("random-top", 4, 2, "0 1 2 3 [R R]"),
        ("interleave", 4, 2, "0 1 [1] 2 [2] 3"),
        ("double", 3, 3, "0 1 2 [0 1 2]"),
        ("upscale", 6, 2, "0 1 2 3 [2 3] 4 5"),
        ("identity", 4, 2, "0 1 [I1] 2 3 [I3]"),
        ("identity", 5, 3, "0 1 [I1] 2 3 [I3] 4 [I4]"),
    ],
)
def test_names(name, layers, added, picture):
    assert growth_operator(name, layers, added).picture() == picture
    assert name in NAMES


def test_depth_up_scaling_of_32_layers_is_one_operator():
    """Two halves of 24 that overlap: 0 .. 23 and 8 .. 31."""
    operator = growth_operator("upscale", 32, 16)
    assert operator.name == "8/16/copy"
    assert [source for source, _ in operator.layer_map()] == [*range(24), *range(8, 32)]


def test_identities_and_scaled_copies_know_their_source():
    operator = GrowthOperator(0, 1, "scaled", layers=2, added=2)
    assert operator.picture() == "0 [S0] 1 [S1]"
    assert [source for source, _ in operator.layer_map()] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: th.growth_operators(4, 5), "at most the 4 layers.*'double' to 8"),
        (lambda: GrowthOperator(0, 3, layers=8, added=4), "block must divide the 4 new layers: 1, 2, 4. Got 3"),
        (lambda: GrowthOperator(5, 1, layers=8, added=4), "start must be one of 0 .. 4"),
        (lambda: GrowthOperator(0, 1, "zero", layers=8, added=4), "init must be 'random', 'copy'"),
        (lambda: GrowthOperator(None, None, layers=8, added=4), "GrowthOperator.of"),
        (lambda: GrowthOperator.of([0, 2, 2]), "growing drops none. 1 is missing"),
        (lambda: GrowthOperator.of([0, 10**12]), "growing drops none. 1, 2 is missing"),
        (lambda: GrowthOperator.of([1, 0, 0]), "in their order"),
        (lambda: GrowthOperator.of([0, 1]), "at least one layer again"),
        (lambda: growth_operator("8/4/copie", 12, 4), "init must be"),
        (lambda: growth_operator("0,0,1/copy", 3, 2), "wanted are 5 of 3"),
        (lambda: growth_operator("double", 6, 2), "which makes 12"),
        (lambda: added_layers(12, 12), "layers must be above the 12"),
        (lambda: added_layers(4, 9), "'double' to 8 first"),
    ],
)
def test_errors_name_the_remedy(make, words):
    with pytest.raises(ValueError, match=words):
        make()
