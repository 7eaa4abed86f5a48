"""`sao env make swe`: tasks of mutated packages, written as a task repository."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from sao.errors import UserError
from sao.sandbox.client import Sandboxes
from sao.swe.make import Maker, held_out_packages, summary
from sao.swe.package import Package, fetch, read_package, unpack
from sao.swe.toolbox import within_reach

CACHE = "~/.cache/sao/swe/sources"


def make(args: argparse.Namespace) -> int:
    """Fetch, mutate, verify, write. Returns the exit code: 0 also when there are fewer tasks than were asked for, which is said."""
    if args.tasks < 1 or args.parallel < 1 or not args.minutes > 0:
        raise UserError(f"--tasks={args.tasks}, --parallel={args.parallel} and --minutes={args.minutes:g} must be positive")
    wanted = [word.strip() for word in args.packages.split(",") if word.strip()] or [entry["name"] for entry in shipped()]
    repo = Path(args.to)
    with tempfile.TemporaryDirectory(prefix="sao-swe-") as scratch:
        packages = _packages(wanted, Path(scratch))
        held_out = held_out_packages([package.name for package in packages], [w for w in re.split(r"[,\s]+", args.held_out) if w])
        if found := within_reach(package.name for package in packages):
            print(
                f"warning: {', '.join(found)} lies in {sys.base_prefix}, where a policy in the sandbox can read it; use an interpreter without packages"
            )
        counts = asyncio.run(_make(args, repo, packages, held_out))
    print(
        f"{repo}: {sum(counts.values())} tasks of {sum(1 for n in counts.values() if n)} packages, held out: {', '.join(sorted(held_out)) or 'none'}"
    )
    print("candidates: " + ", ".join(f"{count} {outcome}" for outcome, count in summary(repo).items()))
    if sum(counts.values()) < args.tasks:
        print(f"that is fewer than {args.tasks}: the time was up, or the packages gave no more; add packages or go on with the same command")
    return 0


async def _make(args: argparse.Namespace, repo: Path, packages: Sequence[Package], held_out: set[str]) -> Counter[str]:
    boxes = Sandboxes(args.backend)
    await boxes.start()
    try:
        maker = Maker(repo, boxes.create, seed=args.seed, held_out=held_out, parallel=args.parallel, say=lambda line: print(line, flush=True))
        return await maker.make(packages, args.tasks, time_limit_s=60.0 * args.minutes)
    finally:
        await boxes.end()


def shipped() -> list[dict[str, Any]]:
    """The list of packages that were tried: name, version, licence."""
    return list(yaml.safe_load(files("sao.envs.swe").joinpath("packages.yaml").read_text()))


def _packages(wanted: Sequence[str], scratch: Path) -> list[Package]:
    """Each package unpacked. Raises UserError for one that cannot be had, or whose licence is not a permissive one."""
    versions = {entry["name"]: f"{entry['name']}=={entry['version']}" for entry in shipped()}
    found: list[Package] = []
    for number, word in enumerate(wanted):
        path = Path(word).expanduser()
        if not path.exists():
            if "/" in word:
                raise UserError(f"--packages: there is no {word}; name a source distribution, a directory or a package of the index")
            path = _cached(versions.get(word, word))
        package = read_package(unpack(path, scratch / str(number)))
        if not package.licence:
            raise UserError(f"--packages: no permissive licence was found in {word}; tasks are made of MIT, BSD and similar packages only")
        if package.name in {other.name for other in found}:
            raise UserError(f"--packages names {package.name} twice; name it once")
        found.append(package)
    return found


def _cached(requirement: str) -> Path:
    cache = Path(CACHE).expanduser()
    name, _, version = requirement.partition("==")
    there = [p for p in cache.glob(f"{name.replace('-', '[-_]')}-{version or '*'}.tar.gz")] if version else []
    if there:
        return there[0]
    print(f"fetching {requirement}", flush=True)
    return fetch(requirement, cache)
