"""`sao bench`: the claims, their figures and the scripts behind them (repository checkouts only)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sao.errors import UserError


def bench_dir() -> Path:
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    if not (folder / "results").is_dir():
        raise UserError("sao bench needs a checkout: benchmarks/ is not part of the wheel")
    return folder


def scripts() -> dict[str, tuple[Path, str]]:
    """Result id -> (script, first line of its docstring). A script names its ids in `IDS`."""
    found: dict[str, tuple[Path, str]] = {}
    for path in sorted(bench_dir().glob("*.py")):
        module = ast.parse(path.read_text())
        text = (ast.get_docstring(module) or "").split("\n")[0]
        for node in module.body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "IDS" for t in node.targets):
                found.update({name: (path, text) for name in ast.literal_eval(node.value)})
    return found


def bench(ids: Sequence[str]) -> int:
    known = scripts()
    if not ids:
        for name, (path, text) in known.items():
            print(f"{name:<28} {_figure(name):<40} {path.name}: {text}")
        return 0
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise UserError(f"there is no benchmark {unknown[0]!r}; `sao bench` lists them")
    chosen = list(dict.fromkeys(known[name][0] for name in ids))
    return max(subprocess.run([sys.executable, str(path)]).returncode for path in chosen)


def _figure(name: str) -> str:
    path = bench_dir() / "results" / f"{name}.json"
    if not path.exists():
        return "not measured"
    result = json.loads(path.read_text())
    met = result["value"] >= result["bar"] if result["higher_is_better"] else result["value"] <= result["bar"]
    return f"{result['value']:.4g} (bar {result['bar']:.4g}, {'met' if met else 'NOT met'})"
