"""What a host is told to tell."""

from metalserve.monitoring.settings import catalogue, metrics_settings


def test_a_host_is_told_what_is_wanted_and_what_holds():
    settings = metrics_settings(
        [{"deployment": "qwen", "release_id": "a1"}], models_dir="/models", gpu_count=8, certificates=["/tls.pem"]
    )
    assert settings["wanted"] == {"qwen": "a1"}
    assert (settings["models_dir"], settings["gpu_count"], settings["certificates"]) == ("/models", 8, ["/tls.pem"])
    assert settings["toolkit_floor"] == catalogue("health.yaml")["toolkit_floor"]


def test_a_branch_ends_with_the_last_day_of_its_month():
    branches = metrics_settings([])["driver_branches"]
    assert branches["580"] == "2028-06-30"
    assert branches["545"] is None  # ended, nobody says when
    assert "615" not in branches  # goes on, nobody says how long
