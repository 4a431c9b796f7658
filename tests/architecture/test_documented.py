"""Documentation that can be checked is checked."""

import re
from pathlib import Path

import appliance.errors

ROOT = Path(__file__).resolve().parents[2]


def names_read_by_settings() -> set[str]:
    text = (ROOT / "appliance" / "settings.py").read_text(encoding="utf-8")
    return set(re.findall(r'env\.env_\w+\(\s*"([A-Z_]+)"', text))


def test_every_setting_is_in_the_example_file() -> None:
    text = (ROOT / "deploy" / "env.example").read_text(encoding="utf-8")
    documented = set(re.findall(r"^#?([A-Z_]+)=", text, flags=re.M))
    assert documented - {"SECRET_KEY_FILE"} == names_read_by_settings()


def test_every_setting_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = {name for name in names_read_by_settings() if f"`{name}`" not in text}
    assert not missing


def test_every_error_is_in_the_tree_of_its_module() -> None:
    tree = appliance.errors.__doc__ or ""
    for name, error in vars(appliance.errors).items():
        if isinstance(error, type) and issubclass(error, appliance.errors.ApplianceError):
            line = next((line for line in tree.splitlines() if name in line.split()), None)
            assert line is not None, f"{name} is not in the tree"
            if error is not appliance.errors.ApplianceError:
                assert str(error.status) in line, f"{name}: status"
                assert error.code in line, f"{name}: code"


def test_changelog_starts_with_the_version_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"', project, flags=re.M)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert version is not None
    assert f"## [{version[1]}]" in changelog
