"""Forks instead of new interpreters: they are given, see and leave what a new process is given, sees and leaves."""

from pathlib import Path

import pytest

from tests.support.scripts import run_with_forks

PARENT = """
import os, subprocess, sys, tempfile
folder = tempfile.TemporaryDirectory()
environment = {**os.environ, "RANK": "3"}
again = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], 'word'])"
code = "import os, sys; print(sys.argv, os.getsid(0) == os.getpid(), len(sys.stdin.read())); sys.exit(7)"
done = subprocess.run(
    [sys.executable, "-u", "-c", again, code], env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE, text=True,
)
print(done.returncode, done.stdout, end="")
seen = "print(open('/proc/self/environ').read().split(chr(0))[0], open('/proc/self/cmdline').read().split(chr(0))[1])"
subprocess.run([sys.executable, "-c", seen], env=environment, check=True)
reader, writer = os.pipe()
free = "import os, sys; os.write(int(sys.argv[1]), b'kept'); os.fstat(int(sys.argv[2]))"
command = [sys.executable, "-c", free, str(writer), str(reader)]
failed = subprocess.run(command, pass_fds=[writer], stderr=subprocess.PIPE)
print(os.read(reader, 9), failed.returncode, failed.stderr.rstrip().splitlines()[-1])
print(os.path.isdir(folder.name), subprocess.check_output(["echo", "another program"]))
"""
SAID = """\
7 ['-c', 'word'] True 0
RANK=3 -c
b'kept' 1 b'OSError: [Errno 9] Bad file descriptor'
True b'another program\\n'
"""


def test_a_fork_begins_like_a_new_interpreter(tmp_path: Path) -> None:
    """With arguments, variables, descriptors and streams of its own; another program is started as ever."""
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "notes").mkdir()
    done = run_with_forks(tmp_path / "parent.py", notes=tmp_path / "notes")
    assert done.output == SAID
    assert done.code == 0
    notes = sorted(note.read_text().partition(" ")[2] for note in (tmp_path / "notes").iterdir())
    assert notes == ["", "3", "3"]


@pytest.mark.parametrize("end", ["sys.exit('why')", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_a_fork_ends_like_a_new_interpreter(tmp_path: Path, end: str) -> None:
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        f"done = subprocess.run([sys.executable, '-c', 'import os, sys; ' + {end!r}], capture_output=True)\n"
        "print(done.returncode, done.stderr.decode().splitlines()[-1:])\n"
    )
    code, said = {"sys": (1, ["why"]), "os.": (-9, []), "1 /": (1, ["ZeroDivisionError: division by zero"])}[end[:3]]
    assert run_with_forks(tmp_path / "parent.py").output == f"{code} {said}\n"


def test_a_fork_removes_what_it_leaves_at_its_end(tmp_path: Path) -> None:
    """And its last line arrives, which has no end."""
    (tmp_path / "parent.py").write_text(
        "import os, subprocess, sys\n"
        "code = 'import sys, tempfile; kept = tempfile.TemporaryDirectory(); sys.stderr.write(kept.name)'\n"
        "done = subprocess.run([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True)\n"
        "name = done.stderr.splitlines()[-1]\n"
        "print(done.returncode, name.startswith('/'), os.path.exists(name))\n"
    )
    done = run_with_forks(tmp_path / "parent.py")
    assert done.output.splitlines()[-1] == "0 True False"
