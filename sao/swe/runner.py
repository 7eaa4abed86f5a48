"""Runs a task's tests inside the sandbox. This file is written into it and started as `python -I`, beside code that may want to look better than it is.

Standard input is one JSON object: {"key": hex, "paths": directories for sys.path, "tests": files, "canary": name, "out": file}. What each test did goes, signed
with the key, to `out`; nothing is read from what the tests print. The canary is a test that fails by its own words: where it is reported as
anything else, reports are being rewritten. The key is read before any line of the tested code runs. A patch that searches this
process's memory for it can still lie; one that prints, exits, patches pytest from a conftest or drops files cannot.
"""

import hashlib
import hmac
import json
import os
import sys
from typing import Any

import pytest

MOST_TEXT = 4000  # characters kept of one failure


class Recorder:
    """What became of each test: its worst moment of setup, call and teardown."""

    def __init__(self) -> None:
        self.status: dict[str, str] = {}
        self.failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        previous = self.status.get(report.nodeid)
        if report.failed:
            now = "FAILED" if report.when == "call" else "ERROR"
            self.failures.setdefault(report.nodeid, str(report.longrepr)[-MOST_TEXT:])
        elif report.skipped:
            now = "XFAIL" if hasattr(report, "wasxfail") else "SKIPPED"
        else:
            now = "PASSED" if report.when == "call" else previous or ""
        if now and previous not in ("FAILED", "ERROR"):
            self.status[report.nodeid] = now

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.status[report.nodeid] = "ERROR"
            self.failures.setdefault(report.nodeid, str(report.longrepr)[-MOST_TEXT:])


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    key = bytes.fromhex(job.pop("key"))
    sys.stdin.close()
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    with open(job["canary"], "w") as file:
        file.write("def test_canary():\n    assert False, 'this test fails'\n")
    sys.path[:0] = job["paths"]
    recorder = Recorder()
    options = ["-rA", "-q", "--tb=native", "--color=no", "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors", "--rootdir=."]
    code = int(pytest.main([*options, *job["tests"], job["canary"]], plugins=[recorder]))
    body = json.dumps({"status": recorder.status, "failures": recorder.failures, "code": code}).encode()
    sys.stdout.flush()
    with open(job["out"], "wb") as file:
        file.write(hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b"\n" + body)
    os._exit(code)


if __name__ == "__main__":
    main()
