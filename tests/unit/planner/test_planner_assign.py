"""GPUs by number: along NVLink and NUMA nodes, never in two deployments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metalserve import catalogue
from metalserve.errors import Refusal
from metalserve.planner import assign_gpus, make_plan
from metalserve.planner.assign import pick_gpus


def pcie_host():
    """Four cards on two NUMA nodes that alternate, bridged in pairs 0-2 and 1-3."""
    host = catalogue.host_from_shape("4xA100-PCIE-80GB")
    kinds = [["X", "SYS", "NV12", "SYS"], ["SYS", "X", "SYS", "NV12"]]
    host["links"] = [*kinds, ["NV12", "SYS", "X", "SYS"], ["SYS", "NV12", "SYS", "X"]]
    for row in host["gpus"]:
        row["numa_node"] = row["index"] % 2
    return host


def test_bridged_pairs_stay_together():
    assert pick_gpus(pcie_host(), 2) == (0, 2)
    assert pick_gpus(pcie_host(), 2, taken=[0]) == (1, 3)


def test_without_links_the_numa_node_decides():
    host = pcie_host()
    host["links"] = None
    assert pick_gpus(host, 2) == (0, 2)


def test_one_gpu_is_taken_where_it_breaks_no_pair():
    host = catalogue.host_from_shape("8xH100")
    # Node 0 has three free GPUs, node 1 four: one GPU comes from node 0.
    assert pick_gpus(host, 1, taken=[0]) == (1,)
    assert pick_gpus(host, 1, taken=[0, 1, 2, 4]) == (3,)
    assert pick_gpus(host, 4, taken=[0]) == (4, 5, 6, 7)


def test_a_gpu_with_mig_is_left_out():
    host = catalogue.host_from_shape("2xH100")
    host["gpus"][0]["mig_enabled"] = True
    assert pick_gpus(host, 1) == (1,)
    with pytest.raises(Refusal, match="2 GPUs wished for, 1 of 2 are free"):
        pick_gpus(host, 2)


def test_deployments_share_a_host():
    host = catalogue.host_from_shape("8xH100")
    found = assign_gpus(
        host, [{"name": "small", "gpus": 1}, {"name": "fixed", "gpus": [0, 1]}, {"name": "large", "gpus": 4}]
    )
    assert found == {"small": (2,), "fixed": (0, 1), "large": (4, 5, 6, 7)}
    assert list(found) == ["small", "fixed", "large"]


def test_all_is_every_gpu():
    assert assign_gpus(catalogue.host_from_shape("2xH100"), [{"name": "one"}]) == {"one": (0, 1)}


@pytest.mark.parametrize(
    ("deployments", "message"),
    [
        ([{"name": "a", "gpus": [0]}, {"name": "b"}], "the deployments a and b both want GPU 0"),
        ([{"name": "a", "gpus": [4]}], "GPU 4 of the deployment a, the host has 4"),
        ([{"name": "a", "gpus": 3}, {"name": "b", "gpus": 2}], "2 GPUs wished for, 1 of 4 are free, 3 are given"),
        ([{"name": "a", "gpus": 0}], "gpus 0 of the deployment a"),
    ],
)
def test_what_cannot_be_given(deployments, message):
    with pytest.raises(Refusal, match=message):
        assign_gpus(catalogue.host_from_shape("4xH100"), deployments)


def test_a_plan_takes_a_number_of_gpus():
    found = make_plan("qwen3-32b", pcie_host(), wishes={"gpus": 2, "context_length": 8192})
    assert found.gpus_used == (0, 2)
    assert found.tensor_parallel_size == 2
    assert not found.disable_custom_all_reduce
    assert "joined best" in found.reasons["gpus_used"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(["8xH100", "8xL40S"]))
def test_no_gpu_is_given_twice(counts, shape):
    host = catalogue.host_from_shape(shape)
    deployments = [{"name": f"d{place}", "gpus": count} for place, count in enumerate(counts)]
    if sum(counts) > 8:
        with pytest.raises(Refusal, match="wished for"):
            assign_gpus(host, deployments)
        return
    found = assign_gpus(host, deployments)
    given_out = [index for indexes in found.values() for index in indexes]
    assert len(given_out) == len(set(given_out)) == sum(counts)
    assert [len(found[item["name"]]) for item in deployments] == counts
