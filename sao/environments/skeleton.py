"""`sao env init NAME`: a package with an environment that trains at once, its test, its configuration and a page about it."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path
from string import Template

from sao.config_load import conf_dir
from sao.environments.files import PROJECT_FILE
from sao.errors import UserError

TEMPLATES = Path(__file__).with_name("template")


def init(name: str, where: Path) -> Path:
    """Write the package NAME below `where`. Raises UserError, and writes nothing, where the name cannot be one; also where the folder cannot be written."""
    if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise UserError(f"{name!r} cannot be imported; choose a name of the letters a to z, digits and _, such as my_game")
    folder = where / name
    taken = next((path for path in (folder, folder.with_suffix(".py")) if path.exists()), None)
    if taken is not None:
        raise UserError(f"{taken} exists already; choose another name, or remove it")
    if (conf_dir() / "env" / f"{name}.yaml").exists():
        raise UserError(f"env={name} is one that ships (conf/env/{name}.yaml); choose another name")
    found = importlib.util.find_spec(name)
    if found is not None:
        raise UserError(f"{name!r} would hide, or be hidden by, the module {name} ({found.origin or 'a folder'}); choose another name")
    words = {"name": name, "cls": "".join(part.capitalize() for part in name.split("_")) + "Environment", "file": PROJECT_FILE}
    texts = {
        "__init__.py": "",
        "environment.py": _filled("environment.py.txt", words),
        f"test_{name}.py": _filled("test.py.txt", words),
        PROJECT_FILE: _filled("sao.yaml.txt", words),
        "README.md": _filled("README.md.txt", words),
    }
    try:
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); go to a folder of yours first") from None
    return folder


def _filled(template: str, words: dict[str, str]) -> str:
    return Template((TEMPLATES / template).read_text()).substitute(words)
