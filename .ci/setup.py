"""Makes a virtual environment for this repository. Standard library only; runs before anything is installed.

Every failure that a new user can meet (old Python, no network, full disk) ends in one line that says what to do.
"""

import argparse
import os
import shutil
import subprocess
import sys

NEEDED = (3, 12)
LOCK, TOOLS = "requirements.lock", "# Tools of a checkout:\n"  # what the product needs stands above this line
UV = [0, 9]  # as the dependency group dev asks
NEEDED_GB = 3
AGAIN = "run the same command again."
IMPORTS = "import lorafusion_jax.cli.demo, lorafusion_jax.api.watch, lorafusion_jax.training.verify"


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
    with open(LOCK) as lock:
        return next((line.split()[0] for line in lock if line.startswith("uv==")), "uv")


def write_run_lock(venv):
    """The part of the lock that the product needs, as a file of its own."""
    file = os.path.join(venv, "run.lock")
    with open(LOCK) as lock, open(file, "w") as part:
        part.write(lock.read().partition(TOOLS)[0])
    return file


def join_locks(run_lock):
    """Sorts the lock: what the product needs first, as another lock names it."""
    with open(run_lock) as needed, open(LOCK) as lock:
        names = [line.split("==")[0] for line in needed if line[0].isalnum()]
        packages = ("\n" + lock.read().replace(TOOLS, "")).replace("\n    ", "\0").split("\n")
    packages = [package.replace("\0", "\n    ") + "\n" for package in packages if package]
    parts = [
        [package for package in packages if (package.split("==")[0] in names) is of_product]
        for of_product in (True, False)
    ]
    with open(LOCK, "w") as lock:
        lock.write("".join(parts[0] + [TOOLS] + parts[1]))


def install_uv(venv, python):
    """Installs uv by the pip of this Python, if it is there and knows how: a pip of the environment's own takes 5 s."""
    wanted = ("install", "--quiet", "--disable-pip-version-check", uv_of_lock())
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", venv)
    by_pip = (sys.executable, "-m", "pip", "--python", python)
    if subprocess.run((*by_pip, *wanted), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(python, "-m", "pip", *wanted)


def uv_of_user():
    """A uv on the path that is new enough; None if there is none. Installing one takes 4 s of CPU and a download."""
    path = shutil.which("uv")
    if path is None:
        return None
    asked = subprocess.run(
        (path, "--version"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True
    )
    version = asked.stdout.split()[1:2] or ["0"]
    numbers = [int(part) for part in version[0].split(".") if part.isdigit()]
    return path if asked.returncode == 0 and numbers >= UV else None


def install(venv, oldest, group, only_run):
    python, uv = os.path.join(venv, "bin", "python"), os.path.join(venv, "bin", "uv")
    if not os.path.exists(uv):  # nothing there, or a set-up that was broken off
        uv_on_path = uv_of_user() if only_run else None  # all of a checkout has the locked one
        if uv_on_path is None:
            install_uv(venv, python)
        else:
            run(sys.executable, "-m", "venv", "--clear", "--without-pip", venv)
            uv = uv_on_path
    pip = (uv, "pip", "--quiet")
    # Compiling 7600 files takes 10 s, once. Importing jax, flax and the rest takes a process 7.4 s of CPU without it,
    # 2.1 s with it. The product alone imports a fifth of them, which its first process compiles and keeps.
    into = ("--python", python) if only_run else ("--python", python, "--compile-bytecode")
    if oldest:
        run(*pip, "install", *into, "--resolution", "lowest-direct", "--upgrade", "--editable", ".", "--group", "dev")
    else:
        # `sync` removes what is not in the file, `install` leaves it: the rest of a checkout may be there already.
        packages = ("install", "--requirement", write_run_lock(venv)) if only_run else ("sync", LOCK)
        run(*pip, packages[0], *into, "--require-hashes", *packages[1:])
        run(*pip, "install", *into, "--no-deps", "--editable", ".")
    if group:
        run(*pip, "install", *into, "--group", group)
    if only_run and sys.dont_write_bytecode:  # every process would compile what it imports
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run((python, "-c", IMPORTS), env=kept, check=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--oldest", action="store_true", help="the oldest supported packages")
    parser.add_argument("--group", help="a dependency group of pyproject.toml, too")
    parser.add_argument("--only-run", action="store_true", help="what the product needs, without tests and tools")
    parser.add_argument("--join", metavar="RUN_LOCK", help="sort the lock by what the product needs, and end")
    options = parser.parse_args()
    if options.join:
        join_locks(options.join)
        return
    if sys.version_info < NEEDED:
        fail(
            "Python >= 3.12 is needed, this is {}.{}; set it with: make PYTHON=/path/to/python3.12".format(
                *sys.version_info[:2]
            )
        )
    if shutil.disk_usage(".").free < NEEDED_GB * 10**9:
        fail("less than {} GB are free here; free some space and {}".format(NEEDED_GB, AGAIN))
    length = "half a minute" if options.only_run else "about a minute"
    print("setup: installing into {} (once, {})".format(options.venv, length), flush=True)
    try:
        install(options.venv, options.oldest, options.group, options.only_run)
    except OSError as problem:
        explain(str(problem))
    except KeyboardInterrupt:
        fail("broken off; to go on, " + AGAIN)
    for name in (".runs",) if options.only_run else (".ready", ".runs"):
        with open(os.path.join(options.venv, name), "w") as mark:
            mark.write("ok\n")


if __name__ == "__main__":
    main()
