#!/usr/bin/env python3
"""What a docker or podman on PATH would be asked: writes its arguments to $FAKE_LOG and acts out the few that the adapter reads."""

import json
import os
import sys

log = os.environ["FAKE_LOG"]
arguments = sys.argv[1:]
with open(log, "a") as file:
    file.write(json.dumps(arguments) + "\n")
what = arguments[0]
if what == "ps":
    if os.environ.get("FAKE_DOWN"):
        sys.exit("Cannot connect to the Docker daemon")
    print("abandoned 999999999.1")
elif what == "run":
    if "missing:image" in arguments:
        print("Unable to find image 'missing:image' locally", file=sys.stderr)
        sys.exit(125)
    print("0123456789abcdef")
elif what == "exec":
    rest = arguments[1:]
    while rest[0].startswith("--"):
        rest = rest[1:] if rest[0] == "--interactive" else rest[2:]
    command = rest[1:]
    if command[-1] == "kill -9 -1":
        sys.exit(137)
    work = os.environ["FAKE_WORK"]
    command = [part.replace("/workspace", work) for part in command]
    os.chdir(work)
    os.execvp(command[0], command)
