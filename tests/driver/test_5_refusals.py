"""What a bare host is refused for, before anything on it is changed."""

import pytest

TRACES = (
    "/etc/modprobe.d/metalserve-nvidia.conf",
    "/etc/apt/sources.list.d/metalserve-nvidia.sources",
    "/usr/bin/nvidia-smi",
)


@pytest.fixture(autouse=True)
def _bare(machine, host):
    """Each starts on the bare host and leaves it bare."""
    machine("load", "bare")
    yield
    for trace in TRACES:
        assert not host.file(trace).exists


def test_a_repository_with_another_key(run_playbook):
    result = run_playbook(
        {"nvidia_driver_repository_url": "{{ lab_repositories }}/compute/cuda/repos/debian13-other-key/x86_64"}
    )
    assert result.rc != 0, result.end
    assert not result.changed, result.end
    assert "fingerprint" in result.text


@pytest.mark.parametrize(
    "gone",
    ["apt-get purge --yes --quiet linux-headers-$(uname -r)", "mv /lib/modules/$(uname -r)/build /root/build"],
    ids=["package", "files"],
)
def test_no_headers_of_the_running_kernel(host, run_playbook, gone):
    with host.sudo():
        host.check_output("sh -c %s", gone)
        # A mirror that has moved on to a newer kernel.
        host.check_output("sh -c 'echo > /etc/apt/sources.list; rm -rf /var/lib/apt/lists/*'")
    result = run_playbook()
    assert result.rc != 0, result.end
    assert not result.changed, result.end
    assert "there are no headers of the running kernel" in result.text
