"""A client of a gateway, and what its HAProxy says of the engines."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict
    text: bytes

    @property
    def json(self):
        return json.loads(self.text)


class Client:
    """Asks the gateway, each time on a connection of its own."""

    def __init__(self, address, port, certificate):
        self.address, self.port = address, port
        self.context = ssl.create_default_context(cadata=certificate)

    def connect(self, timeout=60):
        return http.client.HTTPSConnection(self.address, self.port, timeout=timeout, context=self.context)

    def ask(self, body=None, *, key="sk-first", path="/v1/chat/completions", method="POST", headers=None, raw=None):
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        connection = self.connect()
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()


def states(host):
    """Status of each server as the gateway sees it."""
    rows = host.run("echo 'show stat' | socat - /run/haproxy/admin.sock").stdout.splitlines()
    fields = [row.split(",") for row in rows if row.count(",") > 17]
    return {row[1]: row[17] for row in fields if ":" in row[1]}


def wait_for(condition, seconds=60):
    """Wait until something holds, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"did not come true in {seconds} s")
