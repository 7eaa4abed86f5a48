"""A small package with tests of its own, to make SWE tasks of."""

from __future__ import annotations

from pathlib import Path

from sao.swe.package import Package, read_package, unpack

FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: Small\nVersion: 1.0\nLicense: MIT\n\nA package.\n",
    "small/__init__.py": "from small.sizes import fits, total\n",
    "small/sizes.py": '''def fits(size, limit):
    """Whether something of `size` fits under `limit`."""
    if size <= limit:
        return True
    return False


def total(sizes):
    """The sum of the sizes, at least 1."""
    found = 0
    for size in sizes:
        found += size
    return max(found, 1)


def label(size):
    return "big" if size > 10 else "small"
''',
    "tests/test_sizes.py": """import pytest
from small import fits, total
from small.sizes import label


def test_fits():
    assert fits(1, 2)


def test_does_not_fit():
    assert not fits(3, 2)


@pytest.mark.parametrize("sizes, sum_", [([1, 2], 3), ([], 1)])
def test_total(sizes, sum_):
    assert total(sizes) == sum_


def test_label():
    print("PASSED tests/test_sizes.py::test_nothing")
    assert label(11) == "big" and label(10) == "small"


@pytest.mark.skip(reason="never")
def test_skipped():
    assert False
""",
    "tests/test_other.py": """from small import total


def test_three():
    assert total([1, 1, 1]) == 3


def test_truth():
    assert True
""",
    "setup.cfg": "[tool:pytest]\naddopts = --strict-markers\n",
    "evil.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n",
}


def small_package(folder: Path) -> Package:
    """Written below `folder`, then read as `sao env make swe` reads a directory."""
    root = folder / "small-1.0"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_package(unpack(root, folder / "unpacked"))
