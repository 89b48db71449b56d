"""Makes a virtual environment for this repository. Standard library only; runs before anything is installed.

Every failure that a new user can meet (old Python, no network, full disk) ends in one line that says what to do.
"""

import argparse
import os
import shutil
import subprocess
import sys

NEEDED = (3, 12)
NEEDED_GB = 3
AGAIN = "run the same command again."


def fail(message):
    sys.exit("setup: " + message)


def run(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if result.returncode:
        explain(result.stdout)


def explain(output):
    text = output.lower()
    if "no space left" in text or "disk quota" in text:
        fail("the disk is full; about {} GB are needed here. Free some space and {}".format(NEEDED_GB, AGAIN))
    if "ensurepip is not available" in text:
        fail("this Python cannot make virtual environments; install its venv package (python3-venv) and " + AGAIN)
    signs = (
        "connection",
        "resolve host",
        "dns error",
        "network",
        "timed out",
        "unreachable",
        "error sending request",
        "failed to fetch",
        "no matching distribution found for uv",
    )
    if any(sign in text for sign in signs):
        fail("the package registry cannot be reached; check the network (or proxy) and " + AGAIN)
    sys.stderr.write(output[-3000:])
    fail("installation failed, see above.")


def uv_of_lock():
    """The locked uv, so that everybody installs with the same one."""
    with open("requirements.lock") as lock:
        return next((line.split()[0] for line in lock if line.startswith("uv==")), "uv")


def install(venv, oldest, group):
    python, uv = os.path.join(venv, "bin", "python"), os.path.join(venv, "bin", "uv")
    if not os.path.exists(uv):  # nothing there, or a set-up that was broken off
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", uv_of_lock())
    pip = (uv, "pip", "--quiet")
    # Compiling 7600 files takes 10 s, once. Importing jax, flax and the rest takes a process 7.4 s of CPU without it,
    # 2.1 s with it; where Python is told to write no bytecode, every process would pay.
    into = ("--python", python, "--compile-bytecode")
    if oldest:
        run(*pip, "install", *into, "--resolution", "lowest-direct", "--upgrade", "--editable", ".", "--group", "dev")
    else:
        run(*pip, "sync", *into, "--require-hashes", "requirements.lock")
        run(*pip, "install", *into, "--no-deps", "--editable", ".")
    if group:
        run(*pip, "install", *into, "--group", group)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--oldest", action="store_true", help="the oldest supported packages")
    parser.add_argument("--group", help="a dependency group of pyproject.toml, too")
    options = parser.parse_args()
    if sys.version_info < NEEDED:
        fail(
            "Python >= 3.12 is needed, this is {}.{}; set it with: make PYTHON=/path/to/python3.12".format(
                *sys.version_info[:2]
            )
        )
    if shutil.disk_usage(".").free < NEEDED_GB * 10**9:
        fail("less than {} GB are free here; free some space and {}".format(NEEDED_GB, AGAIN))
    print("setup: installing into {} (once, about a minute)".format(options.venv), flush=True)
    try:
        install(options.venv, options.oldest, options.group)
    except OSError as problem:
        explain(str(problem))
    except KeyboardInterrupt:
        fail("broken off; to go on, " + AGAIN)
    with open(os.path.join(options.venv, ".ready"), "w") as mark:
        mark.write("ok\n")


if __name__ == "__main__":
    main()
