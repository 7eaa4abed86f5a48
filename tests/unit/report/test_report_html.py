import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_run import make_run

from sao.report.figures import correction
from sao.report.html import render, write_report
from sao.report.plots import Series, bar_chart, line_chart, log_ticks, short, ticks
from sao.report.rundata import RunData, load_run
from sao.report.tokens import TokenText

VOID = {"meta", "br", "link", "img", "input"}


class Balance(HTMLParser):
    """Fails on a tag that closes what is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"""(src|href)=["'](?!#)""", page) and "http" not in page.replace("http-equiv", "") and "@import" not in page


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=12)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    return write_report(run_dir).read_text()


def test_report_is_one_file_that_needs_no_network(run_dir: Path, page: str) -> None:
    check(page)
    assert [p.name for p in run_dir.glob("*report*")] == ["report.html"]
    assert "could not be made" not in page and "nothing was recorded" not in page


def test_report_shows_the_headline(page: str) -> None:
    for text in ("0.260 →", "0.940", "0.030 →", "0.990", "4<small> of 4 allowed", "12<small> of 12", "closes</span>", "Log-prob gap"):
        assert text in page


def test_every_plot_carries_finite_numbers(page: str) -> None:
    plots = [json.loads(html.unescape(m)) for m in re.findall(r'data-plot="([^"]*)"', page)]
    assert len(plots) >= 18
    for plot in plots:
        for series in plot.get("s", []):
            assert len(series["x"]) == len(series["y"]) == len(series["v"])
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', page)).lower()


def test_sample_tokens_carry_their_record(run_dir: Path, page: str) -> None:
    payloads = [json.loads(m) for m in re.findall(r'<script type="application/json" id="tok[^"]*">(.*?)</script>', page)]
    assert len(payloads) >= 5
    for payload in payloads:
        for name in ("ver", "lp", "tlp", "val", "adv", "ret", "why"):
            assert len(payload[name]) == len(payload["id"])
    shown = re.search(r'<div class="tokens"[^>]*>(.*?)</div>', page, re.S)
    assert shown is not None
    text = html.unescape(re.sub(r"<[^>]*>", "", shown.group(1)))
    assert text.startswith("<|im_start|>system↵\nUse the calculator.<|im_end|>")
    assert '<span class="chip good">success</span>' in page and '<span class="chip bad">failure</span>' in page


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text()
    check(page)
    for text in (
        "an empty run folder",
        "no trajectories are stored",
        "there is no ledger.json",
        "no data: nothing was recorded for it",
        "<small>no data</small>",
        "metrics.jsonl is not there",
    ):
        assert text in page
    assert "could not be made" not in page and 'class="outcome' not in page


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ({"state": "complete", "message": ""}, ['<p class="outcome">complete</p>']),
        ({"state": "failed", "message": "engine <0> died"}, ["This run failed.", "engine &lt;0&gt; died", "banner bad"]),
        ({"state": "failed"}, ["No message was left"]),
        ({"state": "stopped", "message": ""}, ["stopped at Ctrl-C or SIGTERM", "sao train resume="]),
        ({"state": "running", "message": ""}, ["still running, or cut off"]),
    ],
)
def test_the_page_begins_with_how_the_run_ended(tmp_path: Path, outcome: dict[str, str], says: list[str]) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    page = write_report(tmp_path).read_text()
    check(page)
    top = page[page.index("</header>") : page.index('class="cards"')]
    for text in says:
        assert text in top


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "eval.jsonl", "ledger.json", "trajectories", "checkpoints"])
def test_any_missing_part_leaves_the_rest(run_dir: Path, tmp_path: Path, missing: str) -> None:
    for path in run_dir.iterdir():
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    page = render(load_run(tmp_path))
    check(page)
    assert "could not be made" not in page


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: [")
    (tmp_path / "ledger.json").write_text("[]")
    (tmp_path / "metrics.jsonl").write_text("no\n{}\n")
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step-000001.parquet").write_bytes(b"x")
    run = load_run(tmp_path)
    assert len([note for note in run.notes if "could not be read" in note]) == 4
    check(render(run))


def test_a_section_that_fails_is_named_and_the_rest_stands() -> None:
    run = RunData(Path("x"), ledger={"prompts": 3}, evals=[{"mean": 0.5, "temperature": "hot"}])
    page = render(run)
    check(page)
    assert "this section could not be made" in page and "Asynchrony" in page


def test_a_ledger_that_does_not_close_says_so(run_dir: Path) -> None:
    run = load_run(run_dir)
    run.ledger["prompts"]["trained"] -= 1
    assert "does not close" in render(run)


def test_names_cannot_break_out_of_the_page() -> None:
    page = line_chart('<script>"', [Series("<b>", [1, 2], [1, 2]), Series("x", [1], [1])])
    assert "<script>" not in page and "<b></b>" not in page and "&lt;b&gt;" in page


def test_what_cut_the_tokens_is_the_loss_of_the_run(run_dir: Path) -> None:
    run = load_run(run_dir)
    page = correction(run)
    assert "Tokens rejected by DIS" in page and "band (0.7, 6)" in page
    run.config["algo"] |= {"loss": "tis", "loss_args": {"cap": 3.0}}
    page = correction(run)
    assert "Tokens cut by tis" in page and "loss tis (cap=3.0)" in page and "DIS" not in page and "band" not in page


def test_log_probs_of_the_same_version_agree(run_dir: Path) -> None:
    stats = load_run(run_dir).tokens
    assert stats.gap_sum[0] / stats.gap_count[0] < 2e-5 < stats.gap_sum[1] / stats.gap_count[1]


def test_chart_edges() -> None:
    assert "nothing was recorded" in line_chart("t", []) and "nothing was recorded" in bar_chart("t", [], [], x_label="x")
    assert "nothing was recorded" in line_chart("t", [Series("a", [1, 2], [0, 0])], log=True)
    check(line_chart("constant", [Series("a", [1, 2], [3, 3])]))
    check(line_chart("one point", [Series("a", [1], [0])]))
    assert len(re.findall("L", line_chart("long", [Series("a", range(10_000), [float(i) for i in range(10_000)])]))) < 800
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1.0] and log_ticks(1e-6, 1e-3) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3])
    assert [short(v) for v in (0.25, 12_500, 3e-6, 2_500_000, 0)] == ["0.25", "12.5k", "3e-6", "2.5M", "0"]


def test_tokens_join_to_the_text_even_inside_a_character(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TokenText.find(["", tmp_path / "none", tmp_path])
    words = "a é 漢字 🙂 end"
    ids = tokenizer.encode(words).ids
    pieces = text.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == words and "🙂" in pieces
    assert TokenText.find([]).pieces([5, 7]) == ["5 ", "7 "]
