"""report.html: one file that shows what a run did, made from its folder alone. No network, no library; light and dark.

Whatever is missing is named where it would have stood. Writing a report never fails because a run did.
"""

from __future__ import annotations

import html
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from sao.report import curriculum, figures, long, online, samples
from sao.report.live import clock_text
from sao.report.plots import interval, short, sparkline
from sao.report.rundata import RunData, load_run
from sao.report.tokens import TokenText, tokenizer_candidates

log = logging.getLogger(__name__)

REPORT_FILE = "report.html"
_e = html.escape


def write_report(run_dir: Path | str) -> Path:
    """Write <run>/report.html from what the run folder holds and return its path. A section that cannot be made says why."""
    path = Path(run_dir) / REPORT_FILE
    partial = path.with_name(f".{REPORT_FILE}.{os.getpid()}.partial")
    partial.write_text(render(load_run(Path(run_dir))), encoding="utf-8")
    os.replace(partial, path)
    return path


def render(run: RunData) -> str:
    """The whole page."""
    text = TokenText.find(tokenizer_candidates(run.run_dir, run.config, run.command))
    sections: list[tuple[str, str, str, Callable[[], str]]] = [
        ("learning", "Learning", "Reward on the training tasks, and what policy and critic did to get it.", lambda: figures.learning(run)),
        *([("online", "The stream", "What is rewarded changes while the run goes on: what each change cost, and what stood guard.", lambda: online.section(run))]
          if online.concerns(run) else []),
        *([("long", "Long episodes", "How long they were, which limit ended them, and what of their context was cut or summed up.", lambda: long.section(run))]
          if long.concerns(run) else []),
        *([("curriculum", "The curriculum", "Which tasks were drawn, by what they had lately earned.", lambda: curriculum.section(run))]
          if curriculum.concerns(run) else []),
        ("trajectories", "Trajectories", "What the agent wrote, token by token. Point at a token for its training record; open a row to read it.",
         lambda: samples.section(run, text)),
        ("asynchrony", "Asynchrony", "Engines generate while the learner trains. How old the data was, and who waited for whom.", lambda: figures.asynchrony(run)),
        ("correction", "Off-policy correction", "Double-sided importance sampling against the log-probs the engine logged when it sampled.",
         lambda: figures.correction(run)),
        ("publishing", "Weights into running engines", "Each publication replaces the weights without aborting a request; a canary prompt is then compared.",
         lambda: figures.publishing(run)),
        ("ledger", "The ledger", "Every prompt and every sampled token ends in exactly one place.", lambda: _ledger(run)),
        ("configuration", "Configuration", "", lambda: _configuration(run)),
    ]  # fmt: skip
    body = "".join(
        f'<section id="{key}"><h2>{title}</h2>{f"<p>{intro}</p>" if intro else ""}{_guarded(make)}</section>' for key, title, intro, make in sections
    )
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _, _ in sections)
    folder = resources.files("sao.report")
    css, js = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    name = run.run_dir.resolve().name
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_e(name)} · SAO report</title><style>{css}</style></head><body>"
        f'<nav><div><span class="mark">SAO</span>{links}<button id="theme" type="button">light / dark</button></div></nav>'
        f"<main><header><h1>{_e(name)}</h1><p>{_subtitle(run)}</p></header>{_outcome(run)}{_guarded(lambda: _cards(run))}{body}"
        f"<footer>{_footer(run)}</footer></main><script>{js}</script></body></html>"
    )


def _guarded(make: Callable[[], str]) -> str:
    """A section, or the reason why there is none: a report of a broken run is when it is needed most."""
    try:
        return make()
    except Exception as error:
        log.exception("a section of the report could not be made")
        return f'<p class="missing">this section could not be made: {_e(type(error).__name__)}: {_e(str(error))}</p>'


def _subtitle(run: RunData) -> str:
    model = run.setting("model.path") or str(run.setting("model.factory") or "").partition(":")[0].rpartition(".")[2]
    mixture = run.setting("data.mixture") or {}
    parts = [
        f"{model} on {' + '.join(mixture) or run.setting('env.name', '')}" if model else "",
        f"algorithm {run.setting('algo.name')}" if run.setting("algo.name") else "",
        f"batches of {run.setting('train.batch_size')} trajectories, one rollout per prompt" if run.setting("train.batch_size") else "",
        f"seed {run.setting('seed')}" if run.setting("seed") is not None else "",
    ]
    walls = [str(r["wall"]) for r in run.metrics if "wall" in r]
    parts.append(walls[-1][:16].replace("T", " ") + " UTC" if walls else "")
    return " · ".join(_e(part) for part in parts if part) or "an empty run folder"


def _outcome(run: RunData) -> str:
    """How the run stands, by its outcome.json: a quiet line when all is well, a banner when not, nothing where the file is missing."""
    state, message = run.outcome.get("state"), _e(str(run.outcome.get("message") or ""))
    resume = f"<code>sao train resume={_e(str(run.run_dir))}</code>"
    if state == "complete":
        return '<p class="outcome">complete</p>'
    if state == "failed":
        return f'<div class="outcome banner bad"><b>This run failed.</b> {message or "No message was left; see logs/."}</div>'
    if state == "stopped":
        return f'<div class="outcome banner">stopped at Ctrl-C or SIGTERM; go on with {resume}</div>'
    if state == "running":
        return f'<div class="outcome banner">still running, or cut off; if it was cut off, go on with {resume}</div>'
    return ""


def _cards(run: RunData) -> str:
    cards = [
        _accuracy(run, "Held-out accuracy, temperature 1", lambda t: t > 0, "c2"),
        _accuracy(run, "Held-out accuracy, greedy", lambda t: t == 0, "c3"),
    ]
    train = run.axis("train")
    wanted = run.setting("train.steps")
    has_critic = any("critic/vf_loss" in row for row in train)
    warmup = run.setting("critic.critic_only_steps", 0) if has_critic else 0
    version = int(max((r.get("train/version", 0) for r in train), default=0))
    steps = f"{version}<small> of {wanted}</small>" if wanted else str(version)
    cards.append(_card("Actor steps", steps if train else "–", f"and {warmup} of the critic alone" if warmup else "", "third"))
    tokens = run.ledger.get("tokens", {}).get("sampled")
    trained = run.ledger.get("prompts", {}).get("trained") or (len(run.episodes["step"]) if run.episodes else None)
    cards.append(
        _card("Sampled tokens", short(tokens) if tokens is not None else "–", f"{trained:,} trajectories trained" if trained else "", "third")
    )
    seconds = run.seconds()
    first = next((r["perf/first_update_s"] for r in run.axis("publish") if "perf/first_update_s" in r), None)
    cards.append(
        _card(
            "Wall time",
            clock_text(seconds) if seconds is not None else "–",
            f"first update {first:.0f} s after the command" if first else "",
            "third",
        )
    )
    bound = run.setting("rollout.staleness")
    stalest = int(run.episodes["staleness"].max()) if run.episodes else max((int(r.get("off_policy/staleness_max", 0)) for r in train), default=None)
    small = f"<small> of {bound} allowed</small>" if bound is not None else ""
    cards.append(_card("Largest staleness", f"{stalest}{small}" if stalest is not None else "–", "actor steps behind, oldest token", "third"))
    mean, largest, count = same_version_gap(train)
    cards.append(
        _card(
            "Log-prob gap",
            f"{mean:.1e}" if count else "–",
            f"trainer − engine, same weights; largest {largest:.0e} of {short(count)} tokens"
            if count
            else "no token was compared under its own weights",
            "third",
        )
    )
    idle = _mean(run.series("engine/idle_share", "engine")[1])
    learner = _mean(run.series("perf/learner_idle_share")[1])
    cards.append(
        _card(
            "Idle",
            f"{idle:.0%}<small> engines</small>" if idle is not None else "–",
            f"learner {learner:.0%}" if learner is not None else "",
            "third",
        )
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _accuracy(run: RunData, title: str, wanted: Callable[[float], bool], color: str) -> str:
    chosen = [r for r in run.evals if isinstance(r.get("mean"), int | float) and wanted(float(r.get("temperature", 1)))]
    if not chosen:
        return _card(title, "–", "no evaluation was run (eval.at_start, eval.at_end, eval.every)", "big")
    chosen.sort(key=lambda r: r.get("version", 0))
    first, last = chosen[0], chosen[-1]
    rows = [(r, "c6" if r is first and len(chosen) > 1 else color) for r in ([first, last] if len(chosen) > 1 else [first])]
    track = interval(
        [(f"version {r.get('version', 0)}", float(r["mean"]), float(r.get("low", r["mean"])), float(r.get("high", r["mean"])), c) for r, c in rows]
    )
    value = f'<span class="to" style="color:var(--{color})">{float(last["mean"]):.3f}</span>'
    if len(chosen) > 1:
        value = f'<span class="from">{float(first["mean"]):.3f} →</span> {value}'
    said = f"{last.get('n', '?')} held-out tasks; after training {_span(last)}" + (f", before {_span(first)}" if len(chosen) > 1 else "")
    return (
        f'<div class="card big"><span class="k">{title}</span><div class="v">{value}</div>{track}<span class="s">{said} (95 % interval)</span></div>'
    )


def _span(record: dict[str, Any]) -> str:
    return f"{record['low']:.3f} to {record['high']:.3f}" if "low" in record and "high" in record else "without an interval"


def same_version_gap(train: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Mean and largest |trainer - engine| log-prob over the tokens that were scored again under the weights that sampled them, and their number."""
    name = "logprob_gap/same_version_"
    rows = [r for r in train if f"{name}mean" in r]
    count = sum(float(r[f"{name}tokens"]) for r in rows)
    if not count:
        return 0.0, 0.0, 0.0
    return sum(r[f"{name}mean"] * r[f"{name}tokens"] for r in rows) / count, max(r[f"{name}max"] for r in rows), count


def _card(title: str, value: str, below: str = "", kind: str = "") -> str:
    value = "<small>no data</small>" if value == "–" else value
    return f'<div class="card {kind}"><span class="k">{_e(title)}</span><div class="v">{value}</div><span class="s">{_e(below)}</span></div>'


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ledger(run: RunData) -> str:
    if not run.ledger:
        return '<p class="missing">there is no ledger.json; the run ended before it was written</p>'
    prompts, tokens = run.ledger.get("prompts", {}), run.ledger.get("tokens", {})
    in_flight = sum(int(prompts.get(state, 0)) for state in ("running", "buffered", "training"))
    reasons = sorted({*prompts.get("dropped", {}), *tokens.get("dropped", {})})
    rows = [("trained", "c1", int(prompts.get("trained", 0)), int(tokens.get("trained", 0)))]
    rows += [
        (f"dropped: {reason.replace('_', ' ')}", color, int(prompts.get("dropped", {}).get(reason, 0)), int(tokens.get("dropped", {}).get(reason, 0)))
        for reason, color in zip(reasons, ("c5", "c3", "c7", "c4") * len(reasons), strict=False)
    ]
    rows.append(("in flight at the end", "c6", in_flight, int(tokens.get("in_flight", 0))))
    submitted, sampled = int(prompts.get("submitted", 0)), int(tokens.get("sampled", 0))
    if not submitted and not sampled:
        return '<p class="missing">no data: no prompt was submitted</p>'
    closes = sum(r[2] for r in rows) == submitted and sum(r[3] for r in rows) == sampled
    chip = '<span class="chip good">closes</span>' if closes else '<span class="chip bad">does not close</span>'
    body = "".join(
        f'<tr><td><i class="sw" style="background:var(--{color})"></i>{_e(name)}</td><td class="n">{p:,}</td><td class="n">{_share(p, submitted)}</td>'
        f'<td class="n">{t:,}</td><td class="n">{_share(t, sampled)}</td></tr>'
        for name, color, p, t in rows
    )
    flow = "".join(f'<i style="flex:{p};background:var(--{color})" title="{_e(name)}: {p:,}"></i>' for name, color, p, _ in rows if p)
    retried = sum(prompts.get("retried", {}).values())
    note = (
        f"{prompts.get('attempts', submitted):,} attempts, {retried:,} of them retries after a failure; their tokens count as dropped."
        if retried
        else ""
    )
    return (
        f'<div class="panel"><div class="tools">{chip}<span>submitted = trained + dropped + in flight, for prompts and for sampled tokens</span></div>'
        f'<div class="flow">{flow}</div><table class="t"><tr><th></th><th class="n">prompts</th><th class="n"></th><th class="n">sampled tokens</th><th></th></tr>{body}'
        f'<tr class="total"><td>submitted / sampled</td><td class="n">{submitted:,}</td><td></td><td class="n">{sampled:,}</td><td></td></tr></table>'
        f'<p class="note">{note} <code>sao inspect RUN --dropped</code> says why, one by one.</p></div>'
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _configuration(run: RunData) -> str:
    parts = []
    for title, text, name in (("Plan: actors and resources", run.plan, "plan.txt"), ("Resolved configuration", run.config_text, "config.yaml")):
        inner = f"<pre>{_e(text)}</pre>" if text else f'<p class="missing">{name} is not there</p>'
        parts.append(f'<details class="more"><summary>{title}</summary>{inner}</details>')
    return "".join(parts) + f'<details class="more"><summary>Every metric</summary>{_every_metric(run)}</details>'


def _every_metric(run: RunData) -> str:
    rows = []
    for axis in ("train", "publish", "engine", "eval"):
        for name in sorted(run.names(r".+/.+", axis)):
            _, y = run.series(name, axis)
            if y:
                numbers = "".join(f'<td class="n">{short(v)}</td>' for v in (y[0], y[-1], min(y), max(y)))
                rows.append(f'<tr><td class="mono">{_e(name)}</td><td>{axis}</td><td>{sparkline(y)}</td>{numbers}</tr>')
    if not rows:
        return '<p class="missing">metrics.jsonl holds none</p>'
    head = "<tr><th>name</th><th>axis</th><th></th><th class='n'>first</th><th class='n'>last</th><th class='n'>lowest</th><th class='n'>highest</th></tr>"
    return f'<div class="panel"><table class="t">{head}{"".join(rows)}</table></div>'


def _footer(run: RunData) -> str:
    missing = f" Missing: {_e('; '.join(run.notes))}." if run.notes else ""
    looked = f" Per-token statistics come from {run.tokens.tokens:,} action tokens of {len(run.tokens.steps)} steps." if run.tokens.steps else ""
    return f"Made from the files of this run folder; <code>sao inspect</code> shows any trajectory in the terminal.{looked}{missing}"
