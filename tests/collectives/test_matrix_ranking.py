"""Matrices are ranked by reductions that mean something."""

from __future__ import annotations

import pytest

from shardplan.collectives.matrix_ranking import Request, rank_matrices
from shardplan.errors import ClusterError
from shardplan.mesh import Cluster


@pytest.mark.parametrize(
    ("nbytes", "weight", "message"),
    [
        (-1.0, 1.0, r"nbytes of a reduction over \(0,\) has to be a finite number of at least 0, got -1.0"),
        (float("nan"), 1.0, "nbytes .* got nan"),
        (1.0, -2.0, "weight .* got -2.0"),
        (1.0, float("nan"), "weight .* got nan"),
        (1.0, float("inf"), "weight .* got inf"),
    ],
)
def test_a_request_has_a_size_and_a_weight(nbytes: float, weight: float, message: str):
    with pytest.raises(ClusterError, match=message):
        Request((0,), nbytes, weight)


def test_nothing_ranks_no_matrices():
    with pytest.raises(ClusterError, match="no reduction is given to rank matrices by"):
        rank_matrices(Cluster.load("2x4"), (2, 4), [])
