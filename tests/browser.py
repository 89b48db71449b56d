"""A headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE_S = 60


class Browser:
    """One page."""

    def __init__(self):
        assert PROGRAM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *options, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol and waits for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            self._rest += os.read(self._read, 1 << 16)
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def set_scheme(self, name: str) -> None:
        """Prefers "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def touch(self, selector: str) -> str:
        """Moves a finger along lines through an element; returns the first note that is shown."""
        script = f"""(() => {{
          const target = document.querySelector({selector!r}), box = target.getBoundingClientRect();
          for (const y of [0.5, 0.25, 0.75])
            for (let x = 0.05; x < 1; x += 0.05) {{
              const at = {{clientX: box.left + box.width * x, clientY: box.top + box.height * y, bubbles: true}};
              target.dispatchEvent(new PointerEvent("pointerdown", {{...at, pointerType: "touch"}}));
              const notes = [...document.querySelectorAll("body > [role=status]")];
              const text = notes.filter(note => note.style.display === "block").at(-1)?.textContent;
              if (text) return text;
            }}
          return "";
        }})()"""
        return self.value(script)

    def is_dark(self) -> bool:
        """Whether the page's ground is dark and its text is light."""
        of = "getComputedStyle(document.body)"
        lightness = "((rgb) => rgb.match(/\\d+/g).slice(0, 3).reduce((a, b) => +a + +b) / 3)"
        return self.value(f"{lightness}({of}.backgroundColor) < 60 && {lightness}({of}.color) > 180")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")  # another fragment of the same page would not load it
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """Returns the value of an expression."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script: str, holds: Callable[[Any], bool] = bool) -> Any:
        """Waits until the value of an expression holds."""
        until = time.monotonic() + PATIENCE_S
        while not holds(value := self.value(script)):
            assert time.monotonic() < until, (script, value)
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def picture(self, file: Path) -> None:
        content = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(content))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()
