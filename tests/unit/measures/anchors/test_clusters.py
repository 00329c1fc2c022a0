"""Several anchors: the world of two radii, and clusters that are told by the state alone."""

from __future__ import annotations

import pytest
import torch

from theodolite.data.generators import gaussian_dictionary_world
from theodolite.measures.anchors import AnchorClusters, anchor_clusters, probe_states


def test_check_06_two_clusters_have_two_anchors(tmp_path):
    world = gaussian_dictionary_world(4000, 32, 6000, (0.5, 4.0), law="two", seed=0)
    order = torch.randperm(6000, generator=torch.Generator().manual_seed(0))
    probe = probe_states(world.states[order], world.atoms, top=(0, 80), anchors=2, geometry=False)
    assert probe.mse[1] > 1
    found = probe.clusters[1]
    assert found.top == 80
    assert found.joint_mse == pytest.approx(probe.mse[1], rel=1e-6)
    assert max(found.mse) < 0.05
    # The values of the two halves overlap a little: 33 of 6000 fall on the other side.
    assert float((found.membership == world.group[order][probe.sampled_numbers]).double().mean()) > 0.99
    assert found.overall_mse < 0.05 < found.joint_mse
    probe.save(tmp_path / "probe")
    again = type(probe).load(tmp_path / "probe")
    assert isinstance(again.clusters[1], AnchorClusters)
    assert again.clusters[1].rows() == found.rows()
    assert "2 anchors" in str(again.clusters[1])


def test_clusters_by_state_and_the_places_of_their_members():
    first = torch.zeros(300, dtype=torch.bool)
    first[::10] = True  # first positions of windows are outliers
    states = torch.randn(300, 4, dtype=torch.float64)
    states[:, -1] = 1.0
    states[first, 0] += 50
    values = torch.where(
        first, states @ torch.tensor([0.0, 1, 2, 9.0]).double(), states @ torch.tensor([1.0, 0, 1, 3.0]).double()
    )
    found = anchor_clusters(states, values, 2, by="state", places=torch.arange(300) % 10)
    assert sorted(found.sizes) == [30, 270]
    assert max(found.mse) < 1e-20
    outliers = found.sizes.index(30)
    assert found.rows()[outliers]["first_places"] == 1.0
    assert bool((found.places[found.membership == outliers] == 0).all())


def test_refinement_moves_positions_to_the_nearer_anchor():
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    values = torch.where(torch.arange(400) < 200, states[:, 0] * 5, states[:, 1] * 5)  # equal laws: values do not tell them apart
    plain, refined = (anchor_clusters(states, values, 2, rounds=rounds) for rounds in (0, 20))
    assert 0 < refined.rounds <= 20
    assert refined.overall_mse < 0.1 * plain.overall_mse


def test_bad_arguments():
    states, values = torch.randn(5, 2), torch.randn(5)
    with pytest.raises(ValueError, match=r"anchors must be 1 \.\. 5"):
        anchor_clusters(states, values, 6)
    with pytest.raises(ValueError, match="by must be"):
        anchor_clusters(states, values, 2, by="token")
