"""The set-up says at once what is missing, uses the Python there is, and goes on after an interruption."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "requirements" / "install.sh"
TOOLS = (
    "sh",
    "awk",
    "cat",
    "cp",
    "df",
    "dirname",
    "du",
    "grep",
    "mkdir",
    "mktemp",
    "rm",
    "touch",
    "tr",
    "uname",
)

PYTHON = """#!/bin/sh
# An interpreter of version {version}, as far as a set-up asks.
echo "python{version} $*" >> "$LOG"
case "$*" in
*version_info*) echo {version} ;;
*ensurepip*) exit {without_venv} ;;
"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip install"*) cp "$STUBS/uv" "$(dirname "$0")/uv" ;;
esac
"""

UV = """#!/bin/sh
# Makes environments and installs, as far as a set-up asks; is killed in the middle if told so.
echo "uv $*" >> "$LOG"
echo "links=${UV_FIND_LINKS:-}" >> "$LOG"
case "$*" in
venv*)
    for directory in "$@"; do :; done
    mkdir -p "$directory/bin" && cp "$STUBS/python" "$directory/bin/python" ;;
*"install -q --python"*" uv") cp "$0" "$(dirname "$5")/uv" ;;
*cpu.lock) [ ! -e "$STUBS/killed" ] || { rm "$STUBS/killed"; kill -9 $$; } ;;
esac
"""

CURL = """#!/bin/sh
# Reaches everything but what is named in $UNREACHABLE.
for url in "$@"; do :; done
case "$url" in *${UNREACHABLE:-nothing}*) exit 7 ;; esac
"""


class Machine:
    """A checkout on a machine that has only what a test puts there."""

    def __init__(self, root):
        self.root = root / "checkout"
        self.bin, self.stubs, self.proc = root / "bin", root / "stubs", root / "proc"
        for directory in (self.root / "requirements", self.bin, self.stubs, self.proc):
            directory.mkdir(parents=True)
        shutil.copy(SCRIPT, self.root / "requirements")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.venv = self.root / ".venv"
        self.log = root / "log"
        self.log.touch()
        write(self.stubs / "uv", UV)
        write(self.stubs / "python", PYTHON.format(version="3.11", without_venv=0))
        self.tool("curl", CURL)
        self.tool("cc", "#!/bin/sh\n")
        self.says("cpuinfo", "flags : fpu avx avx2 sse\n")
        self.says("meminfo", "MemTotal: 16000000 kB\nMemFree: 1 kB\nSwapTotal: 0 kB\n")
        self.free_kb(50_000_000)

    def tool(self, name, text):
        write(self.bin / name, text)

    def python(self, name, version, *, without_venv=0):
        self.tool(name, PYTHON.format(version=version, without_venv=without_venv))

    def says(self, name, text):
        (self.proc / name).write_text(text)

    def free_kb(self, free):
        self.tool("df", f"#!/bin/sh\necho Filesystem\necho /dev/a 1 1 {free} 1% /\n")

    def set_up(self, *arguments, **environment):
        self.log.write_text("")
        return subprocess.run(
            [self.root / "requirements" / "install.sh", *(arguments or [".venv"])],
            env={
                "PATH": str(self.bin),
                "PROC": str(self.proc),
                "STUBS": str(self.stubs),
                "LOG": str(self.log),
                "TMPDIR": str(self.root.parent),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @property
    def done(self):
        return self.log.read_text()


def write(path, text):
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def missing(run):
    assert run.returncode != 0
    assert run.stdout == ""
    return [line[4:] for line in run.stderr.splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize(
    ("name", "version"),
    [("python3.11", "3.11"), ("python3.12", "3.12"), ("python3", "3.12"), ("python3", "3.11")],
)
def test_either_version_under_any_name_is_used(machine, name, version):
    machine.python(name, version)
    run = machine.set_up()
    assert run.returncode == 0, run.stderr
    assert (machine.venv / ".ready").exists()
    assert f"python{version} -m venv .venv" in machine.done
    assert "--torch-backend cpu -r requirements/cpu.lock" in machine.done


def test_a_command_that_only_prints_a_message_is_no_interpreter(machine):
    machine.tool("python3.11", "#!/bin/sh\necho 'pyenv: python3.11: command not found' >&2\nexit 127\n")
    machine.python("python3.12", "3.12")
    assert machine.set_up().returncode == 0
    assert "python3.12 -m venv .venv" in machine.done


@pytest.mark.parametrize("version", ["3.8", "3.10", "3.13"])
def test_with_another_python_uv_fetches_one(machine, version):
    machine.python("python3", version)
    run = machine.set_up()
    assert run.returncode == 0, run.stderr
    assert "uv venv -q --seed --python 3.11 .venv" in machine.done
    assert (machine.venv / "bin" / "uv").exists()
    assert [path.name for path in machine.root.parent.iterdir() if path.name.startswith("tmp.")] == []


def test_uv_alone_fetches_one(machine):
    machine.tool("uv", UV)
    assert machine.set_up().returncode == 0
    assert "uv venv -q --seed --python 3.11 .venv" in machine.done


def test_uv_makes_the_environment_where_the_venv_module_is_missing(machine):
    machine.python("python3", "3.12", without_venv=1)
    machine.tool("uv", UV)
    assert machine.set_up().returncode == 0
    assert "uv venv -q --seed --python python3 .venv" in machine.done


def test_all_that_is_missing_is_said_at_once_and_nothing_is_begun(machine):
    (machine.bin / "cc").unlink()
    machine.says("cpuinfo", "flags : fpu avx sse\n")
    machine.says("meminfo", "MemTotal: 3900000 kB\nSwapTotal: 200000 kB\n")
    machine.free_kb(2_000_000)
    machine.tool("uname", "#!/bin/sh\ncase $1 in -s) echo Darwin ;; -m) echo arm64 ;; esac\n")
    found = missing(machine.set_up(UNREACHABLE="//"))
    assert [line.split(":")[0] for line in found] == [
        "Python 3.11 or 3.12 with its venv module, or any Python with it, or uv",
        "Linux on x86-64",
        "a CPU with AVX2",
        "a C compiler",
        "9 GB of memory for the two engines of `make serve`",
        "6 GB of disk under " + str(machine.root),
        "network",
        "network",
    ]
    assert found[4].endswith("4 GB are there, with swap")
    assert found[5].endswith("2 GB are free")
    assert not machine.venv.exists()


def test_an_interpreter_that_cannot_be_fetched_is_missing(machine):
    machine.python("python3", "3.13")
    (line,) = missing(machine.set_up(UNREACHABLE="github.com"))
    assert line.startswith("Python 3.11 or 3.12: there is none here")
    assert "PYTHON=/path/to/python3.12" in line


def test_an_unsuited_python_that_was_named_is_refused(machine):
    machine.python("python3.11", "3.11")
    machine.python("python3.13", "3.13")
    (line,) = missing(machine.set_up(PYTHON="python3.13"))
    assert line.startswith("PYTHON=python3.13 is not Python 3.11 or 3.12")


def test_pytorch_from_a_directory_of_wheels_needs_no_index_of_its_own(machine):
    machine.python("python3.12", "3.12")
    wheels = machine.root.parent / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    (line,) = missing(machine.set_up(UNREACHABLE="pytorch.org", PIP_FIND_LINKS=str(wheels)))
    assert "torch+cpu for Python 3.12" in line
    (wheels / "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl").touch()
    run = machine.set_up(UNREACHABLE="pytorch.org", PIP_FIND_LINKS=str(wheels))
    assert run.returncode == 0, run.stderr
    assert "--torch-backend" not in machine.done


@pytest.mark.parametrize(
    ("given", "links"),
    [
        ({"PIP_FIND_LINKS": "/a /b"}, "/a,/b"),
        ({"PIP_FIND_LINKS": " /a   /b "}, "/a,/b"),
        ({"PIP_FIND_LINKS": "/a"}, "/a"),
        ({}, ""),
        ({"PIP_FIND_LINKS": "/a /b", "UV_FIND_LINKS": "/c"}, "/c"),
    ],
    ids=str,
)
def test_uv_is_told_pips_directories_in_its_own_way(machine, given, links):
    machine.python("python3.11", "3.11")
    assert machine.set_up(**given).returncode == 0
    assert machine.done.splitlines()[-1] == f"links={links}"
    show = 'show: ; @echo "links=$$UV_FIND_LINKS"'
    path = {"PATH": os.environ["PATH"]}
    command = ["make", "--no-print-directory", "--eval", show, "show"]
    done = subprocess.run(
        command, cwd=SCRIPT.parents[1], env=path | given, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"links={links}\n"


def test_without_a_network_the_caches_may_have_everything(machine):
    machine.python("python3.11", "3.11")
    assert missing(machine.set_up(UNREACHABLE="//"))
    assert machine.set_up(UNREACHABLE="//", UV_OFFLINE="1").returncode == 0


def test_what_is_missing_can_be_overridden(machine):
    machine.python("python3.11", "3.11")
    machine.says("meminfo", "MemTotal: 8000000 kB\n")
    assert missing(machine.set_up())
    assert machine.set_up(SKIP_CHECKS="1").returncode == 0


def test_a_set_up_that_was_killed_begins_with_a_new_environment(machine):
    machine.python("python3.11", "3.11")
    (machine.stubs / "killed").touch()
    assert machine.set_up().returncode != 0
    half = machine.venv / "half-a-package"
    half.touch()
    run = machine.set_up()
    assert run.returncode == 0, run.stderr
    assert "what was downloaded is kept" in run.stdout
    assert not half.exists()
    assert (machine.venv / ".ready").exists()


def test_a_complete_environment_is_only_brought_up_to_date(machine):
    machine.python("python3.11", "3.11")
    assert machine.set_up().returncode == 0
    kept = machine.venv / "kept"
    kept.touch()
    run = machine.set_up(UNREACHABLE="//")
    assert run.returncode == 0, run.stderr
    assert kept.exists()
    assert "cpu.lock" in machine.done


def test_an_update_that_was_killed_begins_with_a_new_environment(machine):
    machine.python("python3.11", "3.11")
    assert machine.set_up().returncode == 0
    half = machine.venv / "half-a-package"
    half.touch()
    (machine.stubs / "killed").touch()
    assert machine.set_up().returncode != 0
    assert machine.set_up().returncode == 0
    assert not half.exists()


def test_check_changes_nothing(machine):
    machine.python("python3.11", "3.11")
    assert machine.set_up("--check").returncode == 0
    assert not machine.venv.exists()


def test_make_runs_it_before_anything_else():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "serve", "VENV=/nonexistent"],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "requirements/install.sh /nonexistent"
