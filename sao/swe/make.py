"""Making tasks: mutate a package, keep what some of its tests notice, and prove each task twice before it is written.

A candidate becomes a task when some but not all of the tests that passed now fail, and when, in two independent rounds of fresh sandboxes, the gold patch
resolves it and the untouched repository does not. What was tried is written down, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sao.errors import UserError
from sao.swe.grading import GOOD, SETTINGS, TestRun, grade, grade_untouched, run_tests
from sao.swe.mutations import Mutation, mutations
from sao.swe.package import Package, is_support
from sao.swe.patches import changed_line, new_file
from sao.swe.repo import HELD_OUT, SOURCES, TASKS, TRAIN, SweTask, write_config, write_task
from sao.swe.statement import statement
from sao.swe.workspace import COMMIT, Create, archive, build, pack, run_build, workspace_spec

DATASET = "sao/swe"
TRIED = "tried.jsonl"
ROUNDS = 2
HELD_OUT_SHARE = 5  # one package in so many is held out, at least one where there are two
BASELINE_TIMEOUT_S = 120.0
LONGEST_SUITE_S = 20.0
UNPACK = f"set -e\ntar -xf - --no-same-owner\n{COMMIT}"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Baseline:
    """A package's tests as published. passing: those that passed in two runs and whose ids every reader of logs can read. tests: the files they are in."""

    passing: tuple[str, ...]
    tests: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Candidate:
    package: Package
    module: str
    mutation: Mutation

    @property
    def instance_id(self) -> str:
        change = f"{self.package.version}/{self.module}/{self.mutation.line}/{self.mutation.start}/{self.mutation.kind}"
        return f"pypi__{self.package.name}-{hashlib.sha256(change.encode()).hexdigest()[:8]}"


def held_out_packages(names: Sequence[str], chosen: Sequence[str] = ()) -> set[str]:
    """Which packages no training task comes from: those chosen, else a fifth of them by a hash of their names. Raises UserError for an unknown one."""
    if unknown := sorted(set(chosen) - set(names)):
        raise UserError(f"--held-out names {unknown[0]!r}, which is not among the packages: {', '.join(sorted(names))}")
    if chosen or len(names) < 2:
        return set(chosen)
    ordered = sorted(set(names), key=lambda name: zlib.crc32(name.encode()))
    return set(ordered[: max(1, len(ordered) // HELD_OUT_SHARE)])


class Maker:
    """Writes tasks of several packages into one repository."""

    def __init__(self, repo: Path, create: Create, *, seed: int, held_out: set[str], parallel: int, say: Say) -> None:
        self.repo, self.create, self.seed, self.held_out, self.say = repo, create, seed, held_out, say
        self.parallel = parallel
        self.tried: dict[str, str] = {}
        self.deadline = float("inf")
        if (repo / TRIED).is_file():
            for line in (repo / TRIED).read_text().splitlines():
                row = json.loads(line)
                self.tried[row["id"]] = row["outcome"]

    async def make(self, packages: Sequence[Package], total: int, *, time_limit_s: float = float("inf")) -> Counter[str]:
        """Bring the repository to `total` tasks, spread over the packages, or as near as the time allows; returns tasks by package."""
        self.deadline = time.monotonic() + time_limit_s
        write_config(self.repo, DATASET)
        counts: Counter[str] = Counter({package.name: self._existing(package) for package in packages})
        left = sorted(packages, key=lambda package: counts[package.name])
        while left:
            package = left.pop(0)
            want = counts[package.name] + -(-(total - sum(counts.values())) // (len(left) + 1))
            if want > counts[package.name] and time.monotonic() < self.deadline:
                counts[package.name] = await self._of_package(package, want)
                self.say(
                    f"{package.name} {package.version}: {counts[package.name]} tasks ({'held out' if package.name in self.held_out else 'training'})"
                )
        return counts

    def _existing(self, package: Package) -> int:
        return sum(1 for _ in (self.repo / TASKS).glob(f"pypi__{package.name}-????????/task.yaml"))

    async def _of_package(self, package: Package, want: int) -> int:
        source = self.repo / SOURCES / f"{package.name}-{package.version}.tar.gz"
        pack(package, source)
        baseline = await self._baseline(package, source)
        if not baseline.passing or baseline.seconds > LONGEST_SUITE_S:
            self.say(f"{package.name}: left out, {len(baseline.passing)} tests pass, in {baseline.seconds:.0f} s (at most {LONGEST_SUITE_S:.0f})")
            return self._existing(package)
        waiting = iter([c for c in candidates(package, self.seed) if c.instance_id not in self.tried])
        trying = 0  # never more at once than tasks are missing

        async def work() -> None:
            nonlocal trying
            while self._existing(package) + trying < want and time.monotonic() < self.deadline:
                candidate = next(waiting, None)
                if candidate is None:
                    return
                trying += 1
                try:
                    self._record(candidate, await self._try(candidate, source, baseline))
                finally:
                    trying -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(self.parallel):
                group.create_task(work())
        return self._existing(package)

    def _record(self, candidate: Candidate, outcome: str) -> None:
        self.tried[candidate.instance_id] = outcome
        row = {"id": candidate.instance_id, "kind": candidate.mutation.kind, "module": candidate.module, "outcome": outcome}
        with open(self.repo / TRIED, "a") as file:
            file.write(json.dumps(row) + "\n")

    async def _baseline(self, package: Package, source: Path) -> Baseline:
        cached = source.with_name(source.name.replace(".tar.gz", ".json"))
        if cached.is_file():
            said = json.loads(cached.read_text())
            return Baseline(tuple(said["passing"]), tuple(said["tests"]), said["seconds"])
        runs = [await self._run(package, source, {}, package.tests, BASELINE_TIMEOUT_S) for _ in range(2)]
        stable = [test for test, status in runs[0].status.items() if status == "PASSED" and runs[1].status.get(test) == "PASSED" and readable(test)]
        files = sorted({test.split("::")[0] for test in stable})
        found = Baseline(tuple(sorted(stable)), tuple(files), min(run.result.seconds for run in runs))
        cached.write_text(json.dumps({"passing": found.passing, "tests": found.tests, "seconds": found.seconds}))
        return found

    async def _run(self, package: Package, source: Path, changed: dict[str, bytes], tests: Sequence[str], timeout_s: float) -> TestRun:
        """Run test files of the package with some files changed."""
        sandbox = await self.create(workspace_spec())
        try:
            await run_build(sandbox, UNPACK, archive(source), package.name)
            for path, data in changed.items():
                await sandbox.write(path, data)
            return await run_tests(sandbox, package.import_path, tuple(tests), timeout_s)
        finally:
            await sandbox.close()

    async def _try(self, candidate: Candidate, source: Path, baseline: Baseline) -> str:
        """`kept`, or why a candidate is no task."""
        package, mutation = candidate.package, candidate.mutation
        before = (package.root / candidate.module).read_bytes()
        after = mutation.apply(before)
        try:
            compile(after, candidate.module, "exec")
        except (SyntaxError, ValueError):
            return "does_not_compile"
        timeout_s = 6.0 + 4.0 * baseline.seconds
        related = related_tests(candidate.module, baseline.tests)
        if related and len(related) < len(baseline.tests):
            run = await self._run(package, source, {candidate.module: after}, related, timeout_s)
            if run.trouble:
                return run.trouble[1]
            if baseline.seconds > 2.0 and all(run.status.get(test) in GOOD for test in baseline.passing if test.split("::")[0] in related):
                return "not_noticed"
        run = await self._run(package, source, {candidate.module: after}, baseline.tests, timeout_s)
        if run.trouble:
            return run.trouble[1]
        failing = tuple(test for test in baseline.passing if run.status.get(test) not in GOOD)
        if not failing:
            return "not_noticed"
        if len(failing) == len(baseline.passing):
            return "everything_fails"
        task = self._task(candidate, source, baseline, run, failing, before, after, timeout_s)
        return await self._prove(task) if task else "tests_not_text"

    def _task(
        self,
        candidate: Candidate,
        source: Path,
        baseline: Baseline,
        run: TestRun,
        failing: tuple[str, ...],
        before: bytes,
        after: bytes,
        timeout_s: float,
    ) -> SweTask | None:
        package, mutation = candidate.package, candidate.mutation
        hidden = sorted({test.split("::")[0] for test in failing})
        texts = [(package.root / name).read_bytes() for name in hidden]
        if any(b"\0" in text or not text for text in texts) or not all(map(_is_utf8, texts)):
            return None
        support = [path.relative_to(package.root).as_posix() for path in package.root.rglob("*") if path.is_file() and not path.is_symlink()]
        kept = sorted(p for p in support if (is_support(p) or p.rsplit("/", 1)[-1] in SETTINGS) and "__pycache__" not in p and ".egg-info/" not in p)
        rows_before, rows_after = before.splitlines(), after.splitlines()
        # As in SWE-bench, the files that show the bug decide, and those that are named after the module; where nothing in them must stay right, all.
        tests = tuple(sorted({*hidden, *related_tests(candidate.module, baseline.tests)}))
        passing = [test for test in baseline.passing if test not in set(failing)]
        kept_right = tuple(test for test in passing if test.split("::")[0] in tests)
        if not kept_right:
            tests, kept_right = baseline.tests, tuple(passing)
        return SweTask(
            instance_id=candidate.instance_id,
            package=package.name,
            version=package.version,
            base_commit="",
            split=HELD_OUT if package.name in self.held_out else TRAIN,
            source=source,
            licence=package.licence,
            import_path=package.import_path,
            statement=statement(package.name, mutation.function, mutation.docstring, failing, run.failures),
            gold=changed_line(candidate.module, after, before, mutation.line),
            bug=changed_line(candidate.module, before, after, mutation.line),
            test_patch=b"".join(new_file(name, text) for name, text in zip(hidden, texts, strict=True)),
            tests=tests,
            hidden=tuple(hidden),
            kept=tuple(kept),
            fail_to_pass=failing,
            pass_to_pass=kept_right,
            mutation={
                "kind": mutation.kind,
                "path": candidate.module,
                "line": mutation.line,
                "right": rows_before[mutation.line - 1].decode(),
                "wrong": rows_after[mutation.line - 1].decode(),
                "function": mutation.function,
            },
            timeout_s=round(timeout_s + 20.0, 1),  # graded eight at a time on two cores, too
        )

    async def _prove(self, task: SweTask) -> str:
        """Grade gold and nothing, in ROUNDS rounds, and write the task if all agree."""
        sandbox = await self.create(workspace_spec())
        try:
            task = replace(task, base_commit=await build(sandbox, task))
        finally:
            await sandbox.close()
        for _ in range(ROUNDS):
            untouched = await grade_untouched(task, self.create)
            if untouched.verdict != "unresolved" or set(untouched.failed) != set(task.fail_to_pass) or untouched.broken:
                return "not_stable"
            if not (await grade(task, task.gold, self.create)).resolved:
                return "gold_does_not_resolve"
        write_task(self.repo, task, DATASET)
        return "kept"


def candidates(package: Package, seed: int) -> Iterator[Candidate]:
    """At most one mutation a line, in an order drawn from the seed that takes modules and kinds in turn."""
    rng = random.Random(f"{seed}/{package.name}/{package.version}")
    queues: dict[tuple[str, str], list[Candidate]] = {}
    for module in package.modules:
        try:
            found = mutations((package.root / module).read_bytes())
        except (SyntaxError, ValueError):
            continue
        by_line: dict[int, list[Mutation]] = {}
        for mutation in found:
            by_line.setdefault(mutation.line, []).append(mutation)
        for line in sorted(by_line):
            mutation = rng.choice(by_line[line])
            queues.setdefault((module, mutation.kind), []).append(Candidate(package, module, mutation))
    for queue in queues.values():
        rng.shuffle(queue)
    order = list(queues.values())
    rng.shuffle(order)
    while order:
        for queue in list(order):
            yield queue.pop()
            if not queue:
                order.remove(queue)


def related_tests(module: str, tests: Sequence[str]) -> list[str]:
    """The test files named after a module."""
    stem = Path(module).stem.strip("_")
    return [test for test in tests if stem in Path(test).stem] if stem != "init" else []


def readable(test: str) -> bool:
    """Whether the official log parsers give this id back as it is."""
    return " ".join(test.split()) == test and " - " not in test and test.isprintable() and not re.search(r"\[\d+m", test)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def summary(repo: Path) -> dict[str, Any]:
    """What became of the candidates of a repository."""
    outcomes = Counter(json.loads(line)["outcome"] for line in (repo / TRIED).read_text().splitlines()) if (repo / TRIED).is_file() else Counter()
    return dict(outcomes.most_common())
