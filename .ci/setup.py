"""Makes a virtual environment from the lock file. Standard library only; runs before anything is installed.

Every failure that a new user can meet (old Python, no network, full disk) ends in one line that says what to do.
"""

import argparse
import os
import shutil
import subprocess
import sys

NEEDED = (3, 12)
NEEDED_GB = 3
OLDEST = ["jax==0.11.1", "jaxlib==0.11.1", "flax==0.12.9"]


def fail(message):
    sys.exit("setup: " + message)


def run(*command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if result.returncode:
        explain(result.stdout)


def explain(output):
    text = output.lower()
    if "no space left" in text:
        fail("the disk is full; about {} GB are needed here.".format(NEEDED_GB))
    signs = ("connection", "resolve", "dns", "network", "timed out", "unreachable", "error sending request", "retries")
    if any(sign in text for sign in signs):
        fail("the package registry cannot be reached; check the network (or proxy) and run the same command again.")
    sys.stderr.write(output[-3000:])
    fail("installation failed, see above.")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--oldest", action="store_true", help="oldest supported jax instead of the locked one")
    options = parser.parse_args()
    if sys.version_info < NEEDED:
        fail("Python >= 3.12 is needed, this is {}.{}; set it with: make PYTHON=/path/to/python3.12".format(
            *sys.version_info[:2]))
    if shutil.disk_usage(".").free < NEEDED_GB * 10**9:
        fail("less than {} GB are free here; free some space and run the same command again.".format(NEEDED_GB))
    python = os.path.join(options.venv, "bin", "python")
    print("setup: installing into {} (once, about a minute)".format(options.venv), flush=True)
    try:
        if not os.path.exists(python):
            run(sys.executable, "-m", "venv", options.venv)
        run(python, "-m", "pip", "install", "--quiet", "uv")
        uv = os.path.join(options.venv, "bin", "uv")
        run(uv, "pip", "sync", "--quiet", "--require-hashes", "--python", python, "requirements.lock")
        run(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--editable", ".")
        if options.oldest:
            run(uv, "pip", "install", "--quiet", "--python", python, *OLDEST)
    except OSError as problem:
        explain(str(problem))
    with open(os.path.join(options.venv, ".ready"), "w") as mark:
        mark.write("ok\n")


if __name__ == "__main__":
    main()
