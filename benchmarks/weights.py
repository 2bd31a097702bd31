"""Measure hashing, downloading, a look without a change, and the fan-out over limited links; prints tables.

    sudo env PYTHONPATH=src python benchmarks/weights.py [hash] [download] [look] [fanout]

Needs root, curl, openssl, ip and tc. The fan-out runs in network namespaces on one bridge, each link limited both ways.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from metalserve.remote.weights import ensure_model
from metalserve.remote.weights_download import Transfer
from metalserve.remote.weights_hash import hash_files
from metalserve.remote.weights_job import request_path, state_path, write_json
from metalserve.remote.weights_manifest import make_manifest
from metalserve.remote.weights_share import config_path, write_config

SOURCE = Path(__file__).resolve().parents[1] / "src/metalserve/remote"
RATE_MBIT = 100
SHARDS, SHARD_MIB = 16, 4
DOWNLOAD_MIB = int(os.environ.get("BENCH_DOWNLOAD_MIB", "4096"))


def model(directory: Path, shards: int, shard_mib: int) -> list[dict[str, Any]]:
    """A checkpoint of safetensors files full of random bytes; returns its manifest."""
    directory.mkdir(parents=True)
    index = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        size = shard_mib << 20
        header = json.dumps({f"w{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        with (directory / name).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for _ in range(shard_mib):
                out.write(os.urandom(1 << 20))
        index[f"w{number}"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text('{"model_type": "bench"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return make_manifest(directory)


def seconds(argv: list[str]) -> float:
    """Wall time of a command that must succeed."""
    began = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def bench_hash(work: Path) -> None:
    """The same files, in memory: sha256sum and openssl on all processors, and hash_files. The best of three."""
    model(work / "hash", 8, 256)
    files = sorted(str(path) for path in (work / "hash").glob("*.safetensors"))
    processors = str(len(os.sched_getaffinity(0)))
    rows: dict[str, list[float]] = {"sha256sum": [], "openssl dgst": [], "hash_files": []}
    for _ in range(3):
        for name, command in (("sha256sum", ["sha256sum"]), ("openssl dgst", ["openssl", "dgst", "-sha256"])):
            shell = f"printf '%s\\0' {' '.join(files)} | xargs -0 -P {processors} -n 1 {' '.join(command)}"
            rows[name].append(seconds(["sh", "-c", shell]))
        began = time.monotonic()
        hash_files(Path(file) for file in files)
        rows["hash_files"].append(time.monotonic() - began)
    shutil.rmtree(work / "hash")
    print("hashing 2 GiB in 8 files, best of three")
    for name, times in rows.items():
        print(f"  {name:14} {min(times):6.2f} s  {2 / min(times):5.2f} GiB/s")


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        self.wfile.flush()
        self.connection.sendfile(source)


def bench_download(work: Path) -> None:
    """One file from the loopback to the disk: curl, curl with the same proof afterwards, and the downloader."""
    served = work / "served"
    files = [entry for entry in model(served, 1, DOWNLOAD_MIB) if entry["path"].endswith(".safetensors")]

    def handler(*arguments: Any) -> _Files:
        return _Files(*arguments, directory=str(served))

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    out = work / "curl.out"
    fetch = f"curl -sf -o {out} {url}/{files[0]['path']}"
    shells = {
        "curl; sync": f"{fetch}; sync {out}",
        "curl; sync; openssl dgst": f"{fetch}; sync {out}; openssl dgst -sha256 {out}",
    }
    rows: dict[str, list[float]] = {**{name: [] for name in shells}, "metalserve": []}
    for _ in range(3):
        for name, shell in shells.items():
            rows[name].append(seconds(["sh", "-ec", shell]))
            out.unlink()
        began = time.monotonic()
        ensure_model(work / "models", "bench", "r1", files, [url], reserve_bytes=0, transfer=Transfer())
        rows["metalserve"].append(time.monotonic() - began)
        shutil.rmtree(work / "models")
    server.shutdown()
    shutil.rmtree(served)
    print(f"downloading {DOWNLOAD_MIB} MiB from the loopback, best of three")
    for name, times in rows.items():
        print(f"  {name:24} {min(times):6.2f} s  {DOWNLOAD_MIB / 1024 / min(times):5.2f} GiB/s")


def bench_look(work: Path) -> None:
    """A look at a published model of 64 files that has not changed."""
    files = model(work / "look", 64, 1)
    ensure_model(work / "models", "bench", "r1", files, [str(work / "look")], reserve_bytes=0)
    times = []
    for _ in range(5):
        began = time.monotonic()
        outcome = ensure_model(work / "models", "bench", "r1", files, [], reserve_bytes=0, dry_run=True)
        times.append(time.monotonic() - began)
        assert not outcome.changed
    print(
        f"a look at a published model of {len(files)} files: {1000 * min(times):.1f} ms (on the host, without Ansible)"
    )


@contextlib.contextmanager
def network(hosts: int) -> Iterator[list[str]]:
    """Namespaces with one limited link each, on a bridge; yields their names, the source first."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    names = [f"msw{number}" for number in range(hosts + 1)]
    # The bridge has a namespace of its own: Docker's firewall of the machine would judge its traffic.
    ip("netns", "add", "mswbr")
    ip("-n", "mswbr", "link", "add", "br0", "type", "bridge")
    ip("-n", "mswbr", "link", "set", "br0", "up")
    try:
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", "mswbr", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", "mswbr", "link", "set", name, "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.99.7.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ["root", "tbf", "rate", f"{RATE_MBIT}mbit", "burst", "256k", "latency", "50ms"]
            for namespace, device in (("mswbr", name), (name, "eth0")):
                ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *limit)
        yield names
    finally:
        for name in [*names, "mswbr"]:
            subprocess.run(["ip", "netns", "del", name], check=False)


def worker(namespace: str, word: str, place: Path) -> subprocess.Popen[bytes]:
    """The worker in a namespace, as a host runs it."""
    code = "import sys; from metalserve.remote.weights_worker import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parents[1])}
    argv = ["ip", "netns", "exec", namespace, sys.executable, "-c", code, word, str(place)]
    return subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL)


def fan_out(work: Path, files: list[dict[str, Any]], hosts: int, chain: bool) -> float:
    """Wall time until every host has published, from a source with one link of the same width."""
    running: list[subprocess.Popen[bytes]] = []
    with network(hosts) as names:
        try:
            for number, name in enumerate(names):
                directory = work / name
                idle = {"port": 8747, "addresses": [f"10.99.7.{k + 1}" for k in range(hosts + 1)], "idle_seconds": 600}
                write_config({"models_dir": str(directory if number else work / "origin"), **idle})
                running.append(worker(name, "share", config_path(directory if number else work / "origin")))
            url = "http://10.99.7.{}:8747/bench/r1"
            requests = []
            for number in range(1, hosts + 1):
                peers = [url.format(k + 1) for k in range(number - 1, 0, -1)][:3] if chain else []
                requests.append(
                    {
                        "models_dir": str(work / names[number]), "key": "bench", "revision": "r1", "files": files,
                        "sources": [url.format(1)], "peers": peers, "seed": not peers, "format": "bf16",
                        "require_chat_template": True, "reserve_bytes": 0, "full_hash": False,
                        "connections": 1 if peers else 4, "rate_limit_bytes_per_second": 0, "attempts": 10,
                        "patience_seconds": 600, "read_timeout_seconds": 60, "tokens_path": "/nonexistent",
                    }
                )  # fmt: skip
                write_json(
                    state_path(work / names[number], "bench", "r1"), {"state": "queued", "updated_at": time.time()}
                )
            time.sleep(3)
            began = time.time()
            fetches = []
            for number, request in enumerate(requests, 1):
                place = request_path(work / names[number], "bench", "r1")
                write_json(place, request)
                fetches.append(worker(names[number], "fetch", place))
            if {process.wait() for process in fetches} != {0}:
                raise SystemExit("a fetch failed")
            return time.time() - began
        finally:
            for process in running:
                process.kill()
                process.wait()
            for number in range(1, hosts + 1):
                shutil.rmtree(work / names[number], ignore_errors=True)


def bench_fanout(work: Path) -> None:
    """1, 2, 4 and 8 hosts: all from the source, and along a chain."""
    files = model(work / "model", SHARDS, SHARD_MIB)
    ensure_model(work / "origin", "bench", "r1", files, [str(work / "model")], reserve_bytes=0)
    size = sum(int(entry["size_bytes"]) for entry in files)
    print(f"{size / 1e6:.0f} MB in {SHARDS} shards, links of {RATE_MBIT} Mbit/s each way")
    print("  hosts  all from the source  host to host")
    for hosts in (1, 2, 4, 8):
        times = [fan_out(work, files, hosts, chain) for chain in (False, True)]
        print(f"  {hosts:5}  {times[0]:17.1f} s  {times[1]:10.1f} s", flush=True)


def main() -> None:
    """Run what is named, or all."""
    benches = {"hash": bench_hash, "download": bench_download, "look": bench_look, "fanout": bench_fanout}
    with tempfile.TemporaryDirectory(prefix="metalserve-bench-", dir=os.environ.get("BENCH_DIR")) as work:
        for name in sys.argv[1:] or list(benches):
            benches[name](Path(work))


if __name__ == "__main__":
    main()
