"""The program that fetches weights on a host, under systemd and without the controller.

weights.pyz fetch REQUEST     one model, as its request file says; the state file says how far it is
weights.pyz share CONFIG      give published and finished files to other hosts
weights.pyz verify DIRECTORY  hash everything that is published
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from .weights import ensure_model, verify_published
from .weights_content import Expectation
from .weights_download import Progress, RateLimit, Transfer
from .weights_job import read_json, state_path, write_json
from .weights_manifest import RECORD_NAME, WeightsError
from .weights_prune import removable_sentence
from .weights_share import share

_STATE_SECONDS = 1.0
_RATE_OVER_SECONDS = 15.0


class State:
    """Writes the state file once a second until it is told the end."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path, self._progress = path, progress
        self._total_bytes = self._needed_bytes = 0
        self._started_at = time.time()
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._write("running", {})
        self._thread.start()

    def started(self, total_bytes: int, needed_bytes: int) -> None:
        """Take note of how much there is to do."""
        self._total_bytes, self._needed_bytes = total_bytes, needed_bytes

    def end(self, word: str, more: Mapping[str, Any]) -> None:
        """Write the last state."""
        self._over.set()
        self._thread.join()
        self._write(word, more)

    def _run(self) -> None:
        while not self._over.wait(_STATE_SECONDS):
            self._write("running", {})

    def _write(self, word: str, more: Mapping[str, Any]) -> None:
        now, received = time.monotonic(), self._progress.received_bytes
        self._samples.append((now, received))
        while len(self._samples) > 2 and now - self._samples[0][0] > _RATE_OVER_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = max(0.0, (received - before) / (now - since)) if now > since else 0.0
        left = max(0, self._needed_bytes - received)
        state = {
            "state": word,
            "pid": os.getpid(),
            "total_bytes": self._total_bytes,
            "done_bytes": self._total_bytes - left,
            "received_bytes": received,
            "bytes_per_second": round(rate),
            "eta_seconds": round(left / rate) if rate > 0 else None,
            "by_source": dict(self._progress.by_source),
            "note": self._progress.note,
            "started_at": self._started_at,
            "updated_at": time.time(),
            **more,
        }
        write_json(self._path, state)


def fetch(request_file: Path) -> int:
    """Do what a request says; 0 when the model is published, 1 when it cannot be."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    models_dir = Path(request["models_dir"])
    progress = Progress()
    state = State(state_path(models_dir, request["key"], request["revision"]), progress)

    def stopped(number: int, frame: Optional[FrameType]) -> None:
        # As good as any other moment: whatever is on the disk, the next run goes on from it.
        state.end("stopped", {"message": "The worker was told to stop. Run again: what is complete is kept."})
        os._exit(0)

    signal.signal(signal.SIGTERM, stopped)
    state.start()
    how = Transfer(
        read_timeout_seconds=request["read_timeout_seconds"],
        attempts=request["attempts"],
        patience_seconds=request["patience_seconds"],
        peers=tuple(request["peers"]),
        tokens=read_json(Path(request["tokens_path"])),
        limit=RateLimit(request["rate_limit_bytes_per_second"]),
        progress=progress,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    # A host that may ask the origin has its peers behind it, as what is left when the origin fails.
    order = [*request["sources"], *request["peers"]] if request["seed"] else [*request["peers"], *request["sources"]]
    try:
        outcome = ensure_model(
            models_dir,
            request["key"],
            request["revision"],
            request["files"],
            order,
            full_hash=request["full_hash"],
            expected=Expectation(request["format"], request["require_chat_template"]),
            reserve_bytes=request["reserve_bytes"],
            connections=request["connections"],
            transfer=how,
            removable=lambda: removable_sentence(models_dir, [(request["key"], request["revision"])]),
            started=state.started,
        )
    except (WeightsError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        state.end("failed", {"message": str(error)})
        return 1
    print(outcome.message, flush=True)
    more = {"changed": outcome.changed, "path": outcome.path, "message": outcome.message}
    state.end(
        "done", {**more, "fetched_files": list(outcome.fetched_files), "healed_files": list(outcome.healed_files)}
    )
    return 0


def verify(models_dir: Path) -> int:
    """Hash every published revision; prints one line each and returns 1 when one is damaged."""
    status = 0
    for record in sorted(models_dir.glob(f"[!.]*/[!.]*/{RECORD_NAME}")):
        began = time.monotonic()
        try:
            bad = verify_published(record.parent)
            problem = f"damaged or missing: {', '.join(entry.path for entry in bad)}" if bad else ""
        except (WeightsError, OSError) as error:
            problem = str(error)
        print(f"{record.parent}: {problem or f'proven in {time.monotonic() - began:.1f} s'}", flush=True)
        status = 1 if problem else status
    if status:
        print("Change: run playbooks/stage.yml with -e model_weights_full_hash=true, which heals it.", flush=True)
    return status


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Entry point of the program."""
    word, place = list(sys.argv[1:] if argv is None else argv)
    return {"fetch": fetch, "share": share, "verify": verify}[word](Path(place))
