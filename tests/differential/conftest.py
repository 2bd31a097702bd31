"""The image of the real engine, for the tests that ask it."""

import os
import subprocess

import pytest


@pytest.fixture(scope="session")
def engine_image():
    """The newest engine image of the lab, or METALSERVE_ENGINE_IMAGE; else a skip (a failure when it is required)."""
    reason = None
    image = os.environ.get("METALSERVE_ENGINE_IMAGE", "")
    try:
        if not image:
            listing = subprocess.run(
                ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "metalserve-lab/engine"],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            # Newest first.
            image = next(iter(listing.stdout.split()), "")
        if not image:
            reason = "no engine image: run `make lab`, or set METALSERVE_ENGINE_IMAGE"
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"Docker does not answer ({error})"
    if reason and os.environ.get("METALSERVE_REQUIRE_ENGINE") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return image
