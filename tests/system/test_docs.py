"""Every command in the documentation runs: fenced `bash` blocks, block by block.

All pages share one folder and the first run's page comes first, so that later pages find its run. `bash no-ci` marks what needs a GPU or a cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    (p for p in (ROOT / "docs").rglob("*.md") if re.search(r"^```bash$", p.read_text(), re.MULTILINE)), key=lambda p: (p.name != "first-run.md", p)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("user")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_run(page, folder):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
