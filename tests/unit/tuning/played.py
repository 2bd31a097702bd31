"""A deployment whose best sizes are known, measured with noise; nothing is started."""

import math
import random

from metalserve.errors import Refusal
from metalserve.remote.benchmark import MEASURES, summary
from metalserve.tuning.search import CandidateFailedError

PRESENT = {"max_batched_tokens": 2048, "max_sequences": 256, "kv_cache_dtype": "auto", "eager": False}
SPACE = {
    "max_batched_tokens": [1024, 2048, 4096, 8192, 16384],
    "max_sequences": [64, 128, 256, 512],
    "kv_cache_dtype": ["auto", "fp8"],
    "eager": [False, True],
}
BEST = {"max_batched_tokens": 8192, "max_sequences": 128, "kv_cache_dtype": "fp8", "eager": False}


def throughput(setting):
    """Tokens a second without noise: one peak, at `BEST`."""
    value = 1000.0
    value -= 60 * abs(math.log2(setting["max_batched_tokens"] / 8192))
    value -= 40 * abs(math.log2(setting["max_sequences"] / 128))
    value -= 50 * (setting["kv_cache_dtype"] != "fp8")
    return value - 400 * setting["eager"]


class Engine:
    """Plans and measures.

    Args:
        rate: tokens a second of a setting.
        noise: how far a run may be from it, as a share.
        refuse: settings that the planner refuses.
        fail: settings that do not start.
        seconds: of each measurement.
        alike: settings that give one and the same release, by a key.
    """

    def __init__(self, rate=throughput, *, noise=0.0, refuse=None, fail=None, seconds=100.0, alike=None, seed=1):
        self.rate, self.noise, self.seconds = rate, noise, seconds
        self.refuse, self.fail = refuse or (lambda setting: False), fail or (lambda setting: False)
        self.alike = alike or (lambda setting: setting)
        self.random, self.now, self.measured = random.Random(seed), 0.0, []

    def clock(self):
        return self.now

    def plan(self, changed):
        setting = {**PRESENT, **changed}
        if self.refuse(setting):
            raise Refusal(found="too much", needed="less", change="max_batched_tokens")
        same = self.alike(setting)
        return {
            "release_id": "former" if same == self.alike(PRESENT) else repr(sorted(same.items())),
            "setting": setting,
            "files": {},
            "plan": {"max_num_batched_tokens": 2048, "max_num_seqs": 256},
        }

    def measure(self, release):
        self.now += self.seconds
        self.measured.append(release["setting"])
        if self.fail(release["setting"]):
            raise CandidateFailedError("start: out of memory")
        return self.result(release["setting"])

    def result(self, setting):
        runs = []
        for _ in range(3):
            rate = self.rate(setting) * (1 + self.noise * self.random.uniform(-1, 1))
            runs.append({name: rate if more else 1e5 / rate for name, more in MEASURES.items()})
        return {"asked": {"prompts": 64}, "runs": runs, "summary": summary(runs)}
