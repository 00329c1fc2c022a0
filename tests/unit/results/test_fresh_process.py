"""A saved result is read by a process that has imported nothing yet; a damaged one is named."""

from __future__ import annotations

import pytest
import torch

import theodolite as th


def test_results_load_in_a_fresh_process(tmp_path):
    import subprocess
    import sys

    th.top_eigenpairs(torch.eye(3).double(), 1).save(tmp_path / "pairs")
    code = f"from theodolite.results import load; print(load({str(tmp_path / 'pairs')!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "1 largest eigenvalues" in done.stdout, done.stderr
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        th.load(tmp_path / "broken")
