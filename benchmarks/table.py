"""Write the table of figures in README.md from benchmarks/results/*.json, so that no figure is typed by hand."""

from __future__ import annotations

import json
import re
from typing import Any

from common import RESULTS, ROOT

BEGIN, END = "<!-- figures: python benchmarks/table.py -->", "<!-- end of figures -->"
UNITS = {"demo_minutes": " min", "first_step_seconds": " s"}


def spread_of(result: dict[str, Any]) -> str:
    spread = result["spread"]
    if "low" in spread:
        return f"95 % interval {spread['low']:.3g} to {spread['high']:.3g}, n = {spread['n']}"
    of = "differences " if result["id"].endswith("_p") else ""  # beside a p value stands what it was computed from
    return f"{of}{spread['min']:.3g} to {spread['max']:.3g}, n = {spread['n']}" if spread["n"] > 1 else "one run"


def table() -> str:
    lines = ["| claim | figure | bar | spread | at commit |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        r = json.loads(path.read_text())
        sign = ">=" if r["higher_is_better"] else "<="
        unit = UNITS.get(r["id"], "")
        spread = spread_of(r)
        simulated = " (simulated)" if r["kind"] == "simulated" else ""
        claim = r["claim"].replace("|", r"\|")  # a bar would end the cell
        lines.append(f"| {claim} (`{r['id']}`){simulated} | {r['value']:.3g}{unit} | {sign} {r['bar']:g}{unit} | {spread} | {r['commit']} |")
    machines = {json.dumps(json.loads(p.read_text())["machine"], sort_keys=True) for p in RESULTS.glob("*.json")}
    named = [json.loads(m) for m in sorted(machines)]
    where = "; ".join(f"{m['cores']} cores of {m['cpu']}, {m['memory_mb'] // 1024} GiB, Python {m['python']}" for m in named)
    return "\n".join([*lines, "", f"Machine: {where}."])


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    block = f"{BEGIN}\n{table()}\n{END}"
    path.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
