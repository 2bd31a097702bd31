"""Order and batches of a rollout, and what it keeps up."""

from __future__ import annotations

import pytest

from metalserve.errors import MetalserveError, Refusal
from metalserve.rollout.plan import needed, rollout_plan


def look(*, started=True, deployment="tiny", before="old", wanted="new"):
    return [{"deployment": deployment, "started": started, "active": before, "wanted": wanted if started else before}]


def pool(*names, model="m", name="m"):
    return {"name": name, "models": [model], "servers": [{"name": each} for each in names]}


def row(name, *, up=True, drained_by=None, pool="m"):
    return {
        "pool": pool,
        "name": name,
        "status": "UP" if up else "DOWN",
        "up": up,
        "running": 0,
        "drained_by": drained_by,
    }


def fleet(count, *, down=(), drained=(), parked=(), unchanged=(), **options):
    """A fleet of hosts h1, h2 ... with one engine each behind one gateway."""
    names = [f"h{number}" for number in range(1, count + 1)]
    rows = [
        row(
            f"{name}:tiny",
            up=name not in (*down, *drained, *parked),
            drained_by="rollout" if name in drained else "operator" if name in parked else None,
        )
        for name in names
    ]
    looks = [look(started=name not in unchanged) for name in names]
    gateways = {"gw": {"present": True, "servers": rows}}
    return rollout_plan(names, looks, gateways, [pool(*(f"{name}:tiny" for name in names))], **options)


def test_one_then_a_tenth_then_the_rest_but_never_less_than_half():
    plan = fleet(20)
    assert [len(batch) for batch in plan["batches"]] == [1, 2, 10, 7]
    assert plan["order"] == [f"h{number}" for number in range(1, 21)]
    assert plan["keep"] == {"m": 10}


def test_batches_are_those_of_the_user_where_enough_is_left():
    assert fleet(6, batches=[1, 2], min_serving=1)["batches"] == [["h1"], ["h2", "h3"], ["h4", "h5"], ["h6"]]
    assert [len(batch) for batch in fleet(6, batches=["50%"], min_serving=3)["batches"]] == [3, 3]
    assert [len(batch) for batch in fleet(6, batches=["100%"], min_serving=5)["batches"]] == [1] * 6


def test_hosts_that_need_no_change_come_first_and_count_for_no_batch():
    plan = fleet(4, unchanged=("h1", "h3"))
    assert (plan["order"], plan["batch_sizes"]) == (["h1", "h3", "h2", "h4"], [2, 1, 1])
    assert plan["hosts"]["h1"]["touched"] == []
    assert "2 of 4 hosts change, in 2 batches:" in plan["lines"]
    assert "  1. h2: tiny old -> new" in plan["lines"]


def test_nothing_to_do_is_one_batch_and_takes_no_lock():
    plan = fleet(3, unchanged=("h1", "h2", "h3"))
    assert (plan["batch_sizes"], plan["changes"], plan["batches"]) == ([3], False, [])


def test_what_is_out_already_is_changed_first_and_takes_nothing_away():
    plan = fleet(3, drained=("h3",), min_serving=2)
    assert plan["batches"] == [["h3"], ["h1"], ["h2"]]


def test_a_host_that_a_killed_rollout_left_drained_is_put_back():
    plan = fleet(3, drained=("h2",), unchanged=("h1", "h2", "h3"))
    assert plan["hosts"]["h2"]["heal"] == plan["hosts"]["h2"]["touched"] == ["h2:tiny"]
    assert plan["changes"]
    assert "An earlier rollout left h2 drained: it is proven and put back." in plan["lines"]


def test_a_host_that_is_put_back_first_does_not_count_as_lost():
    plan = fleet(3, drained=("h1",), unchanged=("h1",), min_serving=2)
    assert (plan["order"], plan["batches"]) == (["h1", "h2", "h3"], [["h2"], ["h3"]])


def test_a_host_that_a_person_drained_stays_theirs():
    plan = fleet(3, parked=("h2",), min_serving=1)
    assert plan["hosts"]["h2"]["heal"] == []
    assert "h2:tiny was drained by a person and stays out." in plan["lines"]


def test_too_few_engines_are_refused_before_anything():
    with pytest.raises(
        Refusal, match="m has 1 engines behind the gateway; without h1:tiny, which changes, 0 would be left"
    ):
        fleet(1)
    with pytest.raises(Refusal, match="Needed: 3 that serve at any time"):
        fleet(3, min_serving=3)
    assert fleet(1, min_serving=0)["batches"] == [["h1"]]


def test_a_lost_engine_counts_as_lost():
    names = ["h1", "h2"]
    gateways = {"gw": {"present": True, "servers": [row("h1:tiny"), row("h2:tiny"), row("h3:tiny", up=False)]}}
    pools = [pool("h1:tiny", "h2:tiny", "h3:tiny")]
    with pytest.raises(Refusal, match="of which h3:tiny serve nobody now"):
        rollout_plan(names, [look(), look()], gateways, pools, min_serving=2)
    assert rollout_plan(names, [look(), look()], gateways, pools, min_serving=1)["batches"] == [["h1"], ["h2"]]


def test_a_model_that_nobody_serves_yet_keeps_nobody_waiting():
    plan = fleet(4, down=("h1", "h2", "h3", "h4"), batches=["100%"])
    assert (plan["keep"], plan["batches"]) == ({}, [["h1", "h2", "h3", "h4"]])


def test_each_model_has_its_own_number():
    names = ["h1", "h2", "h3", "h4"]
    rows = [row(f"{name}:{deployment}", pool=deployment) for name in names for deployment in ("a", "b")]
    looks = [look(deployment="a") + look(deployment="b") for _ in names]
    pools = [pool(*(f"{name}:{each}" for name in names), model=each, name=each) for each in ("a", "b")]
    gateways = {"gw": {"present": True, "servers": rows}}
    plan = rollout_plan(names, looks, gateways, pools, batches=["100%"], min_serving={"a": 1, "default": 3})
    assert plan["keep"] == {"a": 1, "b": 3}
    assert [len(batch) for batch in plan["batches"]] == [1, 1, 1, 1]


def test_without_a_gateway_one_host_after_another_and_nothing_is_kept():
    plan = rollout_plan(["h1", "h2"], [look(), look()], {}, [pool("h1:tiny", "h2:tiny")])
    assert (plan["batch_sizes"], plan["keep"], plan["gateways"]) == ([1, 1], {}, [])


def test_a_gateway_that_is_not_there_yet_is_named():
    plan = rollout_plan(["h1"], [look(before=None)], {"gw": {"present": False, "servers": []}}, [pool("h1:tiny")])
    assert "  1. h1: tiny nothing -> new" in plan["lines"]
    assert any(line.startswith("gw does not run yet") for line in plan["lines"])


def test_an_engine_that_the_gateway_does_not_know_is_named():
    gateways = {"gw": {"present": True, "servers": []}}
    lines = rollout_plan(["h1"], [look()], gateways, [pool("h1:tiny")])["lines"]
    assert any(line.startswith("gw does not know h1:tiny yet") for line in lines)


# ---- what a person asks for of one deployment ----


def ask(action, looks, *, servers=None, **options):
    names = [f"h{number}" for number in range(1, len(looks) + 1)]
    rows = [row(f"{name}:tiny") for name in names] if servers is None else servers
    gateways = {"gw": {"present": True, "servers": rows}}
    pools = [pool(*(f"{name}:tiny" for name in names))]
    return rollout_plan(names, looks, gateways, pools, batches=[1], action=action, deployment="tiny", **options)


def seen(active="old", *, wanted="old", ok=True, started=False, stopped=False, message=""):
    return [
        {"deployment": "tiny", "active": active, "wanted": wanted, "ok": ok, "started": started, "stopped": stopped,
         "message": message},
    ]  # fmt: skip


def test_one_host_after_another_is_restarted_and_hosts_without_the_deployment_are_left_alone():
    plan = ask("restarted", [seen(started=True), seen(None, wanted=None, ok=False, message="none"), seen(started=True)])
    assert plan["order"] == ["h1", "h3"]
    assert plan["batches"] == [["h1"], ["h3"]]
    assert (plan["action"], plan["what"]) == ("restarted", "restarts tiny on 2 of 2 hosts")
    assert "  1. h1: tiny old is started again" in plan["lines"]


def test_what_nobody_has_is_refused_and_so_is_what_one_host_cannot_do():
    with pytest.raises(Refusal, match="none of these hosts has a deployment tiny: h1, h2"):
        ask("restarted", [seen(None, ok=False), seen(None, ok=False)])
    with pytest.raises(MetalserveError, match=r"^h2: tiny has no release to go back to$"):
        ask("rolled_back", [seen(started=True), seen(ok=False, message="tiny has no release to go back to")])


def test_a_restart_keeps_as_many_up_as_a_rollout():
    with pytest.raises(Refusal, match="without h1:tiny, which changes, 0 would be left"):
        ask("restarted", [seen(started=True)])
    assert ask("restarted", [seen(started=True)], min_serving=0)["batches"] == [["h1"]]


def test_what_is_retired_does_not_come_back():
    gone = [seen(wanted=None, stopped=True)]
    assert ask("retired", gone * 2 + [seen(wanted=None)] * 2)["batches"] == [["h1"], ["h2"]]
    with pytest.raises(Refusal, match=r"without h1:tiny, h2:tiny, h3:tiny, which would go, 1 would be left. Needed: 2"):
        ask("retired", gone * 3 + [seen(wanted=None)])
    assert "  3. h3: tiny old is stopped" in ask("retired", gone * 3, min_serving=0)["lines"]


def test_engines_that_are_out_and_retired_do_not_come_back_either():
    servers = [row("h1:tiny", up=False), row("h2:tiny"), row("h3:tiny"), row("h4:tiny")]
    gone = [seen(wanted=None, stopped=True)]
    with pytest.raises(Refusal, match=r"1 would be left. Needed: 2"):
        ask("retired", gone * 3 + [seen(wanted=None)], servers=servers)


def test_what_is_not_looked_at_is_not_healed():
    servers = [row("h1:tiny", drained_by="rollout", up=False), row("h1:other", drained_by="rollout", up=False)]
    plan = ask("rolled_back", [seen()], servers=servers)
    assert plan["hosts"]["h1"]["heal"] == ["h1:tiny"]
    assert ask("retired", [seen(wanted=None)], servers=servers)["hosts"]["h1"]["heal"] == []


@pytest.mark.parametrize("batch", [0, "x", "-1", "200 %"])
def test_a_batch_that_is_none_is_refused(batch):
    with pytest.raises(Refusal, match="in rollout_batches"):
        fleet(3, batches=[batch])


@pytest.mark.parametrize(
    ("replicas", "wanted", "number"),
    [(1, "50%", 1), (3, "50%", 1), (4, "50%", 2), (4, 3, 3), (4, "0", 0), (9, "100%", 9)],
)
def test_how_many_must_serve(replicas, wanted, number):
    assert needed(replicas, wanted) == number


@pytest.mark.parametrize("wanted", ["half", -1, "101%", None])
def test_a_number_that_is_none_is_refused(wanted):
    with pytest.raises(Refusal, match="rollout_min_serving is"):
        needed(3, wanted)
