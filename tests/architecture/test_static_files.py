"""What a page loads is there: a missing module leaves a page dead without a word."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "static" / "js").glob("*.js"))
TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))


def tracked() -> set[Path]:
    """Files that git knows; outside a checkout, files that are there."""
    done = subprocess.run(
        ["git", "ls-files", "static", "deploy"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {path for path in ROOT.rglob("*") if path.is_file()}
    return {ROOT / line for line in done.stdout.splitlines()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_import_of_a_script_is_a_file_of_ours(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    wanted = re.findall(r"""(?:from|import)\s*\(?['"](\.{1,2}/[^'"]+)['"]""", text)
    files = tracked()
    missing = [name for name in wanted if (script.parent / name).resolve() not in files]
    assert not missing


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_every_static_file_of_a_template_is_a_file_of_ours(template: Path) -> None:
    wanted = re.findall(r"{% static '([^']+)' %}", template.read_text(encoding="utf-8"))
    files = tracked()
    assert not [name for name in wanted if ROOT / "static" / name not in files]


def test_every_picture_of_the_readme_is_a_file_of_ours() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert wanted
    files = tracked()
    assert not [name for name in wanted if ROOT / name not in files]


def test_vendored_libraries_are_those_of_the_notice() -> None:
    import hashlib

    folder = ROOT / "static" / "vendor"
    notice = (folder / "NOTICE").read_text(encoding="utf-8")
    for path in folder.iterdir():
        if path.suffix in (".js", ".css"):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            assert digest in notice, f"{path.name}: its SHA-256 is not in NOTICE"
