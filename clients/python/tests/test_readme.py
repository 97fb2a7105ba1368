"""The README's programs run, and print what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import LIBRARY

README = Path(__file__).resolve().parents[1] / "README.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n^```\n(.*?)^```$", README.read_text(), re.M | re.S)


@pytest.mark.skipif(LIBRARY != "redis", reason="it is written for redis-py")
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_readme_prints_what_it_says(server, number):
    program, printed = PROGRAMS[number]
    program = program.replace("Redis()", f"Redis(port={server.port})")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_there_are_programs():
    assert len(PROGRAMS) >= 4


def test_what_it_says_is_shown_is_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", README.read_text())
    assert len(named) >= 10
    assert [name for name in named if f"def {name}(" not in tests] == []
