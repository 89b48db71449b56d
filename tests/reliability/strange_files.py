"""What may stand where a file is expected: each function makes it."""

from __future__ import annotations

import os


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def zeros(path):
    with path.open("wb") as file:
        file.truncate(20 * 10**9)


STRANGE = {"a pipe": pipe, "a device": device, "a folder": folder, "20 GB of zeros": zeros}
