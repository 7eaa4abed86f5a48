"""A built wheel carries configuration, environments and report assets, and its command works outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_is_whole(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    wheel = next(tmp_path.glob("sao_rl-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("sao/conf/config.yaml", "sao/conf/experiment/demo.yaml", "sao/envs/calculator/environment.py", "sao/py.typed", "sao/loop.py"):
        assert name in names, name
    assert not any(name.startswith(("conf/", "envs/", "tests/")) for name in names)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import sao, sao.envs.calculator.environment, sao.conf\n"
        f"assert sao.__file__.startswith({str(site)!r}) and sao.conf.__path__[0].startswith({str(site)!r})\n"
        "from sao.cli import main\n"
        "assert main(['config', 'experiment=demo']) == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "calculator" in done.stdout, done.stderr
