"""The tutorials run as they stand: commands, programs and files, in their order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.episodes.shared_data import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(sh|python)(?: title="([\w.]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def script(text: str) -> str:
    """One program: files are written, commands are run, Python shares its names."""
    lines = ["import subprocess", "from pathlib import Path"]
    for language, file, code in BLOCK.findall(text):
        if file:
            lines.append(f"Path({file!r}).write_text({code!r})")
        elif language == "sh":
            lines.append(f"subprocess.run(['bash', '-euc', {code!r}], check=True)")
        else:
            lines.append(code)
    return "\n".join(lines)


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: str(path.stem))
def test_a_tutorial_runs_from_its_first_line_to_its_last(tutorial: Path, tmp_path: Path) -> None:
    (tmp_path / "tutorial.py").write_text(script(tutorial.read_text(encoding="utf-8")))
    done = subprocess.run(
        [sys.executable, "tutorial.py"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "Traceback" not in done.stderr
