"""What follows when a rollout stops at a host."""

from __future__ import annotations

from metalserve.rollout.aftermath import proof_endpoints, rollout_aftermath

MINE = {"changing": ["h1:tiny"], "touched": ["h1:tiny"], "known": {"gw": ["h1:tiny"]}}


def fact(*, check=False, ok=True, serving=True, started=True, state="rolled_out"):
    outcome = {"deployment": "tiny", "ok": ok, "serving": serving, "started": started}
    return {"check": check, "state": state, "outcomes": [outcome]}


def after(mine=MINE, **seen):
    given = {"drained": True, "idle": True, "activated": fact(), "proofs": [], "verdicts": [], **seen}
    return rollout_aftermath(mine, **given)


def proof(passed, msg=""):
    return {"__rollout_pair": {"server": "h1:tiny"}, "passed": passed, "msg": msg}


def test_what_was_not_touched_goes_back():
    assert after(drained=False, activated=fact(check=True))["undrain"] == ["h1:tiny"]
    assert after(idle=False, activated=fact(check=True))["undrain"] == ["h1:tiny"]


def test_what_went_back_by_itself_and_serves_goes_back():
    assert after(activated=fact(ok=False))["undrain"] == ["h1:tiny"]


def test_what_serves_nothing_stays_out():
    assert after(activated=fact(ok=False, serving=False))["stay"] == {
        "h1:tiny": "nothing that passes the gate runs there"
    }


def test_a_host_that_was_lost_on_the_way_stays_out():
    for activated in (None, fact(check=True)):
        result = after(activated=activated)
        assert (result["undrain"], list(result["stay"])) == ([], ["h1:tiny"])


def test_what_the_gateway_refuses_goes_back_to_the_release_before():
    result = after(proofs=[proof(False, "stream: no end")])
    assert result["back"] == [{"server": "h1:tiny", "deployment": "tiny", "reason": "stream: no end"}]
    assert result["reasons"] == ["h1:tiny through the gateway: stream: no end"]


def test_only_a_rollout_goes_back_by_itself():
    result = after(activated=fact(state="restarted"), proofs=[proof(False, "stream: no end")])
    assert (result["back"], result["stay"]) == ([], {"h1:tiny": "stream: no end"})


def test_what_serves_worse_goes_back_too():
    verdict = {"__rollout_pair": {"server": "h1:tiny"}, "verdict": {"ok": False, "text": "9 requests, 9 failed"}}
    result = after(proofs=[proof(True)], verdicts=[verdict])
    assert result["back"][0]["reason"] == "watched: 9 requests, 9 failed"


def test_a_gate_that_could_not_be_asked_has_not_passed():
    assert after(proofs=[{"__rollout_pair": {"server": "h1:tiny"}, "failed": True, "msg": "gone"}])["back"]


def test_a_gateway_that_is_lost_refuses_nothing():
    lost = {"__rollout_pair": {"server": "h1:tiny"}, "failed": True, "msg": "gone", "gateway_lost": "gw"}
    assert after(proofs=[lost], verdicts=[lost]) == {"undrain": ["h1:tiny"], "back": [], "stay": {}, "reasons": []}


def test_a_host_that_was_not_changed_has_no_release_to_go_back_to():
    mine = {**MINE, "changing": []}
    result = after(mine, activated=fact(started=False), proofs=[proof(False, "no")])
    assert (result["back"], result["stay"]) == ([], {"h1:tiny": "no"})


def test_all_is_well_means_nothing_to_say():
    assert after(proofs=[proof(True)]) == {"undrain": ["h1:tiny"], "back": [], "stay": {}, "reasons": []}


def test_each_server_is_asked_through_each_gateway_that_knows_it():
    endpoint = {"url": "http://127.0.0.1:8000", "model": "m", "served_names": [], "engine": "vllm", "thinking": "off"}
    outcomes = [
        {"deployment": name, "endpoint": {**endpoint, "name": name, "unit": "u"}} for name in ("tiny", "other")
    ] + [{"deployment": "unproven", "endpoint": {}}]
    known = {"gw-1": ["h1:tiny"], "gw-2": [], "gw-3": ["h1:tiny", "h1:other"]}
    pairs = proof_endpoints(outcomes, ["h1:tiny"], known, "%2Fs")
    assert [(pair["gateway"], pair["url"]) for pair in pairs] == [
        ("gw-1", "http+unix://%2Fs/h1:tiny"),
        ("gw-3", "http+unix://%2Fs/h1:tiny"),
    ]
    assert set(pairs[0]) == {"name", "url", "model", "served_names", "engine", "thinking", "gateway", "server"}
