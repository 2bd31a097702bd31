"""The images of the real engines, for the tests that ask them."""

import os
import subprocess

import pytest


def newest_image(repository, variable, command):
    """The newest image of the lab, or the one that the variable names; else a skip (a failure when it is required)."""
    reason = None
    image = os.environ.get(variable, "")
    try:
        if not image:
            listing = subprocess.run(
                ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            # Newest first.
            image = next(iter(listing.stdout.split()), "")
        if not image:
            reason = f"no image {repository}: run `{command}`, or set {variable}"
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"Docker does not answer ({error})"
    if reason and os.environ.get("METALSERVE_REQUIRE_ENGINE") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return image


@pytest.fixture(scope="session")
def engine_image():
    return newest_image("metalserve-lab/engine", "METALSERVE_ENGINE_IMAGE", "make lab")


@pytest.fixture(scope="session")
def sglang_image():
    return newest_image("metalserve-lab/sglang", "METALSERVE_SGLANG_IMAGE", "make built-sglang")
