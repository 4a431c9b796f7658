"""What an import loads at run time. Static contracts (lint-imports) do not see this."""

import importlib.metadata

import pytest


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import kernels", "triton"),
        ("import kernels", "torch"),
        ("import inference.scheduler", "torch"),
        ("import inference.streams", "torch"),
        ("import inference.text.tokenizer, inference.text.chat_template", "torch"),
        ("import inference.engine", "django"),
        ("import inference.generator", "django"),
        ("import inference.runner.model_runner", "django"),
    ],
)
def test_import_does_not_load(run_python, statement: str, absent: str) -> None:
    loaded = run_python(f"import sys; {statement}; print({absent!r} in sys.modules)")
    assert loaded == "False", f"`{statement}` loads {absent}"


@pytest.mark.parametrize("command", ["check", "migrate --check --database default"])
def test_manage_commands_do_not_load_torch(run_python, command: str) -> None:
    code = f"""
import sys, os
os.environ["DJANGO_SETTINGS_MODULE"] = "appliance.settings"
import django
django.setup()
from django.core.management import call_command
try:
    call_command(*{command.split()!r})
except SystemExit:
    pass
print("torch" in sys.modules)
"""
    assert run_python(code).splitlines()[-1] == "False"


@pytest.mark.parametrize("name", ["kernels", "inference"])
def test_no_distribution_takes_the_name_of_a_package_of_ours(name: str) -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(name)
