"""Runs inside SGLang's image: SGLang's own parser reads configuration files.

Reads {"cases": {name: {"file": text of engine.yaml, "words": [word, ...], "fields": [name, ...]}}} on standard input,
where a word {config} stands for the path of the file. Writes for each name the parsed values of the fields, or the
words with which SGLang refused. Nothing is resolved and no model is looked at.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

from sglang.srt.server_args import prepare_server_args


def answer(case, folder, name):
    path = Path(folder, f"{name}.yaml")
    path.write_text(case["file"], encoding="utf-8")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parsed = prepare_server_args([word.format(config=path) for word in case["words"]])
    except SystemExit as error:
        return {"status": error.code, "said": said.getvalue()}
    except Exception as error:
        return {"status": type(error).__name__, "said": str(error)}
    return {"status": 0, "arguments": {name: getattr(parsed, name) for name in case["fields"]}}


def main():
    cases = json.load(sys.stdin)["cases"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        answers = {name: answer(case, folder, str(place)) for place, (name, case) in enumerate(cases.items())}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
