"""What a client and an operator see of a gateway: a real HAProxy, with stand-ins for the engines behind it."""

import http.client
import json
import resource
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway_client import states, wait_for

QWEN = {"model": "qwen", "messages": [{"role": "user", "content": "a secret prompt"}]}
SMALL = {"model": "small", "messages": []}


def sent_to(engines):
    return {name: engine.seen for name, engine in engines.items() if engine.seen}


# ---- what is let through, and what is not ----------------------------------------------------------------------------


def test_a_request_reaches_an_engine_of_its_model_without_the_clients_key(gateway, engines):
    answer = gateway.ask(QWEN)
    assert answer.status == 200
    ((name, (request,)),) = sent_to(engines).items()
    assert name in ("stand-in-1:a", "stand-in-2:a")
    assert request["path"] == "/v1/chat/completions"
    assert "authorization" not in request["headers"]
    assert request["headers"]["x-request-id"] == answer.headers["x-request-id"]


def test_the_models_are_listed_without_an_engine(gateway, engines):
    listed = gateway.ask(method="GET", path="/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["Qwen/Qwen3.6", "qwen", "small"]
    assert [model["id"] for model in gateway.ask(method="GET", path="/v1/models", key="sk-limited").json["data"]] == [
        "small"
    ]
    assert sent_to(engines) == {}


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"body": QWEN, "key": None}, 401, "valid API key"),
        ({"body": QWEN, "key": "sk-wrong"}, 401, "valid API key"),
        ({"body": QWEN, "headers": {"Authorization": "Basic c2stZmlyc3Q="}, "key": None}, 401, "valid API key"),
        ({"body": QWEN, "path": "/invocations"}, 404, "route does not exist"),
        ({"body": QWEN, "path": "/v1/chat/completions/"}, 404, "route does not exist"),
        ({"body": QWEN, "path": "/v1/../invocations"}, 404, "route does not exist"),
        ({"body": QWEN, "path": "/v1/%63hat/completions"}, 404, "route does not exist"),
        ({"method": "GET", "path": "/metrics"}, 404, "route does not exist"),
        ({"method": "GET", "path": "/v1/load_lora_adapter"}, 404, "route does not exist"),
        ({"method": "GET", "path": "/v1/chat/completions"}, 405, "POST for the others"),
        ({"method": "DELETE", "path": "/v1/models"}, 405, "GET for /v1/models"),
        ({"body": {**QWEN, "model": "gpt-9"}}, 404, "The model gpt-9 does not exist"),
        ({"body": QWEN, "key": "sk-limited"}, 404, "this key may not use it"),
        ({"body": {"messages": []}}, 400, "names no model"),
        ({"raw": b'{"\\u006dodel": "qwen"}'}, 400, "names no model"),
        ({"raw": b"[1, 2]"}, 400, "no JSON object"),
        ({"raw": b'{"model": "qwen"'}, 400, "no JSON object"),
        ({"body": SMALL, "key": "sk-limited", "headers": {"X-Priority": "5"}}, 403, "may not set X-Priority"),
        ({"body": SMALL, "headers": {"X-Priority": "high"}}, 400, "whole number"),
        ({"body": SMALL, "headers": {"X-Priority": "1000000"}}, 400, "whole number"),
    ],
)
def test_what_is_refused_never_reaches_an_engine(gateway, engines, asked, status, text):
    answer = gateway.ask(**asked)
    assert (answer.status, text in answer.json["error"]["message"]) == (status, True), answer.text
    assert sent_to(engines) == {}


def test_an_oversized_body_is_refused_before_it_is_read(gateway, engines):
    connection = gateway.connect()
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (("Authorization", "Bearer sk-first"), ("Content-Length", "1048577")):
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, "larger than 1048576 bytes" in answer.read().decode()) == (413, True)
    assert sent_to(engines) == {}


def test_a_body_of_unknown_length_is_refused(gateway):
    answer = gateway.ask(raw=iter([b'{"model": "qwen"}']))
    assert (answer.status, "Content-Length" in answer.json["error"]["message"]) == (411, True)


def test_a_slow_client_is_given_up(gateway, engines):
    connection = gateway.connect()
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (("Authorization", "Bearer sk-first"), ("Content-Length", "1000")):
        connection.putheader(name, value)
    connection.endheaders(b'{"model": ')
    answer = connection.getresponse()
    # Time-out of the body (408), or a body that ended too early to be JSON (400): in either case no engine was kept.
    assert answer.status in (400, 408)
    assert sent_to(engines) == {}


def test_anthropics_key_header_counts_as_well(gateway):
    assert gateway.ask(QWEN, key=None, headers={"X-Api-Key": "sk-first"}, path="/v1/messages").status == 200


@pytest.mark.parametrize("place", ["before", "behind"])
def test_the_model_is_found_wherever_it_stands_in_a_large_body(gateway, engines, place):
    text = "ä" * 150_000  # six bytes each in the body
    body = {"model": "small", "x": text} if place == "before" else {"x": text, "model": "small"}
    assert gateway.ask(body).status == 200
    ((name, (request,)),) = sent_to(engines).items()
    assert (name, request["body"]["x"]) == ("stand-in-2:long", text)


def test_long_prompts_go_to_their_own_engine_and_short_ones_do_not(gateway, engines):
    gateway.ask({**SMALL, "x": "y" * 19_000})
    assert list(sent_to(engines)) == ["stand-in-2:b"]
    gateway.ask({**SMALL, "x": "y" * 21_000})
    assert sorted(sent_to(engines)) == ["stand-in-2:b", "stand-in-2:long"]


# ---- priority --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "priority"), [("qwen", -7), ("small", 7)])
def test_priority_has_the_engines_own_direction(gateway, engines, model, priority):
    gateway.ask({"model": model}, headers={"X-Priority": "7"})
    ((_, (request,)),) = sent_to(engines).items()
    assert request["body"] == {"model": model, "priority": priority}
    assert "x-priority" not in request["headers"]


@pytest.mark.parametrize("smuggled", [b'"priority": -9', b'"pri\\u006frity": -9'])
def test_a_client_cannot_smuggle_a_priority(gateway, engines, smuggled):
    gateway.ask(raw=b'{"model": "qwen", ' + smuggled + b"}  ")
    ((_, (request,)),) = sent_to(engines).items()
    assert request["body"]["priority"] == 0


def test_priority_is_written_into_a_large_body_too(gateway, engines):
    text = "y}" * 400_000
    gateway.ask({"model": "qwen", "x": text}, headers={"X-Priority": "-3"})
    ((_, (request,)),) = sent_to(engines).items()
    assert (request["body"]["x"], request["body"]["priority"]) == (text, 3)


# ---- load ------------------------------------------------------------------------------------------------------------


def test_an_engine_is_given_no_more_than_its_sequences_and_the_rest_waits(gateway, engines):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: gateway.ask({**QWEN, "stand_in": {"seconds": 0.4}}), range(12)))
    assert [answer.status for answer in answers] == [200] * 12
    assert [engines[name].most_running for name in ("stand-in-1:a", "stand-in-2:a")] == [2, 2]


def test_who_waited_too_long_is_told_when_to_come_back(gateway):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: gateway.ask({**QWEN, "stand_in": {"seconds": 5}}), range(8)))
    late = [answer for answer in answers if answer.status == 503]
    assert len(late) == 4
    assert {answer.headers["retry-after"] for answer in late} == {"5"}


def test_a_key_has_its_concurrency(gateway):
    with ThreadPoolExecutor(4) as pool:
        asked = pool.map(lambda _: gateway.ask({**SMALL, "stand_in": {"seconds": 1}}, key="sk-limited"), range(4))
        statuses = sorted(answer.status for answer in asked)
    assert statuses == [200, 200, 429, 429]


def test_a_key_has_its_rate_and_others_do_not_feel_it(gateway):
    wait_for(lambda: gateway.ask(SMALL, key="sk-limited").status == 429)
    answer = gateway.ask(SMALL, key="sk-limited")
    assert ("20 requests in a minute" in answer.json["error"]["message"], answer.headers["retry-after"]) == (True, "10")
    assert gateway.ask(SMALL).status == 200


def test_a_stream_is_not_held_back(gateway):
    connection = gateway.connect()
    body = json.dumps({**QWEN, "stand_in": {"events": 10, "pause": 0.2}})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer sk-first"})
    answer = connection.getresponse()
    arrivals = [time.monotonic() for line in iter(answer.readline, b"") if line.startswith(b"data: {")]
    assert len(arrivals) == 10
    # Sent over 1.8 seconds: a buffered answer would arrive at once.
    assert arrivals[-1] - arrivals[0] > 1.2


def test_connections_are_held_by_the_thousand(gateway, host):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    try:
        for _ in range(9500):
            held.append(socket.create_connection((gateway.address, gateway.port), timeout=30))
        wait_for(
            lambda: (
                int(
                    host.check_output("echo 'show info' | socat - /run/haproxy/admin.sock | sed -n 's/^CurrConns: //p'")
                )
                >= 9500
            )
        )
        assert gateway.ask(QWEN).status == 200
    finally:
        for connection in held:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_adds_little_to_the_first_byte(gateway, engines):
    """The bound is wide, because machines that run tests are busy."""
    engine = engines["stand-in-2:b"]
    direct = http.client.HTTPConnection(*engine.server_address)
    through = gateway.connect()
    seconds = {}
    for name, connection in (("direct", direct), ("through", through)):
        rows = []
        for _ in range(60):
            start = time.perf_counter()
            body = json.dumps({**SMALL, "stand_in": {"events": 2}})
            connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer sk-first"})
            answer = connection.getresponse()
            answer.readline()
            rows.append(time.perf_counter() - start)
            answer.read()
        seconds[name] = statistics.median(rows)
    added_ms = (seconds["through"] - seconds["direct"]) * 1000
    print(f"added to the first byte: {added_ms:.2f} ms at the median")
    assert added_ms < 10


# ---- failures --------------------------------------------------------------------------------------------------------


class Caller(threading.Thread):
    """Asks without pause, streaming each second answer, and notes what was no whole answer."""

    def __init__(self, gateway, body=QWEN):
        super().__init__(daemon=True)
        self.gateway, self.body = gateway, body
        self.failures, self.count, self.ending = [], 0, threading.Event()

    def run(self):
        while not self.ending.is_set():
            told = {"events": 5, "pause": 0.02} if self.count % 2 else {"seconds": 0.02}
            try:
                answer = self.gateway.ask({**self.body, "stand_in": told})
                if answer.status != 200 or (self.count % 2 and not answer.text.endswith(b"data: [DONE]\n\n")):
                    self.failures.append((answer.status, answer.text[:200]))
            except OSError as error:
                self.failures.append(repr(error))
            self.count += 1

    def __enter__(self):
        self.start()
        wait_for(lambda: self.count > 3)
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.join()


def test_an_engine_that_refuses_connections_costs_no_request(gateway, engines, host):
    engine = engines["stand-in-1:a"]
    with Caller(gateway) as caller:
        engine.socket.close()  # refuses from now on, without a word to the gateway
        before = caller.count
        wait_for(lambda: caller.count > before + 30)
        wait_for(lambda: states(host)["stand-in-1:a"].startswith("DOWN"))
    assert caller.failures == []
    engine.reopen()


def test_a_priority_is_written_once_when_another_engine_is_tried(gateway, engines):
    engine = engines["stand-in-1:a"]
    engine.socket.close()
    for _ in range(6):
        assert gateway.ask({"model": "qwen"}, headers={"X-Priority": "4"}).status == 200
    engine.reopen()
    assert [seen["raw"].count(b"priority") for seen in engines["stand-in-2:a"].seen] == [1] * 6


def test_an_engine_without_room_is_passed_over(gateway, engines):
    """503 of an engine says that it took nothing: another one is asked."""
    engines["stand-in-1:a"].always = 503
    try:
        answers = [gateway.ask(QWEN) for _ in range(6)]
    finally:
        engines["stand-in-1:a"].always = None
    assert [answer.status for answer in answers] == [200] * 6


def test_no_engine_at_all_is_said(gateway, engines, host):
    engine = engines["stand-in-2:b"]
    engine.healthy = False
    wait_for(lambda: states(host)["stand-in-2:b"].startswith("DOWN"))
    answer = gateway.ask(SMALL)
    engine.healthy = True
    assert (answer.status, answer.json["error"]["code"], answer.headers["retry-after"]) == (503, "overloaded", "5")


# ---- what an operator does -------------------------------------------------------------------------------------------


def test_a_drained_host_gets_nothing_new_finishes_its_work_and_stays_out(gateway, engines, host, run_playbook):
    with Caller(gateway) as caller:
        streams = ThreadPoolExecutor(4)
        long = [streams.submit(gateway.ask, {**QWEN, "stand_in": {"events": 30, "pause": 0.1}}) for _ in range(2)]
        rc, text = run_playbook("playbooks/ops/drain.yml", {"gateway_drain_host": "stand-in-1"})
        assert rc == 0, text
        assert engines["stand-in-1:a"].running == 0
        assert [stream.result().text.count(b"data: {") for stream in long] == [30, 30]
        before = len(engines["stand-in-1:a"].seen)
        assert run_playbook("playbooks/ops/drain.yml", {"gateway_drain_host": "stand-in-1"})[1].count("changed=0") == 1
        # The gateway itself remembers it, over a reload and over a restart.
        host.check_output("systemctl reload haproxy.service")
        wait_for(lambda: states(host).get("stand-in-1:a") == "DRAIN")
        assert len(engines["stand-in-1:a"].seen) == before
    assert caller.failures == []
    host.check_output("systemctl restart haproxy.service")
    wait_for(lambda: states(host).get("stand-in-1:a") == "DRAIN")
    rc, text = run_playbook("playbooks/ops/undrain.yml", {"gateway_drain_host": "stand-in-1"})
    assert rc == 0, text
    wait_for(lambda: states(host).get("stand-in-1:a") == "UP")


def test_requests_that_do_not_end_are_named_and_ended_only_when_told(gateway, engines, run_playbook):
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(gateway.ask, {**QWEN, "stand_in": {"events": 200, "pause": 0.1}})
        wait_for(lambda: sent_to(engines))
        ((name, _),) = sent_to(engines).items()
        wanted = {"gateway_drain_host": name.split(":")[0], "gateway_drain_seconds": 2}
        rc, text = run_playbook("playbooks/ops/drain.yml", wanted)
        assert rc != 0
        assert f"requests are still running on {name}" in text
        rc, text = run_playbook("playbooks/ops/drain.yml", {**wanted, "gateway_drain_force": True})
        assert rc == 0, text
        with pytest.raises(Exception, match="IncompleteRead"):
            stream.result()
    assert run_playbook("playbooks/ops/undrain.yml", {"gateway_drain_host": wanted["gateway_drain_host"]})[0] == 0


def test_a_host_that_nobody_knows_is_refused(run_playbook):
    rc, text = run_playbook("playbooks/ops/drain.yml", {"gateway_drain_host": "gpu-99"})
    assert rc != 0
    assert "no server of gpu-99. It has stand-in-1:a, stand-in-2:a" in text


def test_a_key_is_withdrawn_without_a_dropped_request(gateway, host, hosts, run_playbook):
    assert gateway.ask(QWEN, key="sk-leaving").status == 200
    staying = [client for client in hosts["gateways"]["vars"]["gateway_clients"] if client["name"] != "leaving"]
    with Caller(gateway) as caller:
        rc, text = run_playbook("playbooks/gateway.yml", {"gateway_clients": staying})
        assert rc == 0, text
    assert caller.failures == []
    assert caller.count > 20
    wait_for(lambda: gateway.ask(QWEN, key="sk-leaving").status == 401)
    assert run_playbook("playbooks/gateway.yml")[0] == 0
    assert gateway.ask(QWEN, key="sk-leaving").status == 200


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"gateway_tls_certificate": "/root/none.pem"}, "There is no /root/none.pem on this gateway"),
        ({"gateway_engine_key_file": "/root/none.key"}, "There is no /root/none.key on this gateway"),
        ({"gateway_clients": []}, "would have 3 pools of engines and 0 clients"),
        ({"gateway_clients": [{"name": "x", "key_sha256": "sk-plain"}]}, "never the key itself"),
    ],
)
def test_what_cannot_work_is_refused_and_changes_nothing(run_playbook, extra, text):
    rc, output = run_playbook("playbooks/gateway.yml", extra)
    assert rc != 0
    assert text in output
    assert "changed=0" in output


def test_somebody_elses_configuration_is_left_alone(host, run_playbook):
    host.check_output("cp /etc/haproxy/haproxy.cfg /root/ours && echo '# mine' > /etc/haproxy/haproxy.cfg")
    try:
        rc, text = run_playbook("playbooks/gateway.yml")
        assert rc != 0
        assert "written by somebody else" in text
        assert host.file("/etc/haproxy/haproxy.cfg").content_string == "# mine\n"
    finally:
        host.check_output("cp /root/ours /etc/haproxy/haproxy.cfg")


# ---- what is chosen --------------------------------------------------------------------------------------------------


@pytest.fixture
def with_sessions(run_playbook):
    """The gateway as one that keeps a client's session on one engine; as it was, afterwards."""
    rc, text = run_playbook("playbooks/gateway.yml", {"gateway_affinity_header": "X-Session"})
    assert rc == 0, text
    yield
    rc, text = run_playbook("playbooks/gateway.yml")
    assert rc == 0, text


def engine_of(gateway, session):
    return gateway.ask(QWEN, headers={"X-Session": session} if session else {}).json["engine"]


def test_a_session_stays_on_its_engine_and_moves_only_while_that_is_away(with_sessions, gateway, engines, host):
    sessions = [f"session-{number}" for number in range(24)]
    first = {session: engine_of(gateway, session) for session in sessions}
    assert set(first.values()) == {"stand-in-1:a", "stand-in-2:a"}
    for _ in range(3):
        assert {session: engine_of(gateway, session) for session in sessions} == first
    # Who names no session is spread.
    assert {engine_of(gateway, None) for _ in range(8)} == {"stand-in-1:a", "stand-in-2:a"}
    engines["stand-in-1:a"].healthy = False
    wait_for(lambda: states(host)["stand-in-1:a"].startswith("DOWN"))
    assert {engine_of(gateway, session) for session in sessions} == {"stand-in-2:a"}
    engines["stand-in-1:a"].healthy = True
    wait_for(lambda: states(host)["stand-in-1:a"] == "UP")
    assert {session: engine_of(gateway, session) for session in sessions} == first


def test_one_busy_session_does_not_wait_for_its_engine_alone(with_sessions, gateway, engines):
    body = {**QWEN, "stand_in": {"seconds": 0.5}}
    with ThreadPoolExecutor(4) as pool:
        asked = pool.map(lambda _: gateway.ask(body, headers={"X-Session": "one"}), range(4))
        answers = list(asked)
    assert [answer.status for answer in answers] == [200] * 4
    assert {answer.json["engine"] for answer in answers} == {"stand-in-1:a", "stand-in-2:a"}


def test_engines_are_asked_with_their_own_key_and_never_the_clients(gateway, engines, host, run_playbook):
    host.check_output("install --mode=0600 /dev/null /root/engine.key && echo sk-engine > /root/engine.key")
    rc, text = run_playbook("playbooks/gateway.yml", {"gateway_engine_key_file": "/root/engine.key"})
    assert rc == 0, text
    try:
        assert "sk-engine" not in text
        assert gateway.ask(QWEN).status == 200
        ((_, (request,)),) = sent_to(engines).items()
        assert request["headers"]["authorization"] == "Bearer sk-engine"
        assert gateway.ask(QWEN, key="sk-engine").status == 401
        assert "sk-engine" not in host.file("/etc/haproxy/haproxy.cfg").content_string
    finally:
        rc, text = run_playbook("playbooks/gateway.yml")
        assert rc == 0, text
    engines["stand-in-1:a"].forget()
    engines["stand-in-2:a"].forget()
    gateway.ask(QWEN)
    ((_, (request,)),) = sent_to(engines).items()
    assert "authorization" not in request["headers"]


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_the_log_has_client_model_tokens_and_times_but_no_prompt(gateway, host):
    plain = gateway.ask({**QWEN, "stand_in": {"usage": [7, 3]}}).headers["x-request-id"]
    stream = gateway.ask({**QWEN, "stand_in": {"events": 4}}).headers["x-request-id"]
    journal = wait_for(
        lambda: text if stream in (text := host.run("journalctl -u haproxy -o cat -n 200 --no-pager").stdout) else None
    )
    rows = {row["id"]: row for row in map(json.loads, (line for line in journal.splitlines() if line.startswith("{")))}
    assert (rows[plain]["client"], rows[plain]["model"], rows[plain]["status"]) == ("first", "qwen", 200)
    assert (rows[plain]["prompt_tokens"], rows[plain]["completion_tokens"]) == ("7", "3")
    assert (rows[stream]["prompt_tokens"], rows[stream]["completion_tokens"]) == ("11", "4")
    assert rows[stream]["total_ms"] >= rows[stream]["first_byte_ms"] >= 0
    assert "secret prompt" not in journal
    assert "sk-first" not in journal


def test_metrics_are_told_inside_only(gateway, host):
    page = host.check_output(
        "bash -c \"exec 3<>/dev/tcp/127.0.0.1/8405; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3\""
    )
    assert 'haproxy_server_status{proxy="small",server="stand-in-2:b",state="UP"} 1' in page
    assert host.socket("tcp://127.0.0.1:8405").is_listening
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((gateway.address, 8405), timeout=5)


def test_the_health_page_needs_no_key(gateway):
    assert gateway.ask(method="GET", path="/healthz", key=None).status == 200


# ---- the door of a rollout -------------------------------------------------------------------------------------------

THROUGH_THE_DOOR = """
import http.client, json, socket, sys
class Door(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/run/haproxy/metalserve-proof.sock")
door = Door("localhost")
door.request("POST", sys.argv[1], json.dumps({"model": "qwen", "messages": []}), {"Content-Type": "application/json"})
answer = door.getresponse()
print(json.dumps([answer.status, answer.read().decode()]))
"""


def through_the_door(host, path):
    return json.loads(host.check_output("python3 -c %s %s", THROUGH_THE_DOOR, path))


def test_a_rollout_asks_the_server_that_it_names_drained_or_not(gateway, engines, host, run_playbook):
    for name in ("stand-in-1:a", "stand-in-2:a"):
        assert [through_the_door(host, f"/{name}/v1/chat/completions")[0] for _ in range(3)] == [200] * 3
        assert {each: len(seen) for each, seen in sent_to(engines).items()} == {name: 3}
        engines[name].forget()
    run_playbook("playbooks/ops/drain.yml", {"gateway_drain_host": "stand-in-1"})
    try:
        status, text = through_the_door(host, "/stand-in-1:a/v1/chat/completions")
        assert (status, json.loads(text)["engine"]) == (200, "stand-in-1:a")
    finally:
        run_playbook("playbooks/ops/undrain.yml", {"gateway_drain_host": "stand-in-1"})


@pytest.mark.parametrize("name", ["nobody:a", "stand-in-2:b"])
def test_an_answer_of_another_server_than_the_named_one_is_none(gateway, host, name):
    status, text = through_the_door(host, f"/{name}/v1/chat/completions")
    assert (status, "no such server" in text) == (502, True)


def test_the_door_is_for_root_and_hides_what_is_hidden(gateway, engines, host):
    assert through_the_door(host, "/stand-in-1:a/invocations")[0] == 404
    refused = host.run("su ops -s /bin/sh -c %s", f"python3 -c '{THROUGH_THE_DOOR}' /stand-in-1:a/v1/chat/completions")
    assert "PermissionError" in refused.stderr
    # Over the network a path that names a server is just a path that does not exist.
    assert gateway.ask(QWEN, path="/stand-in-1:a/v1/chat/completions").status == 404
    assert sent_to(engines) == {}
